"""Checkpoints: asynchronous, atomic, checked for damage, and restored onto any mesh bit for bit.

orbax writes a checkpoint into a temporary folder, which it renames when the checkpoint is complete. Before the rename
process 0 adds a manifest of checksums, so that damage of a file is noticed and an older checkpoint is used, and flushes
all files; older checkpoints are deleted when the rename is on the disk, too. Arrays are stored under the names of their
paths (`optimizer_state/0/v_row/embedding`), not under the classes of the tree, and the parameters separately, so that
evaluation reads only them.
"""

import json
import logging as standard_logging
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from flax.traverse_util import unflatten_dict
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

from meliad_like.errors import UserError, is_full_disk, one_line, refusals
from meliad_like.remote import any_path, flush_all, is_remote
from meliad_like.resumable import check_same, read_json, read_object
from meliad_like.training.processes import agreed

TEMPORARY = ".orbax-checkpoint-tmp"
COMMIT_SUCCESS_FILE = "commit_success.txt"  # The name of orbax's marker of a complete checkpoint on gs://.
FULL_DISK_WORDS = ("no space left on device", "disk quota exceeded")
METADATA = "metadata/metadata"
LOGGERS = (logging.get_absl_logger(), standard_logging.getLogger("asyncio"))


class _FlushedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A temporary folder on a disk, whose rename is on the disk before orbax deletes older checkpoints."""

    async def finalize(self) -> None:
        await super().finalize()
        flush_all(self.get_final())


class Checkpoints:
    """The checkpoints of a run, one folder per step. Its `with` statement waits for the last save.

    With several processes, all of them must make the same calls.
    """

    def __init__(self, folder: epath.PathLike, *, keep_last: int = 2, keep_every: int = 0, read_only: bool = False):
        """
        Args:
          folder: parent of the steps' folders, local or on gs://. Other files and folders in it are not touched.
          keep_last: number of newest checkpoints that are kept.
          keep_every: checkpoints of steps that are multiples of it are kept forever; 0: of none.
          read_only: for evaluation while a run may still be writing: nothing is created, moved or deleted.
        """
        # epath would resolve gs://... as a relative path.
        self.folder = any_path(folder) if is_remote(folder) else any_path(folder).resolve()
        self._read_only = read_only
        self._damage: dict[int, str | None] = {}
        self._step_being_written: int | None = None
        if read_only and not self.folder.is_dir():
            raise UserError(f"there is no checkpoint folder {self.folder}")
        every = [policy.EveryNSteps(keep_every)] if keep_every else []
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy.AnyPreservationPolicy([*every, policy.LatestN(keep_last)]),
            create=not read_only,
            # Deletes unfinished checkpoints of a killed run. On gs:// it would delete every folder that is not one.
            cleanup_tmp_directories=not read_only and not is_remote(folder),
            temporary_path_class=None if is_remote(folder) else _FlushedPath,
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._write_manifest),
        )
        if is_remote(folder) and not read_only:
            self._delete_unfinished()
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in ascending order, damaged ones included."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Saves in the background. When it returns the arrays have been copied, so their buffers may be donated.

        Args:
          step: number of steps done; higher than in all earlier checkpoints.
          state: a tree of arrays with a field or key `params` and at least one more.
          metadata: a value that JSON can represent.
        """
        assert not self._read_only
        arrays = named_arrays(state)
        params, rest = _split(arrays)
        with self._refusals_reported():
            self._manager.wait_until_finished()
            self._step_being_written = step
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    rest=ocp.args.StandardSave(rest),
                    metadata=ocp.args.JsonSave({"step": step, "metadata": dict(metadata), "arrays": _shapes(arrays)}),
                ),
                # The training loop decides when to save.
                force=True,
            )

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Loads a whole state.

        Args:
          abstract_state: tree of jax.ShapeDtypeStruct with the new shardings, which may differ from the saved ones.
          step: the step to load; None: the newest one that is not damaged. Newer checkpoints, which are damaged, are
            then renamed to `damaged-STEP`, so that the run can save these steps again, unless all are damaged.

        Returns:
          The state, with the tree structure of `abstract_state`, and the metadata.
        """
        newest, step = step is None, self._usable(step)
        if newest:
            self.move_aside_after(step)
        saved, requested = self._read_json(step), named_arrays(abstract_state)
        targets = dict(zip(("params", "rest"), _split(requested)))
        shapes, expected = saved["arrays"], _shapes(requested)
        if not targets["rest"]:
            del targets["rest"]
            # For reading, in any dtype.
            shapes, expected = (
                {name: shape[shape.index("[") :] for name, shape in each.items() if name.startswith("params/")}
                for each in (shapes, expected)
            )
        way_out = "choose another folder, or a run with the same parameters and optimizer"
        check_same(self.folder / str(step), shapes, expected, way_out=way_out)
        restored = self._manager.restore(
            step, args=ocp.args.Composite(**{name: ocp.args.StandardRestore(item) for name, item in targets.items()})
        )
        arrays = {name: array for item in targets for name, array in named_arrays(restored[item]).items()}
        leaves = [arrays[name] for name in requested]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), saved["metadata"]

    def restore_params(self, abstract_params: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Loads only the parameters, in the dtypes of `abstract_params`; otherwise like `restore`."""
        state, metadata = self.restore({"params": abstract_params}, step)
        return state["params"], metadata

    def read_metadata(self, step: int | None = None) -> dict[str, Any]:
        """The metadata of a step; None: of the newest step that is not damaged, which `restore` would load."""
        return self._read_json(self._usable(step))["metadata"]

    def newest(self) -> int | None:
        """The newest step that is not damaged; None if there is none."""
        return next((step for step in reversed(self.steps()) if not self._find_damage(step)), None)

    def move_aside_after(self, step: int | None) -> None:
        """Renames checkpoints to `damaged-STEP`: those after `step`, or all of them."""
        for damaged in self.steps():
            if self._read_only or (step is not None and damaged <= step):
                continue
            if jax.process_index() == 0:
                aside = self.folder / f"damaged-{damaged}"
                if aside.exists():
                    aside.rmtree()
                (self.folder / str(damaged)).rename(aside)
                logging.warning("checkpoint %s is moved aside, to %s", self.folder / str(damaged), aside.name)
            multihost_utils.sync_global_devices(f"damaged checkpoint {damaged} moved aside")
            self._damage.pop(damaged, None)
            self._manager.reload()

    def check(self) -> None:
        """Raises a UserError that the background save has met so far (a full disk), without waiting for its end."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until the last save is complete, and raises the UserError that it has met."""
        with self._refusals_reported():
            self._manager.wait_until_finished()

    def __enter__(self) -> Self:
        for logger in LOGGERS:
            logger.addFilter(self._is_logged)
        return self

    def __exit__(self, kind, *_) -> None:
        with self._refusals_reported():
            self._manager.close()
        # After an error the filters stay: the last threads of a save that failed end later.
        if kind is None:
            for logger in LOGGERS:
                logger.removeFilter(self._is_logged)

    def _is_logged(self, record: standard_logging.LogRecord) -> bool:
        # orbax logs a traceback in each thread, and asyncio one for each array, although orbax also raises the error.
        folders = os.path.dirname(record.pathname).split(os.sep)
        return record.levelno < standard_logging.ERROR or not {"orbax", "asyncio"} & {*folders}

    def _read_json(self, step: int) -> dict[str, Any]:
        return read_json(self.folder / str(step) / METADATA)

    def _usable(self, step: int | None) -> int:
        """The given step, after a check for damage, or the newest step that is not damaged."""
        steps = self.steps()
        if step is not None:
            if step not in steps:
                raise UserError(f"{self.folder} has no checkpoint of step {step}; it has {steps}")
            if damage := self._find_damage(step):
                raise UserError(f"checkpoint {self.folder / str(step)} is damaged: {damage}; it has {steps}")
            return step
        newest = self.newest()
        if newest is None:
            damaged = f"; damaged: {steps}: bring one back from a copy, or delete them to begin anew" if steps else ""
            raise UserError(f"{self.folder} has no usable checkpoint{damaged}")
        return newest

    def _find_damage(self, step: int) -> str | None:
        """The result of `find_damage` in process 0. Warns once about each damaged step."""
        if step not in self._damage:
            damage = find_damage(self.folder / str(step)) if jax.process_index() == 0 else None
            self._damage[step] = agreed(damage, "as process 0 found")
            if self._damage[step]:
                logging.warning("checkpoint %s is damaged (%s)", self.folder / str(step), self._damage[step])
        return self._damage[step]

    def _delete_unfinished(self) -> None:
        """Deletes unfinished checkpoints of a killed run on gs://, where a file marks a complete checkpoint."""
        if jax.process_index() == 0 and self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.isdecimal() and not (path / COMMIT_SUCCESS_FILE).exists():
                    path.rmtree()
        multihost_utils.sync_global_devices("unfinished checkpoints deleted")

    def _write_manifest(self) -> None:
        """Called by orbax in its background thread after all files of a step are written, before the rename."""
        if jax.process_index() == 0:
            # orbax's temporary name is the step and a suffix; on gs://, without atomic renames, only the step.
            step = str(self._step_being_written)
            names = [path.name for path in self.folder.iterdir()]
            (name,) = (name for name in names if name == step or name.startswith(step + TEMPORARY))
            folder = self.folder / name
            write_manifest(folder)
            if not is_remote(folder):
                flush_all(folder)

    @contextmanager
    def _refusals_reported(self) -> Iterator[None]:
        try:
            yield
        # tensorstore raises ValueError for errors of the file system.
        except (*refusals(), ValueError) as error:
            full = is_full_disk(error)
            step = self.folder / str(self._step_being_written)
            if full or any(words in str(error).lower() for words in FULL_DISK_WORDS):
                raise UserError(
                    f"the disk is full: checkpoint {step} could not be written; the ones before it are kept: free some "
                    "space and start the same command again"
                ) from error
            if is_remote(self.folder):
                raise UserError(
                    f"checkpoint {step} could not be written ({one_line(error)}); the ones before it are kept: the "
                    "same command resumes from there"
                ) from error
            raise


def keep_best(
    folder: epath.PathLike, step: int, state: Any, metadata: Mapping[str, Any], measure: Callable[[Any], float]
) -> None:
    """Keeps the parameters of a step in a folder of their own, unless the parameters already there are as good.

    A damaged checkpoint in the folder is renamed and ignored. A run that repeats steps after a kill may find the step
    saved, and keeps it. `measure` of the metadata is the number to minimise; a step with NaN is not kept.
    """
    if math.isnan(measure(metadata)):
        return
    with Checkpoints(folder, keep_last=1) as best:
        newest = best.newest()
        best.move_aside_after(newest)
        if step in best.steps() or (newest is not None and measure(best.read_metadata(newest)) <= measure(metadata)):
            return
        best.save(step, {"step": state.step, "params": state.params}, metadata)


def first_metadata(folder: epath.Path) -> dict[str, Any]:
    """The metadata of a step that has it, without a check for damage; empty if there is none."""
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        if path.name.isdecimal() and (path / METADATA).exists():
            # It may be damaged, and another step not.
            with suppress(UserError, KeyError):
                return read_object(path / METADATA)["metadata"]
    return {}


def named_arrays(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the names of their paths, in the order of the tree."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _shapes(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}


def _split(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Nested dictionaries of the parameters, and of the other arrays."""
    params = {name: array for name, array in arrays.items() if name.startswith("params/")}
    rest = {name: array for name, array in arrays.items() if name not in params}
    return unflatten_dict(params, sep="/"), unflatten_dict(rest, sep="/")


MANIFEST = "manifest.json"
# orbax writes the time of the commit into the second file afterwards; it is not needed for restoring.
UNLISTED = (MANIFEST, "_CHECKPOINT_METADATA")
CHUNK_BYTES = 1 << 22


def write_manifest(folder: epath.Path) -> None:
    """Writes the manifest of all files that are under `folder` now."""
    digests = {str(path.relative_to(folder)): _digest(path) for path in _files(folder)}
    (folder / MANIFEST).write_text(json.dumps(digests))


def find_damage(folder: epath.Path) -> str | None:
    """Describes the first damaged file under a checkpoint's folder; None: all files are unchanged.

    A file of a disk that can't be read is damaged. A bucket that can't be read raises its error.
    """
    name = MANIFEST
    try:
        for name, digest in read_json(folder / MANIFEST).items():
            if _digest(folder / name) != digest:
                return f"the content of {name} has changed"
        name = METADATA
        step = read_json(folder / METADATA)["step"]
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return f"{name} is missing"
    except OSError as error:
        if is_remote(folder):
            raise
        return f"{name} can't be read: {error.strerror}"
    except (ValueError, AttributeError, KeyError):
        return f"{MANIFEST} is damaged"
    return None if str(step) == folder.name else f"it is the checkpoint of step {step}"


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    # epath's own `walk` and `rglob` don't work on gs://.
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path)
        elif path.name not in UNLISTED:
            yield path


def _digest(path: epath.Path) -> list[int]:
    """The size and the CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return [size, checksum]
