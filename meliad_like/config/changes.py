"""Configs that differ from others in some fields."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from meliad_like.config import construction
from meliad_like.config.bindings import Bindings, collect
from meliad_like.errors import UserError

Config = TypeVar("Config")


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
