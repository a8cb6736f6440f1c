"""By which rule each size in a model's config shrinks when a smaller model of the same kind is made."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

ScalesAs = Literal["length", "width", "heads", "layers", "layer_indices", "fixed"]
"""A number of tokens or of memory slots; a number of channels; the number or the size of heads; a number of layers;
layers named by their numbers; a number that all sizes of the model share."""


def size(default: Any, scales_as: ScalesAs) -> Any:
    """A dataclass field with a default, and the rule by which it shrinks."""
    return dataclasses.field(default=default, metadata={"scales_as": scales_as})


def sizes_of(config: Any, scales_as: ScalesAs) -> list[dataclasses.Field]:
    """The fields of a config that shrink by a rule."""
    return [field for field in dataclasses.fields(config) if field.metadata.get("scales_as") == scales_as]


def scaled(config: Any, rules: Mapping[str, Callable[[Any], Any]]) -> Any:
    """The config with every size changed by the rule that its field names, in nested configs as well.

    Args:
      config: a dataclass. Fields without a rule stay as they are.
      rules: new values from old ones; a rule that is missing changes nothing.
    """

    def change(value: Any, rule: Callable[[Any], Any] | None) -> Any:
        if rule is not None and value is not None:
            return rule(value)
        if dataclasses.is_dataclass(value):
            return scaled(value, rules)
        if isinstance(value, tuple):
            return tuple(change(item, None) for item in value)
        return value

    changes = {
        field.name: change(getattr(config, field.name), rules.get(field.metadata.get("scales_as", "fixed")))
        for field in dataclasses.fields(config)
    }
    return dataclasses.replace(config, **changes)
