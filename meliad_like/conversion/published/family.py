"""The base of families of published models: fields of config.json, and the places of our parameters in the files.

A constant of a published forward pass (`1 + weight`, a multiplier) is folded into the parameters when they are read,
and divided out when they are written.
"""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meliad_like.config import fit
from meliad_like.conversion.parameters import fill
from meliad_like.errors import UserError
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.mixers.base import MIXERS, DecoderShape, MixerConfig
from meliad_like.mixers.dot_product_attention import SpanAttentionConfig
from meliad_like.models.decoder import DecoderConfig
from meliad_like.training.checkpoints import named_arrays

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("windows.toml").read_text())
HARMLESS: list[str] = TABLES["harmless"]
FAMILIES: dict[str, "Family"] = {}
"""The families, by the `model_type` of config.json."""
AnyConfig = DecoderConfig | PretrainedConfig
REQUIRED = object()
"""The default of a field that config.json must have."""


class Fields:
    """The fields of a config.json. Each must be read, or be known to have no effect."""

    def __init__(self, saved: Mapping[str, Any], owner: str):
        """`owner` is the name of the file, for messages."""
        self.saved, self.owner = saved, owner
        self._read: set[str] = set()

    def __call__(self, name: str, kind: Any, default: Any = REQUIRED) -> Any:
        """The value of a field, of this type; a field that is missing or null has the default."""
        self._read.add(name)
        value = self.saved.get(name)
        if value is None:
            if default is REQUIRED:
                raise UserError(f"{self.owner} has no {name}")
            return default
        return fit(value, kind, f"{self.owner}: {name}")

    def sizes(self, *names: str) -> list[int]:
        """The values of fields that are whole numbers above 0."""
        values = [self(name, int) for name in names]
        for name, value in zip(names, values):
            if value < 1:
                raise UserError(f"{self.owner}: {name} = {value} must be positive")
        return values

    def only(self, name: str, *allowed: Any) -> None:
        """Raises a UserError if a field has another value than these, of which the first is that of a missing field."""
        self._read.add(name)
        if (value := self.saved.get(name)) not in (None, *allowed):
            raise UserError(f"{self.owner}: we can't honour {name} = {value!r}, only {' or '.join(map(repr, allowed))}")

    def without_effect(self, *names: str) -> None:
        """Notes that these fields do not change the model."""
        self._read.update(names)

    def check_all_read(self) -> None:
        """Raises a UserError if a field was not read, and may change the model."""
        for name, value in self.saved.items():
            # An unknown switch that is off has no effect.
            if name not in self._read and name not in HARMLESS and value not in (None, False, {}, [], "none"):
                raise UserError(
                    f"{self.owner}: we can't honour {name} = {value!r}, which we don't know and may change the model"
                )


class Layout(NamedTuple):
    """The conversion between one of our arrays and an array of the file."""

    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


SAME = Layout(lambda x: x, lambda x: x)
KERNEL = Layout(np.transpose, np.transpose)
"""Linear maps are [out, in] in the file, and ours [in, out]."""
FILTERS = Layout(lambda x: x[:, 0].T, lambda x: x.T[:, None])
"""Convolutions are [channels, 1, taps] in the file, and ours [taps, channels]."""


def flat(rows: int) -> Layout:
    """A vector of ours that has several rows in the file."""
    return Layout(lambda x: x.reshape(-1), lambda x: x.reshape(rows, -1))


class Part(NamedTuple):
    """One of our arrays, or a part of it along its first axis, and its place in the file."""

    tensor: str
    layout: Layout = SAME
    rows: Sequence[int] | None = None
    """The rows of the tensor that it is, which are along the last axis of our layout; None: all."""
    factor: float | np.ndarray = 1.0
    offset: float = 0.0
    """The number that is added to the tensor's values times the factor."""
    size: int = 0
    """The length of this part along the parameter's first axis, if a parameter has several parts."""

    def read(self, whole: np.ndarray) -> np.ndarray:
        """The part, from the tensor in our layout."""
        array = (whole if self.rows is None else whole[..., np.asarray(self.rows)]).astype(np.float32, copy=False)
        return array if self.factor == 1 and not self.offset else array.astype(float) * self.factor + self.offset

    def write(self, array: np.ndarray) -> np.ndarray:
        """The numbers of the tensor, in our layout."""
        if self.factor != 1 or self.offset:
            array = (array.astype(float) - self.offset) / self.factor
        return np.asarray(array, np.float32)


Places = Mapping[str, Part | Sequence[Part]]
"""The place of each of our parameters by its path, or the places of its parts along the first axis."""


def linear(
    ours: str, theirs: str, factor: float = 1.0, rows: Sequence[int] | None = None, of_input: float = 1.0
) -> dict[str, Part]:
    """The places of a linear map's kernel and bias. `factor` multiplies its results, and `of_input` its input."""
    return {
        f"{ours}/kernel": Part(f"{theirs}.weight", KERNEL, rows, factor * of_input),
        f"{ours}/bias": Part(f"{theirs}.bias", rows=rows, factor=factor),
    }


def gated_network(ours: str, theirs: str, *, gate: float = 1.0, output: float = 1.0) -> dict[str, Part]:
    """The places of a gated network's parameters; `gate` and `output` are factors on their results."""
    return (
        linear(f"{ours}gate", f"{theirs}gate_proj", gate)
        | linear(f"{ours}hidden", f"{theirs}up_proj")
        | linear(f"{ours}output", f"{theirs}down_proj", output)
    )


def places_of_attention(
    mixer: MixerConfig,
    ours: str,
    theirs: str,
    *,
    of_keys: float = 1.0,
    of_input: float = 1.0,
    of_output: float = 1.0,
    norm_offset: float = 0.0,
) -> dict[str, Any]:
    """The places of a layer's attention and output, with factors on keys, input and output. `ours` is the beginning of
    the layer's names, and `theirs` of those of their module."""
    path = f"{ours}mixers/{MIXERS.name_of(mixer)}/"
    places = linear(f"{ours}output", f"{theirs}o_proj", of_output)
    for name, factor in (("query", 1.0), ("key", of_keys), ("value", 1.0)):
        places |= linear(f"{path}{name}", f"{theirs}{name[0]}_proj", factor, of_input=of_input)
    for name in ("query", "key"):
        places[f"{path}{name}_scale"] = Part(f"{theirs}{name[0]}_norm.weight", offset=norm_offset)
    return places


class Family:
    """A family of published models. A subclass is added to `FAMILIES` under each of its model types."""

    model_types: tuple[str, ...] = ()
    embedding, final_norm, layers = "model.embed_tokens", "model.norm", "model.layers"
    """The names of modules in the file: those outside of layers, and the list of layers."""
    norms = "input_layernorm", "post_attention_layernorm"
    """A layer's norm of the mixers, and that of the network."""
    attention, recurrence, network = "self_attn", "", "mlp"
    """A layer's attention, recurrence and gated network."""
    norm_offset = 0.0
    """The number that is added to the weights of these norms."""

    def __init_subclass__(cls):
        super().__init_subclass__()
        FAMILIES.update(dict.fromkeys(cls.__dict__.get("model_types", ()), cls()))

    def normal_form(self, saved: dict[str, Any], owner: str) -> dict[str, Any]:
        """The config.json from which the family reads and which it writes."""
        del owner
        return saved

    def name(self, tensor: str, config: AnyConfig) -> str | None:
        """The name under which the family knows a tensor of the file; None: it is not of the language model."""
        del config
        return tensor

    def pieces(self, tensor: str) -> Sequence[str]:
        """The names of the tensors of which a tensor consists along its first axis. They are written in equal parts."""
        return (tensor,)

    def decoder(self, fields: Fields) -> DecoderConfig:
        """The decoder."""
        raise NotImplementedError

    by_windows: Callable[[Fields], PretrainedConfig] | None = None
    """The pretrained decoder, which reads by windows, as which the models are opened unless `RunConfig.model` is
    "decoder"; None: they are always opened as a decoder."""

    def in_layer(
        self, fields: Fields, config: AnyConfig, mixers: Sequence[Any], ours: str, theirs: str
    ) -> dict[str, Any]:
        """The places of a layer's mixers and output, by default of one mixer, and what differs from the class's names.
        `ours` and `theirs` are the beginnings of all names in the layer."""
        [mixer] = mixers
        if isinstance(mixer, SpanAttentionConfig):
            return places_of_attention(mixer, ours, f"{theirs}{self.attention}.", norm_offset=self.norm_offset)
        return self.in_recurrence(mixer, config.shape, ours, f"{theirs}{self.recurrence}.")

    @staticmethod
    def in_recurrence(mixer: Any, shape: DecoderShape, ours: str, theirs: str) -> dict[str, Any]:
        """The places of a layer's recurrence and output, as `places_of_attention`."""
        raise NotImplementedError

    def places(self, fields: Fields, config: AnyConfig) -> Places:
        """The places of all parameters; those that the decoder lacks are not used."""
        places: dict[str, Any] = {
            "embedding": Part(f"{self.embedding}.weight"),
            "output_embedding": Part("lm_head.weight"),
            **self._norm("final_norm", self.final_norm),
        }
        for i, mixers in enumerate(config.shape.layers):
            ours, theirs = f"layers/{i}/", f"{self.layers}.{i}."
            for path, norm in zip(("norm", "feedforward/norm"), self.norms):
                places |= self._norm(f"{ours}{path}", f"{theirs}{norm}")
            places |= gated_network(f"{ours}feedforward/network/", f"{theirs}{self.network}.")
            places |= self.in_layer(fields, config, mixers, ours, theirs)
        return places

    def _norm(self, ours: str, theirs: str) -> dict[str, Part]:
        scale = Part(f"{theirs}.weight", offset=self.norm_offset)
        return {f"{ours}/scale": scale, f"{ours}/bias": Part(f"{theirs}.bias")}


def parts_of(places: Places, path: str) -> Sequence[Part]:
    """The parts of a parameter of ours."""
    place = places[path]
    return (place,) if isinstance(place, Part) else place


def read_parameters(
    family: Family, places: Places, template: Any, names: Iterable[str], read: Callable[[str], np.ndarray], owner: str
) -> Any:
    """Our parameters from the tensors of a file by their names in the family; all rows must be used.

    Raises:
        UserError: a tensor is missing, has another shape, or has no place in the model.
    """
    used: dict[str, tuple[int, set[int]]] = {}

    def whole(tensor: str) -> np.ndarray:
        pieces = [read(name) for name in family.pieces(tensor)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def make(path: str) -> np.ndarray:
        arrays = []
        for part in parts_of(places, path):
            tensor = part.layout.read(whole(part.tensor))
            size = tensor.shape[-1]
            rows = range(size) if part.rows is None else part.rows
            if len(rows) and max(rows) >= size:
                raise UserError(f"{owner}: {part.tensor} has {size} rows, its config asks for more")
            used.setdefault(part.tensor, (size, set()))[1].update(rows)
            arrays.append(part.read(tensor))
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def tensors(path: str) -> Iterator[str]:
        for part in parts_of(places, path):
            yield from family.pieces(part.tensor)

    params = fill(template, names, tensors, make, owner)
    for tensor, (size, rows) in used.items():
        if len(rows) < size:
            raise UserError(f"{owner}: {tensor} has {size} rows, its config asks for {len(rows)}")
    return params


def to_tensors(family: Family, places: Places, params: Any) -> dict[str, np.ndarray]:
    """The tensors of a file by name, float32; the inverse of `read_parameters`."""
    found: dict[str, list[tuple[Part, np.ndarray]]] = {}
    for path, leaf in named_arrays(params).items():
        array, parts = np.asarray(leaf), parts_of(places, path)
        ends = np.cumsum([part.size for part in parts[:-1]])
        for part, piece in zip(parts, np.split(array, ends)):
            found.setdefault(part.tensor, []).append((part, part.write(piece)))
    tensors = {}
    for name, written in found.items():
        (first, whole), *_ = written
        if first.rows is not None:
            columns = np.concatenate([np.asarray(part.rows) for part, _ in written])
            whole = np.concatenate([piece for _, piece in written], axis=-1)[..., np.argsort(columns)]
        whole = first.layout.write(whole)
        pieces = family.pieces(name)
        length = -(-len(whole) // len(pieces))
        for i, piece in enumerate(pieces):
            tensors[piece] = np.ascontiguousarray(whole[i * length : (i + 1) * length])
    return tensors
