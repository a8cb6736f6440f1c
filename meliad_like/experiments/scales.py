"""One table at three scales: as in the paper, or with every row made smaller by the same rule.

| scale | lengths and widths | heads, head size | layers | tokens a step | steps | meant for |
|---|---|---|---|---|---|---|
| tiny | 1/16 | 1/4 | 1/2 | 512 | 1,600 | two CPU cores: the 42 runs of table 1 in less than an hour |
| small | 1/4 | 1/2 | as they are | 8,192 | 5,000 | one GPU, or a patient laptop |
| paper | as they are | | | 131,072 | 500,000 | the gin files, unchanged |

Lengths are those of windows, segments, states and memories, so XL:2048 keeps four times the window of XL:512, and a
memory 128 windows. The 12-layer model of table 1 is at tiny 6 layers of width 64 with 2 heads of 32, feed-forward 256,
32 states and a window of 32 in segments of 256; at small 12 layers of width 256 with 4 heads of 64, window 128. A
13-layer baseline keeps one layer more than its size. What a user binds with --gin_param is taken as it is.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from meliad_like import config
from meliad_like.config import RunConfig
from meliad_like.config.bindings import Binding, Bindings, collect
from meliad_like.experiments.tables import Row
from meliad_like.models.decoder_config import DecoderConfig

SCALED = (
    "ReaderConfig.segment_length",
    "DecoderConfig.window_length",
    "DecoderConfig.num_states",
    "DecoderConfig.memory_size",
    "DecoderConfig.memory_neighbors",
    "DecoderConfig.model_width",
    "DecoderConfig.feedforward_width",
)


@dataclass(frozen=True)
class Scale:
    """How much smaller than in the paper the rows of a table are."""

    divisor: int = 1
    """Of lengths and widths; its square root is that of the number of heads and of their size."""
    layers: int = 1
    """Divisor of the number of layers, and of the places of those that are special."""
    bindings: Mapping[str, Any] = field(default_factory=dict)
    """Taken instead of what the files say."""
    largest_vocabulary: int | None = None
    """Rows with larger vocabularies of their own are only made when they are named."""
    side_by_side: bool = False
    """Whether the models are so small that a core each is the fastest way to train several."""

    def rules(self) -> dict[str, Callable[[Any], Any]]:
        """What becomes of the value of a field."""
        rules: dict[str, Callable[[Any], Any]] = dict.fromkeys(SCALED, lambda value: value // self.divisor)
        root = math.isqrt(self.divisor)
        rules |= dict.fromkeys(("DecoderConfig.num_heads", "DecoderConfig.head_size"), lambda value: value // root)
        return rules


SCALES = {
    "tiny": Scale(
        divisor=16,
        layers=2,
        # Small steps and a high rate, because the run is short: as in quickstart.gin, where others were tried.
        bindings={
            "DecoderConfig.dropout_rate": 0.0,
            "ReaderConfig.tokens_per_step": 512,
            "ScheduleConfig.name": "cosine",
            "ScheduleConfig.max_rate": 0.05,
            "ScheduleConfig.multiplier": 1.0,
            "ScheduleConfig.warmup_steps": 50,
            "TrainingConfig.num_steps": 1600,
            "TrainingConfig.log_every": 20,
            "TrainingConfig.checkpoint_every": 400,
            "TrainingConfig.checkpoints_kept": 1,
        },
        largest_vocabulary=8_000,
        side_by_side=True,
    ),
    "small": Scale(
        divisor=4,
        bindings={
            "ReaderConfig.tokens_per_step": 8192,
            "ScheduleConfig.name": "cosine",
            "ScheduleConfig.max_rate": 0.02,
            "ScheduleConfig.multiplier": 1.0,
            "ScheduleConfig.warmup_steps": 200,
            "TrainingConfig.num_steps": 5000,
            "TrainingConfig.log_every": 50,
            "TrainingConfig.checkpoint_every": 500,
            "TrainingConfig.checkpoints_kept": 1,
        },
        largest_vocabulary=32_000,
    ),
    "paper": Scale(),
}


def configure(row: Row, scale: Scale, gin_files: Sequence[str] = (), gin_params: Sequence[str] = ()) -> RunConfig:
    """The run of a row at a scale.

    Args:
      row: its file is at the paper's size.
      scale: what is made of that.
      gin_files: the task, and options for all rows; lengths in them are those of the paper's size, too.
      gin_params: these win over everything, and are not scaled.

    Raises:
      UserError: as `config.parse`.
    """
    # A vocabulary that belongs to the row wins over the task's.
    own = {key: b.value for key, b in collect([row.file], []).items() if key.startswith("VocabularyConfig.")}
    params = [*(f"{key} = {value!r}" for key, value in own.items()), *gin_params]
    defaults = {f"DecoderConfig.{f.name}": Binding(f.default, "its default") for f in fields(DecoderConfig)}
    bindings = defaults | collect([row.file, *gin_files], params)
    run = config.build(bindings | _scaled(bindings, scale))
    if not own:
        return run
    return replace(run, data=replace(run.data, store=f"{run.data.store}_{row.name}"))


def _scaled(bindings: Bindings, scale: Scale) -> Bindings:
    """The bindings that differ at a scale, but for those that the user settled."""
    origin = f"the scale 1/{scale.divisor}"
    rules = scale.rules()
    values = {key: rules[key](binding.value) for key, binding in bindings.items() if key in rules}
    num_layers = bindings["DecoderConfig.num_layers"].value
    total = num_layers + bindings["DecoderConfig.extra_layers"].value
    values["DecoderConfig.num_layers"] = num_layers // scale.layers
    if scale.layers > 1:
        for name in ("DecoderConfig.recurrent_layers", "DecoderConfig.memory_layers"):
            values[name] = tuple(layer % total // scale.layers for layer in bindings[name].value)
    values |= scale.bindings
    return {
        key: Binding(value, origin)
        for key, value in values.items()
        if key not in bindings or not bindings[key].origin.startswith("--")
    }
