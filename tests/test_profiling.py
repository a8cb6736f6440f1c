"""Traces of some steps."""

import pytest
import tiny_run
from tiny_run import parse, train

from meliad_like.errors import UserError
from meliad_like.training.loop import parse_steps


@pytest.mark.thorough
def test_the_steps_that_are_asked_for_are_traced(tmp_path, capsys):
    bindings = [
        *tiny_run.make_bindings(tmp_path),
        "MeshConfig.data = 1",
        "TrainingConfig.num_steps = 6",
    ]
    workdir = tmp_path / "run"
    assert train(parse(bindings), workdir, profile_steps=(3, 5)) == 0
    assert f"step 5: wrote a trace into {workdir}/profile" in capsys.readouterr().out
    (trace,) = (workdir / "profile" / "plugins" / "profile").glob("*/*.xplane.pb")
    content = trace.read_bytes()
    # The host's annotation of each step, by which xprof tells them apart.
    assert b"train" in content and b"step_num" in content
    # A run that goes on beyond them traces nothing, and one that ends among them what it did.
    assert train(parse(bindings, "TrainingConfig.num_steps = 7"), workdir, profile_steps=(3, 5)) == 0
    assert "wrote a trace" not in capsys.readouterr().out
    assert train(parse(bindings, "TrainingConfig.num_steps = 8"), workdir, profile_steps=(1, 100)) == 0
    assert len([*(workdir / "profile" / "plugins" / "profile").glob("*/*.xplane.pb")]) == 2


def test_steps_as_the_flag_takes_them():
    assert parse_steps("10:15") == (10, 15)


@pytest.mark.parametrize("text", ["10", "15:10", "0:3", "a:b", "1:2:3", "-1:2"])
def test_other_steps_are_refused(text):
    with pytest.raises(UserError, match=f"--profile_steps={text} must be FIRST:LAST, such as 10:15"):
        parse_steps(text)
