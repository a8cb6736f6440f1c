"""The figures of a row: facts of its config, and evaluations by document or by the Shortformer paper's protocols."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meliad_like.config import RunConfig
from meliad_like.config.run import stages_of
from meliad_like.data.split import Documents
from meliad_like.data.token_store import TokenStore
from meliad_like.evaluation import report
from meliad_like.evaluation.perplexity import make_evaluator
from meliad_like.models.model import Model
from meliad_like.planning.shrinking import rule_of
from meliad_like.registry import configs_in
from meliad_like.run.opening import OpenedCheckpoint
from meliad_like.studies import protocols
from meliad_like.studies.interventions import memory_of

STRIDES_IN_WINDOW = 6
"""Sliding windows have a stride of a sixth; in the paper 512 of 3,072 tokens (section 4.2)."""


def facts(run: RunConfig, vocabulary_size: int) -> dict[str, Any]:
    """Facts about a run that follow from its config."""
    model, num_steps = Model(run.model, vocabulary_size), run.training.num_steps
    fields = [(part, field) for part in configs_in(run.model) for field in dataclasses.fields(part)]
    lengths = {size.name: getattr(part, size.name) for part, size in fields if rule_of(type(part), size) == "length"}
    embedding = model.abstract_params.get("embedding", model.abstract_params.get("vocabulary"))
    of_embedding = sum(leaf.size for leaf in jax.tree.leaves(embedding))
    stages = [((stage.last_step - stage.first_step) / num_steps, stage.run.model) for stage in stages_of(run)]
    flops = [share * Model(config, vocabulary_size).flops.training for share, config in stages]
    return {
        "num_states": 0,
        "overlap": run.model.overlap,
        **lengths,
        "segment_length": run.data.segment_length,
        "window_length": run.model.window_length,
        "share_of_first_stage": stages[0][0] if len(stages) > 1 else 0.0,
        "tokens_per_step": run.data.tokens_per_step,
        "num_steps": num_steps,
        "vocabulary_size": vocabulary_size,
        "parameters": model.num_parameters,
        "parameters_without_embedding": model.num_parameters - of_embedding,
        "memory_numbers": sum(leaf.size for leaf in memory_of(model)),
        "training_flops_per_token": sum(flops),
    }


def by_document(
    trained: OpenedCheckpoint, mesh: Mesh, store: TokenStore, split: str, documents: Documents, path: Path
) -> dict[str, float]:
    """Evaluates every token of documents of the split, each read from its beginning with all that the model remembers;
    `path` is that of the JSON file for all figures, with those of each document."""
    evaluator = make_evaluator(trained.run, trained.model, store, split, mesh, documents=documents)
    evaluation = evaluator(trained.params)
    report.write(evaluation, path)
    costs = {f"flops_{how}": flops for how, flops in trained.model.flops_per_prediction.items()}
    return {name: getattr(evaluation, name) for name in report.FIGURES} | costs


def by_protocol(trained: OpenedCheckpoint, mesh: Mesh, documents: Documents, few: Documents) -> dict[str, float]:
    """Evaluates the documents as one stream in one lane, as in Shortformer's tables (sections 2 and 5).

    - By disjoint segments, with what the model remembers of those before (`perplexity`, `tokens_per_second`, ...).
    - By sliding windows, if the model remembers nothing (`sliding_...`); the paper slides no others, whose predictions
      it does not improve.
    - The tokens of `few` documents one by one, for the speed alone (`single_tokens_per_second`): by decoding, or by a
      window for each token if the model remembers nothing.
    """
    model, window = trained.model, trained.run.data.segment_length
    settings = {"segment_length": window, "mesh": mesh, "loss_slice": trained.run.training.loss_slice}
    evaluate = functools.partial(protocols.evaluate, model, trained.params, **settings)
    all_tokens, few_tokens = (part.concatenated(trained.vocabulary.end_of_document) for part in (documents, few))
    score, num_bytes = evaluate(all_tokens, "segments"), int(np.sum(documents.num_bytes))
    names = ("bits_per_token", "perplexity", "tokens_per_second", "num_tokens")
    figures = {name: getattr(score, name) for name in names} | {
        "bits_per_byte": score.nats / math.log(2) / num_bytes,
        "num_documents": len(documents.lengths),
        "num_bytes": num_bytes,
    }
    # A block's first token attends to itself at least.
    if model.config.traits.num_visible(np.array([model.config.window_length])).item() > 1:
        return figures | {"single_tokens_per_second": evaluate(few_tokens, "token_by_token").tokens_per_second}
    sliding = evaluate(all_tokens, "sliding", stride=max(window // STRIDES_IN_WINDOW, 1))
    single = evaluate(few_tokens, "sliding", stride=1)
    # The first window predicts all its tokens at once.
    num_windows = 1 + max(single.num_tokens - window, 0)
    return figures | {
        "sliding_perplexity": sliding.perplexity,
        "sliding_bits_per_byte": sliding.nats / math.log(2) / num_bytes,
        "sliding_tokens_per_second": sliding.tokens_per_second,
        "single_tokens_per_second": num_windows / single.seconds,
    }
