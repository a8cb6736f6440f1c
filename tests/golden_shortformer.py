"""The reference Shortformer's small model."""

from pathlib import Path

import numpy as np

from meliad_like.models.shortformer import ShortformerConfig

GOLDEN = Path(__file__).parent / "golden"
CONFIG = ShortformerConfig(
    num_layers=2,
    model_width=32,
    num_heads=4,
    head_size=8,
    feedforward_width=64,
    window_length=8,
    cache_length=8,
    cutoffs=(20, 40),
)
THEIRS = {name.removeprefix("param/"): array for name, array in np.load(GOLDEN / "pia_params.npz").items()}
