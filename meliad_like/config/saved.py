"""What is saved with a run, and how it is read back without gin."""

import json
from collections.abc import Set
from dataclasses import asdict
from typing import Any

from etils import epath

from meliad_like.config.bindings import Binding, Bindings
from meliad_like.config.fields import field_types, fit
from meliad_like.config.run import FAMILY, RunConfig, part_classes
from meliad_like.config.search import nearest
from meliad_like.errors import UserError
from meliad_like.mesh import MeshConfig
from meliad_like.models.families import FAMILIES, family_name
from meliad_like.remote import write_whole
from meliad_like.saved_json import parse_json
from meliad_like.training.config import TrainingConfig

JSON_NAME = "config.json"
GIN_NAME = "config.gin"


# Fields that files of earlier versions lack, and whose defaults mean what those versions did.
ADDED = frozenset(
    {
        "RunConfig.history",
        "RunConfig.selector",
        "RunConfig.selector_training",
        "RunConfig.stages",
        "DecoderConfig.feedback",
        "DecoderConfig.memory_layers",
        "DecoderConfig.memory_size",
        "DecoderConfig.memory_neighbors",
        "DecoderConfig.memory_search",
        "DecoderConfig.memory_update",
        "MeshConfig.sequence",
        "PretrainedConfig.matmul_dtype",
        "PretrainedConfig.normalise_pooled",
        "PretrainedConfig.recurrence_rate",
        "PretrainedConfig.recurrence_scale",
        "ReaderConfig.kind",
        "ReaderConfig.selection",
        "ReaderConfig.selections",
        "ReaderConfig.segments_follow",
        "ReaderConfig.train_disjoint",
        "ScheduleConfig.first_rate",
        "TrainingConfig.keep_best",
        "VocabularyConfig.end_token",
    }
)

# What a run may go on with another value of: nothing of it decides what the steps before have learned. A token store
# that was moved is known by its fingerprint.
MAY_CHANGE = frozenset(
    {
        "data.batches_ahead",
        "data.device_batches_ahead",
        "data.num_threads",
        "data.store",
        "model.remat",
        *(f"mesh.{name}" for name in field_types(MeshConfig)),
        *(f"training.{name}" for name in field_types(TrainingConfig) if name != "seed"),
    }
)


def to_dict(run: RunConfig) -> dict[str, dict[str, Any]]:
    """The config as nested dictionaries: one for each part. The model's says which family it is of."""
    parts = asdict(run)
    return parts | {"model": {"family": family_name(run.model), **parts["model"]}}


def to_json(run: RunConfig) -> str:
    """`to_dict` as indented JSON text."""
    return json.dumps(to_dict(run), indent=2) + "\n"


def from_json(text: str | bytes) -> RunConfig:
    """Rebuilds what `to_json` wrote.

    Raises:
      UserError: not JSON, or unknown, missing or ill-typed fields (a file of another version), by name.
    """
    saved = parse_json(text, "the saved config")
    _check_names("", saved, set(field_types(RunConfig)), _added(RunConfig))
    family = "decoder"
    if isinstance(saved["model"], dict):
        # Before there were families, every model was a decoder.
        family = saved["model"].pop("family", family)
    if family not in list(FAMILIES):  # which compares, and takes what can't be hashed
        raise UserError(f"the saved config has model.family={family!r}, which is none of {', '.join(FAMILIES)}")
    parts = {}
    for name, part in part_classes(family).items():
        if name not in saved:
            continue
        types = field_types(part)
        _check_names(f"{name}.", saved[name], set(types), _added(part))
        parts[name] = part(**{key: fit(value, types[key], f"{name}.{key}") for key, value in saved[name].items()})
    return RunConfig(**parts)


def _added(config_class: type) -> set[str]:
    return {key for key in field_types(config_class) if f"{config_class.__name__}.{key}" in ADDED}


def _check_names(prefix: str, saved: Any, names: set[str], optional: Set[str] = frozenset()) -> None:
    # Other missing fields are not given their defaults: only their authors know whether these mean "as before".
    if not isinstance(saved, dict):
        raise UserError(f"the saved config has {saved!r} where {prefix.rstrip('.') or 'the run'} should be an object")
    for name in sorted(saved.keys() - names):
        raise UserError(f"the saved config has an unknown field {prefix}{name}{nearest(name, sorted(names))}")
    if missing := sorted(names - optional - saved.keys()):
        raise UserError(f"the saved config lacks {', '.join(prefix + name for name in missing)}")


def to_bindings(run: RunConfig, origin: str) -> Bindings:
    """The config as gin would bind all of it, for `config.run.build`."""
    bindings = {FAMILY: Binding(family_name(run.model), origin)}
    for name, values in asdict(run).items():
        class_name = type(getattr(run, name)).__name__
        bindings |= {f"{class_name}.{key}": Binding(value, origin) for key, value in values.items()}
    return bindings


def to_gin(run: RunConfig) -> str:
    """The config as a gin file that binds every parameter: read again, it gives the same run."""
    lines, section = [], "RunConfig"
    for key, binding in to_bindings(run, "").items():
        if not key.startswith(f"{section}."):
            section = key.partition(".")[0]
            lines.append("\n")
        lines.append(f"{key} = {binding.value!r}\n")
    return "".join(lines)


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configs differ: `model.num_layers` to (old value, new value).

    Models of different families differ in `model.family`, and their other fields are not compared.
    """
    old_parts, new_parts = to_dict(old), to_dict(new)
    if (families := (old_parts["model"]["family"], new_parts["model"]["family"]))[0] != families[1]:
        old_parts["model"], new_parts["model"] = ({"family": family} for family in families)
    return {
        f"{part}.{key}": (value, new_parts[part][key])
        for part, values in old_parts.items()
        for key, value in values.items()
        if value != new_parts[part][key]
    }


def check_workdir(run: RunConfig, workdir: str | epath.Path) -> None:
    """Nothing is written.

    Raises:
      UserError: the folder holds another run, which differs in more than MAY_CHANGE, or its `config.json` is damaged.
    """
    folder = epath.Path(workdir)
    path = folder / JSON_NAME
    if not path.exists():
        return
    try:
        saved = from_json(path.read_bytes())
    except UserError as error:
        raise UserError(
            f"{path}: {error}; if it is damaged, delete it: the same command then goes on, and writes it anew"
        ) from None
    changed = differences(saved, run)
    fixed = [key for key in changed if key not in MAY_CHANGE]
    if fixed:
        old, new = changed[fixed[0]]
        more = f" and {len(fixed) - 1} more" if len(fixed) > 1 else ""
        raise UserError(
            f"{folder} belongs to another config: {fixed[0]} is {old!r} there, {new!r} here{more}; "
            "choose another --workdir"
        )


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
