"""What is saved with a run, and how it is read back without gin."""

import collections
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from etils import epath

from meliad_like.config.construction import to_bindings
from meliad_like.config.fields import field_types, fit
from meliad_like.config.run import RunConfig
from meliad_like.config.search import nearest
from meliad_like.errors import UserError
from meliad_like.registry import Registry, default_of, to_plain
from meliad_like.remote import write_whole
from meliad_like.resumable import refuse_differences
from meliad_like.saved_json import parse_json

JSON_NAME = "config.json"
GIN_NAME = "config.gin"


def to_dict(run: RunConfig) -> dict[str, dict[str, Any]]:
    """The config as nested dictionaries: one for each part, those of kinds with the kind's name."""
    return to_plain(run)


def to_json(run: RunConfig) -> str:
    """`to_dict` as indented JSON text."""
    return json.dumps(to_dict(run), indent=2) + "\n"


def from_json(text: str | bytes) -> RunConfig:
    """Rebuilds what `to_json` wrote. A field that is missing was added later, and has its default.

    Raises:
      UserError: not JSON, or unknown or ill-typed fields or kinds (a file of another version), by name.
    """
    return from_plain(RunConfig, parse_json(text, "the saved config"))


def from_plain(config_class: type, saved: Any, path: str = "") -> Any:
    """Rebuilds a config of this class from what `to_plain` made of it.

    Args:
      path: of the config in what was saved, for messages.

    Raises:
      UserError: an unknown or ill-typed field or kind.
    """
    if not isinstance(saved, dict):
        raise UserError(f"the saved config has {saved!r} where {path or 'the run'} should be an object")
    types, arguments = field_types(config_class), {}
    for name in sorted(saved.keys() - types.keys()):
        key = f"{path}.{name}".lstrip(".")
        raise UserError(f"the saved config has an unknown field {key}{nearest(name, sorted(types))}")
    for field in dataclasses.fields(config_class):
        if field.name not in saved:
            continue
        value, key = saved[field.name], f"{path}.{field.name}".lstrip(".")
        if (registry := field.metadata.get("registry")) is not None:
            default = default_of(field)
            if not field.metadata["many"]:
                arguments[field.name] = _kind(registry, value, key, type(default))
            elif isinstance(value, list):
                arguments[field.name] = tuple(_kind(registry, member, key, None) for member in value)
            else:
                raise UserError(f"the saved config has {value!r} where {key} should be a list")
        elif dataclasses.is_dataclass(types[field.name]):
            arguments[field.name] = from_plain(types[field.name], value, key)
        else:
            arguments[field.name] = fit(value, types[field.name], key)
    return config_class(**arguments)


def _kind(registry: Registry, saved: Any, path: str, default: type | None) -> Any:
    config_class = default
    if isinstance(saved, dict) and ("kind" in saved or default is None):
        name = saved.get("kind")
        if not isinstance(name, str) or name not in registry:
            raise UserError(
                f"the saved config has {path}.kind={name!r}, which is not one of {', '.join(sorted(registry))}"
            )
        config_class = registry[name]
        saved = {key: value for key, value in saved.items() if key != "kind"}
    return from_plain(config_class, saved, path)


def to_gin(run: RunConfig) -> str:
    """The config as a gin file that binds every parameter: read again, it gives the same run."""
    sections = collections.defaultdict(list)
    for key, binding in to_bindings(run).items():
        sections[key.partition(".")[0]].append(f"{key} = {binding.value!r}\n")
    return "\n".join(map("".join, sections.values()))


class Difference(NamedTuple):
    """A field of two configs that have other values in it."""

    path: str
    """Such as `model.num_layers`; `model.kind` where the kinds are others, whose fields are not compared."""
    old: Any
    new: Any
    resumable: Callable[[Any, Any], bool]
    """(config of the run so far, new config) -> whether the run may resume with the new value."""


def compare(old: Any, new: Any, path: str = "") -> Iterator[Difference]:
    """The fields in which two configs of one class differ."""
    for field in dataclasses.fields(old):
        key, resumable = f"{path}.{field.name}".lstrip("."), field.metadata.get("resumable", lambda old, new: False)
        registry = field.metadata.get("registry")
        pair = getattr(old, field.name), getattr(new, field.name)
        if registry is not None and field.metadata["many"]:
            members = [{registry.name_of(member): member for member in value} for value in pair]
            if list(members[0]) != list(members[1]):
                yield Difference(key, tuple(members[0]), tuple(members[1]), resumable)
            else:
                for name in members[0]:
                    yield from compare(members[0][name], members[1][name], f"{key}.{name}")
        elif type(pair[0]) is not type(pair[1]) and registry is not None:
            yield Difference(f"{key}.kind", registry.name_of(pair[0]), registry.name_of(pair[1]), resumable)
        elif dataclasses.is_dataclass(pair[0]) and type(pair[0]) is type(pair[1]):
            yield from compare(*pair, key)
        elif pair[0] != pair[1]:
            yield Difference(key, *pair, resumable)


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configs differ: `model.num_layers` to (old value, new value)."""
    return {found.path: (found.old, found.new) for found in compare(old, new)}


def check_workdir(run: RunConfig, workdir: str | epath.Path) -> None:
    """Nothing is written.

    Raises:
      UserError: the folder holds another run, which differs in a field that is not `resumable`, or its `config.json` is
        damaged.
    """
    folder = epath.Path(workdir)
    path = folder / JSON_NAME
    if not path.exists():
        return
    try:
        saved = from_json(path.read_bytes())
    except UserError as error:
        raise UserError(
            f"{path}: {error}; if it is damaged, delete it: the same command then resumes, and writes it anew"
        ) from None
    fixed = [found for found in compare(saved, run) if not found.resumable(saved, run)]
    refuse_differences(folder, ((found.path, found.old, found.new) for found in fixed), "choose another --workdir")


def save(run: RunConfig, workdir: str | epath.Path) -> None:
    """Writes `config.json` and `config.gin` into the working folder (made if need be), where they differ.

    Raises:
      UserError: as `check_workdir`.
    """
    check_workdir(run, workdir)
    folder = epath.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in ((folder / JSON_NAME, to_json(run)), (folder / GIN_NAME, to_gin(run))):
        if not path.exists() or path.read_bytes() != text.encode():
            write_whole(path, text)
