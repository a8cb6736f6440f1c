"""One table at three scales: as in the paper, or with every row made smaller by the same rule.

These are the scales of the Block-Recurrent tables; other papers' scales are in the modules of their rows.

| scale | lengths and widths | heads, head size | layers | tokens a step | steps | meant for |
|---|---|---|---|---|---|---|
| tiny | 1/16 | 1/4 | 1/2 | 2,048 | 800 | two CPU cores: the 42 runs of table 1 in less than an hour |
| small | 1/4 | 1/2 | unchanged | 8,192 | 5,000 | one GPU, or days of a laptop |
| paper | unchanged | | | 131,072 | 500,000 | the gin files |

Lengths are those of windows, segments, states and memories, so XL:2048 keeps four times the window of XL:512, and a
memory 128 windows. The 12-layer model of table 1 has at tiny 6 layers of width 64 with 2 heads of 32, feed-forward 256,
32 states and a window of 32 in segments of 256; at small 12 layers of width 256 with 4 heads of 64, window 128. A
13-layer baseline keeps one layer more. Values that a user binds with --gin_param are not scaled.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from meliad_like import config
from meliad_like.config import RunConfig, with_changes
from meliad_like.config.bindings import Binding, Bindings, collect
from meliad_like.mechanisms.base import MECHANISMS
from meliad_like.models.base import MODELS
from meliad_like.sizes import rule_of

if TYPE_CHECKING:
    from meliad_like.experiments.tables import Row


@dataclass(frozen=True)
class Scale:
    """How much smaller than in the paper the rows of a table are."""

    divisor: int = 1
    """Divisor of lengths and widths; its square root divides the number of heads and their size."""
    layers: int = 1
    """Divisor of the number of layers, and of the numbers of special layers."""
    bindings: Mapping[str, Any] = field(default_factory=dict)
    """Values by `Class.field` that replace those of the files."""
    largest_vocabulary: int | None = None
    """Rows with larger vocabularies of their own are only made if they are named."""
    side_by_side: bool = False
    """Whether one core for each model is the fastest way to train several."""
    lengths: int = 0
    """Divisor of lengths; 0: the same as of widths."""
    keep_share_of_steps: bool = False
    """Whether first stages and warmup keep their share of the steps."""
    segments: int = 1
    """Divisor of the lengths of segments alone; windows keep theirs."""
    lanes: int = 1
    """Divisor of the number of lanes; at least one lane is left."""
    targets: int = 0
    """About the number of targets of each training, if it is not 0: rows whose windows repeat more tokens have more
    steps."""
    max_tokens: int | None = None
    """The most tokens to evaluate, of the beginnings of documents; None: all."""
    timed_tokens: int = 1000
    """The number of tokens that are evaluated one by one, for the time alone."""

    def rules(self, classes: Sequence[type], total_layers: int) -> dict[str, Callable[[Any], Any]]:
        """The new value of each field that shrinks, as a function of the old value; by `Class.field`.

        Every field of a model's configs states its own rule (`sizes.size`).

        Args:
          classes: of the configs that the model consists of.
          total_layers: of the model at the paper's size.
        """
        divisor, root = self.lengths or self.divisor, math.isqrt(self.divisor)

        def shorter(value):
            return tuple(v // divisor for v in value) if isinstance(value, (list, tuple)) else value // divisor

        def named(layers):
            return layers and tuple(layer % total_layers // self.layers for layer in layers)

        by_kind: dict[str, Callable[[Any], Any]] = {
            "length": shorter,
            "width": lambda value: value // self.divisor,
            "heads": lambda value: value // root,
            "layers": lambda value: value // self.layers,
            "layer_indices": named if self.layers > 1 else lambda layers: layers,
        }
        rules: dict[str, Callable[[Any], Any]] = {"ReaderConfig.segment_length": shorter}
        rules |= {f"StagesConfig.{name}": shorter for name in ("segment_length", "window_length", "cache_length")}
        return rules | {
            f"{config_class.__name__}.{field.name}": by_kind[rule]
            for config_class in classes
            for field in fields(config_class)
            if (rule := rule_of(config_class, field)) in by_kind
        }


SCALES = {
    "tiny": Scale(
        divisor=16,
        layers=2,
        # Few tokens a step and a high rate, because the run is short; with fewer tokens still, rows of long segments
        # would read from two or three places of the documents at a time, and learn from little else.
        bindings={
            "DecoderConfig.dropout_rate": 0.0,
            "ReaderConfig.tokens_per_step": 2048,
            "RunConfig.schedule": "cosine",
            "CosineSchedule.max_rate": 0.05,
            "ScheduleConfig.multiplier": 1.0,
            "ScheduleConfig.warmup_steps": 50,
            "TrainingConfig.num_steps": 800,
            "TrainingConfig.log_every": 20,
            "TrainingConfig.checkpoint_every": 200,
            "TrainingConfig.checkpoints_kept": 1,
        },
        largest_vocabulary=8_000,
        side_by_side=True,
    ),
    "small": Scale(
        divisor=4,
        bindings={
            "ReaderConfig.tokens_per_step": 8192,
            "RunConfig.schedule": "cosine",
            "CosineSchedule.max_rate": 0.02,
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


def configure(
    row: "Row",
    scale: Scale,
    gin_files: Sequence[str] = (),
    gin_params: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The run of a row at a scale.

    Args:
      row: its files are at the paper's size.
      scale: how they become smaller.
      gin_files: the task, and options for all rows; their lengths are those of the paper's size, too.
      gin_params: bindings that win over everything, and are not scaled.
      fixed: values by `Class.field` that win over files, and are not scaled.

    Raises:
      UserError: as `config.parse`.
    """
    # A vocabulary that belongs to the row wins over the task's.
    papers = collect(row.files, [])
    own = {key: b.value for key, b in papers.items() if "VocabularyConfig." in key or key == "RunConfig.vocabulary"}
    params = [*(f"{key} = {value!r}" for key, value in own.items()), *gin_params]
    family = MODELS[papers["RunConfig.model"].value]
    bindings = collect([*row.files, *gin_files], params)
    bound = {key.partition(".")[0] for key, binding in bindings.items() if not binding.of_base}
    classes = [family, *(kind for kind in MECHANISMS.values() if kind.__name__ in bound)]
    defaults = {
        f"{config_class.__name__}.{f.name}": Binding(f.default, "its default")
        for config_class in classes
        for f in fields(config_class)
        if "scales_as" in f.metadata
    }
    bindings = defaults | bindings
    bindings |= _changed(bindings, fixed or {}, "--load_dir")
    origin = f"the scale 1/{scale.divisor}"
    bindings |= _changed(bindings, _scaled(bindings, scale, classes), origin)
    if scale.keep_share_of_steps:
        whole, steps = papers["TrainingConfig.num_steps"].value, bindings["TrainingConfig.num_steps"].value
        bindings |= _changed(bindings, _with_share_of_steps(bindings, steps / whole), origin)
    if scale.segments > 1 or scale.lanes > 1:
        n, tokens = (bindings[f"ReaderConfig.{name}"].value for name in ("segment_length", "tokens_per_step"))
        lanes, n = max(tokens // n // scale.lanes, 1), n // scale.segments
        bindings |= _changed(bindings, {"ReaderConfig.segment_length": n}, origin)
        # A segment that the user bound is the one whose lanes count.
        n = bindings["ReaderConfig.segment_length"].value
        bindings |= _changed(bindings, {"ReaderConfig.tokens_per_step": n * lanes}, origin)
    run = config.build(bindings)
    if scale.targets and not bindings["TrainingConfig.num_steps"].origin.startswith("--"):
        run = with_changes(run, {"training.num_steps": _steps_of(run, scale.targets)})
    return with_changes(run, {"data.store": f"{run.data.store}_{row.name}"}) if own else run


def _changed(bindings: Bindings, values: Mapping[str, Any], origin: str) -> Bindings:
    """These values as bindings, without those that flags have set."""
    return {
        key: Binding(value, origin, replaced=bindings.get(key), optional=True)
        for key, value in values.items()
        if key not in bindings or not bindings[key].origin.startswith("--")
    }


def _scaled(bindings: Bindings, scale: Scale, classes: Sequence[type]) -> dict[str, Any]:
    """The values of a scale: sizes of configs of these classes, the model's first, and the scale's own bindings."""
    model = classes[0].__name__
    total = bindings[f"{model}.num_layers"].value
    if (extra := f"{model}.extra_layers") in bindings:
        total += bindings[extra].value
    rules = scale.rules(classes, total)
    return {key: rules[key](binding.value) for key, binding in bindings.items() if key in rules} | dict(scale.bindings)


def _with_share_of_steps(bindings: Bindings, share: float) -> dict[str, Any]:
    """The steps of warmup and first stages in a run that has this share of the paper's."""
    values: dict[str, Any] = {"ScheduleConfig.warmup_steps": int(bindings["ScheduleConfig.warmup_steps"].value * share)}
    if (key := "StagesConfig.num_steps") in bindings:
        values[key] = tuple(max(round(steps * share), 1) for steps in bindings[key].value)
    return values


def _steps_of(run: RunConfig, targets: int) -> int:
    """The number of steps in which a run of windows has this number of targets."""
    window = run.model.window_length
    overlap = run.data.training_overlap(run.model.overlap)
    return math.ceil(targets / (run.data.tokens_per_step * (window - overlap) / window))
