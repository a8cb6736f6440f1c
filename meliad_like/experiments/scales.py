"""A table at several scales: as in the paper, or with every row made smaller by the same rule.

The scales of a paper's tables are in the module of its rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from meliad_like import config
from meliad_like.config import RunConfig, with_changes
from meliad_like.data.readers import ReaderConfig
from meliad_like.registry import rule_of

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
    keep_share_of_warmup: bool = False
    """Whether the warmup keeps its share of the steps, as stages do where the number of steps is not from `targets`."""
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

    def sizes(self, run: RunConfig) -> dict[str, Any]:
        """The smaller sizes of a run, by `Class.field`. Every field of a model's configs states its rule (`sizes`)."""
        model, divisor, root = run.model, self.lengths or self.divisor, math.isqrt(self.divisor)

        def shorter(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return tuple(map(shorter, value))
            # Of a few tokens one is left: a size of 0 would be another model.
            return max(value // divisor, min(value, 1))

        def named(layers):
            return layers and tuple(layer % model.total_layers // self.layers for layer in layers)

        rules = {
            "length": shorter,
            "width": lambda value: value // self.divisor,
            "heads": lambda value: value // root,
            "layers": lambda value: value // self.layers,
            "layer_indices": named if self.layers > 1 else lambda layers: layers,
        }
        smaller = {
            f"{type(part).__name__}.{size.name}": rules[rule](getattr(part, size.name))
            for part in (model, *model.mechanisms, *parts_of(run.data))
            for size in fields(part)
            if (rule := rule_of(type(part), size)) in rules
        }
        of_stages = {
            f"StagesConfig.{name}": shorter(getattr(run.stages, name))
            for name in ("segment_length", "window_length", "cache_length")
        }
        return smaller | of_stages | {"ReaderConfig.segment_length": shorter(run.data.segment_length) // self.segments}


def parts_of(reader: ReaderConfig) -> list[Any]:
    """The configs inside that of a reader, such as the lengths of windows with spans."""
    values = (getattr(reader, field.name) for field in fields(reader))
    return [value for value in values if is_dataclass(value)]


def configure(
    row: "Row",
    scale: Scale,
    gin_files: Sequence[str] = (),
    gin_params: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The run of a row at a scale.

    `gin_files` are the task and options for all rows, with the lengths of the paper's size, as the row's own files.
    Values in `fixed`, by `Class.field`, win over files, `gin_params` over everything; neither is scaled.
    """
    files, fixed, bound = [*row.files, *gin_files], dict(fixed or {}), config.bound_by(gin_params)
    if row.vocabulary_size:
        # A vocabulary that belongs to the row wins over the task's.
        own = config.bound_values(config.parse(row.files))
        fixed |= {key: value for key, value in own.items() if "Vocabulary" in key or key == "RunConfig.vocabulary"}
    # Macros are parts of files, and scaled with them.
    macros = [param for param in gin_params if "." not in param.partition("=")[0]]
    whole = config.parse(files, macros, fixed)
    values = scale.sizes(whole) | dict(scale.bindings)
    share = (values | bound).get("TrainingConfig.num_steps", whole.training.num_steps) / whole.training.num_steps
    values["StagesConfig.num_steps"] = tuple(max(round(steps * share), 1) for steps in whole.stages.num_steps)
    if scale.keep_share_of_warmup:
        values["ScheduleConfig.warmup_steps"] = int(whole.schedule.warmup_steps * share)
    if scale.segments > 1 or scale.lanes > 1:
        # A segment that the user bound is the one whose lanes count.
        segment = (values | bound)["ReaderConfig.segment_length"]
        values["ReaderConfig.tokens_per_step"] = segment * max(whole.data.num_lanes // scale.lanes, 1)
    run = config.parse(files, gin_params, values | fixed)
    if scale.targets and "TrainingConfig.num_steps" not in bound:
        window, overlap = run.model.window_length, run.data.training_overlap(run.model.overlap)
        new = run.data.tokens_per_step * (window - overlap) / window
        run = with_changes(run, {"training.num_steps": math.ceil(scale.targets / new)})
    return with_changes(run, {"data.store": f"{run.data.store}_{row.name}"}) if row.vocabulary_size else run
