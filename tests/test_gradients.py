"""Every parameter of the model of every shipped gin file and row is trained: none has a gradient of zero."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shipped import NAMES, needs
from test_mixers import EXAMPLES

from meliad_like import config
from meliad_like.config import construction
from meliad_like.config.bindings import collect
from meliad_like.history.settings import HistorySettings
from meliad_like.layers.basic import Kind
from meliad_like.mixers.positions import POSITIONS
from meliad_like.models.model import Model
from meliad_like.optimization.optimizers import DECAYED
from meliad_like.planning import shrinking
from meliad_like.registry import configs_in

V = 512


def path_of(keys):
    return jax.tree_util.keystr(keys, simple=True, separator="/")


SAME = ("dropout_rate", "activation_dtype", "matmul_dtype", "remat", "attention_kernel", "scan_layers", "rate", "unit")
"""Settings that neither add parameters nor change what is read."""


def structure_of(settings):
    """What distinguishes two models in addition to their sizes, their initial values and which layers have what. Of
    other numbers and of layers' numbers, whether there are any but zero."""

    def told(value):
        numbers = value if isinstance(value, tuple) else (value,)
        return repr(any(numbers) if all(isinstance(x, int | float) for x in numbers) else value)

    same = (*SAME, "pattern", "layers", "extra_layers", "attention_scale", "time_constants", "scale", "logit_scale")
    sizes = ("length", "width", "heads", "layers")
    return [
        (
            type(part).__name__,
            *(
                (field.name, told(getattr(part, field.name)))
                for field in dataclasses.fields(part)
                if field.metadata.get("scales_as") not in sizes and "registry" not in field.metadata
                if field.name not in same
            ),
        )
        for part in configs_in(settings)
    ]


WITHOUT_PARAMETERS = ("activation", "clear_states", "horizon", "mask_empty_cache", "search")
"""Settings that change what is read, but neither add parameters nor leave one out."""
BIASES = {position.__name__ for position in POSITIONS.values()}
"""Their gradients are those of the reference in test_positions.py."""


def values_of(structure):
    """The parts of a model, and each value of the fields that may decide on parameters."""
    return {
        (part, value)
        for part, *values in structure
        if part not in BIASES
        for value in (None, *(value for value in values if value[0] not in WITHOUT_PARAMETERS))
    }


CHOSEN = (
    "ancient_history/leaking_selector.gin",
    "block_recurrent/feedback_fixed_skip.gin",
    "block_recurrent/feedback_lstm_single.gin",
    "block_recurrent/fixed_dual.gin",
    "melodi/dense_4k.gin",
    "memory_map/window_summary.gin",
    "mixer/local_attention.gin",
    "pretrained/smollm2_135m.gin",
    "recurrent_pretrained/quiet_start.gin",
    "shortformer/baseline.gin",
    "shortformer/book_corpus.gin",
    "melodi/table/short_only",
)
"""The models that don't only combine parts and values of others, or of test_mixers.py: named, because to parse all
files takes seconds, and each process of a test session collects the tests."""


def parse(file):
    return construction.build(collect([file, *needs(file)], []), config.RunConfig, HistorySettings)[0]


@functools.cache
def small_models():
    """The runs of all shipped files and rows, of those whose models differ in their sizes alone the first; and the
    names of those that have new parts or values."""
    runs, new, structures = {}, [], set()
    seen = set().union(*(values_of(structure_of(example.config)) for example in EXAMPLES.values()))
    for file in NAMES:
        run = parse(file)
        structure = structure_of(run.model)
        if str(structure) in structures:
            continue
        structures.add(str(structure))
        runs[file], values = run, values_of(structure)
        if not values <= seen:
            new.append(file)
        seen |= values
    return runs, new


@pytest.fixture
def one_layer_above_another(monkeypatch):
    monkeypatch.setattr(shrinking, "MOST_LAYERS", 2)


@pytest.mark.parametrize("file", CHOSEN)
def test_every_parameter_gets_a_gradient(file, one_layer_above_another):
    check(parse(file))


@pytest.mark.exhaustive
def test_every_parameter_of_the_others_gets_a_gradient(one_layer_above_another):
    for file, run in small_models()[0].items():
        if file not in CHOSEN:
            check(run)


def check(run):
    model = Model(shrinking.shrink(run).model, V)
    blocks, w = 2, model.config.window_length
    params = model.init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, V, (2, 2, blocks * w + 1)).astype(np.int32)
    start = np.zeros((2, 2, blocks), bool)
    start[0, :, 0] = start[1, 0, 1] = True

    @jax.jit
    def gradient(params):
        def loss(params):
            module = model.bind(params)

            def read(carry, segment):
                tokens, start = segment
                losses, carry = module.losses(tokens[:, :-1], tokens[:, 1:], carry, start, slice_length=w)
                return carry, jnp.sum(losses.nats)

            # A loop, so that one segment is compiled.
            return jnp.sum(jax.lax.scan(read, module.init_carry(2), (tokens, start))[1])

        return jax.grad(loss)(params)

    # Parameters that begin as zeros, such as gates and scales, must not hide others.
    moved = jax.tree.map(lambda x: x + 0.1 * np.random.default_rng(1).normal(size=x.shape).astype(np.float32), params)
    trained = {name: value for name, value in gradient(moved).items() if model.rate_factors.get(name) != 0}
    untouched = [path_of(path) for path, leaf in jax.tree.leaves_with_path(trained) if not np.any(np.asarray(leaf))]
    assert not untouched, run.model


@pytest.mark.thorough
def test_what_the_parameters_are():
    """`parameter_kinds.txt` has all parameters by what they are, read by a person: which have weight decay, and which
    Muon makes orthogonal."""
    runs, new = small_models()
    assert tuple(new) == CHOSEN
    found = {}
    for run in runs.values():
        for path, kind in jax.tree.leaves_with_path(Model(shrinking.shrink(run).model, V).kinds):
            found.setdefault(re.sub(r"/\d+(?=/)", "/*", path_of(path)), set()).add(kind)
    assert all(len(kinds) == 1 for kinds in found.values())
    assert DECAYED == {"matrix", "table", "filter"}
    lines = []
    for kind in get_args(Kind):
        lines += [f"# {kind}", *sorted(name for name, kinds in found.items() if kind in kinds), ""]
    table = Path(__file__).with_name("parameter_kinds.txt").read_text().splitlines()
    assert [line for line in table if not line.startswith("#:")] == lines[:-1]
