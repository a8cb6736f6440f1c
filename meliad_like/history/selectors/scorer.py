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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Float

from meliad_like.config import bound_values, rebuild
from meliad_like.data.token_store import TokenStore
from meliad_like.data.vocabulary import Vocabulary, load_vocabulary
from meliad_like.errors import UserError
from meliad_like.history.config import SELECTORS, HistoryConfig, HistorySettings, Part
from meliad_like.history.selection import SpanScorer
from meliad_like.history.selectors.inputs import SelectorInputs, Texts, encode_batch, make_inputs
from meliad_like.history.selectors.model import Params, Selector
from meliad_like.history.spans import Ends, Scores, Stride, Tokens
from meliad_like.history.stride_store import fingerprint
from meliad_like.models.pretrained.config import PretrainedConfig
from meliad_like.resumable import check_same, read_json
from meliad_like.run.opening import VOCABULARY_FOLDER
from meliad_like.training.checkpoints import Checkpoints

FILE_NAME = "selector.json"
SPANS = ("span_length", "separator")
"""Fields of HistoryConfig that must be as in the training of a selector."""


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


class LearnedSelector(SpanScorer):
    """Scores candidates by the gains that a selector predicts.

    A `light` selector reads every different span of a document once and every context once, whatever the number of
    candidates and strides; the vectors of spans are kept until the next document.
    """

    runs_a_model = True

    def __init__(
        self, selector: Selector, params: Params, inputs: SelectorInputs, vocabulary: Vocabulary, step: int = 0
    ):
        """`step`: the training step of the parameters."""
        self.selector, self.params, self.inputs, self.vocabulary, self.step = selector, params, inputs, vocabulary, step
        self.batch_size = 64
        """Texts that are encoded at once."""
        self.leaks_the_future = inputs.leaks_the_future
        self.name = selector.config.name + ("_released_code" if self.leaks_the_future else "")
        self.fingerprint = fingerprint((selector, inputs), params)
        self.encoded_tokens: Counter[Part] = Counter()
        """Tokens of each part that the encoder has read so far."""
        self._document = -1
        self._spans: dict[bytes, np.ndarray] = {}

    @property
    def flops(self) -> float:
        # Those of the head are negligible.
        per_token, widths = self.selector.encoder_flops_per_token, self.inputs.widths
        return sum(count * per_token(widths[part]) for part, count in self.encoded_tokens.items())

    def scores(self, document: Tokens, stride: Stride, ends: Ends) -> Scores:
        if stride.document != self._document:
            self._spans, self._document = {}, stride.document
        # Rows are padded to the next power of two, so that few programs are compiled.
        padding, projected = (1 << (len(ends) - 1).bit_length()) - len(ends), {}
        for part in self.selector.config.parts:
            texts = self.inputs.texts(part, document, stride, ends)
            rows = self._known(texts) if part == "span" else self._encoded(part, texts)
            projected[part] = jnp.asarray(rows if part == "context" else np.pad(rows, ((0, padding), (0, 0))))
        return np.asarray(_score(self.selector, self.params, projected))[: len(ends)]

    def _known(self, spans: Texts) -> Float[np.ndarray, "m w"]:
        """The projected vectors of spans; only spans whose tokens are new are read."""
        keys = [row.tobytes() for row in spans.tokens]
        if new := {key: row for row, key in enumerate(keys) if key not in self._spans}:
            rows = list(new.values())
            self._spans |= zip(new, self._encoded("span", Texts(spans.tokens[rows], spans.length[rows])), strict=True)
        return np.stack([self._spans[key] for key in keys])

    def _encoded(self, part: Part, texts: Texts) -> Float[np.ndarray, "m w"]:
        """The projected vectors of texts."""
        self.encoded_tokens[part] += int(texts.length.sum())
        most = self.batch_size
        starts = range(0, len(texts.length), most)
        batches = [Texts(*(column[start : start + most] for column in texts)) for start in starts]
        project = functools.partial(_project, self.selector, part)
        return np.concatenate([encode_batch(project, self.params, batch, most) for batch in batches])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _project(selector: Selector, part: Part, params: Params, tokens: jax.Array, length: jax.Array) -> jax.Array:
    return selector.project(params, part, selector.encode(params["encoder"], tokens, length))


_score = jax.jit(Selector.score, static_argnums=0)


def open_selector(folder: str | Path) -> LearnedSelector:
    """Opens the working folder of a training: the best parameters, or the newest where none were evaluated.

    Raises a UserError if there is no selector, or it is of another version.
    """
    folder = Path(folder).expanduser()
    path = folder / FILE_NAME
    if not path.exists():
        raise UserError(f"there is no selector in {folder}: python -m meliad_like.history train_selector makes one")
    saved = read_json(path)
    try:
        settings = rebuild(HistorySettings, saved.get("settings"))
        encoder_config = rebuild(PretrainedConfig, saved.get("encoder"))
    except UserError as error:
        raise UserError(f"{path} is of another version: {error}; train the selector again") from None
    vocabulary = load_vocabulary(folder / VOCABULARY_FOLDER)
    selector = Selector(settings.selector, encoder_config, saved["vocabulary_size"])
    inputs = make_inputs(settings.history, settings.selector, vocabulary)
    trained = jax.eval_shape(selector.init, jax.random.key(0))
    params, step = _restore(folder / ("best" if (folder / "best").is_dir() else "checkpoints"), trained)
    if not selector.config.train_encoder:
        params["encoder"], _ = _restore(folder / "encoder", selector.encoder.abstract_params)
    return LearnedSelector(selector, params, inputs, vocabulary, step)


def _restore(folder: Path, abstract: Params) -> tuple[Params, int]:
    """The newest parameters in a checkpoint folder, on the first device, and their step."""
    device = SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract)
    with Checkpoints(folder, read_only=True) as checkpoints:
        params, metadata = checkpoints.restore_params(placed)
    return params, metadata.get("step", 0)


def open_selectors(folders: Sequence[str | Path], history: HistoryConfig, store: TokenStore) -> list[LearnedSelector]:
    """Selectors from the folders of their trainings, for the documents of any store with the same vocabulary.

    Selectors with the same name get their folder added to it. Raises a UserError if a selector was trained with another
    vocabulary or other spans.
    """
    selectors: dict[Path, LearnedSelector] = {}
    for folder in folders:
        selector = open_selector(folder)
        store.check_vocabulary(selector.vocabulary.fingerprint, f"the selector {folder}")
        spans = ({name: getattr(config, name) for name in SPANS} for config in (selector.inputs.layout.config, history))
        check_same(folder, *spans)
        selectors[Path(folder).expanduser().resolve()] = selector
    names = Counter(selector.name for selector in selectors.values())
    for folder, selector in selectors.items():
        selector.name += f":{folder}" if names[selector.name] > 1 else ""
    return list(selectors.values())
