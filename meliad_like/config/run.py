"""The config of a whole run: how bindings become one, and how they or other code change fields of it."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from meliad_like.config import construction
from meliad_like.config.bindings import Bindings, collect
from meliad_like.config.stages import StagesConfig, stages_of
from meliad_like.config.training import TrainingConfig
from meliad_like.data.documents import SOURCES, SourceConfig
from meliad_like.data.files_source import StandardLibrarySource
from meliad_like.data.readers import READERS, LanesReaderConfig, ReaderConfig
from meliad_like.data.vocabulary import VOCABULARIES, BytesVocabularyConfig, VocabularyConfig
from meliad_like.errors import UserError
from meliad_like.mesh import MeshConfig
from meliad_like.models.base import MODELS, ModelConfig
from meliad_like.models.decoder import DecoderConfig
from meliad_like.optimization.optimizers import OPTIMIZERS, Adafactor, OptimizerConfig
from meliad_like.optimization.schedules import SCHEDULES, CosineSchedule, ScheduleConfig
from meliad_like.registry import kind_field

Config = TypeVar("Config")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run, except the machine and the working folder."""

    model: ModelConfig = kind_field(MODELS, DecoderConfig)
    """The network: the config of one of the families in `models/`, which `RunConfig.model` names in gin."""
    source: SourceConfig = kind_field(SOURCES, StandardLibrarySource)
    """Where the documents come from."""
    vocabulary: VocabularyConfig = kind_field(VOCABULARIES, BytesVocabularyConfig)
    """How text becomes tokens."""
    data: ReaderConfig = kind_field(READERS, LanesReaderConfig)
    """How documents become batches."""
    optimizer: OptimizerConfig = kind_field(OPTIMIZERS, Adafactor)
    """What turns gradients into updates."""
    schedule: ScheduleConfig = kind_field(SCHEDULES, CosineSchedule)
    """The learning rate of each step."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """The loop: number of steps, seed, what happens how often."""
    stages: StagesConfig = field(default_factory=StagesConfig)
    """Stages of training with other lengths, before the one that all of the above describes."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How the devices are laid out."""

    def __post_init__(self) -> None:
        self.data.check_model(self.model)
        num_lanes, parts = self.data.num_lanes, self.training.gradient_accumulation
        if num_lanes % parts:
            raise UserError(
                f"gradient_accumulation={parts} must divide the {num_lanes} lanes (tokens_per_step / segment_length)"
            )
        if self.stages.num_steps:
            stages_of(self)


def parse(
    gin_files: Sequence[str] = (), gin_params: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> RunConfig:
    """The run that `base.gin`, these `--gin_file`s and these `--gin_param`s describe.

    Args:
      gin_files: names as `--gin_file` takes them, in any order.
      gin_params: bindings such as `DecoderConfig.num_layers = 3`; they win over every file.
      values: by `Class.field`; they win over every file, and not over `gin_params`. Kinds have their names.

    Raises:
      UserError: anything about them is wrong, on one line.
    """
    return construction.build(collect(gin_files, gin_params, values), RunConfig)[0]


def parse_with(gin_files: Sequence[str], gin_params: Sequence[str], *others: Any) -> tuple[Any, ...]:
    """The run, and other configs that the same files and parameters describe, such as those of a command.

    `others` are their classes, or configs whose values hold where nothing is bound.
    """
    return construction.build(collect(gin_files, gin_params), RunConfig, *others)


class Changes(NamedTuple):
    """What gin files and parameters change of configs that there are already."""

    bindings: Bindings

    def __call__(self, *configs: Any) -> Any:
        """The changed configs: one, or a tuple of several.

        Raises:
          UserError: a binding is wrong, or none of the configs reads it.
        """
        changed = construction.build(self.bindings, *configs)
        return changed[0] if len(changed) == 1 else changed

    def value(self, key: str, default: Config) -> Config:
        """What is bound to `Class.field`; the default where nothing of its type is."""
        binding = self.bindings.get(key)
        return binding.value if binding is not None and type(binding.value) is type(default) else default


def read_changes(gin_files: Sequence[str] = (), gin_params: Sequence[str] = ()) -> Changes:
    """Reads gin files and parameters whose bindings change a saved config; those of base.gin change nothing.

    Raises:
      UserError: as `collect`, or a parameter binds a macro.
    """
    for text in gin_params:
        if "." not in text.partition("=")[0]:
            raise UserError(f"--gin_param={text}: the checkpoint has no macros; bind Class.parameter = value")
    return Changes({key: value for key, value in collect(gin_files, gin_params).items() if not value.of_base})


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values in some fields; it is validated once they all have changed.

    Args:
      changes: by the paths of fields, such as `{"data.segment_length": 512, "model.remat": "layers"}`.
    """
    own = {path: value for path, value in changes.items() if "." not in path}
    inside: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        if rest:
            inside[name][rest] = value
    for name, more in inside.items():
        own[name] = with_changes(own.get(name, getattr(config, name)), more)
    return dataclasses.replace(config, **own)  # type: ignore[type-var]  # configs are dataclasses


def bound_by(gin_params: Sequence[str]) -> dict[str, Any]:
    """The values that parameters bind, by `Class.field`; macros, which only files read, are left out."""
    fields = [text for text in gin_params if "." in text.partition("=")[0]]
    return {key: binding.value for key, binding in collect((), fields).items() if binding.rank == 0}
