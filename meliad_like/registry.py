"""Registries of kinds: the frozen config dataclasses that can fill one role, such as that of an optimizer or a reader.

A *kind* is a dataclass with only the fields that it reads, so that a field without effect can't be set. The package
that defines a role owns its registry (`READERS = Registry("reader")`); a new kind, in this package or in another one,
is registered there (`@READERS.register("lanes")`), and general code never names it: it has `kind_field`s of the role.

A role whose kinds are in modules of their own names these modules. Other packages name a module that registers kinds
in the entry-point group `meliad_like.kinds`. Both are imported when a kind is looked up that is not there yet.
"""

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar, dataclass_transform

from meliad_like.errors import UserError

ENTRY_POINTS = "meliad_like.kinds"
Class = TypeVar("Class", bound=type)
ScalesAs = Literal["length", "width", "heads", "layers", "layer_indices", "layer_entries", "fixed"]
"""The rule by which a field shrinks with the model.

`length`: a number of tokens or of memory slots. `width`: a number of channels. `heads`: the number or the size of
heads. `layers`: a number of layers. `layer_indices`: layers named by their numbers. `layer_entries`: an entry for each
layer. `fixed`: a number that all sizes of the model share.
"""


class Registry(Mapping[str, type]):
    """The config classes of one role, by name."""

    def __init__(self, role: str, *modules: str):
        """`modules`: full names of modules that register kinds of this role when they are imported."""
        self.role = role
        self._modules = modules
        self._classes: dict[str, type] = {}
        self._loaded = False

    @dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
    def register(self, name: str) -> Callable[[Class], Class]:
        """A class decorator that makes a config a frozen dataclass, if it isn't one, and adds it under `name`."""

        def add(config_class: Class) -> Class:
            if "__dataclass_fields__" not in vars(config_class):
                config_class = dataclasses.dataclass(frozen=True)(config_class)
            if self._classes.setdefault(name, config_class) is not config_class:
                raise ValueError(f"two classes are registered as {self.role} {name!r}")
            return config_class

        return add

    def _load(self, name: str = "") -> dict[str, type]:
        """The classes of all modules, or only of those before the one of this name: some take seconds to import."""
        for module in self._modules:
            if name not in self._classes:
                importlib.import_module(module)
        if name not in self._classes and not self._loaded:
            self._loaded = True
            for entry_point in entry_points(group=ENTRY_POINTS):
                entry_point.load()
        return self._classes

    def __getitem__(self, name: str) -> type:
        if name not in self._load(name):
            raise UserError(f"{self.role}={name!r} is not one of {', '.join(sorted(self._classes))}")
        return self._classes[name]

    def __contains__(self, name: str) -> bool:  # type: ignore[override]
        return name in self._load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._load())

    def __len__(self) -> int:
        return len(self._load())

    def name_of(self, config: Any) -> str:
        """The name under which the class of `config` is registered."""
        return next(name for name, config_class in self._classes.items() if type(config) is config_class)


def kind_field(
    registry: Registry,
    default: Callable[[], Any],
    *,
    many: bool = False,
    named_in: str | None = None,
    may_change: bool = False,
) -> Any:
    """A dataclass field whose value is of a registered kind; with `many`, a tuple of configs of different kinds.

    In gin it is bound to the name of the kind, or to the names of all kinds of the tuple. `named_in` is a field before
    it: the kinds of the tuple are those whose names are in the value of that field (`names_in`).

    `may_change` is whether a run may resume with other kinds, as `resumable` of other fields.
    """
    metadata = {"registry": registry, "many": many or named_in is not None, "named_in": named_in}
    return dataclasses.field(default_factory=default, metadata=metadata | {"resumable": lambda old, new: may_change})


def names_in(value: Any) -> list[str]:
    """The names in a text, joined by +, or in all texts inside of a tuple, in their order."""
    if isinstance(value, str):
        return [name.strip() for name in value.split("+")]
    return [name for part in value for name in names_in(part)] if isinstance(value, (list, tuple)) else []


def resumable(default: Any, when: Callable[[Any, Any], bool] = lambda old, new: True) -> Any:
    """A dataclass field that may change when a run resumes, because earlier steps did not depend on it.

    `when` of the run's config so far and the new one is whether the field may differ between the two.
    """
    return dataclasses.field(default=default, metadata={"resumable": when})


def may_change(field: dataclasses.Field, old: Any, new: Any) -> bool:
    """Whether a field may differ between two configs of which the new one resumes the old one."""
    return field.metadata.get("resumable", lambda old, new: False)(old, new)


def size(default: Any, scales_as: ScalesAs) -> Any:
    """A dataclass field with a default, and the rule by which it shrinks."""
    return dataclasses.field(default=default, metadata={"scales_as": scales_as})


def default_of(field: dataclasses.Field) -> Any:
    """The default of a dataclass field."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def configs_in(config: Any) -> Iterator[Any]:
    """A config, and the configs inside of it."""
    yield config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for member in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(member):
                yield from configs_in(member)


def bound_fields(config: Any) -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """All fields of a config and of the configs in it: the name with which gin binds a field, the field, and its value.

    The value of a field with a kind is the kind's name. Fields whose kinds another field names are left out.
    """
    for part in configs_in(config):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.metadata.get("named_in"):
                continue
            if (registry := field.metadata.get("registry")) is not None:
                value = tuple(map(registry.name_of, value)) if field.metadata["many"] else registry.name_of(value)
            if not dataclasses.is_dataclass(value):
                yield f"{type(part).__name__}.{field.name}", field, value


def bound_values(config: Any) -> dict[str, Any]:
    """The values of `bound_fields` by their names, from which `config.rebuild` makes the same config."""
    return {name: value for name, _, value in bound_fields(config)}


def changed_settings(config: Any, registry: Registry) -> dict[str, Any]:
    """The kind of a config, and its fields that don't have their defaults: new fields with defaults don't change it."""
    values = {field.name: (getattr(config, field.name), default_of(field)) for field in dataclasses.fields(config)}
    return {"kind": registry.name_of(config)} | {name: new for name, (new, old) in values.items() if new != old}


def fingerprint(plain: Any) -> str:
    """SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
