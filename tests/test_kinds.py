"""Configs made of registered kinds at any depth: bindings, JSON, gin files, differences and fingerprints."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from meliad_like import config
from meliad_like.config import construction
from meliad_like.config.bindings import Binding, Rank
from meliad_like.errors import UserError
from meliad_like.registry import Registry, changed_settings, fingerprint, kind_field, resumable

MEMORIES, NETWORKS = Registry("memory"), Registry("network")


@MEMORIES.register("window")
@dataclass(frozen=True)
class Window:
    length: int = 8


@dataclass(frozen=True)
class Gate:
    bias: float = 1.0


@dataclass(frozen=True)
class Layered:
    layers: tuple[int, ...] = ()


@MEMORIES.register("states")
@dataclass(frozen=True)
class States(Layered):
    number: int = 4
    gate: Gate = field(default_factory=Gate)


@MEMORIES.register("lookup")
@dataclass(frozen=True)
class Lookup(Layered):
    size: int = 64


@NETWORKS.register("stack")
@dataclass(frozen=True)
class Stack:
    width: int = 16
    memories: tuple[Any, ...] = kind_field(MEMORIES, lambda: (Window(),), many=True)


@NETWORKS.register("table")
@dataclass(frozen=True)
class Table:
    width: int = 16
    rows: int = 3


@NETWORKS.register("rows")
@dataclass(frozen=True)
class Rows:
    names: tuple[Any, ...] = ("states+lookup",)
    memories: tuple[Any, ...] = kind_field(MEMORIES, tuple, named_in="names")


@dataclass(frozen=True)
class Root:
    network: Any = kind_field(NETWORKS, Stack)
    steps: int = resumable(1)


def build(base=(), file=(), start=Root):
    """Bindings as text, those of base.gin and those of another file, to a config."""
    bindings = {}
    for rank, lines in ((Rank.DEFAULT, base), (Rank.FILE, file)):
        for number, line in enumerate(lines, 1):
            key, _, value = line.partition(" = ")
            bindings[key] = Binding(eval(value), f"mine.gin:{number}", rank)
    return construction.build(bindings, start)[0]


def message(*arguments, **more):
    with pytest.raises(UserError) as caught:
        build(*arguments, **more)
    return str(caught.value)


def test_a_kind_is_chosen_by_its_name_and_bound_by_its_class():
    assert build() == Root()
    assert build(file=["Root.network = 'table'", "Table.rows = 5"]) == Root(Table(rows=5))
    assert build(file=["Window.length = 2"]).network.memories == (Window(2),)


def test_kinds_are_chosen_by_a_list_of_names():
    chosen = "Stack.memories = ['states', 'lookup']"
    made = build(base=["Lookup.size = 128"], file=[chosen, "States.layers = [1]", "Gate.bias = 0"])
    assert made.network.memories == (States((1,), gate=Gate(0.0)), Lookup(size=128))
    assert build(file=["Stack.memories = ()"]).network.memories == ()


def test_kinds_are_named_by_another_field():
    made = build(file=["Root.network = 'rows'", "States.layers = [1]"])
    assert made.network == Rows(memories=(Lookup(), States((1,))))
    made = build(file=["Rows.names = ('window+other', (3, 'lookup'))", "Lookup.size = 1"], start=Root(Rows()))
    assert made.network.memories == (Lookup(size=1), Window())
    # In a config that there is already, the kinds that are named again keep their values.
    made = build(file=["Rows.names = ('states',)"], start=Root(Rows(memories=(States(number=2), Window()))))
    assert made.network.memories == (States(number=2),)
    assert "Rows.memories" not in config.bound_values(made) and config.rebuild(Root, config.bound_values(made)) == made


def test_a_field_is_bound_by_a_base_class_for_all_kinds_that_have_it():
    file = ["Stack.memories = ('lookup', 'states')", "Layered.layers = (3,)", "Lookup.layers = (2,)"]
    assert build(file=file).network.memories == (Lookup((2,)), States((3,)))
    # base.gin gives way to a file, even where it names the kind itself.
    assert build(base=["States.layers = (1,)"], file=[*file[:2]]).network.memories[1].layers == (3,)


STATES = "Stack.memories = 'states'"


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            ["Table.rows = 5"],
            "mine.gin:1: nothing reads Table.rows: Root.network is 'stack' (the default), not 'table'",
        ),
        (
            ["Root.network = 'table'", "Gate.bias = 0.0"],
            "mine.gin:2: nothing reads Gate.bias: Root.network is 'table' (mine.gin:1), not 'stack'",
        ),
        (
            ["Root.network = 'rows'", "Window.length = 3"],
            "mine.gin:2: nothing reads Window.length: Rows.names is ('lookup', 'states') (the default), not 'window'",
        ),
        (
            ["Root.network = 'rows'", "Rows.memories = ('window',)"],
            "mine.gin:2: Rows.memories follows from Rows.names: bind that",
        ),
        (
            ["Gate.bias = 0.0"],
            "mine.gin:1: nothing reads Gate.bias: Stack.memories is 'window' (the default), not 'states'",
        ),
        (
            ["Layered.layers = ()"],
            "nothing reads Layered.layers: Stack.memories is 'window' (the default), not 'states'",
        ),
        (["Window.lenght = 5"], "mine.gin:1: Window has no parameter lenght (nearest: length)"),
        (["Windw.length = 5"], "mine.gin:1: unknown class Windw (nearest: Window)"),
        (["Root.network = 'tabel'"], "mine.gin:1: Root.network = 'tabel' is not one of rows, stack, table"),
        (["Stack.memories = [3]"], "mine.gin:1: Stack.memories = 3 is not one of lookup, states, window"),
        ([STATES, "States.gate = 3"], "mine.gin:2: States.gate has fields of its own: bind Gate.FIELD = ..."),
        ([STATES, "States.number = 'a'"], "mine.gin:2: States.number='a' must be int"),
    ],
)
def test_a_binding_that_nothing_reads_is_an_error(file, expected):
    assert expected in message(file=file)


def test_a_parameter_that_chooses_a_kind_replaces_a_files_kind_with_its_fields(tmp_path):
    (tmp_path / "mine.gin").write_text("RunConfig.schedule = 'linear'\nLinearSchedule.max_rate = 0.5\n")
    run = config.parse([str(tmp_path / "mine.gin")], ["RunConfig.schedule = 'constant'"])
    assert type(run.schedule) is type(config.parse([], ["RunConfig.schedule = 'constant'"]).schedule)


def test_what_a_file_binds_of_a_kind_that_it_does_not_choose_is_an_error(tmp_path):
    (tmp_path / "mine.gin").write_text("RunConfig.schedule = 'constant'\nLinearSchedule.max_rate = 0.5\n")
    with pytest.raises(
        UserError, match="mine.gin:2: nothing reads LinearSchedule.max_rate: RunConfig.schedule is 'con"
    ):
        config.parse([str(tmp_path / "mine.gin")])


def test_bindings_of_base_for_other_kinds_are_defaults():
    assert build(base=["Table.rows = 5", "Gate.bias = 0.0"]) == Root()
    assert build(base=["Table.rows = 5"], file=["Root.network = 'table'"]) == Root(Table(rows=5))


def test_a_config_is_changed_by_bindings():
    start = Root(Stack(5, (Window(3), States((1,)))), 7)
    file = ["Stack.memories = ('lookup', 'states')", "States.number = 9", "Lookup.size = 2"]
    assert build(file=file, start=start) == Root(Stack(5, (Lookup(size=2), States((1,), 9))), 7)
    assert build(file=["Root.network = 'table'"], start=start) == Root(Table(), 7)


def test_what_is_saved_is_read_back():
    made = Root(Stack(5, (States((1,), gate=Gate(2.0)), Window(3))), 7)
    values = config.bound_values(made)
    assert list(values.items())[:5] == [
        ("Root.network", "stack"),
        ("Root.steps", 7),
        ("Stack.width", 5),
        ("Stack.memories", ("states", "window")),
        ("States.layers", (1,)),
    ]
    assert config.rebuild(Root, values) == made
    del values["Gate.bias"]
    assert config.rebuild(Root, values).network.memories[0].gate == Gate()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"Root.network": "tabel"}, "the saved config: Root.network = 'tabel' is not one of rows, stack, table"),
        ({"Stack.memories": [{"size": 3}]}, "Stack.memories = {'size': 3} is not one of lookup, "),
        ({"Stack.memories": 3}, "Stack.memories = 3 is not one of lookup"),
        ({"Stack.rows": 3}, "Stack has no parameter rows"),
        ([], "the saved config is [], not an object"),
    ],
)
def test_what_is_saved_of_another_version_is_an_error(values, expected):
    with pytest.raises(UserError) as caught:
        config.rebuild(Root, values)
    assert expected in str(caught.value)


def test_differences_are_named_as_in_gin():
    old, new = Root(Stack(5, (Window(3), States()))), Root(Stack(6, (Window(3), States(gate=Gate(2.0)))), 2)
    assert config.differences(old, new) == {"Stack.width": (5, 6), "Gate.bias": (1.0, 2.0), "Root.steps": (1, 2)}
    assert config.differences(old, Root(Table())) == {"Root.network": ("stack", "table")}
    assert config.differences(old, Root(Stack(5))) == {
        "Stack.memories": (("window", "states"), ("window",)),
        "Window.length": (3, 8),
    }


def test_a_new_field_with_a_default_changes_no_fingerprint():
    later = dataclasses.make_dataclass("Table", [("width", int, 16), ("rows", int, 3), ("depth", int, 2)], frozen=True)
    networks = Registry("network")
    networks.register("table")(later)
    before = fingerprint(changed_settings(Table(rows=5), NETWORKS))
    assert fingerprint(changed_settings(later(rows=5), networks)) == before
    assert fingerprint(changed_settings(later(rows=5, depth=3), networks)) != before
    assert fingerprint(changed_settings(Stack(), NETWORKS)) != fingerprint(changed_settings(Table(), NETWORKS))
