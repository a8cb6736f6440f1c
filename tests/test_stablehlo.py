"""Exported models read and write as ours do, by the reader in their folder."""

import dataclasses
import importlib.util

import jaxtyping
import numpy as np
import pytest
from decoders import with_mixer
from families import FAMILIES, SLIDE, STATES, C, W, language_model

from meliad_like.conversion.parameters import write_checkpoint
from meliad_like.conversion.stablehlo import convert_to_stablehlo, export_programs
from meliad_like.models.model import Model

TEXTS = [
    "A long document, of which every token is predicted. " * 3,
    "Another one, which is read in step with the first. " * 3,
]


def exported(lm, tmp_path):
    """The reader's model of a folder that was made of this model."""
    write_checkpoint(tmp_path / "ours", lm.params, lm.opened.run, lm.vocabulary)
    convert_to_stablehlo(tmp_path / "ours", (), tmp_path / "theirs")
    spec = importlib.util.spec_from_file_location("read_model", tmp_path / "theirs" / "read_model.py")
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    return reader.Model(tmp_path / "theirs")


@pytest.mark.parametrize("family", ["mixers", *FAMILIES])
def test_any_number_of_lanes(family, monkeypatch):
    # Checks of shapes know no symbols.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    mixers = "dot_product_attention", "gated_delta_rule", "rg_lru", "dense_memory", "external_memory"
    config = dataclasses.replace(SLIDE, num_layers=5, pattern=tuple(f"{mixer}+feedforward" for mixer in mixers))
    config = FAMILIES.get(family, config)
    assert len(list(export_programs(Model(config, 256), {"block": W}))) == 2


def test_an_exported_model_with_windows_that_overlap(tmp_path, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    lm = language_model(FAMILIES["overlapping llama"])
    model, length = exported(lm, tmp_path), 2 * W + 2
    first, state = model.read(model.encode(TEXTS[0][:length]))
    second, _ = model.read(model.encode(TEXTS[0][length:]), state)
    np.testing.assert_allclose(np.append(first, second), lm.score(TEXTS[0]).log_probabilities, atol=1e-6)


def test_an_exported_model_reads_and_writes_as_ours(tmp_path):
    """A layer with recurrent states and one with the window alone; two documents of segments, blocks and tokens."""
    config = with_mixer(dataclasses.replace(SLIDE, num_layers=2), STATES, (1,))
    lm = language_model(config)
    model, length = exported(lm, tmp_path), 3 * C * W + W + 1
    scores = lm.score_batch([text[:length] for text in TEXTS])
    tokens = np.stack([model.encode(text[:length]) for text in TEXTS])
    log_probabilities, state = model.read(tokens)
    assert np.isnan(log_probabilities[:, 0]).all()
    np.testing.assert_allclose(log_probabilities, [score.log_probabilities for score in scores], atol=1e-6)
    greedy = lm.generate_batch([score.state for score in scores], 20, temperature=0)
    written, after = model.generate(state, 20)
    assert written.tolist() == [one.tokens for one in greedy]
    assert model.decode(written[0]) == greedy[0].text

    # Read in parts, and continued from a file.
    first, place = model.read(tokens[:, : W + 1])
    model.save(tmp_path / "place.npz", place)
    second, again = model.read(tokens[:, W + 1 :], model.load(tmp_path / "place.npz"))
    np.testing.assert_allclose(np.append(first, second, axis=1), log_probabilities, atol=1e-6)
    np.testing.assert_array_equal(model.generate(again, 20)[0], written)
    assert after.num_read == length + 19
    drawn = [model.generate(state, 20, temperature=1.0, seed=seed)[0].tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]

    # What the library refuses.
    for wrong, message in (
        ([5, 400, 7], "token 400 is not in the vocabulary"),
        ([5, -1], "token -1 is not in the vocabulary"),
        ([1.5, 2.0], "must be integers, not float64"),
        ([], "no tokens to read"),
    ):
        with pytest.raises(ValueError, match=message):
            model.read(np.array(wrong, type(wrong[0]) if wrong else int))
