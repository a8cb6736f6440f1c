"""The config of a whole run: how bindings become one, and how they or other code change fields of it."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from meliad_like.config import construction
from meliad_like.config.bindings import Bindings, Rank, Values, collect
from meliad_like.data.readers import READERS, LanesReaderConfig, ReaderConfig
from meliad_like.errors import UserError
from meliad_like.mesh import MeshConfig
from meliad_like.models.config import MODELS, ModelConfig
from meliad_like.models.decoder import DecoderConfig
from meliad_like.optimization.optimizers import OPTIMIZERS, Adafactor, OptimizerConfig
from meliad_like.optimization.schedules import SCHEDULES, CosineSchedule, ScheduleConfig
from meliad_like.registry import kind_field, resumable, size
from meliad_like.sources.base import SOURCES, SourceConfig
from meliad_like.sources.files import StandardLibrarySource
from meliad_like.trackers import TRACKERS, TensorBoard, TrackerConfig
from meliad_like.validation import check_choices, check_not_negative, check_positive, check_seeds
from meliad_like.vocabularies.base import VOCABULARIES, BytesVocabularyConfig, VocabularyConfig


@dataclass(frozen=True)
class TrainingConfig:
    """The training loop. Every `..._every` is the number of steps between two of its events; 0 is never."""

    num_steps: int = 500_000
    """The number of steps. A run may resume with another, unless the learning rates of earlier steps depend on it."""
    seed: int = 0
    """The random seed of the initial parameters, the order of the documents and the dropout; below 2**32."""
    gradient_accumulation: int = 1
    """The number of parts into which the lanes of a step are divided; they are computed one after the other, to save
    memory. The gradient is the same as of all of them at once, whatever their numbers of tokens. Where a model draws
    its dropout lane by lane, all parts have the same masks."""
    loss_slice: int = resumable(1024)
    """The number of tokens of a lane whose logits exist at the same time."""
    z_loss: float = 0.0
    """Factor of an additional loss, the squared logarithm of the softmax's sum, which keeps logits small (Chowdhery et
    al. 2022, section 5). Metrics show the loss without it."""
    nonfinite: Literal["stop", "skip"] = resumable("stop", lambda old, new: old.training.nonfinite == "stop")
    """The treatment of a loss or gradient that is not finite: `stop` with a saved state, or `skip` the step and count
    it. A run that has stopped may resume with `skip`; one that may have skipped steps can't resume with `stop`."""
    max_consecutive_skips: int = resumable(10)
    """The number of skipped steps in a row at which a run ends with an error; it also does if all steps are skipped."""
    log_every: int = resumable(10)
    """The number of steps between two logs of the metrics."""
    evaluate_every: int = resumable(0)
    """The number of steps between two evaluations; 0: no evaluation."""
    evaluate_split: str = resumable("validation", lambda old, new: not old.training.keep_best)
    """The split that these evaluations read. The best so far can't be compared with evaluations of other tokens."""
    evaluate_max_tokens: int | None = resumable(None, lambda old, new: not old.training.keep_best)
    """The largest number of tokens in these evaluations, which read a random subset of the split; None: all of it. If
    every document is longer, they read the beginning of the first one."""
    keep_best: bool = resumable(False)
    """Whether the parameters with the fewest bits per token in these evaluations are kept, in the run's folder `best`,
    which is a checkpoint folder of its own."""
    checkpoint_every: int = resumable(1000)
    """The number of steps between two checkpoints; the last step has one as well, also with 0."""
    checkpoints_kept: int = resumable(3)
    """Number of newest checkpoints that are kept."""
    checkpoint_keep_every: int = resumable(0)
    """The number of steps between checkpoints that are never deleted; 0: none."""
    sample_every: int = resumable(0)
    """The number of steps between two samples of text; 0: no samples."""
    sample_tokens: int = resumable(200)
    """The number of tokens of a sample."""

    def __post_init__(self):
        check_choices(self)
        if self.keep_best and not self.evaluate_every:
            raise UserError("keep_best=True needs an evaluate_every")
        if self.sample_every and not self.sample_tokens:
            raise UserError(f"sample_every={self.sample_every} needs sample_tokens of at least 1")
        check_seeds(self, ("seed",))
        counts = ("num_steps", "gradient_accumulation", "loss_slice", "max_consecutive_skips")
        check_positive(self, (*counts, "log_every", "checkpoints_kept"))
        periods = ("evaluate_every", "checkpoint_every", "checkpoint_keep_every", "sample_every")
        check_not_negative(self, (*periods, "sample_tokens", "z_loss"))


@dataclass(frozen=True)
class StagesConfig:
    """The stages before the last, one number for each of them in every field; (): no such stages.

    The last stage is what the rest of the config describes. Parameters, optimizer state and the learning rate's
    schedule continue from stage to stage; the carry of the lanes does not. All stages have the same tokens per step, so
    the number of lanes follows from the segment length.
    """

    num_steps: tuple[int, ...] = ()
    """Steps of each stage; the last one has the rest of TrainingConfig.num_steps."""
    segment_length: tuple[int, ...] = size((), "length")
    """The value of ReaderConfig.segment_length in each stage. (): as in the last stage; so in the fields below."""
    window_length: tuple[int, ...] = size((), "length")
    """The model's window_length in each stage."""
    cache_length: tuple[int, ...] = size((), "length")
    """The model's cache_length in each stage, where it has one (`ShortformerConfig`)."""

    def __post_init__(self):
        for name, lengths in vars(self).items():
            if lengths and len(lengths) != len(self.num_steps):
                steps = f"StagesConfig.num_steps={self.num_steps}"
                raise UserError(f"StagesConfig.{name}={lengths} and {steps} must have a number for each stage")
        if any(steps < 1 for steps in self.num_steps):
            raise UserError(f"StagesConfig.num_steps={self.num_steps} must all be at least 1")


Config = TypeVar("Config")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run, except the machine and the working folder."""

    model: ModelConfig = kind_field(MODELS, DecoderConfig)
    """The network: the config of one of the families in `models/`, which `RunConfig.model` names in gin."""
    source: SourceConfig = kind_field(SOURCES, StandardLibrarySource)
    """The source of the documents."""
    vocabulary: VocabularyConfig = kind_field(VOCABULARIES, BytesVocabularyConfig)
    """The vocabulary, which turns text into tokens."""
    data: ReaderConfig = kind_field(READERS, LanesReaderConfig)
    """The reader, which turns documents into batches."""
    optimizer: OptimizerConfig = kind_field(OPTIMIZERS, Adafactor)
    """The optimizer, which turns gradients into updates."""
    schedule: ScheduleConfig = kind_field(SCHEDULES, CosineSchedule)
    """The learning rate of each step."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """The loop: number of steps, seed, intervals of logs, evaluations and checkpoints."""
    stages: StagesConfig = field(default_factory=StagesConfig)
    """Stages of training with other lengths, before the one that all of the above describes."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """The layout of the devices."""
    trackers: tuple[TrackerConfig, ...] = kind_field(TRACKERS, lambda: (TensorBoard(),), many=True, may_change=True)
    """The trackers that show metrics in addition to `metrics.jsonl`."""

    def on_this_platform(self) -> "RunConfig":
        """The same run with the model as it is computed on the devices of this program (`ModelConfig`)."""
        return dataclasses.replace(self, model=self.model.on_this_platform())

    def __post_init__(self) -> None:
        self.data.check_model(self.model)
        num_lanes, parts = self.data.num_lanes, self.training.gradient_accumulation
        if num_lanes % parts:
            lanes = f"{num_lanes} lanes (tokens_per_step / segment_length)"
            raise UserError(f"gradient_accumulation={parts} must divide the {lanes}")
        if self.stages.num_steps:
            stages_of(self)


def parse(gin_files: Sequence[str] = (), gin_params: Sequence[str] = (), values: Values = None) -> RunConfig:
    """The run that `base.gin`, these `--gin_file`s (in any order) and these `--gin_param`s describe.

    `values` by `Class.field` win over every file, and not over `gin_params`; kinds have their names.
    """
    return construction.build(collect(gin_files, gin_params, values), RunConfig)[0]


class Changes(NamedTuple):
    """The changes that gin files and parameters make to existing configs."""

    bindings: Bindings

    def __call__(self, *configs: Any) -> Any:
        """The changed configs: one, or a tuple of several. Raises a UserError if none of them reads a binding."""
        changed = construction.build(self.bindings, *configs)
        return changed[0] if len(changed) == 1 else changed


def read_changes(gin_files: Sequence[str] = (), gin_params: Sequence[str] = (), values: Values = None) -> Changes:
    """Reads changes of a saved config, as `parse` does; base.gin changes nothing."""
    bindings = collect(gin_files, gin_params, values)
    return Changes({key: binding for key, binding in bindings.items() if binding.rank != Rank.DEFAULT})


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values in some fields, which are validated together.

    `changes` are by the paths of fields, such as `{"data.segment_length": 512, "model.remat": "layers"}`.
    """
    inside: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        inside[name][rest] = value
    fields = {name: more.pop("", getattr(config, name)) for name, more in inside.items()}
    fields = {name: with_changes(value, inside[name]) if inside[name] else value for name, value in fields.items()}
    return dataclasses.replace(config, **fields)  # type: ignore[type-var]  # configs are dataclasses


class Stage(NamedTuple):
    """Consecutive steps of a run with the same lengths."""

    index: int
    first_step: int
    """The number of steps done before this stage."""
    last_step: int
    """The number of steps done after this stage."""
    run: RunConfig
    """The config of these steps, as if there were no others."""


def stages_of(run: RunConfig) -> list[Stage]:
    """All stages of a run, in order. Raises a UserError if one is not possible, or the last one has no step left."""
    first, stages = 0, []
    for index, steps in enumerate(run.stages.num_steps):
        stages.append(Stage(index, first, first + steps, _run_of_stage(run, index)))
        first += steps
    if first >= (steps := run.training.num_steps):
        stage_steps = f"StagesConfig.num_steps={run.stages.num_steps}"
        raise UserError(f"{stage_steps} leaves none of TrainingConfig.num_steps={steps} to the last stage")
    last = dataclasses.replace(run, stages=StagesConfig())
    return [*stages, Stage(len(stages), first, run.training.num_steps, last)]


def _run_of_stage(run: RunConfig, index: int) -> RunConfig:
    stages = run.stages
    if stages.cache_length and not hasattr(run.model, "cache_length"):
        raise UserError(f"StagesConfig.cache_length has no effect: {type(run.model).__name__} has no such field")
    lengths = {"data.segment_length": stages.segment_length, "model.window_length": stages.window_length}
    lengths["model.cache_length"] = stages.cache_length
    try:
        changes = {path: values[index] for path, values in lengths.items() if values}
        return with_changes(run, {"stages": StagesConfig(), **changes})
    except UserError as error:
        raise UserError(f"stage {index + 1} of {len(stages.num_steps) + 1}: {error}") from None
