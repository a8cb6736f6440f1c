"""Plans: the figures of a compiled program, and the report of the command for a run."""

import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import pytest

from meliad_like import config, plan
from meliad_like.errors import UserError
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.models.model import Model
from meliad_like.planning.programs import MemoryEstimate, estimates, refused_bytes, state_parts
from meliad_like.planning.report import alternatives, nearest_that_fits, to_json
from meliad_like.planning.topology import GIB, GPUS, Chip, Topology, by_chips, open_topology
from meliad_like.training.program import make_program


@pytest.fixture(scope="module")
def run():
    params = ["ReaderConfig.tokens_per_step = 512", "DecoderConfig.num_layers = 1", "RECURRENT_LAYERS = (-1,)"]
    params += ["MeshConfig.fsdp = 2", "MeshConfig.tensor = 2", "DecoderConfig.dropout_rate = 0.0"]
    return config.parse(["size/tiny.gin", "block_recurrent/fixed_skip.gin"], params)


@pytest.fixture(scope="module")
def planned(run):
    return list(estimates(run, 256, Topology("cpu:8", jax.devices(), "cpu")))


@pytest.mark.thorough
def test_parts_equal_a_hand_count(run, planned):
    training, evaluation, decoding = planned
    assert [estimate.name for estimate in planned] == ["training", "evaluation", "decoding"]
    model = Model(run.model, 256)
    # Nearly all parameters are cut twice; position bias, scales and norms once or not at all.
    assert training.parts["parameters"] == pytest.approx(model.num_parameters * 4 / 4, rel=0.1)
    assert evaluation.parts["parameters"] == decoding.parts["parameters"] == training.parts["parameters"]
    # Momentum as large as the parameters; the rest of Adafactor's state is larger than that where nothing is factored.
    assert 1 <= training.parts["optimizer state"] / training.parts["parameters"] < 2.5
    # 8 lanes on 4 shards: tokens, targets and mask, and by block start, document and position.
    assert training.parts["batch"] == 2 * (64 * (4 + 4 + 1) + 4 * (1 + 4 + 4))
    assert training.flops == model.flops.training * 512 / 8
    assert decoding.flops == model.flops.forward * 8 / 8
    assert all(estimate.activations > 0 and estimate.total > 0 for estimate in planned)


@pytest.mark.thorough
def test_a_quick_plan_says_the_same_of_memory(run, planned):
    (quick,) = estimates(run, 256, Topology("cpu:8", jax.devices(), "cpu"), ("decoding",), quick=True)
    assert quick.parts == planned[-1].parts
    assert quick.total == pytest.approx(planned[-1].total, rel=0.05)


def estimate_of(total_gib, **changes):
    plain = MemoryEstimate("training", TOPOLOGY, {"parameters": 0}, int(total_gib * GIB), 0, 0, 1e12, 0.0)
    return plain._replace(**changes)


TOPOLOGY = Topology("v4:2", [None] * 2, "TPU v4", Chip(32 * GIB, 1e12, 1e14))
UNKNOWN = TOPOLOGY._replace(chip=None)


def test_what_fits_and_what_limits():
    assert estimate_of(31).fits
    assert not estimate_of(33).fits
    assert estimate_of(1e6, topology=UNKNOWN).fits
    small = estimate_of(1)
    assert small.seconds == {"arithmetic": 0.01, "memory": 2 * GIB / 1e12} and small.limited_by == "arithmetic"
    assert small._replace(topology=UNKNOWN).seconds == {}
    written = to_json([small])
    assert json.loads(json.dumps(written))["programs"][0]["fits"]


def test_the_exit_status_says_whether_it_fits(monkeypatch, capsys):
    monkeypatch.setattr("meliad_like.planning.topology.open_topology", lambda name: TOPOLOGY)
    monkeypatch.setattr("meliad_like.planning.report.nearest_that_fits", lambda *_, **options: "MeshConfig.fsdp = 2")

    def exit_status(total_gib, *flag_words):
        monkeypatch.setattr("meliad_like.planning.programs.estimates", lambda *_, **options: [estimate_of(total_gib)])
        plan.COMMAND.flags.unparse_flags()
        plan.COMMAND.flags(["plan", "--topology=v4:2", "--vocabulary_size=256", *flag_words])
        return plan.main()

    assert exit_status(31) == 0
    assert "does not fit" not in capsys.readouterr().out
    assert exit_status(33) == 1
    assert "does not fit: training (33.0 GiB)\nit would fit with MeshConfig.fsdp = 2\n" in capsys.readouterr().out
    assert exit_status(33, "--nosearch") == 1
    assert "it would fit" not in capsys.readouterr().out


def test_alternatives_need_less_and_can_be_built(run):
    found = dict(alternatives(run, 8))
    assert list(found)[:2] == ["DecoderConfig.remat = 'dots'", "DecoderConfig.remat = 'layers'"]
    assert "TrainingConfig.gradient_accumulation = 2 with DecoderConfig.remat = 'layers'" in found
    assert found["MeshConfig.fsdp = 4 with DecoderConfig.remat = 'layers'"].mesh.fsdp == 4
    fewer = found["ReaderConfig.tokens_per_step = 256 with DecoderConfig.remat = 'layers'"]
    assert (fewer.data.num_lanes, run.data.num_lanes) == (4, 8)


def test_alternatives_begin_with_what_the_run_has(run):
    """A run that rematerialises some of it, on a mesh whose copies it has chosen."""
    model, mesh = dataclasses.replace(run.model, remat="dots"), dataclasses.replace(run.mesh, data=2)
    found = dict(alternatives(dataclasses.replace(run, model=model, mesh=mesh), 8))
    assert next(iter(found)) == "DecoderConfig.remat = 'layers'"
    fsdp = found["MeshConfig.fsdp = 4 with MeshConfig.data = -1 with DecoderConfig.remat = 'layers'"]
    assert (fsdp.mesh.data, fsdp.mesh.fsdp, fsdp.model.remat) == (-1, 4, "layers")
    sparing = dataclasses.replace(run, model=dataclasses.replace(run.model, remat="layers"))
    assert not [bindings for bindings, _ in alternatives(sparing, 8) if "remat" in bindings]


def test_the_nearest_settings_that_fit(run, monkeypatch):
    """Those that cannot fit are not compiled, and of the others the first that fits is named."""
    tried = []

    def least_bytes(run, vocabulary_size, topology):
        return (3 if run.mesh.fsdp == 2 else 1) * GIB

    def estimates(run, vocabulary_size, topology):
        yield estimate_of(3 if run.mesh.fsdp == 4 else 1, topology=topology)

    monkeypatch.setattr("meliad_like.planning.report.least_bytes", least_bytes)
    monkeypatch.setattr("meliad_like.planning.report.estimates", estimates)
    small = TOPOLOGY._replace(chip=TOPOLOGY.chip._replace(memory=2 * GIB), devices=[None] * 16)
    found = nearest_that_fits(run, 256, small, tried.append)
    assert found == "MeshConfig.fsdp = 8 with DecoderConfig.remat = 'layers'"
    assert tried == [f"MeshConfig.fsdp = {fsdp} with DecoderConfig.remat = 'layers'" for fsdp in (4, 8)]
    monkeypatch.setattr("meliad_like.planning.report.least_bytes", lambda *_: 3 * GIB)
    assert nearest_that_fits(run, 256, small, tried.append) is None
    # Of chips whose memory is not known, only the compiler says what fits.
    gave_up = [estimate_of(1, gave_up=True)]
    monkeypatch.setattr(
        "meliad_like.planning.report.estimates", lambda run, *_: gave_up * (run.model.remat != "layers")
    )
    assert nearest_that_fits(run, 256, small._replace(chip=None), print) == "DecoderConfig.remat = 'layers'"


def test_a_compiler_that_gives_up_says_what_it_would_need():
    used = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded by 4.75G."
    assert refused_bytes(used, 4 * GIB) == 16.5 * GIB
    temporary = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (32.50G) exceeds"
    )
    assert refused_bytes(f"{temporary} available HBM (30.75G).", 4 * GIB) == 32.5 * GIB
    assert refused_bytes("INTERNAL: something else", 0) is None
    estimate = estimate_of(1, gave_up=True)
    assert not estimate.fits
    assert estimate.limited_by == "memory's size"
    assert estimate_of(1).limited_by == "arithmetic"


@pytest.mark.parametrize("name", ["v4", "v4:2x", "v7-32"])
def test_mistaken_topologies(name):
    with pytest.raises(UserError, match=f"--topology={name} must be a kind and a shape"):
        open_topology(name)


@pytest.mark.parametrize(("name", "shape"), [("a100:4", "1x1x4"), ("h100:2x8", "1x2x8"), ("h200:1", "1x1x1")])
def test_gpus_are_described_to_the_compiler(monkeypatch, name, shape):
    said = {}

    def get_topology_desc(**options):
        said.update(options)
        kind = re.search('device_description_str: "(.*)"', options["target_config"])[1]
        return SimpleNamespace(devices=[SimpleNamespace(device_kind=kind)])

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", get_topology_desc)
    topology = open_topology(name)
    assert (said["platform"], said["topology"]) == ("cuda", shape)
    assert topology.chip.memory == pytest.approx(0.75 * GPUS[name.partition(":")[0]].memory, rel=0.01)


@pytest.mark.parametrize(
    ("name", "bounds"), [("v4:1x1x1", [1, 1, 1]), ("v5e:1x1", [1, 1, 1]), ("v4:2x1x1", [2, 1, 1]), ("v6e:2x2", None)]
)
def test_slices_smaller_than_a_host_are_named_to_the_compiler(monkeypatch, name, bounds):
    said = {}

    def get_topology_desc(**options):
        said.update(options)
        return SimpleNamespace(devices=[SimpleNamespace(device_kind="TPU v4")])

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", get_topology_desc)
    assert open_topology(name).name == said["topology_name"] == name
    assert said.get("chips_per_host_bounds") == bounds


@pytest.mark.parametrize(
    ("name", "chips"),
    [
        ("v4-8", "v4:2x2x1"),
        ("v4-16", "v4:2x2x2"),
        ("v4-32", "v4:2x2x4"),
        ("v4-64", "v4:2x4x4"),
        ("v4-256", "v4:4x4x8"),
        ("v5p-128", "v5p:4x4x4"),
        ("v5litepod-1", "v5e:1x1"),
        ("v5litepod-8", "v5e:2x4"),
        ("v5litepod-16", "v5e:4x4"),
        ("v5e-16", "v5e:4x4"),
        ("v6e-32", "v6e:4x8"),
        ("v6e-256", "v6e:16x16"),
        ("v4:2x2x4", "v4:2x2x4"),
    ],
)
def test_slices_with_the_names_of_the_launch_scripts(name, chips):
    assert by_chips(name) == chips


def test_without_the_compiler_it_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the TPU compiler: install it with pip install 'meliad_like\\[tpu\\]'"):
        open_topology("v4:2x2x4")
    with pytest.raises(UserError, match="needs the GPU compiler: install it with pip install 'meliad_like\\[gpu\\]'"):
        open_topology("h100:8")


V = 32_000


def count_by_hand(layers, d, inner, f, recurrent, states):
    """Parameters of a decoder whose recurrent layers are fixed:skip; norms, biases and scales are left out."""
    layer = 4 * d * inner + 2 * d * f
    # The tokens' second query and the other half of their output; four projections of states, and the output of both
    # their attentions; initial states and state ids.
    recurrence = d * inner + inner * d + 4 * d * inner + 2 * inner * d + 2 * states * d
    return V * d + layers * layer + recurrent * recurrence


@pytest.mark.parametrize(
    ("size", "mesh", "expected"),
    [
        ("size/medium_150m.gin", MeshConfig(), count_by_hand(12, 1024, 1024, 4096, 1, 512)),
        ("size/tall_1200m.gin", MeshConfig(), count_by_hand(24, 2048, 2048, 8192, 2, 512)),
        ("size/tall_1200m.gin", MeshConfig(fsdp=2, tensor=4), count_by_hand(24, 2048, 2048, 8192, 2, 512) / 8),
    ],
)
def test_the_papers_sizes_by_hand(size, mesh, expected):
    run = config.parse([size, "block_recurrent/fixed_skip.gin"])
    parts = state_parts(make_program(run, V, make_mesh(mesh)))
    assert parts["parameters"] == pytest.approx(4 * expected, rel=0.1)
    # Adafactor: momentum as large as the parameters, which their copies divide among them; second moments as row and
    # column sums, a thousandth of them.
    copies = 8 // (mesh.fsdp * mesh.tensor)
    assert parts["optimizer state"] == pytest.approx(4 * expected / copies, rel=0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("file", "topology", "gib"),
    [
        ("block_recurrent/fixed_skip.gin", "v4:2x2x4", 9.4),
        ("block_recurrent/fixed_skip.gin", "v5e:4x4", 9.3),
        ("block_recurrent/table4/recurrent_1300m", "v4:2x2x4", 42.7),
    ],
)
def test_three_figures_of_the_page_compiled_again(file, topology, gib):
    """Minutes each, and needs the TPU's compiler."""
    pytest.importorskip("libtpu")
    run = config.parse([file, "option/bfloat16.gin"])
    (estimate,) = estimates(run, V, open_topology(topology), ("training",), quick=True)
    assert estimate.total / GIB == pytest.approx(gib, rel=0.1)
