"""Time per token of generation, early and late in a document: it must not depend on how much was read.

python benchmarks/generation_speed.py

A window's last token is also measured apart: some models compress the window then. It is the difference between chunks
of tokens with a window's end and chunks without.
"""

import dataclasses
import time

import jax
import numpy as np
from absl import app, flags
from rich.console import Console

from meliad_like.families.melodi import MelodiConfig
from meliad_like.generation.streaming import GenerationState, Generator, SamplingConfig
from meliad_like.mixers.base import MIXERS, MixerConfig
from meliad_like.mixers.dense_memory import DenseMemory
from meliad_like.mixers.recurrent_states import RecurrentStates
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.tables import Table
from meliad_like.vocabularies.dictionary import DictionaryVocabulary

TOKENS = flags.DEFINE_integer("tokens", 512, "Tokens per measurement, whole windows, so that each has the same work.")
MODELS = flags.DEFINE_list("models", None, "Names of the models. Default: all.")
REPEATS = flags.DEFINE_integer("repeats", 5, "Measurements of each place, in turn; the median counts.")

BATCH = flags.DEFINE_integer("batch", 1, "Number of texts written at once.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the most likely tokens that together reach this probability.")
VOCABULARY_SIZE = flags.DEFINE_integer("vocabulary_size", 256, "Number of tokens.")

SEGMENT_LENGTH, CHUNK = 1024, 64
SIZES = {
    "num_layers": 4,
    "model_width": 256,
    "num_heads": 4,
    "head_size": 64,
    "feedforward_width": 1024,
    "window_length": 128,
}
SLIDE = DecoderConfig(**SIZES)


def with_mixer(mixer: MixerConfig) -> DecoderConfig:
    """The decoder with a mixer in the place of the window in layer 2."""
    layers = ("sliding_window+feedforward", ((2,), f"{MIXERS.name_of(mixer)}+feedforward"))
    return dataclasses.replace(SLIDE, pattern=layers, mixers=(mixer,))


CONFIGS = {
    "Slide": SLIDE,
    "fixed:skip": with_mixer(RecurrentStates(num_states=128)),
    "lstm:dual": with_mixer(RecurrentStates(num_states=128, gate="lstm", cell="dual")),
    # A quarter of the sizes of melodi/base.gin and melodi/dense_4k.gin, as the window.
    "MELODI": MelodiConfig(
        **SIZES,
        feedforward_bias=False,
        long_layers=(2,),
        num_summaries=16,
        short_length=16,
        long_length=8,
        long_slots=1024,
    ),
    "Dense memory": with_mixer(DenseMemory(num_slots=1024)),
}


def main(_):
    rows = []
    for name in MODELS.value or CONFIGS:
        config = CONFIGS[name]
        model = Model(config, VOCABULARY_SIZE.value)
        params = jax.jit(model.init)(jax.random.key(0))
        generator = Generator(
            model,
            params,
            segment_length=SEGMENT_LENGTH,
            vocabulary=DictionaryVocabulary([(str(word), 1) for word in range(VOCABULARY_SIZE.value - 4)]),
            sampling=SamplingConfig(top_p=TOP_P.value),
            stop_at_end=False,
            chunk=CHUNK,
        )
        places = {
            (1_000, "read"): read(generator, 1_000),
            (20_000, "read"): read(generator, 20_000),
            # The tokens in between don't matter: decoding depends on their number alone.
            (100_000, "position set"): at(read(generator, 1_000), 100_000),
        }
        measure(generator, places)  # compiles
        samples = [measure(generator, places) for _ in range(REPEATS.value)]
        for place in places:
            ending, others = (np.concatenate([sample[place][i] for sample in samples]) for i in range(2))
            token = float(np.median(np.concatenate([ending, others]).reshape(REPEATS.value, -1).mean(axis=1))) / CHUNK
            last = float(np.median(ending) - (CHUNK - 1) / CHUNK * np.median(others))
            rows.append(
                (name, f"{place[0]:,}", place[1], f"{1e3 * token:.3f}", f"{1e3 * last:.2f}", f"{1 / token:,.0f}")
            )
    header = ("model", "position", "how", "ms per token", "ms of a window's last token", "tokens per second")
    Console(width=120).print(Table(str(jax.devices()[0]), header, rows).to_rich())


def read(generator: Generator, num_tokens: int) -> GenerationState:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY_SIZE.value - 1, num_tokens + 1)
    return generator.read(generator.begin(*range(BATCH.value)), [tokens] * BATCH.value)


def at(state: GenerationState, position: int) -> GenerationState:
    """The same memory later in a document, at the same place in its block."""
    places = position + (state.num_read - position) % SLIDE.window_length
    # The numbers of tokens that mixers have read are the only arrays of lanes alone.
    carry = jax.tree.map(lambda x: places.astype(np.int32) if x.ndim == 1 else x, state.carry)
    return state._replace(carry=carry, num_read=places)


def measure(
    generator: Generator, places: dict[tuple[int, str], GenerationState]
) -> dict[tuple[int, str], tuple[list, list]]:
    """Seconds of each chunk at each place, which moves on by `--tokens`: chunks with a window's end, and others."""
    seconds = {place: ([], []) for place in places}
    for place, state in places.items():
        offset, began = int(state.carry.position[0]), time.perf_counter()
        for _, state in generator.write(state, TOKENS.value):  # noqa: B007, B020  # the last one is kept
            now = time.perf_counter()
            has_end = offset % SLIDE.window_length + CHUNK >= SLIDE.window_length
            seconds[place][0 if has_end else 1].append(now - began)
            offset, began = offset + CHUNK, now
        places[place] = state
    return seconds


if __name__ == "__main__":
    app.run(main)
