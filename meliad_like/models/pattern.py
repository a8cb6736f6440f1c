"""Which layers of a decoder have which mixers (`DecoderConfig.pattern` and `MixerConfig.layers`)."""

from collections.abc import Iterator, Sequence

from meliad_like.errors import UserError
from meliad_like.mixers.base import MIXERS, MixerConfig, layer_indices
from meliad_like.mixers.sliding_window import SlidingWindow

FEEDFORWARD = "feedforward"
"""The name of the feed-forward network in a pattern."""


def names_of(entry: str) -> frozenset[str]:
    """The names in an entry of a pattern."""
    return frozenset(name.strip() for name in entry.split("+"))


def distinct_entries(pattern: Sequence[str]) -> tuple[str, ...]:
    """The different entries of a pattern, in their order: the shortest pattern with all kinds of layers."""
    return tuple(dict.fromkeys(pattern))


def named_mixers(mixers: Sequence[MixerConfig], pattern: Sequence[str]) -> Iterator[MixerConfig]:
    """The mixers, and those that only the pattern names; without the default window if a pattern leaves it out.

    Raises:
        UserError: a mixer is there twice, or is placed twice or nowhere, or the pattern names something else.
    """
    in_pattern = frozenset().union(*map(names_of, pattern)) - {FEEDFORWARD}
    by_name = {MIXERS.name_of(mixer): mixer for mixer in mixers}
    if len(by_name) < len(mixers):
        raise UserError("mixers hold two of the same class: name all of its layers in one")
    for name, mixer in by_name.items():
        kind = type(mixer).__name__
        if name in in_pattern and mixer.layers != type(mixer)().layers:
            raise UserError(f"DecoderConfig.pattern names {name}, so that {kind}.layers={mixer.layers} has no effect")
        if name not in in_pattern and mixer.layers == ():
            where = "DecoderConfig.pattern does not name it" if pattern else f"bind nothing of {kind}"
            raise UserError(f"{kind}.layers=() names no layer: name some, or {where}")
        if name in in_pattern or not pattern or mixer != SlidingWindow():
            yield mixer
    for name in sorted(in_pattern - set(by_name)):
        if name not in MIXERS:
            raise UserError(
                f"DecoderConfig.pattern names {name!r}, which is not one of {', '.join((*MIXERS, FEEDFORWARD))}"
            )
        yield MIXERS[name]()


def place_mixers(
    mixers: Sequence[MixerConfig], pattern: Sequence[str], num_layers: int
) -> tuple[tuple[tuple[MixerConfig, ...], ...], tuple[int, ...]]:
    """The mixers of each layer, from the result of `named_mixers`, and the layers with a feed-forward network.

    Raises:
        UserError: a layer can't have the mixers that it has, or has nothing.
    """
    if len(pattern) > num_layers:
        raise UserError(f"DecoderConfig.pattern has {len(pattern)} entries, and the decoder has {num_layers} layers")
    entries = [names_of(pattern[i % len(pattern)]) if pattern else frozenset() for i in range(num_layers)]
    names = [MIXERS.name_of(mixer) for mixer in mixers]
    layers: list[list[MixerConfig]] = [[] for _ in range(num_layers)]
    for mixer in mixers:
        if mixer.reads is not None and mixer.reads not in names:
            raise UserError(f"{type(mixer).__name__} reads what {MIXERS[mixer.reads].__name__} publishes: add it too")
        for i in _layers_of(mixer, mixers, entries):
            layers[i].append(mixer)
    for i, (in_layer, entry) in enumerate(zip(layers, entries)):
        windows = [type(mixer).__name__ for mixer in in_layer if mixer.has_window]
        if len(windows) > 1:
            raise UserError(f"layer {i} can't have both {' and '.join(windows)}: each has the attention to the window")
        if not in_layer and FEEDFORWARD not in entry:
            raise UserError(f"layer {i} has no mixer by which it sees other tokens: name it in `layers`")
    with_feedforward = (i for i, entry in enumerate(entries) if not pattern or FEEDFORWARD in entry)
    return tuple(map(tuple, layers)), tuple(with_feedforward)


def _layers_of(mixer: MixerConfig, mixers: Sequence[MixerConfig], entries: Sequence[frozenset[str]]) -> frozenset[int]:
    """The layers that the pattern or the mixer names.

    A mixer of all layers leaves some to others: the window those with attention to it, and a reader of published values
    those that publish them.
    """
    name = MIXERS.name_of(mixer)
    if any(name in entry for entry in entries):
        return frozenset(i for i, entry in enumerate(entries) if name in entry)
    indices = layer_indices(f"{type(mixer).__name__}.layers", mixer.layers, len(entries))
    if mixer.layers is not None:
        return indices
    if isinstance(mixer, SlidingWindow):
        left_to = [other for other in mixers if other.has_window and other is not mixer]
    else:
        left_to = [other for other in mixers if MIXERS.name_of(other) == mixer.reads]
    return indices.difference(*(_layers_of(other, mixers, entries) for other in left_to))
