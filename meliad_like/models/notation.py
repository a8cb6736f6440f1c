"""The notation of the mixers and the network of each layer of a stack (`DecoderConfig.pattern`).

An entry names all that a layer has, joined by +, such as "sliding_window+feedforward". The entries of a stack are
repeated from the first layer to the last. Behind them may follow pairs of layers, by their numbers, and the entry that
these layers have instead.
"""

from collections.abc import Sequence

from meliad_like.errors import UserError
from meliad_like.validation import layer_indices

Pair = tuple[tuple[int, ...], str]
"""Layers, counted from 0, negative numbers from the end, and their entry."""


def entries_by_layer(layers: Sequence[str | Pair], num_layers: int) -> list[str]:
    """The entry of each layer. Raises a UserError if no entry is repeated, or more than there are layers, or a pair
    names no layer, or one that does not exist or that a pair has named before."""
    repeated, pairs = split_pattern(layers)
    if not repeated or any(isinstance(pair, str) for pair in pairs):
        raise UserError(f"DecoderConfig.pattern={layers} must begin with entries, such as 'sliding_window+feedforward'")
    if len(repeated) > num_layers:
        raise UserError(f"DecoderConfig.pattern has {len(repeated)} entries, and the decoder has {num_layers} layers")
    entries = [repeated[i % len(repeated)] for i in range(num_layers)]
    for indices, entry in pairs:
        if not indices:
            raise UserError(f"DecoderConfig.pattern names no layer for {entry!r}")
        for i in indices:
            entries[i % num_layers] = entry
    layer_indices("DecoderConfig.pattern", [i for indices, _ in pairs for i in indices], num_layers)
    return entries


def split_pattern(layers: Sequence[str | Pair]) -> tuple[list[str], list[Pair]]:
    """The entries that are repeated, and the pairs behind them."""
    repeated = [entry for entry in layers if isinstance(entry, str)]
    return repeated, list(layers[len(repeated) :])  # type: ignore[return-value]  # checked by `entries_by_layer`
