"""What is saved with a run, and how it is read back without gin."""

import collections
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from etils import epath

from meliad_like.config.bindings import nearest
from meliad_like.config.construction import bound_values, field_types, fit
from meliad_like.config.run import RunConfig
from meliad_like.errors import UserError
from meliad_like.registry import Registry, default_of, to_plain
from meliad_like.remote import write_whole
from meliad_like.resumable import refuse_differences
from meliad_like.saved_json import parse_json

JSON_NAME = "config.json"
GIN_NAME = "config.gin"


def to_json(run: RunConfig) -> str:
    """The config as indented JSON: nested dictionaries, one for each part, those of kinds with the kind's name."""
    return json.dumps(to_plain(run), indent=2) + "\n"


def from_json(text: str | bytes) -> RunConfig:
    """Rebuilds what `to_json` wrote. A field that is missing was added later, and has its default.

    Raises:
      UserError: not JSON, or unknown or ill-typed fields or kinds (a file of another version), by name.
    """
    return from_plain(RunConfig, parse_json(text, "the saved config"))


def from_plain(config_class: type, saved: Any, path: str = "") -> Any:
    """Rebuilds a config of this class from what `to_plain` made of it; messages name the `path` of a field.

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
        if (registry := field.metadata.get("registry")) is None:
            expected = types[field.name]
            is_config = dataclasses.is_dataclass(expected)
            arguments[field.name] = from_plain(expected, value, key) if is_config else fit(value, expected, key)
        elif not field.metadata["many"]:
            arguments[field.name] = _kind(registry, value, key, type(default_of(field)))
        elif isinstance(value, list):
            arguments[field.name] = tuple(_kind(registry, member, key, None) for member in value)
        else:
            raise UserError(f"the saved config has {value!r} where {key} should be a list")
    return config_class(**arguments)


def _kind(registry: Registry, saved: Any, path: str, default: type | None) -> Any:
    if not isinstance(saved, dict) or ("kind" not in saved and default is not None):
        return from_plain(default, saved, path)
    name = saved.get("kind")
    if not isinstance(name, str) or name not in registry:
        raise UserError(f"the saved config has {path}.kind={name!r}, which is not one of {', '.join(sorted(registry))}")
    return from_plain(registry[name], {key: value for key, value in saved.items() if key != "kind"}, path)


def to_gin(run: RunConfig) -> str:
    """The config as a gin file that binds every parameter: read again, it gives the same run."""
    sections = collections.defaultdict(list)
    for key, value in bound_values(run).items():
        sections[key.partition(".")[0]].append(f"{key} = {value!r}\n")
    return "\n".join(map("".join, sections.values()))


class Difference(NamedTuple):
    """A field in which two configs differ."""

    path: str
    """Such as `model.num_layers`; `model.kind` where the kinds are others, whose fields are not compared."""
    key: str
    """The name by which gin binds the field, such as `DecoderConfig.num_layers`."""
    old: Any
    new: Any
    resumable: Callable[[Any, Any], bool]
    """(config of the run so far, new config) -> whether the run may resume with the new value."""


def compare(old: Any, new: Any, path: str = "") -> Iterator[Difference]:
    """The fields in which two configs of one class differ."""
    for field in dataclasses.fields(old):
        inner, key = f"{path}.{field.name}".lstrip("."), f"{type(old).__name__}.{field.name}"
        resumable = field.metadata.get("resumable", lambda old, new: False)
        pair = getattr(old, field.name), getattr(new, field.name)
        if (registry := field.metadata.get("registry")) is None:
            if dataclasses.is_dataclass(pair[0]):
                yield from compare(*pair, inner)
            elif pair[0] != pair[1]:
                yield Difference(inner, key, *pair, resumable)
            continue
        many = field.metadata["many"]
        members = [{registry.name_of(member): member for member in (value if many else [value])} for value in pair]
        names = [tuple(each) for each in members]
        if names[0] != names[1]:
            before, after = names if many else (name for (name,) in names)
            yield Difference(inner if many else f"{inner}.kind", key, before, after, resumable)
        else:
            for name, member in members[0].items():
                yield from compare(member, members[1][name], f"{inner}.{name}" if many else inner)


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configs differ: `model.num_layers` to (old value, new value)."""
    return {found.path: (found.old, found.new) for found in compare(old, new)}


def check_workdir(run: RunConfig, workdir: str | epath.Path) -> None:
    """Checks that a folder is free for a run: one that has no checkpoint belongs to nobody.

    Raises:
      UserError: the folder holds another run, which differs in a field that is not `resumable`, or its `config.json` is
        damaged.
    """
    path = epath.Path(workdir) / JSON_NAME
    steps = path.parent / "checkpoints"
    if not path.exists() or not steps.is_dir() or not any(each.name.isdecimal() for each in steps.iterdir()):
        return
    try:
        saved = from_json(path.read_bytes())
    except UserError as error:
        raise UserError(
            f"{path}: {error}; if it is damaged, delete it: the same command then resumes, and writes it anew"
        ) from None
    fixed = [found for found in compare(saved, run) if not found.resumable(saved, run)]
    refuse_differences(path.parent, ((found.key, found.old, found.new) for found in fixed), "choose another --workdir")


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
