"""Published models that are trained and evaluated on documents."""

import dataclasses
import json
import math
import shutil

import forked
import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny_run
from published_models import GOLDEN, PADDED, W, copied, opened, padded

import meliad_like
from meliad_like.config import read_changes
from meliad_like.config.run import with_changes
from meliad_like.conversion.pretrained import convert_to_huggingface
from meliad_like.data.batch import empty_batch
from meliad_like.data.token_store import TokenStore
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.planning.description import describe
from meliad_like.run.opening import config_for_training
from meliad_like.training.program import make_program, num_trained
from meliad_like.vocabularies.base import ByteVocabulary


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    """A published model whose tokens are bytes, as a folder that has our vocabulary, and bindings of documents.

    Of its five layers, of which every third is attention, it has four, of which every second is: two are compiled.
    """
    folder = tmp_path_factory.mktemp("bytes") / "model"
    bindings = tiny_run.make_bindings(folder.parent)
    changes = {"vocab_size": 264, "num_hidden_layers": 4, "block_types": ["recurrent", "attention"]}
    ByteVocabulary(8).save(copied("recurrent_gemma", folder, changes))
    saved = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {name: x for name, x in saved.items() if not name.startswith("model.layers.")}
    tensors["model.embed_tokens.weight"] = np.random.default_rng(0).normal(0, 0.3, (264, 32)).astype(np.float32)
    for i, source in enumerate((0, 2, 1, 2)):
        prefix = f"model.layers.{source}."
        of_layer = {name.removeprefix(prefix): x for name, x in saved.items() if name.startswith(prefix)}
        tensors |= {f"model.layers.{i}.{name}": x for name, x in of_layer.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    others = [binding for binding in bindings if not binding.startswith(("DecoderConfig", "RECURRENT", "Vocabulary"))]
    more = (
        "DecoderConfig.window_length = 8",
        "DecoderConfig.scan_layers = True",
        "ReaderConfig.segment_length = 24",
        "ReaderConfig.tokens_per_step = 192",
    )
    steps = "TrainingConfig.num_steps = 4", "TrainingConfig.checkpoint_every = 2", "MeshConfig.data = 1"
    return folder, [*others, *more, *steps]


@pytest.mark.thorough
def test_the_first_loss_of_a_training_is_that_of_transformers():
    lm, expected = opened("recurrent_gemma"), np.load(GOLDEN / "recurrent_gemma" / "expected.npz")
    ids, mask = padded(expected["ids"]), np.tile(np.arange(PADDED) < 69, (2, 1))
    bindings = f"DecoderConfig.window_length = {W}", f"ReaderConfig.segment_length = {PADDED}"
    run = config_for_training(GOLDEN / "recurrent_gemma", read_changes((), bindings))
    run = with_changes(run, {"data.tokens_per_step": 2 * PADDED})
    program = make_program(run, 101, make_mesh(MeshConfig(), jax.devices()[:1]))
    state = program.initialise().starting_with(lm.params)
    batch = empty_batch(2, PADDED, W)._replace(inputs=ids, targets=np.roll(ids, -1, axis=1), loss_mask=mask)
    _, metrics = program.compile_step()(state, batch)
    assert float(metrics.loss) == pytest.approx(float(expected["loss"]), rel=1e-5)


def test_documents_are_evaluated_with_a_folder(of_bytes, tmp_path):
    """In bfloat16 and from a store, which is made first."""
    folder, bindings = of_bytes
    source = [x for x in bindings if x.startswith(("RunConfig.source", "FolderSource"))]
    source += "DecoderConfig.window_length = 8", "ReaderConfig.segment_length = 24"
    flags = {"checkpoint": folder, "store": tmp_path / "store", "output": tmp_path / "results.json"}
    flags |= {"split": "validation", "dtype": "bfloat16"}
    words = [*(f"--{name}={value}" for name, value in flags.items()), *(f"--gin_param={x}" for x in source)]
    done = forked.run("-m", "meliad_like.evaluate", "--prepare", *words, environment=tiny_run.environment(1))
    assert done.returncode == 0, done.stderr
    lm, split = meliad_like.load(folder, dtype="bfloat16"), TokenStore(tmp_path / "store").split("validation")
    documents = [split.tokens(i, 0, int(length)) for i, length in enumerate(split.lengths)]
    nats = -sum(lm.score(tokens).log_probability for tokens in documents)
    figures = json.loads((tmp_path / "results.json").read_text())["figures"]
    expected = nats / math.log(2) / sum(len(tokens) - 1 for tokens in documents)
    assert figures["bits_per_token"] == pytest.approx(expected, rel=1e-4)


MIXERS_ALONE = "OptimizerConfig.trained = ('layers/*/mixers/*',)"


def is_mixers(path):
    return "'mixers'" in jax.tree_util.keystr(path)


@pytest.mark.thorough
def test_some_parameters_are_trained_on_four_devices_as_on_one(of_bytes):
    """Attention and recurrence; the others keep every bit, and have no optimizer state."""
    folder, bindings = of_bytes
    adam = "RunConfig.optimizer = 'adamw'", "ScheduleConfig.warmup_steps = 0", "OptimizerConfig.base_rate = 0.01"
    bindings = [x for x in bindings if not x.startswith(("Adafactor", "ScheduleConfig"))]
    changes = read_changes((), [*bindings, *adam, MIXERS_ALONE])
    run, lm = config_for_training(folder, changes), meliad_like.load(folder)
    start = jax.tree.map(np.asarray, lm.params)
    results = []
    for mesh in (MeshConfig(data=1), MeshConfig(data=1, fsdp=2, tensor=2)):
        setup = tiny_run.set_up(dataclasses.replace(run, mesh=mesh))
        step, state = setup.program.compile_step(), setup.program.initialise()
        params = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), start, state.params)
        state = state.starting_with(params)
        for i in range(2):
            state, metrics = step(state, setup.reader.batch(i, range(8)))
        results.append((metrics.loss, state.params))
    for (path, before), after in zip(jax.tree.leaves_with_path(start), jax.tree.leaves(results[1][1])):
        if not is_mixers(path):
            tiny_run.assert_same_bits(after, before)
        elif path[-1] != jax.tree_util.DictKey("decay"):  # Hardly any gradient.
            assert not np.array_equal(after, before), path
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    mixers = [x.size for path, x in jax.tree.leaves_with_path(start) if is_mixers(path)]
    moments = [x for x in jax.tree.leaves(state.optimizer_state) if x.ndim]
    assert sum(x.size for x in moments) == 2 * sum(mixers) > 0
    assert num_trained(run, lm.model) == sum(mixers)
    assert dict(describe(run, 264).table().rows)["trained parameters"] == f"{sum(mixers):,}"


@pytest.mark.thorough
def test_training_starts_with_a_folder_and_resumes(of_bytes, tmp_path, capsys):
    folder, bindings = of_bytes
    run = config_for_training(folder, read_changes((), [*bindings, MIXERS_ALONE]))
    assert run.model.published and run.model.window_length == 8
    assert tiny_run.train(run, tmp_path / "straight", str(folder)) == 0
    lm = meliad_like.load(folder)
    # As a kill after step 2 would have left it.
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "4")
    assert tiny_run.train(run, tmp_path / "resumed", str(folder)) == 0
    ours, again = (meliad_like.load(tmp_path / name) for name in ("straight", "resumed"))
    tiny_run.assert_same_bits(ours.params, again.params)
    assert f"{num_trained(run, ours.model):,} of them trained, from step 2 to 4" in capsys.readouterr().out
    for (path, before), after in zip(jax.tree.leaves_with_path(lm.params), jax.tree.leaves(again.params)):
        assert is_mixers(path) or np.array_equal(after, before), path
    convert_to_huggingface(str(tmp_path / "resumed"), str(tmp_path / "theirs"))
    back = meliad_like.load(tmp_path / "theirs")
    text = "a rose is when bees do not"
    assert back.score(text).bits_per_byte == pytest.approx(again.score(text).bits_per_byte, abs=1e-4)
