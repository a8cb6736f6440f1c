"""A tiny frozen model, documents, and the settings with which ancient history reads them."""

from pathlib import Path

import jax
import numpy as np

from meliad_like import config
from meliad_like.conversion.parameters import write_checkpoint
from meliad_like.data.preparation import prepare
from meliad_like.models.model import Model

# Windows of 24: two spans of 6 at every third position, 12 recent tokens, 4 of them targets.
HISTORY = [
    "RunConfig.data = 'ancient_history'",
    "HistoryConfig.window_length = 24",
    "HistoryConfig.history_length = 12",
    "HistoryConfig.span_length = 6",
    "HistoryConfig.stride = 4",
    r"HistoryConfig.separator = '\n'",
]
MODEL = [
    "RunConfig.model = 'pretrained'",
    "PretrainedConfig.num_layers = 1",
    "PretrainedConfig.model_width = 16",
    "PretrainedConfig.num_heads = 2",
    "PretrainedConfig.num_key_value_heads = 2",
    "PretrainedConfig.head_size = 8",
    "PretrainedConfig.feedforward_width = 16",
    "PretrainedConfig.max_positions = 24",
    "PretrainedConfig.window_length = 24",
    "ReaderConfig.segment_length = 24",
    "ReaderConfig.tokens_per_step = 192",
]
LENGTHS = {"train": (90, 60, 40), "validation": (30,), "test": (75, 20, 50)}


def make_place(folder: Path) -> list[str]:
    """Makes a token store and a checkpoint of a random model below `folder`, and returns their run's bindings."""
    chance, documents = np.random.default_rng(0), {}
    for split, lengths in LENGTHS.items():
        texts = (" ".join(chance.choice(["a", "rose", "is", "when"], size=length))[: length - 1] for length in lengths)
        documents[split] = {str(i): text for i, text in enumerate(texts)}
    return write_place(folder, documents, [*MODEL, *HISTORY], folder / "model", scale=4, seed=1)


def write_place(folder, documents, bindings, checkpoint, scale, seed):
    """Writes documents, by split and name, their token store, and the checkpoint of a random model."""
    for split, texts in documents.items():
        (folder / "documents" / split).mkdir(parents=True)
        for name, text in texts.items():
            (folder / "documents" / split / f"{name}.txt").write_text(text)
    place = [f"FolderSourceConfig.folder = '{folder / 'documents'}'", f"ReaderConfig.store = '{folder / 'store'}'"]
    bindings = ["RunConfig.source = 'text'", *place, *bindings]
    run = config.parse([], bindings)
    vocabulary = prepare(run.source, run.vocabulary, run.data.store, num_workers=1).vocabulary
    # Larger than a fresh model's, so that what it reads makes a difference.
    params = jax.tree.map(lambda x: scale * x, jax.jit(Model(run.model, vocabulary.size).init)(jax.random.key(seed)))
    write_checkpoint(checkpoint, params, run, vocabulary)
    return bindings
