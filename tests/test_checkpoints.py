import errno
import logging
import math
import os
import re
import shutil
import signal
import socket
import textwrap
from pathlib import Path

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging as absl_logging
from checkpoint_states import State, abstract, assert_same_bits, make_state, save_all
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from tiny_run import read_metadata

from meliad_like.errors import UserError
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.training import checkpoints as checkpoints_lib
from meliad_like.training.checkpoints import Checkpoints, keep_best


def place(state: State, shape: tuple[int, int, int]) -> State:
    """The state on a mesh: kernels cut along both axes, the carry by lanes."""
    mesh = make_mesh(MeshConfig(*shape))
    specs = {(16, 8): PartitionSpec("fsdp", "tensor"), (8, 4): PartitionSpec(("data", "fsdp"))}
    return jax.tree.map(
        lambda array: jax.device_put(array, NamedSharding(mesh, specs.get(array.shape, PartitionSpec()))), state
    )


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 4, 2)])
def test_restores_every_dtype_bit_for_bit_on_another_mesh(tmp_path, shape):
    state, target = place(make_state(), (2, 2, 2)), place(make_state(), shape)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {"config": {"layers": 3}})
        checkpoints.wait()
        restored, metadata = checkpoints.restore(abstract(target))
    assert_same_bits(restored, state)
    assert metadata == {"config": {"layers": 3}}
    assert jax.tree.map(lambda a: a.sharding, restored) == jax.tree.map(lambda a: a.sharding, target)


def test_restores_into_other_classes_with_the_same_names(tmp_path):
    save_all(tmp_path, [1])
    state = make_state()
    other = abstract(state._replace(optimizer_state=[(), state.optimizer_state[1]._asdict()]))
    with Checkpoints(tmp_path) as checkpoints:
        restored, _ = checkpoints.restore(other)
    assert_same_bits(restored.optimizer_state[1]["v"], state.optimizer_state[1].v)


def test_parameters_alone(tmp_path):
    save_all(tmp_path, [1, 2])
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        params, metadata = checkpoints.restore_params(abstract(make_state(1).params), step=1)
    assert_same_bits(params, make_state(1).params)
    assert metadata == {"step": 1}


def test_donating_the_buffers_after_save_does_not_change_what_is_written(tmp_path):
    state = {"params": {"kernel": jax.random.normal(jax.random.key(0), (1000, 1000))}, "step": jnp.int32(1)}
    expected = jax.tree.map(np.array, state)
    update = jax.jit(lambda tree: jax.tree.map(lambda array: array + 1, tree), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        for _ in range(5):
            state = update(state)
        jax.block_until_ready(state)
        checkpoints.wait()
        restored, _ = checkpoints.restore(abstract(state))
    assert_same_bits(restored, expected)


def test_which_steps_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep_last=2, keep_every=4) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step, make_state(step), {})
        checkpoints.wait()
        assert checkpoints.steps() == [4, 6, 7]


@pytest.mark.parametrize(
    "harm, words",
    [
        (lambda folder: os.truncate(largest_file(folder), 10), "has changed"),
        (lambda folder: largest_file(folder / "params").unlink(), "is missing"),
        (lambda folder: flip_a_bit(largest_file(folder / "rest" / "d")), "has changed"),
        (lambda folder: flip_a_bit(largest_file(folder / "metadata")), "has changed"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text('{"fil'), "manifest.json is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, caplog, harm, words):
    # Arrays large enough that a data file, not the manifest, is the largest file.
    state = make_state()._replace(params={"layer": {"kernel": jax.random.normal(jax.random.key(0), (64, 64))}})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {"step": 1})
        checkpoints.save(2, state, {"step": 2})
    harm(tmp_path / "2")
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.read_metadata() == {"step": 1}
    assert f"{tmp_path}/2 is damaged" in caplog.text
    assert words in caplog.text
    with Checkpoints(tmp_path) as checkpoints:
        restored, metadata = checkpoints.restore(abstract(state))
        assert metadata == {"step": 1}
        assert_same_bits(restored, state)
        checkpoints.save(2, state, {"step": "again"})
    assert read_metadata(tmp_path) == {"step": "again"}
    assert (tmp_path / "damaged-2").is_dir()


def test_a_checkpoint_under_another_number_is_damaged(tmp_path, caplog):
    # Copies under names without a meaning change nothing.
    (tmp_path / "9.backup").mkdir()
    save_all(tmp_path, [9])
    shutil.copytree(tmp_path / "9", tmp_path / "12")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(abstract(make_state()))[1] == {"step": 9}
        assert checkpoints.steps() == [9]
    assert f"{tmp_path}/12 is damaged (it is the checkpoint of step 9)" in caplog.text


@pytest.mark.parametrize("name", ["params", "metadata", "manifest.json", "_CHECKPOINT_METADATA"])
def test_a_checkpoint_that_cannot_be_read_is_damaged(tmp_path, caplog, monkeypatch, name):
    """A bad sector of the disk."""
    save_all(tmp_path, [1, 2])
    bad, open_file = str(tmp_path / "2" / name), type(epath.Path(tmp_path)).open

    def fail(path, *mode, **others):
        if str(path).startswith(bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_file(path, *mode, **others)

    monkeypatch.setattr(type(epath.Path(tmp_path)), "open", fail)
    with Checkpoints(tmp_path) as checkpoints:
        step = 2 if name == "_CHECKPOINT_METADATA" else 1
        assert checkpoints.restore(abstract(make_state()))[1] == {"step": step}
    assert step == 2 or "can't be read: Input/output error" in caplog.text


def test_all_is_flushed_before_the_rename_and_the_rename_before_a_deletion(tmp_path, monkeypatch):
    """So that a power cut leaves whole checkpoints, also where only one is kept."""
    events = []

    def noted(kind, act):
        def call(path, *more, **others):
            if kind != "flush" or not os.get_inheritable(path):
                where = os.readlink(f"/proc/self/fd/{path}") if kind == "flush" else os.fspath(path)
                events.append((kind, os.path.relpath(where, tmp_path)))
            return act(path, *more, **others)

        return call

    save_all(tmp_path, [1], keep_last=1)
    calls = ((os, "fsync", "flush"), (os, "rename", "rename"), (os, "replace", "rename"), (shutil, "rmtree", "delete"))
    for module, name, kind in calls:
        monkeypatch.setattr(module, name, noted(kind, getattr(module, name)))
    save_all(tmp_path, [2], keep_last=1)
    [at] = [i for i, (kind, path) in enumerate(events) if kind == "rename" and "/" not in path]
    temporary = events[at][1]
    before = {path.removeprefix(temporary) for kind, path in events[:at] if kind == "flush"}
    files = {f"/{path.relative_to(tmp_path / '2')}" for path in (tmp_path / "2").rglob("*")}
    assert files - before <= {"/commit_success.txt"} and {"", "."} <= before
    [deleted] = [i for i, event in enumerate(events) if event == ("delete", "1")]
    after = [path for kind, path in events[at:deleted] if kind == "flush"]
    assert {".", "2", "2/commit_success.txt"} <= set(after)


def test_no_checkpoint_left(tmp_path):
    save_all(tmp_path, [1])
    (tmp_path / "1" / "manifest.json").unlink()
    with pytest.raises(UserError, match=re.escape(f"{tmp_path} has no usable checkpoint; damaged: [1]")):
        read_metadata(tmp_path)
    with pytest.raises(UserError, match=r"there is no checkpoint folder .*nowhere"):
        read_metadata(tmp_path / "nowhere")


def test_where_none_is_good_none_is_moved_and_every_start_says_so(tmp_path):
    """The second one would otherwise begin at step 0 without a word."""
    save_all(tmp_path, [1, 2])
    for step in (1, 2):
        (tmp_path / str(step) / "manifest.json").unlink()
    for _ in range(2):
        with Checkpoints(tmp_path) as checkpoints:
            with pytest.raises(
                UserError, match=re.escape("no usable checkpoint; damaged: [1, 2]: bring one back from")
            ):
                checkpoints.restore(abstract(make_state()))
            assert checkpoints.steps() == [1, 2]


def test_looking_moves_nothing(tmp_path):
    save_all(tmp_path, [1, 2])
    (tmp_path / "2" / "manifest.json").unlink()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.read_metadata() == {"step": 1}
        assert checkpoints.steps() == [1, 2]


def test_a_step_that_is_asked_for_has_no_substitute(tmp_path):
    save_all(tmp_path, [1, 2])
    (tmp_path / "2" / "manifest.json").unlink()
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        with pytest.raises(UserError, match=r"2 is damaged: manifest\.json is missing"):
            checkpoints.restore(abstract(make_state()), step=2)
        with pytest.raises(UserError, match=re.escape("no checkpoint of step 7; it has [1, 2]")):
            checkpoints.read_metadata(step=7)


def test_another_model_is_named(tmp_path):
    save_all(tmp_path, [1])
    params = abstract(make_state().params)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        with pytest.raises(UserError, match=re.escape("params/scale is '[8]' there, '[9]' here")):
            checkpoints.restore_params({**params, "scale": jax.ShapeDtypeStruct((9,), jnp.float32)})
        with pytest.raises(UserError, match="params/more is 'absent' there"):
            checkpoints.restore_params({**params, "more": params["scale"]})


def test_the_best_is_kept_whatever_happened_to_the_one_before(tmp_path):
    def kept(step, loss):
        keep_best(tmp_path, step, make_state(step), {"step": step, "loss": loss}, lambda metadata: metadata["loss"])
        return read_metadata(tmp_path)

    assert kept(1, 3.0) == kept(2, 4.0) == {"step": 1, "loss": 3.0}
    assert kept(3, 2.0) == {"step": 3, "loss": 2.0}
    # Done again after a kill, on another mesh.
    assert kept(3, 1.9) == {"step": 3, "loss": 2.0}
    for step in (3, 4):
        (tmp_path / str(step) / "manifest.json").unlink()
        assert kept(4, 9.0 - step) == {"step": 4, "loss": 9.0 - step}


def test_what_is_not_a_number_takes_no_place_of_the_best(tmp_path):
    for step, loss in ((1, 2.0), (2, math.nan)):
        keep_best(tmp_path, step, make_state(step), {"loss": loss}, lambda metadata: metadata["loss"])
    assert read_metadata(tmp_path) == {"loss": 2.0}


def test_a_full_disk_is_one_line_and_the_checkpoint_before_is_kept(tmp_path, monkeypatch):
    def no_space(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, make_state(1), {"step": 1})
    checkpoints.wait()
    monkeypatch.setattr(checkpoints_lib, "write_manifest", no_space)
    checkpoints.save(2, make_state(2), {})
    with pytest.raises(UserError, match=r"the disk is full: checkpoint .*/2 could not be written; the ones before"):
        checkpoints.wait()
    monkeypatch.undo()
    assert read_metadata(tmp_path) == {"step": 1}
    save_all(tmp_path, [2])
    assert read_metadata(tmp_path) == {"step": 2}


def test_orbax_is_silent_about_what_it_raises_and_nothing_else(tmp_path, caplog, monkeypatch):
    for step in (1, 2):
        save_all(tmp_path, [step])
    logger, place = absl_logging.get_absl_logger(), "/site-packages/orbax/checkpoint/checkpoint_manager.py"
    # Without those that errors in other tests have left.
    monkeypatch.setattr(logger, "filters", [])

    def log():
        for level, name in ((logging.WARNING, "warned"), (logging.ERROR, "raised")):
            logger.handle(logger.makeRecord("absl", level, place, 1, name, (), None))

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.restore(abstract(make_state()))
        # Usual operation causes no warning. Saving twice at the same time would.
        assert not caplog.records
        with Checkpoints(tmp_path, read_only=True):
            pass
        log()
    log()
    with pytest.raises(OSError), Checkpoints(tmp_path):
        raise OSError
    # Threads of a save that failed may end later.
    log()
    messages = [record.message for record in caplog.records if record.pathname == place]
    assert messages == ["warned", "warned", "raised", "warned"]


def test_killed_while_writing(tmp_path):
    """The kill comes when all is written but the manifest: the checkpoint must not count, and not be in the way."""
    program = f"""
        import os, signal, sys
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]}
        import conftest, test_checkpoints as t
        def kill(folder):
            os.kill(os.getpid(), signal.SIGKILL)
        t.save_all({str(tmp_path)!r}, [1])
        t.checkpoints_lib.write_manifest = kill
        t.save_all({str(tmp_path)!r}, [2])
    """
    killed = forked.run("-c", textwrap.dedent(program))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert any(path.name.startswith("2.") for path in tmp_path.iterdir())
    assert read_metadata(tmp_path) == {"step": 1}
    save_all(tmp_path, [2])
    assert read_metadata(tmp_path) == {"step": 2}
    assert not any(path.name.startswith("2.") for path in tmp_path.iterdir())


TWO_PROCESSES = """
    import sys
    sys.path[:0] = {paths}
    from meliad_like.training.processes import initialize_distributed
    port, process, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    import conftest
    initialize_distributed("localhost:" + port, 2, process, timeout_seconds=60)
    import pathlib, jax, numpy as np, test_checkpoints as t
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec
    from meliad_like.training.checkpoints import Checkpoints
    from meliad_like.mesh import MeshConfig, make_mesh

    def make(mesh, step):
        content = np.random.default_rng(step).normal(size=(16, 16))
        sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor"))
        array = jax.make_array_from_callback(content.shape, sharding, lambda index: content[index])
        return {{"params": {{"kernel": array}}, "carry": array + 1}}

    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make(make_mesh(MeshConfig(2, 2, 4)), step), {{"step": step}})
    multihost_utils.sync_global_devices("written")
    if process == 0:
        (pathlib.Path(folder) / "2" / "params" / "manifest.ocdbt").unlink()
    expected = make(make_mesh(MeshConfig(1, 16, 1)), 1)
    multihost_utils.sync_global_devices("damaged")
    with Checkpoints(folder) as checkpoints:
        restored, metadata = checkpoints.restore(t.abstract(expected))
    assert metadata == {{"step": 1}}, metadata
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(expected)):
        assert all(np.array_equal(c.data, d.data) for c, d in zip(a.addressable_shards, b.addressable_shards))
"""


def test_two_processes_write_one_checkpoint_and_agree_on_a_damaged_one(tmp_path):
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    program = textwrap.dedent(TWO_PROCESSES).format(paths=paths)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    words = ["-c", program, port]
    processes = [forked.Process([*words, str(process), str(tmp_path)], dict(os.environ)) for process in range(2)]
    for process in processes:
        result = process.finish()
        assert result.returncode == 0, result.stderr
