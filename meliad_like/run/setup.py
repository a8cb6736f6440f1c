"""Set-up of a training: the documents, the reader and the program of each stage, and the state to begin with."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meliad_like.config import RunConfig, bound_values, read_changes
from meliad_like.config.run import Stage, stages_of
from meliad_like.data.batch import Reader
from meliad_like.data.token_store import STORE_NAME, TokenStore
from meliad_like.errors import StoreError, UserError
from meliad_like.mesh import make_mesh, replicated
from meliad_like.models.config import MODELS
from meliad_like.models.model import Model
from meliad_like.remote import any_path
from meliad_like.resumable import check_same
from meliad_like.run.opening import checkpoint_metadata, open_model
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.training.program import TrainingProgram, make_program
from meliad_like.training.step import TrainState


class StageSetup(NamedTuple):
    """One stage of a run before its first step, which follows from the config, the documents and the devices."""

    whole_run: RunConfig
    """The config of all stages."""
    stage: Stage
    previous: "StageSetup | None"
    """The stage before; None: this is the first."""
    stores: list[TokenStore]
    """The token stores that the training reads; the first has the run's documents."""
    reader: Reader
    """The reader of the training documents; its step 0 is the first of the stage."""
    program: TrainingProgram

    @property
    def run(self) -> RunConfig:
        """The config of this stage."""
        return self.stage.run

    @property
    def store(self) -> TokenStore:
        return self.stores[0]

    @property
    def model(self) -> Model:
        return self.program.model

    def begin_stage(self, state: TrainState) -> TrainState:
        """The last state of the stage before, with an empty carry for the lanes of this stage."""
        shardings = jax.tree.map(lambda x: x.sharding, self.program.abstract_state.carry)
        init_carry = jax.jit(
            lambda params: self.model.bind(params).init_carry(self.reader.num_lanes), out_shardings=shardings
        )
        return state._replace(carry=init_carry(state.params))

    def to_save(self, state: TrainState) -> TrainState:
        """The form in which a checkpoint holds a state of this stage: one from before its first step has the lanes of
        the stage before, whose memory is not read."""
        if self.previous is not None and int(state.step) == self.stage.first_step:
            return self.previous.begin_stage(state)
        return state


def set_up(run: RunConfig, mesh: Mesh | None = None, read: Sequence[str] = ()) -> list[StageSetup]:
    """Opens the documents and lays out all stages on the devices, without compiling: mistakes are found in seconds.

    Args:
      mesh: default: the mesh of the config, of all devices.
      read: fingerprints of the token stores in the checkpoint of a resumed run, which keeps these versions.

    Returns:
      The stages in their order; most runs have one.
    """
    stages, stores = stages_of(run), [store.read_by(read) for store in run.data.open_stores()]
    if (added := stores[0].check_settings(run.source, run.vocabulary)) and not read:
        folder = str(stores[0].folder)
        without = "(FolderSourceConfig.folder = '' reads it without them)"
        raise StoreError(folder, f"{len(added)} files are newer than the token store {folder} {without}: add them")
    mesh = make_mesh(run.mesh) if mesh is None else mesh
    setups: list[StageSetup] = []
    for stage in stages:
        data, model = stage.run.data, stage.run.model
        reader = data.make(
            stores[0],
            "train",
            model.overlap,
            documents=data.documents(stores, "train"),
            num_lanes=data.num_lanes,
            window_length=model.window_length,
            # Each stage has its own order of documents; with one seed all would begin with the same documents.
            seed=run.training.seed + (stage.index << 32),
        )
        program = make_program(stage.run.on_this_platform(), stores[0].vocabulary.size, mesh)
        setups.append(StageSetup(run, stage, setups[-1] if setups else None, stores, reader, program))
    for setup in setups:
        if setup.model.abstract_params != setups[-1].model.abstract_params:
            raise UserError(f"stage {setup.stage.index + 1} would need other parameters than the last stage")
    return setups


def vocabulary_size(run: RunConfig) -> int:
    """The size of the vocabulary by the settings, or, if it has to be learned, by the token store if there is one."""
    if not run.vocabulary.trained:
        return run.vocabulary.expected_size
    has_store = (any_path(run.data.store) / STORE_NAME).exists()
    return TokenStore(run.data.store).vocabulary.size if has_store else run.vocabulary.expected_size


def starting_state(setup: StageSetup, checkpoints: Checkpoints, load_dir: str | None) -> TrainState:
    """The state to begin with. In order of precedence:

    1. the newest usable checkpoint of this working folder;
    2. the parameters of another run (`load_dir`), with everything else fresh;
    3. fresh parameters.
    """
    if checkpoints.steps():
        state, saved = checkpoints.restore(setup.program.abstract_state)
        earlier, current = (
            {name: about[name] for name in ("vocabulary_fingerprint", "store_fingerprint")}
            for about in (saved, metadata(setup, saved["step"]))
        )
        check_same(checkpoints.folder, earlier, current)
        # The state after the last finite step was saved, so that a halted run can be resumed with another policy.
        return state._replace(halted=jax.device_put(jnp.zeros((), bool), replicated(setup.program.mesh)))
    state = setup.program.initialise()
    if load_dir is None:
        return state
    model = setup.whole_run.model
    # Some published models open as either of two kinds.
    changes = read_changes(values={"RunConfig.model": MODELS.name_of(model)})
    opened = open_model(load_dir, changes=changes, mesh=setup.program.mesh)
    setup.store.check_vocabulary(opened.vocabulary.fingerprint, f"the model in {load_dir}")
    if not model.extends(opened.run.model):
        way_out = "train the model of the checkpoint, or choose another one"
        check_same(f"--load_dir={load_dir}", bound_values(opened.run.model), bound_values(model), way_out=way_out)
    # Parameters that a pretrained model does not have, such as those of a recurrence, are fresh.
    shardings = jax.tree.map(lambda x: x.sharding, {name: state.params[name] for name in opened.params})
    return state.starting_with({**state.params, **jax.device_put(opened.params, shardings)})


def metadata(setup: StageSetup, step: int) -> dict:
    """The metadata of the checkpoint of a step."""
    stores = [store.fingerprint for store in setup.stores]
    return checkpoint_metadata(setup.whole_run, setup.store.vocabulary, step, stores)
