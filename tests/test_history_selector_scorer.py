"""A trained selector that ranks candidates: its inputs, and the checks of its folder."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selector_runs import HISTORY, TRAINING, VOCABULARY, MadeUp, train

from meliad_like.data.vocabulary import ByteVocabulary
from meliad_like.errors import UserError
from meliad_like.history.selectors.scorer import open_selector, open_selectors
from meliad_like.history.spans import candidates, select, strides

LENGTH = 90
DOCUMENT = MadeUp().tokens(2, 0, LENGTH)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A trained selector of each kind, and one that leaks the future."""
    root = tmp_path_factory.mktemp("selectors")
    short = dataclasses.replace(TRAINING, num_steps=2, evaluate_every=0, checkpoint_every=0)
    train(root / "joint", "joint", short, train_encoder=False)
    train(root / "light", "light", short, train_encoder=False)
    train(root / "leaking", "light", short, train_encoder=False, context="released_code")
    return root


def selecting(length=LENGTH):
    return [stride for stride in strides(length, HISTORY, document=2) if stride.selects]


def all_scores(scorer, document=DOCUMENT):
    return [scorer.scores(document, stride, candidates(stride, HISTORY)) for stride in selecting(len(document))]


@pytest.mark.parametrize("kind", ["joint", "light"])
def test_scores_are_those_of_the_head_on_the_texts(folders, kind):
    opened = open_selector(folders / kind)
    opened.batch_size = 8
    selector, params, inputs = opened.selector, opened.params, opened.inputs
    stride = selecting()[2]
    ends = candidates(stride, HISTORY)
    vectors = {}
    for part in selector.config.parts:
        texts = inputs.texts(part, DOCUMENT, stride, ends)
        vectors[part] = selector.encode(params["encoder"], jnp.asarray(texts.tokens), jnp.asarray(texts.length))
    expected = selector.score_vectors(params, vectors)
    assert len(ends) > 8
    np.testing.assert_allclose(opened.scores(DOCUMENT, stride, ends), expected, rtol=1e-4)


@pytest.mark.parametrize("kind, sees", [("joint", False), ("light", False), ("leaking", True)])
def test_only_the_released_code_s_context_sees_the_future(folders, kind, sees):
    scorer = open_selector(folders / kind)
    assert scorer.leaks_the_future is sees
    names = {"joint": "learned_selector", "light": "light_selector", "leaking": "light_selector_released_code"}
    assert scorer.name == names[kind]
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


def test_a_light_selector_reads_each_span_and_each_context_once(folders):
    letters = np.random.default_rng(5).integers(33, 120, 400).astype(np.int32)
    read = []
    for length in (104, 264):
        all_scores(light := open_selector(folders / "light"), letters[:length])
        ends = candidates(selecting(length)[-1], HISTORY)
        assert light.encoded_tokens.total() == len(ends) * HISTORY.span_length + len(selecting(length)) * 8
        read.append(light.encoded_tokens.total() / length)
    # Two spans of four tokens a stride of eight targets overlap by half, and a context of eight: three for each token.
    assert read[0] < read[1] < 3
    all_scores(joint := open_selector(folders / "joint"), letters[:264])
    assert joint.encoded_tokens.total() == sum(len(candidates(stride, HISTORY)) for stride in selecting(264)) * 12
    assert joint.encoded_tokens.total() > 30 * light.encoded_tokens.total()
    assert joint.flops > 30 * light.flops > 0


def test_another_document_begins_anew(folders):
    scorer = open_selector(folders / "light")
    first = all_scores(scorer)
    read, stride = scorer.encoded_tokens.total(), selecting()[0]
    again = scorer.scores(DOCUMENT, stride, candidates(stride, HISTORY))
    np.testing.assert_array_equal(again, first[0])
    assert scorer.encoded_tokens.total() == read + 8
    scorer.scores(DOCUMENT, stride._replace(document=3), candidates(stride, HISTORY))
    assert len(scorer._spans) <= len(candidates(stride, HISTORY))


class Store:
    """A token store, as far as its vocabulary goes."""

    def __init__(self, vocabulary):
        self._vocabulary = vocabulary

    def check_vocabulary(self, fingerprint, owner):
        if fingerprint != self._vocabulary.fingerprint:
            raise UserError(f"{owner}: {fingerprint[:12]} {self._vocabulary.fingerprint[:12]}")


def test_what_does_not_fit_is_named(folders, tmp_path):
    both = open_selectors([folders / "light", folders / "joint"], HISTORY, Store(VOCABULARY))
    assert [selector.name for selector in both] == ["light_selector", "learned_selector"]
    twice = open_selectors([folders / "light", f"{folders}/joint/../light"], HISTORY, Store(VOCABULARY))
    assert [selector.name for selector in twice] == ["light_selector"]
    other = ByteVocabulary(size_multiple=64)
    message = f"the selector .*light: {VOCABULARY.fingerprint[:12]} {other.fingerprint[:12]}"
    with pytest.raises(UserError, match=message):
        open_selectors([folders / "light"], HISTORY, Store(other))
    longer = dataclasses.replace(HISTORY, span_length=8)
    with pytest.raises(UserError, match="light belongs to another config: span_length is 4 there, 8 here"):
        open_selectors([folders / "light"], longer, Store(VOCABULARY))
    with pytest.raises(UserError, match="there is no selector in .*train_selector makes one"):
        open_selector(tmp_path)


def test_selectors_of_the_same_kind_have_different_names(folders, tmp_path):
    shutil.copytree(folders / "light", tmp_path / "light")

    def names(*places):
        return [selector.name for selector in open_selectors(places, HISTORY, Store(VOCABULARY))]

    assert names(folders / "light", tmp_path / "light") == [
        f"light_selector:{folders.resolve() / 'light'}", f"light_selector:{tmp_path.resolve() / 'light'}",
    ]  # fmt: skip


def test_a_selector_of_another_version_is_named(folders):
    path = folders / "light" / "selector.json"
    saved = path.read_text()
    changed = json.loads(saved)
    # A field that was added later has its default.
    del changed["settings"]["LightSelectorConfig.encoder_layers"]
    path.write_text(json.dumps(changed))
    assert open_selector(folders / "light").selector.config.encoder_layers == 0
    changed["settings"]["LightSelectorConfig.depth"] = 2
    path.write_text(json.dumps(changed))
    message = "selector.json is of another version: .*LightSelectorConfig has no parameter depth.*; train"
    with pytest.raises(UserError, match=message):
        open_selector(folders / "light")
    path.write_text(saved)


def test_the_folder_alone_is_enough(folders, tmp_path):
    (folders / "joint").rename(tmp_path / "moved")
    scores = all_scores(open_selector(tmp_path / "moved"))
    (tmp_path / "moved").rename(folders / "joint")
    assert all(np.isfinite(row).all() and row.std() > 0 for row in scores)
    assert jax.tree.leaves(open_selector(folders / "joint").params["encoder"])
