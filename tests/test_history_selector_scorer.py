"""A trained selector that ranks candidates: its inputs, and the checks of its folder."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selector_runs import HISTORY, TRAINING, VOCABULARY, MadeUp, train

from meliad_like.errors import UserError
from meliad_like.history.selectors.model import score
from meliad_like.history.selectors.scorer import open_selector, open_selectors
from meliad_like.history.spans import candidates, select, strides
from meliad_like.vocabularies.base import ByteVocabulary

LENGTH = 90
DOCUMENT = MadeUp().tokens(2, 0, LENGTH)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two trained selectors, of which the second leaks the future."""
    root = tmp_path_factory.mktemp("selectors")
    short = dataclasses.replace(TRAINING, num_steps=2, evaluate_every=0, checkpoint_every=0)
    train(root / "prefix", short)
    train(root / "leaking", short, context="released_code")
    return root


def selecting(length=LENGTH):
    return [stride for stride in strides(length, HISTORY, document=2) if stride.selects]


def all_scores(scorer, document=DOCUMENT):
    return [scorer.scores(document, stride, candidates(stride, HISTORY)) for stride in selecting(len(document))]


@pytest.mark.thorough
def test_scores_are_those_of_the_texts(folders):
    opened = open_selector(folders / "prefix")
    opened.batch_size = 8
    stride = selecting()[2]
    ends = candidates(stride, HISTORY)
    texts = opened.inputs.texts(DOCUMENT, stride, ends)
    expected = score(opened.selector, opened.params, jnp.asarray(texts.tokens), jnp.asarray(texts.length))
    assert len(ends) > 8
    np.testing.assert_allclose(opened.scores(DOCUMENT, stride, ends), expected, rtol=1e-4)
    assert opened.num_tokens == 12 * len(ends) and opened.flops > 0


@pytest.mark.parametrize("name, sees", [("prefix", False), ("leaking", True)])
@pytest.mark.thorough
def test_only_the_released_code_s_context_sees_the_future(folders, name, sees):
    scorer = open_selector(folders / name)
    assert scorer.leaks_the_future is sees
    assert scorer.name == {"prefix": "learned_selector", "leaking": "learned_selector_released_code"}[name]
    for stride in selecting():
        ends = candidates(stride, HISTORY)
        other = DOCUMENT.copy()
        other[stride.first :] = 120
        before, after = (scorer.scores(document, stride, ends) for document in (DOCUMENT, other))
        if sees:
            assert np.abs(before - after).max() > 1e-6
        else:
            np.testing.assert_array_equal(before, after)
            np.testing.assert_array_equal(select(before, ends, HISTORY), select(after, ends, HISTORY))
        # What was read before the targets is not a secret.
        other = DOCUMENT.copy()
        other[stride.first - 1] = 120
        assert np.abs(before - scorer.scores(other, stride, ends)).max() > 1e-6


class Store:
    """A token store, as far as its vocabulary goes."""

    def __init__(self, vocabulary):
        self._vocabulary = vocabulary

    def check_vocabulary(self, fingerprint, owner):
        if fingerprint != self._vocabulary.fingerprint:
            raise UserError(f"{owner}: {fingerprint[:12]} {self._vocabulary.fingerprint[:12]}")


@pytest.mark.thorough
def test_what_does_not_fit_is_named(folders, tmp_path):
    both = open_selectors([folders / "leaking", folders / "prefix"], HISTORY, Store(VOCABULARY))
    assert [selector.name for selector in both] == ["learned_selector_released_code", "learned_selector"]
    twice = open_selectors([folders / "prefix", f"{folders}/leaking/../prefix"], HISTORY, Store(VOCABULARY))
    assert [selector.name for selector in twice] == ["learned_selector"]
    other = ByteVocabulary(size_multiple=64)
    message = f"the selector .*prefix: {VOCABULARY.fingerprint[:12]} {other.fingerprint[:12]}"
    with pytest.raises(UserError, match=message):
        open_selectors([folders / "prefix"], HISTORY, Store(other))
    longer = dataclasses.replace(HISTORY, span_length=8)
    with pytest.raises(UserError, match="prefix belongs to another config: span_length is 4 there, 8 here"):
        open_selectors([folders / "prefix"], longer, Store(VOCABULARY))
    with pytest.raises(UserError, match="there is no selector in .*train_selector makes one"):
        open_selector(tmp_path)


def test_selectors_of_the_same_name_get_their_folders(folders, tmp_path):
    shutil.copytree(folders / "prefix", tmp_path / "prefix")

    def names(*places):
        return [selector.name for selector in open_selectors(places, HISTORY, Store(VOCABULARY))]

    assert names(folders / "prefix", tmp_path / "prefix") == [
        f"learned_selector:{folders.resolve() / 'prefix'}", f"learned_selector:{tmp_path.resolve() / 'prefix'}",
    ]  # fmt: skip


def test_a_selector_of_another_version_is_named(folders):
    path = folders / "prefix" / "selector.json"
    saved = path.read_text()
    changed = json.loads(saved)
    # A field that was added later has its default.
    del changed["settings"]["SelectorConfig.encoder_layers"]
    path.write_text(json.dumps(changed))
    assert open_selector(folders / "prefix").selector.config.encoder_layers == 0
    changed["settings"]["SelectorConfig.depth"] = 2
    path.write_text(json.dumps(changed))
    message = "selector.json is of another version: .*SelectorConfig has no parameter depth.*; train"
    with pytest.raises(UserError, match=message):
        open_selector(folders / "prefix")
    path.write_text(saved)


def test_the_folder_alone_is_enough(folders, tmp_path):
    (folders / "prefix").rename(tmp_path / "moved")
    scores = all_scores(open_selector(tmp_path / "moved"))
    (tmp_path / "moved").rename(folders / "prefix")
    assert all(np.isfinite(row).all() and row.std() > 0 for row in scores)
    assert jax.tree.leaves(open_selector(folders / "prefix").params["encoder"])
