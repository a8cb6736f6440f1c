"""Every row of the Shortformer paper's tables as a run."""

import pytest

from meliad_like import config
from meliad_like.config.run import stages_of
from meliad_like.data.readers import READERS
from meliad_like.errors import UserError
from meliad_like.vocabularies.dictionary import DictionaryVocabularyConfig

EPOCH = 1401
# Position, cache, segments and reader of the last stage; steps and length of the first one, if there are two.
BASELINE, PIA = ("input", 0), ("infused", 512)
ROWS = {
    "baseline.gin": (*BASELINE, 3072, "shuffled"),
    "infused_cache.gin": (*PIA, 512, "stream"),
    "staged_baseline.gin": (*BASELINE, 3072, "shuffled", 50 * EPOCH, 128),
    "shortformer.gin": (*PIA, 512, "stream", 100 * EPOCH, 128),
    "tables/baseline": (*BASELINE, 3072, "shuffled"),
    "tables/infused_no_cache": ("infused", 0, 3072, "shuffled"),
    "tables/infused_no_cache_in_order": ("infused", 0, 3072, "stream"),
    "tables/cache_not_infused": ("input", 3072, 3072, "stream"),
    **{f"tables/baseline_{n}": (*BASELINE, n, "shuffled") for n in (32, 64, 128, 256, 512, 1024, 1536)},
    **{
        f"tables/staged_{n}_{epochs}": (*BASELINE, 3072, "shuffled", epochs * EPOCH, n)
        for n in (32, 64, 128, 256, 512, 1024, 1536)
        for epochs in range(25, 201, 25)
    },
    **{f"tables/infused_cache_{n}": ("infused", n, n, "stream") for n in (32, 64, 128, 256, 512, 768, 1024, 1536)},
    **{f"tables/infused_cache_512_{n}": ("infused", n, 512, "stream") for n in (256, 1024)},
    **{f"tables/shortformer_{n}": (*PIA, 512, "stream", 100 * EPOCH, n) for n in (32, 64, 128, 256)},
    **{f"table9/second_length_{n}": (*BASELINE, n, "shuffled", 50 * EPOCH, 128) for n in (256, 512, 1024, 1536, 3072)},
    "table11/baseline": (*BASELINE, 1024, "shuffled"),
    "table11/infused_cache": (*PIA, 512, "stream"),
    "table11/staged_baseline": (*BASELINE, 1024, "shuffled", 136_635, 128),
    "table11/shortformer": (*PIA, 512, "stream", 280_102, 128),
    "table12/baseline": (*BASELINE, 3072, "shuffled"),
    "table12/staged_baseline": (*BASELINE, 3072, "shuffled", 136_635, 128),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_the_papers(row):
    run = config.parse([f"shortformer/{row}"])
    *first, last = stages_of(run)
    model = last.run.model
    actual = (model.position, model.cache_length, last.run.data.segment_length, READERS.name_of(run.data))
    assert model.window_length == last.run.data.segment_length
    for stage in first:
        actual += (stage.last_step, stage.run.data.segment_length)
        assert stage.run.model.window_length == stage.run.data.segment_length
        # L' = L, where there is a cache.
        assert stage.run.model.cache_length in (0, stage.run.data.segment_length)
    assert actual == ROWS[row]
    book_corpus = row.startswith(("table11", "table12"))
    assert run.training.num_steps == (59 * 9495 if book_corpus else 286_000)
    assert (model.cutoffs, model.softmax_dropout_rate) == (((), 0.0) if book_corpus else ((20_000, 60_000), 0.2))


def test_every_row_of_every_table_is_there():
    rows = {name.removeprefix("shortformer/") for name in config.shipped_rows() if name.startswith("shortformer/")}
    assert rows == {row for row in ROWS if not row.endswith(".gin")}


def test_the_protocol():
    run = config.parse(["task/wikitext103.gin", "shortformer/shortformer.gin"])
    assert (run.data.tokens_per_step, run.optimizer.clip_norm, run.optimizer.momentum) == (8 * 9216, 0.1, 0.99)
    assert [stage.run.data.num_lanes for stage in stages_of(run)] == [8 * 72, 8 * 18]
    assert isinstance(run.vocabulary, DictionaryVocabularyConfig)


def test_a_size_of_another_family_is_an_error():
    with pytest.raises(UserError, match="nothing reads DecoderConfig.num_layers: RunConfig.model is 'short"):
        config.parse(["size/small_37m.gin", "shortformer/shortformer.gin"])
