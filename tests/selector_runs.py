"""Small selectors of ancient history on synthetic documents, whose scores measure how well spans and contexts
match."""

import functools

import jax
import numpy as np
import pandas as pd

from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.history.selectors.inputs import make_inputs
from meliad_like.history.selectors.model import Selector, encoder_config, encoder_params
from meliad_like.history.selectors.training import SelectorTraining
from meliad_like.history.settings import HistoryConfig, SelectorConfig, SelectorTrainingConfig
from meliad_like.history.spans import Layout, candidates, is_scored, strides
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.models.model import Model
from meliad_like.optimization.optimizers import Adam
from meliad_like.vocabularies.base import ByteVocabulary

HISTORY = HistoryConfig(window_length=24, history_length=8, span_length=4, stride=8, separator="\n")
VOCABULARY = ByteVocabulary()
DECODER = PretrainedConfig(
    num_layers=1, model_width=8, num_heads=2, num_key_value_heads=2, head_size=4, feedforward_width=16,
    max_positions=24, window_length=24,
)  # fmt: skip
TRAINING = SelectorTrainingConfig(
    num_steps=6, batch_size=4, optimizer=Adam(base_rate=0.01), validation_every=3, encode_batch=8, log_every=2,
    evaluate_every=3, checkpoint_every=2,
)  # fmt: skip


class MadeUp:
    """Synthetic documents of two letters and blanks."""

    lengths = np.array([60, 75, 90, 64, 81])
    names = tuple("abcde")

    def tokens(self, document, start, stop):
        letters = np.random.default_rng(document).choice([97, 98, 32], 100)
        return letters[start:stop].astype(np.int32)


@functools.cache
def selector_of(history=HISTORY, **changes):
    """A selector, the parameters that its encoder begins with, and what it reads."""
    config = SelectorConfig(head_width=6, **changes)
    inputs = make_inputs(history, config, VOCABULARY)
    encoder = encoder_config(config, DECODER, inputs.text_length)
    params = jax.jit(Model(DECODER, VOCABULARY.size).init)(jax.random.key(1))
    return Selector(config, encoder, VOCABULARY.size), encoder_params(encoder, params), inputs


@functools.cache
def pairs_of(history=HISTORY):
    """All candidates of all documents; a span is worth its letters a."""
    rows, documents = [], MadeUp()
    for document, length in enumerate(documents.lengths.tolist()):
        tokens = documents.tokens(document, 0, length)
        for stride in strides(length, history, document):
            if not is_scored(stride, history):
                continue
            ends = candidates(stride, history)
            scores = (Layout(history, None).span_tokens(tokens, ends) == 97).sum(axis=1).astype(np.float32)
            rows.append(pd.DataFrame({"document": document, "stride": stride.number, "end": ends, "score": scores}))
    return pd.concat(rows, ignore_index=True)


def devices(number=1):
    """A mesh of some devices, which share the lanes."""
    return make_mesh(MeshConfig(data=number), jax.devices()[:number])


def train(folder, training=TRAINING, history=HISTORY, num_devices=1, **changes):
    """Trains in the folder; returns the exit status."""
    selector, encoder, inputs = selector_of(history, **changes)
    return SelectorTraining(
        selector, encoder, inputs, training, pairs_of(history), MadeUp(), VOCABULARY, folder, {"scores": "made up"},
        devices(num_devices),
    ).run()  # fmt: skip
