"""What a run needs, before it is compiled: parameters, memory between steps, operations."""

import jax
import pytest
from tiny_run import FILES

from meliad_like import config
from meliad_like.config.run import stages_of
from meliad_like.errors import UserError
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.planning.description import describe
from meliad_like.training.program import make_program


def test_a_description_has_the_bytes_of_the_state_and_does_not_depend_on_the_mesh():
    run = config.parse([*FILES, "option/adam.gin"])
    found = describe(run, 256)
    assert found.model.num_parameters == 34_284 + 256 * 32
    state = make_program(run, 256, make_mesh(MeshConfig(), jax.devices()[:1])).abstract_state
    size = {
        name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(getattr(state, name))) for name in state._fields
    }
    assert found.parts["parameters"] == size["params"] == 4 * found.model.num_parameters
    assert found.parts["optimizer state"] == size["optimizer_state"] >= 8 * found.model.num_parameters
    assert found.parts["carry"] == size["carry"] and found.num_lanes == 4
    assert describe(config.parse([*FILES, "option/adam.gin"], ["MeshConfig.fsdp = 64"]), 256) == found


def test_a_description_adds_up_the_stages():
    model = {"cutoffs": (50, 100), "num_layers": 1, "model_width": 32, "num_heads": 1, "head_size": 32}
    sizes = [f"ShortformerConfig.{name} = {value}" for name, value in model.items()]
    run = config.parse(["shortformer/shortformer.gin"], sizes)
    found = describe(run, 200)
    flops = [stage.run.model.flops(200).training for stage in stages_of(run)]
    assert found.num_tokens == 286_000 * 73_728
    assert found.total_flops == pytest.approx(73_728 * (140_100 * flops[0] + 145_900 * flops[1]))
    assert flops[0] < flops[1] == found.model.flops.training
    with pytest.raises(UserError, match=r"cutoffs=\(50, 100\) must be below the vocabulary's size of 99"):
        describe(run, 99)


def test_the_table_names_what_it_counts():
    rows = dict(describe(config.parse(FILES), 256).table().rows)
    assert rows["parameters"] == "42,476" and rows["steps"] == "500,000"
    assert rows["parameters, all devices together"] == "0.162 MiB"
    assert rows["the model sees"] == "everything by its states, the last 17 tokens by attention"
    # 500,000 steps of 256 tokens at 275 TFLOP/s and the like are a moment.
    days = {name: float(value) for name, value in rows.items() if "of its peak" in name}
    assert len(days) == 5 and all(0 < value < 0.02 for value in days.values())
    assert days["days of one v5p at 40% of its peak"] == pytest.approx(
        float(rows["operations of all steps"]) / (0.4 * 459e12) / 86_400, rel=0.01
    )
