"""Configurations in the reference's syntax become ours, with as many parameters, and what is lost is named."""

import sys
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest

from meliad_like import describe
from meliad_like.config import parse
from meliad_like.conversion.meliad import to_meliad
from meliad_like.conversion.meliad_gin import convert_meliad_gin, read_bindings, recipe_of
from meliad_like.errors import UserError
from meliad_like.models.model import Model

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from meliad_gin import reference_parameters  # noqa: E402  # the folder of the benchmarks is not a package

SHARED = """
import one_module
from library import another
D = 32
V = 60
training_loop.Trainer:
  num_steps = 1_000
  num_test_steps = 2
  optimizer_factory = @optimizer_config.AdafactorConfig()
optimizer_config.AdamConfig.beta1 = 0.5
optimizer_config.AdafactorConfig.momentum = None
language_model.TransformerTaskConfig:
  dataset_name = "pg19_bytes"
  vocab_size = 300
  sequence_length = 64
  batch_size = 4
"""
LAYER = """
  num_heads = 2
  head_size = 16
  mlp_dim = 64
  window_length = 16
  attn_dropout_rate = 0.1
  relative_position_type = "t5"
"""
RECURRENT = """
include "shared.gin"
decoder_stack.DecoderStack:
  num_layers = 4
  embedding_size = %D
  recurrent_layer_indices = (-3, 2)
  dstack_window_length = 16
  final_dropout_rate = 0.1
transformer_layer.TransformerLayer:
  recurrent_num_states = 5
  recurrent_gate_type = "lstm"
"""
BIASES = """
transformer_base.TransformerBase.ffn_factory = @transformer_ffn/nn_components.MLPWrapper
transformer_ffn/nn_components.MLPWrapper.mlp_factory = @transformer_ffn/nn_components.SimpleMLP
"""
DENSE = """
include "shared.gin"
transformer_stack.DecoderStack.embedding_dim = %D
transformer_stack.TransformerStack:
  num_layers = 2
  side_layer_factory = @side_mem/recurrent_memory_layer.RecurrentMemoryLayer
  side_layer_indices = (0,)
side_mem/recurrent_memory_layer.RecurrentMemoryLayer.recurrent_state_factory = @mem_t/dense_kv_memory.DenseKVMemory
mem_t/dense_kv_memory.DenseKVMemory.memory_size = 128
txl_mem/dense_kv_memory.DenseKVMemory.memory_size = 64
"""
MELODI = """
include "shared.gin"
transformer_stack.DecoderStack.embedding_dim = %D
transformer_stack.DecoderStack.stack_factory = @ordinary/melodi_layer.MelodiStack
ordinary/melodi_layer.MelodiStack:
  num_layers = 3
  layer_factory = @ordinary/melodi_layer.MelodiSequenceLayer
  long_term_memory_layer_indices = (1,)
  long_term_memory_size = 12
  long_term_memory_increment_size = 3
  short_term_memory_size = 4
  summary_size = 4
"""
THEIRS = {
    "shared": SHARED,
    "recurrent": f"{RECURRENT}{LAYER}",
    "memory": f"{RECURRENT}{LAYER}"
    "decoder_stack.DecoderStack:\n  recurrent_layer_indices = ()\n  memory_layer_indices = (-1,)\n"
    "  disable_position_encoding_for_memory_layers = True\n",
    "dense": f"{DENSE}{BIASES}ordinary/transformer_layer.TransformerLayer:{LAYER}",
    "melodi": f"{MELODI}{BIASES}ordinary/melodi_layer.MelodiSequenceLayer:{LAYER}",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in THEIRS.items():
        (tmp_path / f"{name}.gin").write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "shared"])
def test_parameters(folder, name, capsys):
    output = folder / "ours.gin"
    convert_meliad_gin(str(folder), [f"{name}.gin"], [], str(output))
    config = parse([str(output)]).model
    model = Model(config, 300)
    reference, idle = reference_parameters(read_bindings(folder, [f"{name}.gin"]))
    assert capsys.readouterr().out == f"{model.num_parameters:,} parameters with their vocabulary of 300 tokens\n"
    assert model.num_parameters + idle == reference
    # Independently: the arrays of a checkpoint of theirs.
    theirs = to_meliad(jax.tree.map(lambda leaf: np.zeros(leaf.shape), model.abstract_params), config)
    assert sum(array.size for array in theirs.values()) == reference


def test_bindings(folder):
    recipe = recipe_of(read_bindings(folder, ["recurrent.gin"], ["D = 64", "Trainer.num_steps = 7"]))
    assert recipe.text().splitlines() == [
        'include "task/pg19_bytes.gin"',
        "Adafactor.momentum = 0.0",
        "DecoderConfig.dropout_rate = 0.1",
        "DecoderConfig.feedforward_width = 64",
        "DecoderConfig.head_size = 16",
        "DecoderConfig.mask_empty_cache = False",
        "DecoderConfig.model_width = 64",
        "DecoderConfig.num_heads = 2",
        "DecoderConfig.num_layers = 4",
        "DecoderConfig.pattern = "
        "('sliding_window+state_reader+feedforward', ((-3, 2), 'recurrent_states+feedforward'))",
        "DecoderConfig.position = 't5'",
        "DecoderConfig.window_length = 16",
        "ReaderConfig.segment_length = 64",
        "ReaderConfig.tokens_per_step = 256",
        "RecurrentStates.cell = 'dual'",
        "RecurrentStates.gate = 'lstm'",
        "RecurrentStates.num_states = 5",
        "RunConfig.optimizer = 'adafactor'",
        "TrainingConfig.evaluate_max_tokens = 512",
        "TrainingConfig.num_steps = 7",
        "VocabularyConfig.size_multiple = 300",
    ]


@pytest.mark.parametrize(
    ("binding", "problem"),
    [
        ("Trainer.num_trials = 3", "Trainer.num_trials = 3: it is unknown"),
        ("TransformerLayer.use_long_xl_architecture = False", "a window always sees the tokens before it"),
        ("Trainer.num_steps = %STEPS", "Trainer.num_steps = %STEPS: it has no value"),
        ("DecoderStack.final_dropout_rate = 0.2", "DecoderConfig.dropout_rate is 0.2 already"),
        ("DecoderStack.dstack_window_length = 32", "DecoderStack.dstack_window_length = 32: blocks are windows"),
    ],
)
def test_what_has_no_counterpart(folder, binding, problem):
    recipe = recipe_of(read_bindings(folder, ["recurrent.gin"], [binding]))
    assert len(recipe.problems) == 1 and problem in recipe.problems[0]
    assert recipe.text().startswith(f"# has no counterpart: {recipe.problems[0]}\n")


def test_missing_files(tmp_path):
    with pytest.raises(UserError, match="no gin file base.gin in .*: --input is the folder transformer/configs"):
        read_bindings(tmp_path, ["base.gin"])
    with pytest.raises(UserError, match="name their files in .*: --gin_file=base_memory.gin"):
        convert_meliad_gin(str(tmp_path), [], [], "ours.gin")


def test_the_reference_s_files():
    """The table of all files of the reference (`benchmarks/meliad_gin.py`)."""
    rows = pd.read_csv(ROOT / "benchmarks" / "results" / "meliad_gin.csv", index_col="file")
    assert (len(rows), rows.converts.sum()) == (92, 76)
    converted = rows[rows.converts]
    assert (converted.parameters + converted.idle_parameters == converted.reference_parameters).all()
    assert rows.reason.notna().equals(~rows.converts)
    assert converted.parameters["size/medium_150M.gin"] == 151_285_856


def test_configs_by_their_names(capsys):
    describe.list_files(["bias_skip"])
    assert capsys.readouterr().out.startswith("block_recurrent/fixed_skip.gin ")
