"""A run's metrics as a picture."""

import json

import forked
import matplotlib.image
import numpy as np
import pandas as pd
import pytest

from meliad_like.errors import UserError
from meliad_like.remote import check_output
from meliad_like.studies import pictures


@pytest.fixture
def workdir(tmp_path):
    """A run of 400 steps, logged every 10 and evaluated twice."""
    rows = [{"step": s, "kind": "train", "bits_per_byte": 2 + 6 / s, "accuracy": 0.5} for s in range(10, 410, 10)]
    rows += [{"step": s, "kind": "validation", "bits_per_byte": 2.5 - s / 1000} for s in (200, 400)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_command_draws_what_the_metrics_say(workdir):
    evaluation = workdir / "evaluation.json"
    evaluation.write_text(json.dumps({"split": "test", "other_bits_per_byte": {"untrained": 9.5, "gzip -9": 2.1}}))
    result = forked.run("-m", "meliad_like.plot", f"--workdir={workdir}", f"--evaluation={evaluation}")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"drew {workdir / 'bits_per_byte.png'}\n"
    image = matplotlib.image.imread(workdir / "bits_per_byte.png")
    assert image.shape[:2] == (540, 960)
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 100


def test_curves_are_apart_by_kind(workdir):
    curves = pictures.read_metrics(workdir, "bits_per_byte")
    assert {kind: len(values) for kind, values in curves.items()} == {"train": 40, "validation": 2}
    np.testing.assert_array_equal(curves["validation"].index, [200, 400])
    np.testing.assert_allclose(curves["validation"], [2.3, 2.1])


def test_runs_of_other_batch_sizes_compare(tmp_path):
    """By tokens and by seconds, also where a log is of a resumed run's first steps, and where a validation is between
    two logs."""
    rows = [
        {"step": step, "kind": "train", "loss": 1.0, "num_tokens": tokens, "seconds_per_step": seconds}
        for step, tokens, seconds in ((10, 100, 2.0), (20, 300, 0.5), (22, 10, 1.0))
    ]
    rows.insert(2, {"step": 15, "kind": "validation", "loss": 2.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for by, train, validation in (("tokens", [100, 400, 410], 250), ("seconds", [20, 25, 27], 22.5)):
        curves = pictures.read_metrics(tmp_path, "loss", by)
        assert curves["train"].index.tolist() == train and curves["validation"].index.tolist() == [validation]


def test_older_runs_have_no_seconds(workdir):
    with pytest.raises(UserError, match="has no seconds_per_step; it has accuracy, bits_per_byte"):
        pictures.read_metrics(workdir, "accuracy", "seconds")


def test_several_runs_are_apart_by_their_folders(workdir, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "metrics.jsonl").write_text((workdir / "metrics.jsonl").read_text())
    assert list(pictures.read_runs([str(workdir)], "accuracy")) == ["train"]
    assert list(pictures.read_runs([str(workdir), str(other)], "accuracy")) == [f"{workdir}: train", f"{other}: train"]


def test_the_legend_of_two_runs_covers_no_curve(workdir, monkeypatch):
    figures = []
    monkeypatch.setattr(pictures.Figure, "savefig", lambda figure, *_, **options: figures.append(figure))
    curves = pictures.read_metrics(workdir, "bits_per_byte").items()
    pictures.draw({f"runs/{run}: {kind}": curve for run in "ab" for kind, curve in curves}, {}, "", workdir / "a.png")
    (figure,) = figures
    figure.draw_without_rendering()
    (legend,), (axes,) = figure.legends, figure.axes
    assert len(legend.get_texts()) == 4 and not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_a_picture_of_a_single_point(tmp_path):
    pictures.draw({"train": pd.Series([9.0], [10])}, {}, "loss", tmp_path / "new" / "loss.png")
    assert (tmp_path / "new" / "loss.png").exists()


@pytest.mark.parametrize("name", ["loss.txt", "loss"])
def test_a_format_that_cannot_be_drawn_is_named(tmp_path, name):
    for flag, path in ("output", tmp_path / name), ("heat_map", f"gs://bucket/{name}"):
        with pytest.raises(UserError, match=rf"--{flag}=.*{name} must end with one of \..*\.png, "):
            check_output(path, flag, "picture")


def test_levels_are_the_compressors(tmp_path):
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps({"split": "test", "other_bits_per_byte": {"untrained": 9.5, "xz -9": 1.8}}))
    assert pictures.read_levels(path) == {"xz -9 on test": 1.8}


def test_what_is_missing_is_named(workdir, tmp_path):
    with pytest.raises(UserError, match="has no loss; it has accuracy, bits_per_byte"):
        pictures.read_metrics(workdir, "loss")
    with pytest.raises(UserError, match="--workdir is the folder of a training"):
        pictures.read_metrics(tmp_path / "none", "loss")
    with pytest.raises(UserError, match="there is no evaluation"):
        pictures.read_levels(tmp_path / "none.json")
    # Of an evaluation without --compare, and of another list.
    for text in ("{}", "[]"):
        (tmp_path / "plain.json").write_text(text)
        with pytest.raises(UserError, match="write it with evaluate --compare --output"):
            pictures.read_levels(tmp_path / "plain.json")
