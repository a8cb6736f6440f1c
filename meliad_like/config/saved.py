"""What is saved with a run, and how it is read back without gin."""

import json
from dataclasses import asdict
from typing import Any

from etils import epath

from meliad_like.config.fields import field_types, fit
from meliad_like.config.run import PARTS, RunConfig
from meliad_like.config.search import nearest
from meliad_like.errors import UserError

JSON_NAME = "config.json"
GIN_NAME = "config.gin"


def to_json(run: RunConfig) -> str:
    """The config as indented JSON text: one object for each part."""
    return json.dumps(asdict(run), indent=2) + "\n"


def from_json(text: str) -> RunConfig:
    """Rebuilds what `to_json` wrote.

    Raises:
      UserError: not JSON, or unknown, missing or ill-typed fields (a file of another version), by name.
    """
    try:
        saved = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"the saved config is not JSON: {error}") from None
    _check_names("", saved, set(PARTS))
    parts = {}
    for name, part in PARTS.items():
        types = field_types(part)
        _check_names(f"{name}.", saved[name], set(types))
        parts[name] = part(**{key: fit(value, types[key], f"{name}.{key}") for key, value in saved[name].items()})
    return RunConfig(**parts)


def _check_names(prefix: str, saved: Any, names: set[str]) -> None:
    # A missing field is not given its default: only its author knows whether the default means "as before".
    if not isinstance(saved, dict):
        raise UserError(f"the saved config has {saved!r} where {prefix.rstrip('.') or 'the run'} should be an object")
    for name in sorted(saved.keys() - names):
        raise UserError(f"the saved config has an unknown field {prefix}{name}{nearest(name, sorted(names))}")
    if missing := sorted(names - saved.keys()):
        raise UserError(f"the saved config lacks {', '.join(prefix + name for name in missing)}")


def to_gin(run: RunConfig) -> str:
    """The config as a gin file that binds every parameter: read again, it gives the same run."""
    sections = []
    for name, part in PARTS.items():
        lines = [f"{part.__name__}.{key} = {value!r}\n" for key, value in asdict(getattr(run, name)).items()]
        sections.append("".join(lines))
    return "\n".join(sections)


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configs differ: `model.num_layers` to (old value, new value)."""
    pairs = ((part, asdict(getattr(old, part)), asdict(getattr(new, part))) for part in PARTS)
    return {
        f"{part}.{key}": (old_values[key], new_values[key])
        for part, old_values, new_values in pairs
        for key in old_values
        if old_values[key] != new_values[key]
    }


def check_workdir(run: RunConfig, workdir: str | epath.Path) -> None:
    """Nothing is written.

    Raises:
      UserError: the folder holds another run; only `training.` (not its seed) and `mesh.` may change on the way.
    """
    folder = epath.Path(workdir)
    if not (folder / JSON_NAME).exists():
        return
    changed = differences(from_json((folder / JSON_NAME).read_text()), run)
    fixed = [key for key in changed if key == "training.seed" or not key.startswith(("training.", "mesh."))]
    if fixed:
        old, new = changed[fixed[0]]
        more = f" and {len(fixed) - 1} more" if len(fixed) > 1 else ""
        raise UserError(
            f"{folder} belongs to another config: {fixed[0]} is {old!r} there, {new!r} here{more}; "
            "choose another --workdir"
        )


def save(run: RunConfig, workdir: str | epath.Path) -> None:
    """Writes `config.json` and `config.gin` into the working folder (made if need be).

    Raises:
      UserError: as `check_workdir`.
    """
    check_workdir(run, workdir)
    folder = epath.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON_NAME).write_text(to_json(run))
    (folder / GIN_NAME).write_text(to_gin(run))
