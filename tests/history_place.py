"""A tiny frozen model, documents, and the settings with which ancient history reads them."""

from pathlib import Path

import jax
import numpy as np

from meliad_like import config
from meliad_like.data.preparation import prepare
from meliad_like.data.vocabulary import ByteVocabulary
from meliad_like.models.model import Model
from meliad_like.run.opening import write_checkpoint

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
    chance = np.random.default_rng(0)
    for split, lengths in LENGTHS.items():
        (folder / "documents" / split).mkdir(parents=True)
        for i, length in enumerate(lengths):
            text = " ".join(chance.choice(["a", "rose", "is", "when"], size=length))[: length - 1]
            (folder / "documents" / split / f"{i}.txt").write_text(text)
    bindings = [
        "RunConfig.source = 'text'",
        f"FolderSourceConfig.folder = '{folder / 'documents'}'",
        f"ReaderConfig.store = '{folder / 'store'}'",
        *MODEL,
        *HISTORY,
    ]
    run = config.parse([], bindings)
    prepare(run.source, run.vocabulary, run.data.store, num_workers=1)
    vocabulary = ByteVocabulary()
    # Larger than a fresh model's, so that what it reads makes a difference.
    params = jax.tree.map(lambda x: 4 * x, Model(run.model, vocabulary.size).init(jax.random.key(1)))
    write_checkpoint(folder / "model", params, run, vocabulary)
    return bindings
