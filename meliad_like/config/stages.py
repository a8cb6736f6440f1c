"""Staged training: first with short segments and windows, then with longer ones (Shortformer, section 4)."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from meliad_like.errors import UserError

if TYPE_CHECKING:
    from meliad_like.config.run import RunConfig


@dataclass(frozen=True)
class StagesConfig:
    """The stages before the last, one number for each of them in every field; (): no such stages.

    The last stage is what the rest of the config describes. Parameters, optimizer state and the learning rate's
    schedule continue from stage to stage; the carry of the lanes does not. All stages have the same tokens per step, so
    the number of lanes follows from the segment length.
    """

    num_steps: tuple[int, ...] = ()
    """Steps of each stage; the last one has what is left of TrainingConfig.num_steps."""
    segment_length: tuple[int, ...] = ()
    """In the place of ReaderConfig.segment_length. (): as in the last stage; so in the fields below."""
    window_length: tuple[int, ...] = ()
    """In the place of the model's."""
    cache_length: tuple[int, ...] = ()
    """In the place of the model's, where it has one (`ShortformerConfig`)."""

    def __post_init__(self):
        for name in ("segment_length", "window_length", "cache_length"):
            if getattr(self, name) and len(getattr(self, name)) != len(self.num_steps):
                raise UserError(
                    f"StagesConfig.{name}={getattr(self, name)} and StagesConfig.num_steps={self.num_steps} must have "
                    "a number for each stage before the last"
                )
        if any(steps < 1 for steps in self.num_steps):
            raise UserError(f"StagesConfig.num_steps={self.num_steps} must all be at least 1")


class Stage(NamedTuple):
    """Steps that are trained alike."""

    index: int
    first_step: int
    """Steps done before it."""
    last_step: int
    """Steps done after it."""
    run: "RunConfig"
    """The config of these steps, as if there were no others."""


def stages_of(run: "RunConfig") -> list[Stage]:
    """All stages of a run, in order; one, where it is not staged.

    Raises:
      UserError: the earlier stages leave no step to the last one, or one of them is not possible.
    """
    config, first, stages = run.stages, 0, []
    for index, steps in enumerate(config.num_steps):
        stages.append(Stage(index, first, first + steps, _changed(run, config, index)))
        first += steps
    if first >= run.training.num_steps:
        raise UserError(
            f"StagesConfig.num_steps={config.num_steps} leaves none of TrainingConfig.num_steps="
            f"{run.training.num_steps} to the last stage"
        )
    last = dataclasses.replace(run, stages=StagesConfig())
    return [*stages, Stage(len(stages), first, run.training.num_steps, last)]


def _changed(run: "RunConfig", config: StagesConfig, index: int) -> "RunConfig":
    changes = {
        name: getattr(config, name)[index] for name in ("window_length", "cache_length") if getattr(config, name)
    }
    if missing := sorted(changes.keys() - {field.name for field in dataclasses.fields(run.model)}):
        raise UserError(f"StagesConfig.{missing[0]} has no effect: {type(run.model).__name__} has no such field")
    try:
        data = run.data
        if config.segment_length:
            data = dataclasses.replace(data, segment_length=config.segment_length[index])
        return dataclasses.replace(
            run, stages=StagesConfig(), data=data, model=dataclasses.replace(run.model, **changes)
        )
    except UserError as error:
        raise UserError(f"stage {index + 1} of {len(config.num_steps) + 1}: {error}") from None
