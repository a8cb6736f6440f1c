"""The config of a whole run, and how bindings become one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meliad_like.config import construction
from meliad_like.config.bindings import Bindings, collect
from meliad_like.config.stages import StagesConfig, stages_of
from meliad_like.config.training import TrainingConfig
from meliad_like.data.documents import SOURCES, SourceConfig, StandardLibrarySource
from meliad_like.data.readers import READERS, LanesReaderConfig, ReaderConfig
from meliad_like.data.vocabulary import VOCABULARIES, BytesVocabularyConfig, VocabularyConfig
from meliad_like.errors import UserError
from meliad_like.mesh import MeshConfig
from meliad_like.models.base import MODELS, ModelConfig
from meliad_like.models.decoder import DecoderConfig
from meliad_like.optimization.optimizers import OPTIMIZERS, Adafactor, OptimizerConfig
from meliad_like.optimization.schedules import SCHEDULES, CosineSchedule, ScheduleConfig
from meliad_like.registry import kind_field


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


def parse(gin_files: Sequence[str] = (), gin_params: Sequence[str] = ()) -> RunConfig:
    """The run that `base.gin`, these `--gin_file`s and these `--gin_param`s describe.

    Args:
      gin_files: names as `--gin_file` takes them, in any order.
      gin_params: bindings such as `DecoderConfig.num_layers = 3`; they win over every file.

    Raises:
      UserError: anything about them is wrong, on one line.
    """
    return build(collect(gin_files, gin_params))


def parse_with(gin_files: Sequence[str], gin_params: Sequence[str], *others: Any) -> tuple[Any, ...]:
    """The run, and the other configs that the same files and parameters describe, such as those of a command.

    Args:
      gin_files, gin_params: as for `parse`.
      others: classes of the other configs, or configs whose values hold where nothing is bound.
    """
    return construction.build(collect(gin_files, gin_params), RunConfig, *others)


def build(bindings: Bindings) -> RunConfig:
    """A RunConfig from bindings, each of which must be read."""
    return construction.build(bindings, RunConfig)[0]
