"""A trained selector as a `SpanScorer`, and its folder, which is all that using it needs.

selector.json    the configs, and what the selector was trained on
encoder/         the pretrained decoder, if it was not trained
checkpoints/     the newest parameters, with the optimizer's state
best/            the parameters with the least validation loss
vectors/         vectors of a fixed encoder, used in training only
metrics.jsonl
"""

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Float, Int

from meliad_like.config import bound_values, rebuild
from meliad_like.data.token_store import TokenStore
from meliad_like.data.vocabulary import Vocabulary, load_vocabulary
from meliad_like.errors import UserError
from meliad_like.history.config import SELECTORS, HistoryConfig, HistorySettings, Part
from meliad_like.history.gains import TimedFunction
from meliad_like.history.selectors.inputs import SelectorInputs, Texts, encode_batch, make_inputs
from meliad_like.history.selectors.model import Params, Selector
from meliad_like.history.spans import Stride
from meliad_like.history.stride_store import fingerprint
from meliad_like.models.pretrained.config import PretrainedConfig
from meliad_like.resumable import read_json
from meliad_like.run.opening import VOCABULARY_FOLDER
from meliad_like.training.checkpoints import Checkpoints

FILE_NAME = "selector.json"


class OpenedSelector(NamedTuple):
    """All that scoring needs."""

    selector: Selector
    params: Params
    inputs: SelectorInputs
    vocabulary: Vocabulary
    step: int


def selector_metadata(selector: Selector, inputs: SelectorInputs, vocabulary: Vocabulary) -> dict[str, Any]:
    """What decides a selector, for `selector.json` and every checkpoint."""
    kind = {"HistorySettings.selector": SELECTORS.name_of(selector.config)}
    return {
        "settings": bound_values(inputs.layout.config) | kind | bound_values(selector.config),
        "encoder": bound_values(selector.encoder_config),
        "vocabulary_size": selector.vocabulary_size,
        "vocabulary_fingerprint": vocabulary.fingerprint,
        "leaks_the_future": inputs.leaks_the_future,
    }


def save_encoder(folder: Path, params: Params) -> None:
    """Keeps a decoder that is not trained, once for all checkpoints."""
    with Checkpoints(folder / "encoder") as checkpoints:
        if not checkpoints.steps():
            checkpoints.save(0, {"step": np.int32(0), "params": params}, {})


def open_selector(folder: str | Path) -> OpenedSelector:
    """Opens the working folder of a training: the best parameters, or the newest where none were evaluated.

    Raises a UserError if there is no selector, or it is of another version.
    """
    folder = Path(folder).expanduser()
    try:
        saved = read_json(folder / FILE_NAME)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"there is no selector in {folder}: python -m meliad_like.history train_selector --output=DIR makes one"
        ) from None
    try:
        settings = rebuild(HistorySettings, saved.get("settings"))
        encoder_config = rebuild(PretrainedConfig, saved.get("encoder"))
    except UserError as error:
        raise UserError(f"{folder / FILE_NAME} is of another version: {error}; train the selector again") from None
    vocabulary = load_vocabulary(folder / VOCABULARY_FOLDER)
    selector = Selector(settings.selector, encoder_config, saved["vocabulary_size"])
    inputs = make_inputs(settings.history, settings.selector, vocabulary)
    trained = jax.eval_shape(selector.init, jax.random.key(0))
    params, step = _restore(folder / ("best" if (folder / "best").is_dir() else "checkpoints"), trained)
    if not selector.config.train_encoder:
        params["encoder"], _ = _restore(folder / "encoder", selector.encoder.abstract_params)
    return OpenedSelector(selector, params, inputs, vocabulary, step)


def _restore(folder: Path, abstract: Params) -> tuple[Params, int]:
    """The newest parameters in a checkpoint folder, on the first device, and their step."""
    device = SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract)
    with Checkpoints(folder, read_only=True) as checkpoints:
        params, metadata = checkpoints.restore_params(placed)
    return params, metadata.get("step", 0)


class LearnedSelector:
    """Scores candidates by the gains that a selector predicts.

    A `light` selector reads every different span of a document once and every context once, whatever the number of
    candidates and strides; the vectors of spans are kept until the next document.
    """

    runs_a_model = True

    def __init__(self, opened: OpenedSelector, batch_size: int = 64):
        """`batch_size`: texts that are encoded at once."""
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
        selector = opened.selector

        def project(part, params, tokens, length):
            return selector.project(params, part, selector.encode(params["encoder"], tokens, length))

        self._project = {part: TimedFunction(functools.partial(project, part)) for part in selector.config.parts}
        self._score = TimedFunction(selector.score)

    @property
    def compile_seconds(self) -> float:
        """Time of compilation in all calls so far."""
        return sum(program.compile_seconds for program in (self._score, *self._project.values()))

    def scores(
        self, document: Int[np.ndarray, " tokens"], stride: Stride, ends: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        if stride.document != self._document:
            self._spans, self._document = {}, stride.document
        # Rows are padded to the next power of two, so that few programs are compiled.
        padding, projected = 2 ** (len(ends) - 1).bit_length() - len(ends), {}
        for part in self._selector.config.parts:
            texts = self._inputs.texts(part, document, stride, ends)
            rows = self._known(texts) if part == "span" else self._encoded(part, texts)
            projected[part] = jnp.asarray(rows if part == "context" else np.pad(rows, ((0, padding), (0, 0))))
        return self._score(self._params, projected)[: len(ends)]

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

    Selectors with the same name get their folder added to it. Raises a UserError if a folder is given twice, or if its
    selector was trained with another vocabulary or other spans.
    """
    selectors: dict[Path, LearnedSelector] = {}
    for folder in folders:
        place, opened = Path(folder).expanduser().resolve(), open_selector(folder)
        if place in selectors:
            raise UserError(f"the selector {place} is given twice")
        store.check_vocabulary(opened.vocabulary.fingerprint, f"the selector {folder}")
        for name in ("span_length", "separator"):
            theirs, ours = getattr(opened.inputs.layout.config, name), getattr(history, name)
            if theirs != ours:
                raise UserError(
                    f"the selector {folder} was trained on spans with HistoryConfig.{name}={theirs!r}, and here it is "
                    f"{ours!r}"
                )
        selectors[place] = LearnedSelector(opened)
    names = Counter(selector.name for selector in selectors.values())
    for place, selector in selectors.items():
        selector.name += f":{place}" if names[selector.name] > 1 else ""
    return list(selectors.values())
