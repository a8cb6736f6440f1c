"""Continuations with and without a context: the text consists of the model's most likely tokens."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from study_runs import DOCUMENTS, WINDOW, Page, assert_safe, one_device, request, runs
from ways import begin, read

from meliad_like.errors import UserError
from meliad_like.studies import continuations
from meliad_like.studies.continuations import FORGOTTEN, REMEMBERED, shared_words
from meliad_like.studies.readings import open_subject

__all__ = ["one_device", "runs"]  # fixtures


def greedy(opened, prompt, num_tokens):
    """Greedy decoding, in which each token is computed from all tokens before it in one pass."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        blocks = -(-len(tokens) // WINDOW)
        padded = np.zeros((1, 8 * WINDOW), np.int32)
        padded[0, : len(tokens)] = tokens
        start = np.zeros((1, 8), bool)
        assert blocks <= 8
        logits, _ = read(opened.model, opened.params, padded, begin(opened.model, opened.params, 1), start)
        tokens.append(int(jnp.argmax(logits[0, len(tokens) - 1].at[opened.vocabulary.end_of_document].set(-jnp.inf))))
    return tokens[len(prompt) :]


def test_with_and_without_the_context(runs, tmp_path):
    checkpoint = runs("fixed_skip")
    continuations.run(request(checkpoint, tmp_path, context_tokens=2 * WINDOW, num_tokens=20, document=("two",)))
    saved = json.loads((tmp_path / "summary.json").read_text())
    subject = open_subject(checkpoint)
    opened, text = subject.opened, DOCUMENTS["two"]
    assert [passage["start"] for passage in saved["passages"]] == [(360 - 52) // 3, 2 * (360 - 52) // 3]
    for passage in saved["passages"]:
        context = text[passage["start"] :][: 2 * WINDOW]
        assert passage["context"] == context and passage["original"] == text[passage["start"] + 2 * WINDOW :][:20]
        ways = passage["written"][subject.label]
        remembered = greedy(opened, opened.vocabulary.encode(context), 20)
        assert ways[REMEMBERED] == opened.vocabulary.decode(remembered)
        forgotten = remembered[:1] + greedy(opened, remembered[:1], 19)
        assert ways[FORGOTTEN] == opened.vocabulary.decode(forgotten)
    page = Page(tmp_path)
    assert_safe(page)
    assert f"{subject.label}: {WINDOW} tokens" in page.text and saved["passages"][0]["original"] in page.text


def test_shared_words():
    assert shared_words("The River bends; rivers bend.", "the river and the RIVER, a canoe, boats") == 1 / 3
    assert np.isnan(shared_words("river", "a bend or two"))


def test_what_does_not_fit_is_named(runs, tmp_path):
    checkpoint = runs("fixed_skip")
    with pytest.raises(UserError, match=f"--context_tokens=20 must be a multiple of fixed_skip<b>'s window, {WINDOW}"):
        continuations.run(request(checkpoint, tmp_path, context_tokens=20))
    with pytest.raises(UserError, match="no document has the 820 tokens of a context and its continuation"):
        continuations.run(request(checkpoint, tmp_path, context_tokens=800))
