"""Small models of every family."""

import dataclasses

import jax
from decoders import with_mixer

from meliad_like.config import RunConfig
from meliad_like.data.readers import LanesReaderConfig
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.families.pretrained.recurrence import WindowSummary
from meliad_like.families.shortformer import ShortformerConfig
from meliad_like.library import LanguageModel
from meliad_like.mixers.dot_product_attention import DotProductAttention, LocalAttention
from meliad_like.mixers.external_memory import ExternalMemory
from meliad_like.mixers.mamba2 import Mamba2
from meliad_like.mixers.positions import Rotary
from meliad_like.mixers.recurrent_states import RecurrentStates, StateReader
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.run.opening import OpenedCheckpoint
from meliad_like.vocabularies.base import ByteVocabulary

# Lanes, blocks and heads for eight devices along any axis.
B, C, W, V = 8, 8, 4, 64
SIZES = {"num_layers": 1, "model_width": 16, "num_heads": 8, "head_size": 2, "feedforward_width": 16}
SLIDE = DecoderConfig(**SIZES, window_length=W)
STATES = RecurrentStates(num_states=4)
SKIP = with_mixer(SLIDE, STATES, (0,))
TWO = dataclasses.replace(SKIP, num_layers=2)
GPT2 = PretrainedConfig(**SIZES, num_key_value_heads=8, max_positions=W, window_length=W)
LLAMA = dataclasses.replace(GPT2, architecture="llama", num_key_value_heads=4, activation="silu", tied_embedding=False)
RECURRENCE = {"recurrence": (WindowSummary(layers=(0,), width=5, depth=1, pooling="attention"),)}
CONFIGS = {
    "slide": SLIDE,
    "xl": dataclasses.replace(SLIDE, window_length=C * W),
    **{
        f"{gate}:{cell}": with_mixer(SLIDE, dataclasses.replace(STATES, gate=gate, cell=cell), (0,))
        for gate in ("fixed", "lstm")
        for cell in ("skip", "single", "dual")
    },
    "slide below skip": dataclasses.replace(with_mixer(TWO, STATES, (1,)), clear_states=True),
    "rotary": dataclasses.replace(SKIP, position=Rotary(), remat="layers"),
    "scanned": dataclasses.replace(SKIP, num_layers=2, remat="dots", scan_layers=True),
    "kernel": dataclasses.replace(SKIP, attention_kernel="interpreted"),
    "unmasked": dataclasses.replace(SKIP, mask_empty_cache=False),
    "feedback": with_mixer(TWO, StateReader()),
    "memorizing": with_mixer(SLIDE, ExternalMemory(num_slots=4 * W, num_neighbors=3), (0,)),
    "memorizing in kernels": dataclasses.replace(
        with_mixer(SLIDE, ExternalMemory(num_slots=4 * W, num_neighbors=4, search="bucketed"), (0,)),
        attention_kernel="interpreted",
    ),
    # Not the delta rule, whose keys have unit length: one of two channels may be almost 0, and rounding errors large.
    "recurrences in kernels": dataclasses.replace(
        with_mixer(SLIDE, Mamba2(head_size=2, state_size=2)), recurrence_kernel="interpreted"
    ),
    # A span that ends inside of a block, and one longer than the segment.
    "spans": dataclasses.replace(
        TWO,
        pattern=("local_attention+feedforward", "dot_product_attention+feedforward"),
        mixers=(LocalAttention(span=2 * W - 1), DotProductAttention(span=2 * C * W, num_key_heads=4)),
    ),
    "shortformer": ShortformerConfig(**SIZES, window_length=W, cache_length=W, cutoffs=(16, 32), band_factor=2),
    "gpt2": GPT2,
    "llama": LLAMA,
    "recurrent gpt2": dataclasses.replace(GPT2, **RECURRENCE),
    "recurrent llama": dataclasses.replace(LLAMA, **RECURRENCE),
}
BYTES = ByteVocabulary()
FAMILIES = {
    **{name: CONFIGS[name] for name in ("lstm:dual", "memorizing", "shortformer", "feedback")},
    "overlapping llama": dataclasses.replace(LLAMA, overlap=1, max_positions=W, **RECURRENCE),
}


def language_model(config, vocabulary=BYTES) -> LanguageModel:
    model = Model(config, vocabulary.size)
    run = RunConfig(model=config, data=LanesReaderConfig(segment_length=C * W, tokens_per_step=C * W))
    return LanguageModel(OpenedCheckpoint(run, model, model.init(jax.random.key(1)), vocabulary, 7))
