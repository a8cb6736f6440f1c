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
    mixers: Sequence[MixerConfig], pattern: Sequence[str], num_layers: int, bare: frozenset[int]
) -> tuple[tuple[MixerConfig, ...], ...]:
    """The mixers of each layer.

    Args:
        mixers: the result of `named_mixers`.
        pattern: of the decoder.
        num_layers: the number of layers.
        bare: the layers that can't have mixers.

    Raises:
        UserError: a layer can't have the mixers that it has, or has nothing.
    """
    layers: list[list[MixerConfig]] = [[] for _ in range(num_layers)]
    entries = [names_of(pattern[i % len(pattern)]) if pattern else frozenset() for i in range(num_layers)]
    in_pattern = frozenset().union(*entries)
    indices = {}
    for mixer in mixers:
        name = MIXERS.name_of(mixer)
        indices[name] = layer_indices(f"{type(mixer).__name__}.layers", mixer.layers, num_layers)
        if name in in_pattern:
            indices[name] = frozenset(i for i, entry in enumerate(entries) if name in entry)
        elif mixer.layers is None:
            indices[name] -= bare
    for mixer in mixers:
        name = MIXERS.name_of(mixer)
        if name not in in_pattern and mixer.layers is None:
            others = [other for other in mixers if other is not mixer]
            if isinstance(mixer, SlidingWindow):
                others = [other for other in others if other.has_window]
            else:
                others = [other for other in others if MIXERS.name_of(other) == mixer.reads]
            indices[name] -= frozenset().union(*(indices[MIXERS.name_of(other)] for other in others))
        if mixer.reads is not None and mixer.reads not in indices:
            raise UserError(f"{type(mixer).__name__} reads what {MIXERS[mixer.reads].__name__} publishes: add it too")
        for i in indices[name]:
            layers[i].append(mixer)
    for i, (here, entry) in enumerate(zip(layers, entries)):
        kinds = [type(mixer).__name__ for mixer in here]
        windows = [type(mixer).__name__ for mixer in here if mixer.has_window]
        if i in bare and here:
            raise UserError(f"layer {i} can't have {' and '.join(kinds)}: layers of its kind have no mixers")
        if len(windows) > 1:
            raise UserError(f"layer {i} can't have both {' and '.join(windows)}: each has the attention to the window")
        if not here and i not in bare and FEEDFORWARD not in (entry if pattern else ()):
            raise UserError(f"layer {i} has no mixer by which it sees other tokens: name it in `layers`")
    return tuple(map(tuple, layers))
