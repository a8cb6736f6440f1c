"""The files of a config in a working folder, and how they are read back without gin."""

import collections
import json
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from etils import epath

from meliad_like.config import construction
from meliad_like.config.bindings import Binding
from meliad_like.config.run import RunConfig
from meliad_like.errors import UserError
from meliad_like.registry import bound_fields, bound_values, may_change
from meliad_like.remote import write_whole
from meliad_like.resumable import check_same, parse_json

JSON_NAME = "config.json"
GIN_NAME = "config.gin"
Config = TypeVar("Config")


def to_json(run: RunConfig) -> str:
    """The config as indented JSON: all values by the names with which gin binds them."""
    return json.dumps(bound_values(run), indent=2) + "\n"


def from_json(text: str | bytes) -> RunConfig:
    """Rebuilds the config that `to_json` wrote. Raises a UserError as `rebuild`, and if the text is not JSON."""
    return rebuild(RunConfig, parse_json(text, "the saved config"))


def rebuild(config_class: type[Config], saved: Mapping[str, Any]) -> Config:
    """Rebuilds a config from its `bound_values`. A field that is missing was added later, and has its default.

    Raises a UserError that names an unknown or ill-typed field or kind, which a file of another version has.
    """
    if not isinstance(saved, dict):
        raise UserError(f"the saved config is {saved!r}, not an object")
    bindings = {key: Binding(value, "the saved config") for key, value in saved.items()}
    return construction.build(bindings, config_class)[0]


def to_gin(run: RunConfig, names: Collection[str] | None = None) -> str:
    """The config as a gin file that binds every parameter, or those in `names`: read again, it gives the same run."""
    sections = collections.defaultdict(list)
    for key, value in bound_values(run).items():
        if names is not None and key not in names:
            continue
        sections[key.partition(".")[0]].append(f"{key} = {value!r}\n")
    return "\n".join(map("".join, sections.values()))


def differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Values in which two configs differ: (old, new) by the names of their bindings. Of other kinds only the names."""
    old, new = bound_values(old), bound_values(new)
    return {key: (value, new[key]) for key, value in old.items() if key in new and value != new[key]}


def check_workdir(run: RunConfig, workdir: str | epath.Path, flag: str = "--workdir") -> None:
    """Raises a UserError if a folder has checkpoints of a run that differs in a field that is not `resumable`."""
    path = epath.Path(workdir) / JSON_NAME
    steps = [int(each.name) for each in path.parent.glob("checkpoints/*") if each.name.isdecimal()]
    if not path.exists() or not steps:
        return
    try:
        saved = from_json(path.read_bytes())
    except UserError as error:
        raise UserError(f"{path}: {error}; if it is damaged, delete it: the same command writes it anew") from None
    fixed = {name for name, field, _ in bound_fields(saved) if not may_change(field, saved, run)}
    if max(steps) <= min(each.schedule.num_independent(each.training.num_steps) for each in (saved, run)):
        fixed.remove("TrainingConfig.num_steps")
    changed = {name: values for name, values in differences(saved, run).items() if name in fixed}
    old, new = ({name: values[i] for name, values in changed.items()} for i in (0, 1))
    way_out = f"choose another {flag}"
    if flag == "--workdir" and saved.model == run.model:
        way_out += f"; --load_dir={path.parent} begins with the parameters of this one"
    check_same(path.parent, old, new, way_out=way_out)


def save(run: RunConfig, workdir: str | epath.Path) -> None:
    """Writes `config.json` and `config.gin` into the working folder (made if need be), after `check_workdir`."""
    check_workdir(run, workdir)
    folder = epath.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in ((folder / JSON_NAME, to_json(run)), (folder / GIN_NAME, to_gin(run))):
        if not path.exists() or path.read_bytes() != text.encode():
            write_whole(path, text)
