"""From gin files to one frozen `RunConfig`, and from there to JSON and back.

gin files are read here and nowhere else: everything below the entry points takes plain dataclasses, because a value
read while jax traces is frozen into the compiled program, and a worker process has no gin state at all.
"""

from meliad_like.config.construction import field_types, fit
from meliad_like.config.files import about, read_table, shipped_files, shipped_rows
from meliad_like.config.run import Changes, RunConfig, parse, read_changes, with_changes
from meliad_like.config.saved import check_workdir, differences, from_json, rebuild, save, to_gin, to_json
from meliad_like.registry import bound_values

__all__ = [
    "Changes",
    "RunConfig",
    "about",
    "bound_values",
    "check_workdir",
    "differences",
    "field_types",
    "fit",
    "from_json",
    "parse",
    "read_changes",
    "read_table",
    "rebuild",
    "save",
    "shipped_files",
    "shipped_rows",
    "to_gin",
    "to_json",
    "with_changes",
]
