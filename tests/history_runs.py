"""A small frozen model, documents and their token store, for the commands of ancient history."""

import numpy as np
from history_place import write_place

EVIL = "<b>&" * 12
HISTORY = {
    "window_length": 48, "history_length": 16, "span_length": 8, "stride": 16, "separator": "\n", "max_candidates": 6,
}  # fmt: skip
BINDINGS = [f"HistoryConfig.{name} = {value!r}" for name, value in HISTORY.items()] + [
    "SelectorConfig.head_width = 4",
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
    documents, words = {}, ["Gomin ", "met ", "Arodan ", "and the goblins. "]
    for split in ("train", "test"):
        chance = np.random.default_rng(len(split))
        documents[split] = {name: "".join(chance.choice(words, 30)) + EVIL for name in ("one", "two", "three")}
    bindings = [
        "RunConfig.model = 'pretrained'",
        *(f"PretrainedConfig.{name} = {value}" for name, value in MODEL.items()),
        "ReaderConfig.segment_length = 48",
        "ReaderConfig.tokens_per_step = 48",
        f"VocabularyConfig.size_multiple = {size_multiple}",
        "MeshConfig.data = 8",
    ]
    write_place(folder, documents, bindings, folder / "model" / "checkpoints", scale=8, seed=2)
    return folder
