"""Models as programs of StableHLO, which jax runs without this package (`read_model.py`)."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import meliad_like
from meliad_like.config import read_changes
from meliad_like.conversion import read_model
from meliad_like.conversion.pretrained import new_folder, save_tensors
from meliad_like.errors import UserError
from meliad_like.generation.reading import LOSS_SLICE, read_while_decoding
from meliad_like.layers.losses import token_losses
from meliad_like.models.model import Model
from meliad_like.registry import fingerprint
from meliad_like.remote import write_whole
from meliad_like.resumable import write_json
from meliad_like.run.opening import open_checkpoint, save_vocabulary
from meliad_like.run.text import carry_identity
from meliad_like.training.checkpoints import named_arrays

PLATFORMS = ("cpu", "cuda", "tpu")
CALLS = {
    "begin": "(parameters, lanes int32[b]) -> the carry of b empty documents",
    "segment, block, token": "(parameters, carry, tokens int32[b, n], the next of each int32[b, n], counts int32[b]) "
    "-> (log-probabilities of the next ones float32[b, n], last logits float32[b, v], carry). The first `counts` tokens"
    " are read, which must be in the current block; of a segment, which begins with a block, all (counts = n).",
}
"""The arguments and results of the programs; parameters and carry are lists of arrays."""


def convert_to_stablehlo(checkpoint: str | Path, gin_params: Sequence[str], folder: str | Path) -> None:
    """Writes our newest checkpoint as programs for all platforms, parameters, a vocabulary and a reader of them."""
    opened = open_checkpoint(checkpoint, changes=read_changes((), gin_params))
    if reason := opened.model.config.traits.needs_segments:
        raise UserError(f"{checkpoint}: memories depend on where segments end ({reason}), and tokens have no segments")
    # `opened.model` would have the kernels of this platform.
    model, vocabulary = Model(opened.run.model, opened.vocabulary.size), opened.vocabulary
    window, segment = model.config.window_length, opened.run.data.segment_length
    # Windows that overlap repeat tokens, which blocks of a segment don't. A segment of one block needs no program.
    has_segments = segment > window and not model.config.overlap
    lengths = {"block": window, "token": 1} | ({"segment": segment} if has_segments else {})
    folder = new_folder(folder)
    for name, program in export_programs(model, lengths):
        write_whole(folder / f"{name}.stablehlo", program)
    save_tensors(named_arrays(opened.params), folder / "parameters.safetensors")
    save_vocabulary(vocabulary, folder)
    write_whole(folder / "read_model.py", Path(read_model.__file__).read_bytes())
    facts = {
        "made_with": {"meliad_like": meliad_like.__version__, "jax": jax.__version__},
        "identity": fingerprint(carry_identity(opened)),
        "vocabulary": {
            "kind": vocabulary.kind,
            "size": vocabulary.size,
            "end_tokens": list(vocabulary.end_tokens),
            "unwritable": np.flatnonzero(~vocabulary.writable).tolist(),
        },
        "window_length": window,
        "overlap": model.config.overlap,
        "programs": {"begin": 0} | lengths,
        "calls": CALLS,
        "parameters": _described(model.abstract_params),
        "carry": [leaf | {"shape": ["b", *leaf["shape"][1:]]} for leaf in _described(_carry(model))],
    }
    write_json(folder / "model.json", facts)


def export_programs(model: Model, lengths: Mapping[str, int]) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the programs of `CALLS`, for any number of lanes and these numbers of tokens."""
    params, carry = model.abstract_params, _carry(model)

    def begin(parameters, lanes):
        module = model.bind(jax.tree.unflatten(jax.tree.structure(params), parameters))
        return jax.tree.leaves(module.begin_decoding(module.init_carry(lanes.shape[0])))

    def read(parameters, carry_leaves, tokens, targets, counts, *, segment):
        module = model.bind(jax.tree.unflatten(jax.tree.structure(params), parameters))
        state = jax.tree.unflatten(jax.tree.structure(carry), carry_leaves)
        if segment:
            start = jnp.zeros((tokens.shape[0], tokens.shape[1] // model.config.window_length), bool)
            (*_, output), state = read_while_decoding(module, tokens, state, start)
        else:
            (*_, output), state = module.read_tokens(tokens, counts, state)
        hidden = module.finish(output, None)
        nats = token_losses(module, hidden, targets, LOSS_SLICE).nats
        last = jnp.take_along_axis(hidden, (counts - 1)[:, None, None], axis=1)[:, 0]
        return -nats, module.logits(last), jax.tree.leaves(state)

    (b,) = export.symbolic_shape("b")
    leaves = [jax.ShapeDtypeStruct((b, *leaf.shape[1:]), leaf.dtype) for leaf in jax.tree.leaves(carry)]
    lanes = jax.ShapeDtypeStruct((b,), jnp.int32)
    calls = {"begin": (begin, lanes)}
    for name, length in lengths.items():
        tokens = jax.ShapeDtypeStruct((b, length), jnp.int32)
        calls[name] = functools.partial(read, segment=name == "segment"), leaves, tokens, tokens, lanes
    for name, (function, *arguments) in calls.items():
        exported = export.export(jax.jit(function), platforms=PLATFORMS)(jax.tree.leaves(params), *arguments)
        yield name, bytes(exported.serialize())


def _carry(model: Model) -> Any:
    return model.abstract_carry(1, decoding=True)


def _described(tree: Any) -> list[dict[str, Any]]:
    """The name, the shape and the dtype of each leaf of a tree, in its order."""
    return [
        {"name": name, "shape": list(leaf.shape), "dtype": leaf.dtype.name} for name, leaf in named_arrays(tree).items()
    ]
