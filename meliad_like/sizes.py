"""The rules by which the sizes in a model's config shrink for a smaller model of the same kind."""

import dataclasses
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


def rule_of(config_class: type, field: dataclasses.Field) -> ScalesAs:
    """The rule by which a field of a config shrinks; `fixed` for fields that don't hold a whole number.

    Raises:
      TypeError: the field holds a whole number and states no rule, so that a smaller model could be a wrong one.
    """
    rule = field.metadata.get("scales_as")
    if rule is None and isinstance(field.default, int) and not isinstance(field.default, bool):
        name = f"{config_class.__name__}.{field.name}"
        raise TypeError(f"{name} must state how it scales: {field.name}: int = size({field.default}, RULE)")
    return rule or "fixed"
