"""Builds a tree of config dataclasses from bindings, whatever the kinds in it.

A field is bound by the name of its class (`TrainingConfig.num_steps = 3`), or by that of a base class which has the
field too, so that one binding serves all kinds of a role. Dataclasses inside a config are bound in the same way. A
field made by `kind_field` is bound to the name of a kind (`RunConfig.model = "decoder"`); one with `many` to the names
of all its kinds, and a kind of which anything is bound outside `base.gin` is added to them.
"""

import contextlib
import dataclasses
import math
import typing
from collections.abc import Callable
from types import UnionType
from typing import Any, Literal, Union

from meliad_like.config.bindings import Binding, Bindings, Rank
from meliad_like.config.files import nearest
from meliad_like.errors import UserError
from meliad_like.registry import Registry, default_of

Maker = Callable[[], Any]


def build(bindings: Bindings, *roots: Any) -> tuple[Any, ...]:
    """Configs from bindings, each of which must be read by one of them.

    Bindings of base.gin are defaults: they may belong to a kind that is not chosen, or to a root that is not asked for.
    Where nothing is bound, the defaults of a root that is a class hold, or the values of one that is a config. Raises a
    UserError if a binding is wrong or nothing reads it, or if the values don't go together.
    """
    builder = _Builder(bindings)
    makers = [builder.maker(root) for root in roots]
    # Nothing is made, and so validated, until every binding is known to be read.
    builder.check_all_read()
    return tuple(make() for make in makers)


class _Builder:
    def __init__(self, bindings: Bindings):
        self._bindings = bindings
        self._read: set[str] = set()
        self._built: dict[str, type] = {}
        # The registry, the names of its kinds that a field has, and where they were chosen.
        self._choices: dict[str, tuple[Registry, tuple[str, ...], str]] = {}

    def maker(self, start: Any) -> Maker:
        """Makes a class, or a changed config, with all that is bound of it and of what is inside it."""
        config_class = start if isinstance(start, type) else type(start)
        self._built |= _owners(config_class)
        types, values, makers = field_types(config_class), {}, {}
        for field in dataclasses.fields(config_class):
            key, binding = self._find(config_class, field.name)
            value = default_of(field) if isinstance(start, type) else getattr(start, field.name)
            if (registry := field.metadata.get("registry")) is not None:
                makers[field.name] = self._kinds(registry, field.metadata["many"], key, binding, value)
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

    def _kinds(self, registry: Registry, many: bool, key: str, binding: Binding | None, default: Any) -> Maker:
        """Makes a config of a kind, or `many`, and notes which kinds they are."""
        members = {registry.name_of(member): member for member in (default if many else [default])}
        origin = "the default"
        if binding is not None:
            names, origin = binding.value, binding.origin
            names = names if many and isinstance(names, (list, tuple)) else [names]
            for name in names:
                if not isinstance(name, str) or name not in registry:
                    raise UserError(f"{origin}: {key} = {name!r} is not one of {', '.join(sorted(registry))}")
            members = {name: members.get(name, registry[name]) for name in names}
        if many:
            bound = {key.rpartition(".")[0] for key, each in self._bindings.items() if each.rank != Rank.DEFAULT}
            added = {name: registry[name] for name in sorted(registry) if registry[name].__name__ in bound}
            members |= {name: config_class for name, config_class in added.items() if name not in members}
        self._choices[key] = registry, tuple(members), origin
        makers = list(map(self.maker, members.values()))
        return (lambda: tuple(make() for make in makers)) if many else makers[0]

    def check_all_read(self) -> None:
        """Raises a UserError if nothing has read a binding of a file or parameter."""
        not_chosen = self._not_chosen()
        for key, binding in self._bindings.items():
            if key in self._read or binding.rank in (Rank.PROGRAM, Rank.DEFAULT):
                continue
            class_name, _, parameter = key.rpartition(".")
            if class_name in self._built and parameter not in not_chosen.get(class_name, ("", (), ()))[2]:
                hint = nearest(parameter, self._built[class_name].__dataclass_fields__)
                raise UserError(f"{binding.origin}: {class_name} has no parameter {parameter}{hint}")
            if class_name not in not_chosen:
                hint = nearest(class_name, self._built | not_chosen)
                raise UserError(f"{binding.origin}: unknown class {class_name}{hint}")
            choice_key, kinds, _ = not_chosen[class_name]
            choice = self._bindings.get(choice_key)
            replaces = choice is not None and (choice.replaced in kinds or choice.rank == Rank.PROGRAM)
            if replaces and binding.rank == Rank.FILE:
                # A parameter that replaces a file's kind replaces its fields, too; so does a kind that a program sets.
                continue
            _, names, origin = self._choices[choice_key]
            chosen = repr(names[0]) if len(names) == 1 else names
            raise UserError(
                f"{binding.origin}: nothing reads {key}: {choice_key} is {chosen} ({origin}), not {kinds[0]!r}"
            )

    def _not_chosen(self) -> dict[str, tuple[str, list[str], set[str]]]:
        """Classes by name that were not built: the field and the kinds that would have built each, and its fields."""
        not_chosen: dict[str, tuple[str, list[str], set[str]]] = {}
        for key, (registry, names, _) in self._choices.items():
            of_choice: dict[str, tuple[str, list[str], set[str]]] = {}
            for name in registry:
                for owner, base in _owners_inside(registry[name]).items() if name not in names else ():
                    _, kinds, fields = of_choice.setdefault(owner, (key, [], set()))
                    kinds.append(name)
                    fields.update(base.__dataclass_fields__)
            # The choice of a part counts before that of the whole.
            not_chosen |= of_choice
        return not_chosen


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
    """`value` as the type `expected`: lists become tuples, integers floats. Raises a UserError if it does not fit.

    Infinity is refused: gin can't say it, and a saved config would not be read again.
    """
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
