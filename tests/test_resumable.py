"""Work that is interrupted and resumed."""

import pytest

from meliad_like.errors import UserError
from meliad_like.history.stride_store import Journal
from meliad_like.resumable import check_same

OLD = {"config": {"model": {"layers": 12, "recurrent": (9,)}, "mesh": {"data": 8}}, "vocabulary": "ab12"}


def test_settings_of_another_run():
    new = {"config": {"model": {"layers": 13, "recurrent": [9], "gate": "lstm"}}, "vocabulary": "cd34"}
    with pytest.raises(UserError) as error:
        check_same("runs/a", OLD, new, may_differ=["config.mesh.data"])
    assert str(error.value) == (
        "runs/a belongs to another config: config.model.layers is 12 there, 13 here; config.model.gate is 'absent' "
        "there, 'lstm' here; vocabulary is 'ab12' there, 'cd34' here; choose another folder, or the same values"
    )
    with pytest.raises(UserError, match="'cd34' here and 1 more; choose another folder"):
        check_same("runs/a", OLD, new)


def test_settings_that_may_differ():
    new = {**OLD, "config": {**OLD["config"], "mesh": {"data": 4}}}
    check_same("runs/a", OLD, new, may_differ=["config.mesh.data"])
    with pytest.raises(UserError, match=r"config\.mesh\.data is 8 there, 4 here"):
        check_same("runs/a", OLD, new, may_differ=["config.mesh"])


def test_a_journal_is_resumed(tmp_path):
    path = tmp_path / "new" / "parts.jsonl"
    journal = Journal(path, {"config": (1, 2)})
    assert journal.rows == []
    journal.write({"part": 0})
    journal.write({"part": 1})
    path.write_text(path.read_text() + '{"part": 2')
    journal = Journal(path, {"config": (1, 2)})
    assert journal.rows == [{"part": 0}, {"part": 1}]
    journal.write({"part": 2})
    assert len(Journal(path, {"config": (1, 2)}).rows) == 3


def test_a_journal_that_was_cut_short_begins_again(tmp_path):
    path = tmp_path / "parts.jsonl"
    for left in ("", '{"config": '):
        path.write_text(left)
        assert Journal(path, {"config": (1, 2)}).rows == []
        assert path.read_text() == '{"config": [1, 2]}\n'


def test_a_damaged_journal_is_named(tmp_path):
    path = tmp_path / "parts.jsonl"
    Journal(path, {"config": 1}).write({"part": 0})
    for number, damaged in ((1, "}\n" + path.read_text()), (3, path.read_text() + '{"part": \n')):
        path.write_text(damaged)
        with pytest.raises(UserError, match=f"parts.jsonl:{number} is not JSON: "):
            Journal(path, {"config": 1})


def test_the_journal_of_other_settings_is_replaced_only_if_asked(tmp_path):
    path = tmp_path / "parts.jsonl"
    Journal(path, {"config": 1}).write({"part": 0})
    with pytest.raises(UserError, match="belongs to another config: config is 1 there, 2 here"):
        Journal(path, {"config": 2})
    assert Journal(path, {"config": 1}, replace=True).rows == [{"part": 0}]
    assert Journal(path, {"config": 2}, replace=True).rows == []
