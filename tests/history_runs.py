"""A small frozen model, documents and their token store, for the commands of ancient history."""

import jax
import numpy as np

from meliad_like import config
from meliad_like.data.preparation import prepare
from meliad_like.data.vocabulary import ByteVocabulary
from meliad_like.models.model import Model
from meliad_like.run.opening import write_checkpoint

EVIL = "<b>&" * 12
HISTORY = {
    "window_length": 48, "history_length": 16, "span_length": 8, "stride": 16, "separator": "\n", "max_candidates": 6,
}  # fmt: skip
BINDINGS = [f"HistoryConfig.{name} = {value!r}" for name, value in HISTORY.items()] + [
    "SelectorConfig.head_width = 4",
    "SelectorConfig.train_encoder = False",
    "SelectorTrainingConfig.num_steps = 6",
    "SelectorTrainingConfig.batch_size = 4",
    "SelectorTrainingConfig.validation_every = 2",
    "SelectorTrainingConfig.evaluate_every = 3",
]
MODEL = {
    "num_layers": 1, "model_width": 8, "num_heads": 2, "num_key_value_heads": 2, "head_size": 4,
    "feedforward_width": 16, "max_positions": 48, "window_length": 48,
}  # fmt: skip


def make_place(folder, *, size_multiple=1):
    """Makes a checkpoint (`model`) and a token store (`store`) in a folder; three documents in every split."""
    for split in ("train", "test"):
        (folder / "documents" / split).mkdir(parents=True)
        chance = np.random.default_rng(len(split))
        for name in ("one", "two", "three"):
            words = chance.choice(["Gomin ", "met ", "Arodan ", "and the goblins. "], 30)
            (folder / "documents" / split / f"{name}.txt").write_text("".join(words) + EVIL)
    run = config.parse(
        [],
        [
            "RunConfig.model = 'pretrained'",
            *(f"PretrainedConfig.{name} = {value}" for name, value in MODEL.items()),
            "RunConfig.source = 'text'",
            f"FolderSourceConfig.folder = '{folder / 'documents'}'",
            f"ReaderConfig.store = '{folder / 'store'}'",
            "ReaderConfig.segment_length = 48",
            "ReaderConfig.tokens_per_step = 48",
            f"VocabularyConfig.size_multiple = {size_multiple}",
            "MeshConfig.data = 8",
        ],
    )
    prepare(run.source, run.vocabulary, run.data.store, num_workers=1)
    vocabulary = ByteVocabulary(size_multiple)
    # Larger than a fresh model's, so that what it reads makes a difference.
    params = jax.tree.map(lambda x: 8 * x, jax.jit(Model(run.model, vocabulary.size).init)(jax.random.key(0)))
    write_checkpoint(folder / "model" / "checkpoints", params, run, vocabulary)
    return folder
