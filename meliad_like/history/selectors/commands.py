"""The commands that train a selector and that show what a selection chose."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meliad_like.config.bindings import collect
from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.history.commands import selections
from meliad_like.history.opening import Request, open_request
from meliad_like.history.page import write_history_page
from meliad_like.history.page_readings import read_histories
from meliad_like.history.selectors.inputs import Places, make_inputs
from meliad_like.history.selectors.model import Selector, encoder_config, encoder_params
from meliad_like.history.selectors.pairs import Pairs
from meliad_like.history.selectors.training import train_selector
from meliad_like.history.spans import HistoryConfig
from meliad_like.history.stride_store import WITHOUT_EFFECT, StrideStore, fingerprint
from meliad_like.models.pretrained.config import PretrainedConfig
from meliad_like.run.opening import open_store, open_with


def train(request: Request, folder: Path, scores: str) -> int:
    """Trains a selector, or goes on with it.

    Args:
        request: the checkpoint is that of the decoder that the selector begins with; it need not be the one that
            scored. Documents are those of the scores.
        folder: see `checkpoint`.
        scores: folder of a store of scores. Its settings hold, but for what the selector reads.

    Returns:
        The exit status, as of `train_selector`.

    Raises:
        UserError: the scores are missing or not complete, or of other settings than are bound; the checkpoint is of
            another family or vocabulary; or as `make_inputs`, `encoder_config` and `train_selector`.
    """
    scored = StrideStore(scores)
    if scored.info.what != "scores":
        raise UserError(f"{scores} is a store of {scored.info.what}, and a selector is trained on scores")
    scored.check_complete()
    opened, _ = open_with(request.checkpoint, request.gin_params, request.step, request.gin_files)
    _check_bound(request, opened.run.history, scored)
    if not isinstance(opened.run.model, PretrainedConfig):
        raise UserError(
            f"the checkpoint {request.checkpoint} is a {type(opened.run.model).__name__} model: a selector begins with "
            "a pretrained decoder"
        )
    store = open_store(opened, request.checkpoint, request.store, prepare=False)
    history = dataclasses.replace(scored.info.config, selector_context=opened.run.history.selector_context)
    config = opened.run.selector
    inputs = make_inputs(history, config, opened.vocabulary)
    encoder = encoder_config(config, opened.run.model, inputs.num_tokens(config.kind))
    return train_selector(
        Selector(config, encoder, opened.vocabulary.size),
        # Selectors are trained on one device.
        jax.device_put(encoder_params(encoder, opened.params), jax.devices()[0]),
        inputs,
        opened.run.selector_training,
        Pairs(Places(*scored.rows()), np.array(scored.numbers)),
        scored.documents(store),
        opened.vocabulary,
        folder,
        {
            "scored_by": scored.info.maker,
            "begun_with": fingerprint(opened.model, opened.params),
            "store_fingerprint": store.fingerprint,
            "split": scored.info.split,
            "documents": scored.info.documents_fingerprint,
            "num_documents": len(scored.info.documents),
            "num_pairs": len(scored.numbers),
        },
    )


def _check_bound(request: Request, history: HistoryConfig, scored: StrideStore) -> None:
    """
    Raises:
        UserError: a field of HistoryConfig is bound to something else than the scores were made with.
    """
    for key, binding in collect(request.gin_files, request.gin_params).items():
        name = key.removeprefix("HistoryConfig.")
        if name == key or binding.of_base or name in WITHOUT_EFFECT:
            continue
        theirs, ours = getattr(scored.info.config, name), getattr(history, name)
        if theirs != ours:
            raise UserError(
                f"HistoryConfig.{name}={ours!r} has no effect on train_selector: the scores in {scored.folder} were "
                f"made with {theirs!r}, and a selector learns from them as they are; leave it out, or score anew"
            )


def page(request: Request, folder: Path, names: Sequence[str], selectors: Sequence[str], num_terms: int) -> None:
    """Writes the page of some documents.

    Args:
        request: the model and the documents.
        folder: of the page; made if need be.
        names, selectors: as of `commands.selections`, of which there must be one.
        num_terms: words of the highest impact that are shown.

    Raises:
        UserError: as `open_request` and `open_selectors`.
    """
    opened = open_request(request)
    (scorer,) = selections(opened, names, selectors)
    config = opened.config
    windows, gains = opened.windows(), opened.gains()

    def work(progress):
        return read_histories(
            windows, gains, opened.documents, scorer, config, opened.separator, opened.checkpoint.vocabulary, progress
        )

    histories = with_progress(request.split, work)
    details: dict[str, Any] = {
        "checkpoint": request.checkpoint,
        "step": opened.checkpoint.step,
        "parameters": opened.checkpoint.model.num_parameters,
        "split": request.split,
        "token store": opened.store.fingerprint[:12],
        "selection reads": "what it is to predict (leaks the future)" if scorer.leaks_the_future else "the past alone",
        # What a trained selector reads is its own.
        **{
            name.replace("_", " "): value
            for name, value in dataclasses.asdict(config).items()
            if name != "selector_context"
        },
    }
    write_history_page(folder, histories, scorer, config, opened.checkpoint.vocabulary, details, num_terms)
    print(f"wrote {folder / 'index.html'}")
