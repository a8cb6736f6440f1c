"""Builds a tree of config dataclasses from bindings, whatever the kinds in it.

A field is bound by the name of its class (`TrainingConfig.num_steps = 3`), or by that of a base class which has the
field too, so that one binding serves all kinds of a role. Dataclasses inside a config are bound in the same way. A
field made by `kind_field` is bound to the name of a kind (`RunConfig.model = "decoder"`), or to the names of several.
"""

import contextlib
import dataclasses
import math
import typing
from collections.abc import Callable, Iterable
from types import UnionType
from typing import Any, Literal, NamedTuple, Union

from meliad_like.config.bindings import Binding, Bindings, Rank
from meliad_like.config.files import nearest
from meliad_like.errors import UserError
from meliad_like.registry import Registry, default_of, names_in

Maker = Callable[[], Any]


def build(bindings: Bindings, *roots: Any) -> tuple[Any, ...]:
    """Configs from bindings, each of which must be read by one of them.

    Nothing needs to read bindings of base.gin. Where nothing is bound, the defaults of a root that is a class hold, or
    the values of a config. Raises a UserError if a binding is wrong or nothing reads it, or values don't go together.
    """
    builder = _Builder(bindings)
    makers = [builder.maker(root) for root in roots]
    # Nothing is made, and so validated, until every binding is known to be read.
    builder.check_all_read()
    return tuple(make() for make in makers)


class _Choice(NamedTuple):
    """The kinds that a field has: those that a binding names, or the default ones."""

    registry: Registry
    names: tuple[str, ...]
    key: str
    binding: Binding | None

    def __str__(self) -> str:
        names = repr(self.names[0]) if len(self.names) == 1 else self.names
        return f"{self.key} is {names} ({self.binding.origin if self.binding else 'the default'})"

    def others_with(self, owner: str) -> dict[str, type]:
        """The class by whose name `owner` fields are bound, of each of the kinds that the field does not have."""
        others = {name: _owners_inside(kind) for name, kind in self.registry.items() if name not in self.names}
        return {name: owners[owner] for name, owners in others.items() if owner in owners}

    def replaces(self, kinds: Iterable[str]) -> bool:
        """Whether a parameter names these kinds instead of some that a file names, or a program names them."""
        binding = self.binding
        return binding is not None and (
            binding.rank == Rank.PROGRAM or not set(kinds).isdisjoint(names_in(binding.replaced))
        )


class _Builder:
    def __init__(self, bindings: Bindings):
        self._bindings = bindings
        self._read: set[str] = set()
        self._built: dict[str, type] = {}
        self._choices: list[_Choice] = []

    def maker(self, start: Any) -> Maker:
        """Makes a class, or a changed config, with all bindings of it and of the configs inside it."""
        config_class = start if isinstance(start, type) else type(start)
        self._built |= _owners(config_class)
        types, values, makers = field_types(config_class), {}, {}
        for field in dataclasses.fields(config_class):
            key, binding = self._find(config_class, field.name)
            value = default_of(field) if isinstance(start, type) else getattr(start, field.name)
            if (naming := field.metadata.get("named_in")) is not None:
                if binding is not None:
                    raise UserError(f"{binding.origin}: {key} follows from {config_class.__name__}.{naming}: bind that")
                names = sorted(set(names_in(values[naming])) & set(field.metadata["registry"]))
                makers[field.name] = self._kinds(field, names, value, *self._find(config_class, naming))
            elif "registry" in field.metadata:
                names = None if binding is None else _names_bound(field, key, binding)
                makers[field.name] = self._kinds(field, names, value, key, binding)
            elif dataclasses.is_dataclass(types[field.name]):
                if binding is not None:
                    name = types[field.name].__name__
                    raise UserError(f"{binding.origin}: {key} has fields of its own: bind {name}.FIELD = ...")
                makers[field.name] = self.maker(types[field.name] if value is dataclasses.MISSING else value)
            elif binding is not None:
                try:
                    values[field.name] = fit(binding.value, types[field.name], key)
                except UserError as error:
                    raise UserError(f"{binding.origin}: {error}") from None
            elif value is not dataclasses.MISSING:
                values[field.name] = value
        return lambda: config_class(**values, **{name: make() for name, make in makers.items()})

    def _find(self, config_class: type, name: str) -> tuple[str, Binding | None]:
        """The binding of a field: of --gin_param before files before base.gin, then of the class before its bases."""
        keys = [f"{owner}.{name}" for owner, base in _owners(config_class).items() if name in base.__dataclass_fields__]
        bound = [key for key in keys if key in self._bindings]
        self._read.update(bound)
        key = min(bound, key=lambda key: self._bindings[key].rank, default=keys[0])
        return key, self._bindings.get(key)

    def _kinds(
        self, field: dataclasses.Field, names: Iterable[str] | None, start: Any, key: str, binding: Binding | None
    ) -> Maker:
        """Makes the config of a kind, or a tuple of them, and notes the choice. `names`: the kinds; None: those of
        `start`, which also has the values of fields that are not bound."""
        registry, many = field.metadata["registry"], field.metadata["many"]
        members = {registry.name_of(member): member for member in (start if many else [start])}
        names = tuple(members if names is None else names)
        self._choices.append(_Choice(registry, names, key, binding))
        makers = [self.maker(members.get(name, registry[name])) for name in names]
        return (lambda: tuple(make() for make in makers)) if many else makers[0]

    def check_all_read(self) -> None:
        """Raises a UserError if nothing reads a binding of a file or parameter, unless a parameter or program has
        replaced the kind whose field a file binds."""
        for key, binding in self._bindings.items():
            if key in self._read or binding.rank in (Rank.PROGRAM, Rank.DEFAULT):
                continue
            owner, _, parameter = key.rpartition(".")
            # The choice of a part counts before the choice of the whole.
            others = ((choice, choice.others_with(owner)) for choice in reversed(self._choices))
            choice, kinds = next((other for other in others if other[1]), (None, {}))
            if owner in self._built and not any(parameter in kind.__dataclass_fields__ for kind in kinds.values()):
                hint = nearest(parameter, self._built[owner].__dataclass_fields__)
                raise UserError(f"{binding.origin}: {owner} has no parameter {parameter}{hint}")
            if choice is None:
                classes = (kind for choice in self._choices for kind in choice.registry.values())
                known = dict.fromkeys(name for kind in classes for name in _owners_inside(kind))
                raise UserError(f"{binding.origin}: unknown class {owner}{nearest(owner, [*self._built, *known])}")
            if binding.rank == Rank.PARAMETER or not choice.replaces(kinds):
                raise UserError(f"{binding.origin}: nothing reads {key}: {choice}, not {next(iter(kinds))!r}")


def _names_bound(field: dataclasses.Field, key: str, binding: Binding) -> list[str]:
    """The names of registered kinds to which a field is bound."""
    registry, value = field.metadata["registry"], binding.value
    names = value if field.metadata["many"] and isinstance(value, (list, tuple)) else [value]
    for name in names:
        if not isinstance(name, str) or name not in registry:
            raise UserError(f"{binding.origin}: {key} = {name!r} is not one of {', '.join(sorted(registry))}")
    return list(dict.fromkeys(names))


def _owners_inside(config_class: type) -> dict[str, type]:
    """A dataclass, its bases, and all dataclasses that can be inside it, by the names by which fields are bound."""
    owners = _owners(config_class)
    types = field_types(config_class)
    for field in dataclasses.fields(config_class):
        if (registry := field.metadata.get("registry")) is not None:
            for inside in registry.values():
                owners |= _owners_inside(inside)
        elif dataclasses.is_dataclass(types[field.name]):
            owners |= _owners_inside(types[field.name])
    return owners


def _owners(config_class: type) -> dict[str, type]:
    """A dataclass and its bases that are dataclasses, the class itself first, by the names by which their fields are
    bound: those of the classes, or `bound_as`."""
    owners: dict[str, type] = {}
    for base in config_class.__mro__:
        if "__dataclass_fields__" in vars(base):
            owners.setdefault(vars(base).get("bound_as", base.__name__), base)
    return owners


def field_types(config_class: type) -> dict[str, Any]:
    """Names of a dataclass' fields to their evaluated annotations."""
    hints = typing.get_type_hints(config_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class)}


def fit(value: Any, expected: Any, name: str) -> Any:
    """`value` as the type `expected`: lists become tuples, integers floats. Raises a UserError if it does not fit, or
    is not finite."""
    try:
        return _fit(value, expected)
    except TypeError:
        raise UserError(f"{name}={value!r} must be {_describe(expected)}") from None
    except OverflowError:
        raise UserError(f"{name}={value!r} must be finite") from None


def _fit(value: Any, expected: Any) -> Any:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (Union, UnionType):
        for choice in arguments:
            with contextlib.suppress(TypeError):
                return _fit(value, choice)
    elif origin is tuple and isinstance(value, (list, tuple)):
        element_types = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(element_types) == len(value):
            return tuple(map(_fit, value, element_types))
    elif expected is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise OverflowError
        return float(value)
    # `type(...) is`: True is an int to isinstance, and num_layers=True is a mistake.
    elif expected is Any or (value in arguments if origin is Literal else type(value) is (origin or expected)):
        return value
    raise TypeError


def _describe(expected: Any) -> str:
    if typing.get_origin(expected) in (Literal, Union, UnionType):
        return " or ".join(map(_describe, typing.get_args(expected)))
    if isinstance(expected, type):
        return expected.__name__.replace("NoneType", "None")
    return repr(expected)
