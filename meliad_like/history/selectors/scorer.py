"""A trained selector as a `SpanScorer`, and its folder, which is all that using it needs.

selector.json    the configs, and what the selector was trained on
checkpoints/     the newest parameters, with the optimizer's state
best/            the parameters with the least validation loss
metrics.jsonl
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from meliad_like.config import rebuild
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.generation.reading import power_of_two
from meliad_like.history.selection import SpanScorer
from meliad_like.history.selectors.inputs import SelectorInputs, Texts, make_inputs
from meliad_like.history.selectors.model import Params, Selector, score
from meliad_like.history.settings import HistoryConfig, HistorySettings
from meliad_like.history.spans import Ends, Scores, Stride, Tokens
from meliad_like.history.stride_store import fingerprint
from meliad_like.resumable import check_same, read_json
from meliad_like.run.opening import VOCABULARY_FOLDER
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.vocabularies.base import Vocabulary, load_vocabulary

FILE_NAME = "selector.json"
SPANS = ("span_length", "separator")
"""Fields of HistoryConfig that must be as in the training of a selector."""


class LearnedSelector(SpanScorer):
    """Scores candidates by the gains that a selector predicts."""

    runs_a_model = True

    def __init__(self, selector: Selector, params: Params, inputs: SelectorInputs, vocabulary: Vocabulary, step: int):
        """`step`: the training step of the parameters."""
        self.selector, self.params, self.inputs, self.vocabulary, self.step = selector, params, inputs, vocabulary, step
        self.batch_size = 64
        """Texts that are read at once."""
        self.leaks_the_future = inputs.leaks_the_future
        self.name = "learned_selector" + ("_released_code" if self.leaks_the_future else "")
        self.fingerprint = fingerprint((selector, inputs), params)
        self.num_tokens = 0
        """Tokens that the encoder has read so far."""

    @property
    def flops(self) -> float:
        # The operations of the head are negligible.
        return self.num_tokens * self.selector.flops_per_token(self.inputs.text_length)

    def scores(self, document: Tokens, stride: Stride, ends: Ends) -> Scores:
        texts = self.inputs.texts(document, stride, ends)
        self.num_tokens += int(texts.length.sum())
        starts = range(0, len(ends), self.batch_size)
        batches = [Texts(*(column[start : start + self.batch_size] for column in texts)) for start in starts]
        return np.concatenate([self._scores(batch) for batch in batches])

    def _scores(self, texts: Texts) -> Scores:
        # Sizes are powers of two, so that few programs are compiled.
        count = len(texts.length)
        size = min(self.batch_size, power_of_two(count))
        tokens = np.pad(texts.tokens, ((0, size - count), (0, 0)))
        length = np.pad(texts.length, (0, size - count), constant_values=1)
        return np.asarray(score(self.selector, self.params, tokens, length))[:count]


def open_selector(folder: str | Path) -> LearnedSelector:
    """Opens the working folder of a training: the best parameters, or the newest where none were evaluated. Raises a
    UserError if there is no selector, or it is of another version."""
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
    trained, device = jax.eval_shape(selector.init, jax.random.key(0)), SingleDeviceSharding(jax.devices()[0])
    on_device = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), trained)
    kept = folder / ("best" if (folder / "best").is_dir() else "checkpoints")
    with Checkpoints(kept, read_only=True) as checkpoints:
        params, metadata = checkpoints.restore_params(on_device)
    return LearnedSelector(selector, params, inputs, vocabulary, metadata.get("step", 0))


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
