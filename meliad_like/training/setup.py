"""A run before its first step: documents, mesh, shardings, and the compiled step."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from meliad_like.config import RunConfig
from meliad_like.data.batch import Batch, empty_batch
from meliad_like.data.readers import LanesReader, Reader
from meliad_like.data.stream import ShuffledReader, StreamReader
from meliad_like.data.token_store import STORE_NAME, TokenStore
from meliad_like.data.vocabulary import make_vocabulary
from meliad_like.data.windows import WindowsReader
from meliad_like.errors import UserError
from meliad_like.history.reader import make_history_reader
from meliad_like.models.families import check_sequence, extends
from meliad_like.models.model import Model
from meliad_like.remote import any_path
from meliad_like.training.checkpoints import Checkpoints, compare_metadata
from meliad_like.training.mesh import (
    carry_shardings,
    lane_sharding,
    make_mesh,
    optimizer_state_shardings,
    parameter_shardings,
    replicated,
)
from meliad_like.training.opening import checkpoint_metadata, open_checkpoint
from meliad_like.training.optimizers import at_rates, make_optimizer
from meliad_like.training.schedules import make_schedule
from meliad_like.training.stages import Stage, stages_of
from meliad_like.training.state import TrainState, init_state
from meliad_like.training.step import make_train_step


class Program(NamedTuple):
    """The model and its training step on a mesh: what is a function of the config and the devices."""

    model: Model
    mesh: Mesh
    abstract_state: TrainState
    """Shapes, with the shardings of this mesh."""
    initialise: Callable[[], TrainState]
    train_step: jax.stages.Wrapped
    """(state, batch) -> (state, metrics), jitted; the state's buffers are donated."""
    abstract_batch: Batch
    """Shapes of the batch of a step, over all hosts."""

    def compile_step(self, options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
        """The step for these shapes and shardings. It refuses all others, so a run compiles it once.

        Args:
          options: for XLA.
        """
        with jax.set_mesh(self.mesh):
            return self.train_step.lower(self.abstract_state, self.abstract_batch).compile(options)


class Setup(NamedTuple):
    """A stage of a run before its first step: what is a function of the config, the documents and the devices."""

    run: RunConfig
    """The config of this stage."""
    whole_run: RunConfig
    """That of all stages."""
    stage: Stage
    store: TokenStore
    reader: Reader
    program: Program

    @property
    def model(self) -> Model:
        return self.program.model

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    @property
    def abstract_state(self) -> TrainState:
        return self.program.abstract_state

    def begin_stage(self, state: TrainState) -> TrainState:
        """The state that the stage before left, with nothing remembered, for the lanes of this one."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state.carry)
        init_carry = jax.jit(
            lambda params: self.model.bind(params).init_carry(self.reader.num_lanes), out_shardings=shardings
        )
        return state._replace(carry=init_carry(state.params))


def set_up(whole_run: RunConfig, stage: Stage | None = None) -> Setup:
    """Opens the documents and lays out the devices. Nothing is compiled yet, so that mistakes are found in seconds.

    Args:
      whole_run: all stages.
      stage: one of them; None: the last one, which most runs have alone.

    Raises:
      UserError: the token store is missing or was made by other settings, or the mesh does not fit.
    """
    stage = stages_of(whole_run)[-1] if stage is None else stage
    run = stage.run
    store = TokenStore(run.data.store)
    store.check_settings(run.source, run.vocabulary)
    for each in stages_of(whole_run):
        check_sequence(each.run.model, each.run.data.segment_length, run.mesh.sequence)
    reader = make_reader(stage, store)
    return Setup(run, whole_run, stage, store, reader, make_program(run, store.vocabulary.size, make_mesh(run.mesh)))


def make_program(run: RunConfig, vocabulary_size: int, mesh: Mesh) -> Program:
    """Lays out the model, its optimizer and its lanes on a mesh, without any documents and without compiling.

    Args:
      run: of one stage.

    Raises:
      UserError: the mesh does not fit the lanes or the model.
    """
    num_lanes = run.data.num_lanes
    check_sequence(run.model, run.data.segment_length, mesh.shape["sequence"])
    model = Model(run.model, vocabulary_size)
    lanes = lane_sharding(mesh, num_lanes)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if num_lanes % (run.training.gradient_accumulation * shards):
        raise UserError(
            f"{num_lanes} lanes (tokens_per_step / segment_length) do not divide into "
            f"gradient_accumulation={run.training.gradient_accumulation} parts on {shards} device(s)"
        )
    optimizer = make_optimizer(run.optimizer, make_schedule(run.schedule, run.training.num_steps))
    optimizer = at_rates(optimizer, model.rate_factors)

    # The seed comes in as data: its program is then that of all seeds, and is found in a compilation cache.
    def initialise(key_data) -> TrainState:
        return init_state(model, optimizer, num_lanes, jax.random.wrap_key_data(key_data))

    key_data = np.asarray(jax.random.key_data(jax.random.key(run.training.seed)))
    shapes = jax.eval_shape(initialise, key_data)
    params = parameter_shardings(mesh, model.axes, shapes.params)
    shardings = TrainState(
        step=replicated(mesh),
        params=params,
        optimizer_state=optimizer_state_shardings(mesh, shapes.optimizer_state, shapes.params, params),
        carry=carry_shardings(mesh, num_lanes, shapes.carry),
        num_skipped=replicated(mesh),
        halted=replicated(mesh),
    )
    abstract_state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )
    train_step = jax.jit(
        make_train_step(model, optimizer, run.training),
        donate_argnums=0,
        in_shardings=(shardings, lanes),
        out_shardings=(shardings, replicated(mesh)),
    )
    return Program(
        model=model,
        mesh=mesh,
        abstract_state=abstract_state,
        initialise=functools.partial(jax.jit(initialise, out_shardings=shardings), key_data),
        train_step=train_step,
        abstract_batch=abstract_batch(run),
    )


def vocabulary_size(run: RunConfig) -> int:
    """Tokens of the vocabulary: the token store's; where there is no store yet, as many as the settings say."""
    if (any_path(run.data.store) / STORE_NAME).exists():
        return TokenStore(run.data.store).vocabulary.size
    settings = run.vocabulary
    if settings.trained:
        return -(-settings.size // settings.size_multiple) * settings.size_multiple
    return make_vocabulary(settings).size


def make_reader(stage: Stage, store: TokenStore) -> Reader:
    """The reader of the training documents that the config asks for; its steps are those of the stage."""
    run = stage.run
    arguments = (
        store.split("train"),
        run.data.num_lanes,
        run.data.segment_length,
        run.model.window_length,
        # Each stage has an order of its own: it would otherwise begin with what the first one began with.
        run.training.seed + (stage.index << 32),
    )
    size, end = store.vocabulary.size, store.vocabulary.end_of_document
    overlap = Model(run.model, size).overlap
    if run.data.kind == "windows":
        return WindowsReader(
            *arguments,
            vocabulary_size=size,
            overlap=0 if run.data.train_disjoint else overlap,
            apart=not run.data.segments_follow,
        )
    if overlap:
        raise UserError(f"windows with overlap={overlap} need ReaderConfig.kind='windows', not {run.data.kind!r}")
    if run.data.kind == "ancient_history":
        return make_history_reader(run, arguments[0], store, "train", run.data.num_lanes, arguments[-1])
    if run.data.kind == "lanes":
        return LanesReader(*arguments, vocabulary_size=size)
    kind = {"stream": StreamReader, "shuffled": ShuffledReader}[run.data.kind]
    return kind(*arguments, vocabulary_size=size, end_of_document=end)


def abstract_batch(run: RunConfig) -> Batch:
    """Shapes of the batch of a step, over all hosts."""
    batch = empty_batch(run.data.num_lanes, run.data.segment_length, run.model.window_length)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def starting_state(setup: Setup, checkpoints: Checkpoints, load_dir: str | None) -> TrainState:
    """Where to begin. In order of precedence:

    1. the newest usable checkpoint of this working folder;
    2. the parameters of another run's (`load_dir`), everything else fresh;
    3. fresh parameters.
    """
    if checkpoints.steps():
        state, saved = checkpoints.restore(setup.abstract_state)
        fingerprints = ("vocabulary_fingerprint", "store_fingerprint")
        here = metadata(setup, saved["step"])
        compare_metadata(checkpoints.folder, {k: saved[k] for k in fingerprints}, {k: here[k] for k in fingerprints})
        # What is in the file is the state after its last good step, so a halted run can go on under another policy.
        return state._replace(halted=jax.device_put(jnp.zeros((), bool), replicated(setup.mesh)))
    state = setup.program.initialise()
    if load_dir is None:
        return state
    opened = open_checkpoint(load_dir, mesh=setup.mesh)
    setup.store.check_vocabulary(opened.vocabulary.fingerprint, f"the checkpoint {load_dir}")
    wanted = setup.whole_run.model
    if not extends(wanted, opened.run.model):
        raise UserError(f"--load_dir={load_dir} holds another model: {opened.run.model}, not {wanted}")
    # What a pretrained model did not have, such as a recurrence, begins fresh.
    return state._replace(params={**state.params, **opened.params})


def metadata(setup: Setup, step: int) -> dict:
    """What is saved with the checkpoint of a step."""
    return checkpoint_metadata(setup.whole_run, setup.store.vocabulary, step, setup.store.fingerprint)
