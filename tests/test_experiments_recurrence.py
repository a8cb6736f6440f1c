"""The recurrence for pretrained models as tables and figures: rows, two of them from a tiny model, and the report."""

import dataclasses

import forked
import jax
import pytest
from pretrained_models import Pretrained, write_byte_tokenizer, write_windows
from table_results import table_rows, write_result
from tiny_run import mesh_of_the_first_devices

from meliad_like.conversion.pretrained import convert_from_huggingface
from meliad_like.data.preparation import prepare
from meliad_like.errors import UserError
from meliad_like.experiments.experiment import Experiment
from meliad_like.experiments.pretrained import fields_of
from meliad_like.experiments.report import gather, result_file
from meliad_like.experiments.tables import SUBJECTS
from meliad_like.experiments.tables.table import Scale, configure
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.models.model import Model
from meliad_like.vocabularies.tokenizers import TokenizersVocabularyConfig

TABLE = SUBJECTS["recurrence"]
DECODER = PretrainedConfig(
    num_layers=2,
    model_width=16,
    num_heads=2,
    num_key_value_heads=2,
    head_size=8,
    feedforward_width=16,
    max_positions=130,
    window_length=128,
)


@pytest.mark.parametrize(
    "name", ["baseline_128_30", "baseline_300_200", "recurrent_128_0", "recurrent_300_5", "baseline_600_50"]
)
def test_a_row_is_its_gin_files(name):
    kind, window, overlap = name.split("_")
    model = configure(TABLE.row(name), TABLE.scales["paper"]).model
    assert (model.window_length, model.overlap) == (int(window), int(overlap))
    assert (model.summary is not None) == (kind == "recurrent")


def test_what_is_not_recurrent_is_trained_once_for_each_window():
    trainings = {row.run_name for row in TABLE.rows if not row.extra}
    assert trainings == {f"recurrent_{w}_{o}" for w in (128, 300) for o in (0, 30)} | {
        "baseline_128_0",
        "baseline_300_0",
    }
    assert {TABLE.row(f"baseline_300_{o}").run_name for o in (0, 5, 200)} == {"baseline_300_0"}
    assert TABLE.row("recurrent_300_30").baseline == "baseline_300_30"


def test_all_rows_have_as_many_targets():
    for name in ("tiny", "small"):
        scale = TABLE.scales[name]
        for row in TABLE.rows:
            run = configure(row, scale)
            repeated = run.model.overlap if run.model.summary is not None else 0
            new = run.data.tokens_per_step * (1 - repeated / run.model.window_length)
            assert scale.targets <= run.training.num_steps * new < scale.targets + new
    tiny = configure(TABLE.row("recurrent_300_0"), TABLE.scales["tiny"])
    assert (tiny.data.segment_length, tiny.data.tokens_per_step, tiny.training.num_steps) == (1500, 1500, 27)
    bound = configure(TABLE.row("recurrent_300_0"), TABLE.scales["tiny"], gin_params=["TrainingConfig.num_steps = 3"])
    assert bound.training.num_steps == 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Our checkpoint of a random GPT-2, documents, and a task that names them."""
    folder = tmp_path_factory.mktemp("recurrence")
    (folder / "theirs").mkdir()
    write_windows(Pretrained(DECODER, 257, Model(DECODER, 257).init(jax.random.key(0))), 256, folder / "theirs")
    write_byte_tokenizer(folder / "theirs")
    for split in ("train", "validation", "test"):
        (folder / "documents" / split).mkdir(parents=True)
        (folder / "documents" / split / "rose.txt").write_text("a rose is a rose is " * 20)
    task = [
        "RunConfig.source = 'text'",
        f"FolderSourceConfig.folder = '{folder / 'documents'}'",
        "RunConfig.vocabulary = 'bytes'",
        f"ReaderConfig.store = '{folder / 'store'}'",
    ]
    (folder / "task.gin").write_text("\n".join(task))
    vocabulary = [f"FileVocabularyConfig.model_file = '{folder / 'theirs'}'"]
    convert_from_huggingface(folder / "theirs", [], vocabulary, folder / "gpt2" / "checkpoints")
    return folder


def experiment(place, **changes) -> Experiment:
    bindings = {"TrainingConfig.log_every": 1, "MeshConfig.data": 1}
    scale = Scale(lanes=8, targets=4000, bindings=bindings | {"TrainingConfig.evaluate_every": 2}, max_tokens=300)
    return Experiment(
        table=dataclasses.replace(TABLE, scales={"tiny": scale}),
        scale_name="tiny",
        gin_files=(str(place / "task.gin"),),
        gin_params=("PretrainedConfig.dropout_rate = 0.0", *changes.pop("gin_params", ())),
        folder=place / "runs",
        seeds=(0,),
        load_dir=str(place / "gpt2"),
        row_names=("baseline_128_0", "baseline_128_30", "recurrent_128_30"),
        **changes,
    )


def test_rows_begin_with_the_pretrained_model_and_its_vocabulary(place):
    made, row = experiment(place), TABLE.row("baseline_128_30")
    trained, evaluated = made.trained_run(row, 0), made.run(row, 0)
    assert (trained.model.num_layers, trained.model.max_positions) == (2, 130)
    assert isinstance(trained.vocabulary, TokenizersVocabularyConfig)
    assert trained.data.store == f"{place / 'store'}_gpt2"
    # Trained as another row, and evaluated as itself.
    assert (trained.model.overlap, evaluated.model.overlap) == (0, 30)
    assert result_file(made.folder, row, 0) == made.folder / "baseline_128_0-0" / "baseline_128_30.json"
    bound = experiment(place, gin_params=("ReaderConfig.store = 'mine'",))
    assert bound.run(TABLE.row("baseline_128_0"), 0).data.store == "mine"


@pytest.mark.thorough
def test_rows_are_trained_and_evaluated(place, monkeypatch):
    made = experiment(place)
    monkeypatch.setattr("meliad_like.experiments.experiment.make_mesh", mesh_of_the_first_devices)
    run = made.run(TABLE.row("baseline_128_0"), 0)
    prepare(run.source, run.vocabulary, run.data.store, num_workers=1)
    assert made.make() == (0, [])
    assert all(made.finished(row, 0) for row in made.rows)
    results = gather(TABLE, made.folder, [0], "test")
    disjoint, overlapping, recurrent = (results.means.loc[name] for name in made.row_names)
    # 300 tokens, of which the first is not predicted.
    assert disjoint["num_tokens"] == overlapping["num_tokens"] == 299
    assert disjoint["word_perplexity"] != overlapping["word_perplexity"]
    repeated = overlapping["flops_by_the_paper"] / disjoint["flops_by_the_paper"]
    assert repeated == pytest.approx(128 / 98)
    assert recurrent["flops_as_counted"] > overlapping["flops_as_counted"]
    assert recurrent["parameters"] > disjoint["parameters"]
    assert recurrent["logged_tokens_per_second"] > 0
    # 4,000 targets are two steps of 2,560 tokens, or three where a window repeats 30 of 128.
    assert (disjoint["num_steps"], recurrent["num_steps"]) == (2, 3)
    assert {path.name for path in (made.folder / "baseline_128_0-0").glob("*.json")} == {
        "config.json", "result.json", "baseline_128_30.json", "test.json", "test_baseline_128_30.json",
    }  # fmt: skip


def test_what_is_no_pretrained_model_is_named(place, tmp_path):
    with pytest.raises(
        UserError, match=r"no pretrained model at --load_dir=.*/none: python -m meliad_like.convert hugg"
    ):
        fields_of(tmp_path / "none")
    settings = place / "gpt2" / "checkpoints" / "vocabulary" / "vocabulary.json"
    saved = settings.read_text()
    settings.write_text('{"kind": "bytes", "size_multiple": 1}')
    with pytest.raises(UserError, match="holds PretrainedConfig with a vocabulary of bytes, not a pretrained model"):
        fields_of(place / "gpt2")
    settings.write_text(saved)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["recurrence"],
            "recurrence begins with a pretrained model: give --load_dir=DIR; python -m meliad_like.convert",
        ),
        (["table1", "--load_dir=x"], "--load_dir has no effect on table1: it is for recurrence and ancient_history"),
    ],
)
def test_a_model_that_is_missing_or_too_much_is_one_line(arguments, message):
    done = forked.run("-m", "meliad_like.experiments", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_the_report(tmp_path):
    for name, perplexity in (("baseline_300_0", 60.0), ("baseline_300_30", 58.0), ("recurrent_300_30", 55.0)):
        figures = {"bits_per_byte": perplexity / 100, "flops_by_the_paper": 2.139e8}
        write_result(tmp_path, TABLE.row(name), word_perplexity=perplexity, **figures)
    text = Experiment("tiny", (), (), tmp_path, seeds=(0,), table=TABLE).results().to_markdown("tiny")
    rows = table_rows(text)
    recurrent = rows["recurrence, T 300, overlap 30"]
    assert (recurrent["word perplexity"], recurrent["difference"]) == ("55.00", "-0.0300")
    assert recurrent["MFLOP a token by the paper's count"] == "213.9"
    assert (recurrent["paper: PG-19 validation"], recurrent["paper: MFLOP a token"]) == ("142.35", "194")
    assert rows["no recurrence, T 128, overlap 0"]["word perplexity"] == "-"
    assert "(of runs with the same seed) are relative to: the model without a recurrence at the same window" in text
