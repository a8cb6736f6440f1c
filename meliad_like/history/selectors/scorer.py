"""A trained selector as a `SpanScorer`."""

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.history.selectors.checkpoint import OpenedSelector, open_selector
from meliad_like.history.selectors.config import Part
from meliad_like.history.selectors.inputs import Texts
from meliad_like.history.selectors.model import Params
from meliad_like.history.selectors.vectors import encode_batch
from meliad_like.history.spans import HistoryConfig, Stride
from meliad_like.history.stride_store import fingerprint


class _Program:
    """A function of parameters and arrays, compiled once for each shape; measures the time of compilation."""

    def __init__(self, function: Callable[..., jax.Array]):
        self.compile_seconds = 0.0
        self._function = jax.jit(function)
        self._compiled: dict[tuple, jax.stages.Compiled] = {}

    def __call__(self, params: Params, *arrays: Any) -> jax.Array:
        shapes = tuple(array.shape for array in jax.tree.leaves(arrays))
        if shapes not in self._compiled:
            began = time.perf_counter()
            self._compiled[shapes] = self._function.lower(params, *arrays).compile()
            self.compile_seconds += time.perf_counter() - began
        return self._compiled[shapes](params, *arrays)


class LearnedSelector:
    """Scores candidates by the gains that a selector predicts.

    A `light` selector reads every different span of a document once and every context once, whatever the number of
    candidates and strides; the vectors of spans are kept until the next document.
    """

    runs_a_model = True

    def __init__(self, opened: OpenedSelector, batch_size: int = 64):
        """
        Args:
          opened: the selector.
          batch_size: texts that are encoded at once.
        """
        self.leaks_the_future = opened.inputs.leaks_the_future
        self.name = opened.selector.config.name + ("_released_code" if self.leaks_the_future else "")
        self.fingerprint = fingerprint((opened.selector, opened.inputs), opened.params)
        self.num_encoded_tokens = 0
        """Tokens read by the encoder so far."""
        self.flops = 0.0
        """Operations of the encoder so far (`layers/flops.py`); those of the head are negligible."""
        self._selector, self._params, self._inputs = opened.selector, opened.params, opened.inputs
        self._batch_size = batch_size
        self._document = -1
        self._spans: dict[bytes, np.ndarray] = {}
        selector = self._selector

        def project(part, params, tokens, length):
            return selector.project(params, part, selector.encode(params["encoder"], tokens, length))

        self._project = {part: _Program(functools.partial(project, part)) for part in selector.parts}
        self._score = _Program(selector.score)

    @property
    def compile_seconds(self) -> float:
        """Time of compilation in all calls so far."""
        return sum(program.compile_seconds for program in (self._score, *self._project.values()))

    def scores(
        self, document: Int[np.ndarray, " tokens"], stride: Stride, ends: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        """See `SpanScorer`."""
        if stride.document != self._document:
            self._spans, self._document = {}, stride.document
        texts = {part: self._inputs.texts(part, document, stride, ends) for part in self._selector.parts}
        projected = {
            part: self._known(text) if part == "span" else self._encoded(part, text) for part, text in texts.items()
        }
        # Rows are padded to the next power of two, so that few programs are compiled.
        size = 2 ** (len(ends) - 1).bit_length()
        padded = {
            part: jnp.asarray(rows if part == "context" else np.pad(rows, ((0, size - len(rows)), (0, 0))))
            for part, rows in projected.items()
        }
        return np.asarray(self._score(self._params, padded))[: len(ends)]

    def _known(self, spans: Texts) -> Float[np.ndarray, "m w"]:
        """The projected vectors of spans; only spans whose tokens are new are read."""
        keys = [row.tobytes() for row in spans.tokens]
        if new := list({key: row for row, key in enumerate(keys) if key not in self._spans}.values()):
            rows = self._encoded("span", Texts(spans.tokens[new], spans.length[new]))
            self._spans |= dict(zip((keys[row] for row in new), rows, strict=True))
        return np.stack([self._spans[key] for key in keys])

    def _encoded(self, part: Part, texts: Texts) -> Float[np.ndarray, "m w"]:
        starts, most = range(0, len(texts.length), self._batch_size), self._batch_size
        batches = [Texts(*(column[start : start + most] for column in texts)) for start in starts]
        vectors = [encode_batch(self._project[part], self._params, batch, most) for batch in batches]
        num_tokens = int(texts.length.sum())
        self.num_encoded_tokens += num_tokens
        self.flops += num_tokens * self._selector.encoder_flops_per_token(self._inputs.widths[part])
        return np.concatenate(vectors)


def open_selectors(folders: Sequence[str | Path], history: HistoryConfig, store: TokenStore) -> list[LearnedSelector]:
    """Selectors from the folders of their trainings, for the documents of any store with the same vocabulary.

    Selectors with the same name get their folder's name, or its path, added to it.

    Raises:
      UserError: there is no selector, it is given twice, or it was trained with another vocabulary or other spans.
    """
    places = [Path(folder).expanduser().resolve() for folder in folders]
    if twice := [place for place, count in Counter(places).items() if count > 1]:
        raise UserError(f"the selector {twice[0]} is given twice")
    selectors = [_open(folder, history, store) for folder in folders]
    kinds, last_parts = Counter(selector.name for selector in selectors), Counter(place.name for place in places)
    for selector, place in zip(selectors, places, strict=True):
        if kinds[selector.name] > 1:
            selector.name += f":{place.name if last_parts[place.name] == 1 else place}"
    return selectors


def _open(folder: str | Path, history: HistoryConfig, store: TokenStore) -> LearnedSelector:
    opened = open_selector(folder)
    store.check_vocabulary(opened.vocabulary.fingerprint, f"the selector {folder}")
    for name in ("span_length", "separator"):
        theirs, ours = getattr(opened.inputs.history, name), getattr(history, name)
        if theirs != ours:
            raise UserError(
                f"the selector {folder} was trained on spans with HistoryConfig.{name}={theirs!r}, and here it is "
                f"{ours!r}"
            )
    return LearnedSelector(opened)
