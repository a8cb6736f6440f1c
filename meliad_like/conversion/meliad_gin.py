"""gin files of google-research/meliad, as one gin file of ours.

Their files are parsed and not run: their modules are not needed. `meliad_gin.csv` says what each binding is here. Its
column `ours` has the field that gets the value, or fields with values; `-`, if the binding changes nothing here; or
after `!` the reason why it has no counterpart. Rows with a value come before the one for all other values. Of a class
after `@` only those bindings count to which another value refers. Names without a dot are used by `_complete`. The last
rows name our files for theirs.
"""

import ast
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gin import config_parser

from meliad_like.config import parse
from meliad_like.config.bindings import Placeholder, statements
from meliad_like.errors import UserError
from meliad_like.mixers.base import MIXERS
from meliad_like.models.model import Model
from meliad_like.remote import write_whole

_ROWS = list(csv.DictReader(Path(__file__).with_suffix(".csv").read_text().splitlines()))
RULES = {(row["theirs"].removeprefix("@"), row["value"]): row["ours"] for row in _ROWS}
"""The counterpart of a binding, by its class and parameter, and its value or ""."""
FILES = {row["ours"]: row["theirs"] for row in _ROWS if row["theirs"].endswith(".gin")}
"""Their gin files with another name, by our gin file or row."""
BY_REFERENCE = {row["theirs"][1:].rpartition(".")[0] for row in _ROWS if row["theirs"].startswith("@")}
"""The classes of which a configuration uses those that a value refers to."""


@dataclass(frozen=True)
class Recipe:
    """The counterpart of a configuration of theirs."""

    bindings: dict[str, Any]
    """Values by our `Class.field`."""
    problems: list[str]
    """Bindings that have no counterpart here, with the reason."""
    task: str | None
    """Our gin file of the documents; None if theirs are made up."""
    vocabulary_size: int | None
    """The number of their tokens; None if no file says it."""

    def text(self) -> str:
        """The gin file."""
        lines = [f"# has no counterpart: {problem}" for problem in self.problems]
        lines.append(f'include "{self.task}"' if self.task else "# Add documents: a gin file of task/.")
        lines += [f"{key} = {value!r}" for key, value in sorted(self.bindings.items())]
        return "\n".join(lines) + "\n"


def read_bindings(folder: str | Path, gin_files: Sequence[str], gin_params: Sequence[str] = ()) -> dict[str, Any]:
    """The values that a configuration of theirs uses, by `scope/Class.parameter` without the names of modules.

    Args:
      folder: the folder from which files are included, `transformer/configs`.
      gin_files: names of files in it, or paths. As in gin, the last binding of a parameter counts.
      gin_params: bindings after those of the files.
    """
    theirs: dict[str, Any] = {}
    for name in gin_files:
        theirs |= _read(Path(folder), name)
    for text in gin_params:
        theirs |= _bindings(Path(folder), statements(text, f"--gin_param={text}", numbered=False))
    return _in_use({key: _resolve(value, theirs) for key, value in theirs.items() if "." in key})


def recipe_of(theirs: dict[str, Any]) -> Recipe:
    """Our recipe, from the values that a configuration of theirs uses."""
    ours: dict[str, Any] = {}
    problems = []

    def bind(key: str, value: Any, because: str) -> None:
        if ours.setdefault(key, value) != value:
            problems.append(f"{because}: {key} is {ours[key]!r} already, because both are one number here")

    for key, value in theirs.items():
        because, rule = f"{key} = {value!r}", _rule(key, value)
        unresolved = isinstance(value, Placeholder) and value.startswith("%")
        if rule is None:
            problems.append(f"{because}: it {'has no value' if unresolved else 'is unknown'}")
        elif rule.startswith("!"):
            problems.append(f"{because}: {rule[1:]}")
        elif "=" in rule:
            for field, _, text in (part.partition(" = ") for part in rule.split("; ")):
                bind(field, ast.literal_eval(text), because)
        elif unresolved and rule != "-":
            problems.append(f"{because}: it has no value")
        elif rule != "-":
            bind(rule, value, because)
    return _complete(ours, problems)


def _read(folder: Path, name: str) -> dict[str, Any]:
    for path in (folder / name, Path(name)):
        if path.is_file():
            return _bindings(folder, statements(path.read_text(), str(path)))
    raise UserError(f"no gin file {name} in {folder}: --input is the folder transformer/configs of meliad")


def _bindings(folder: Path, parsed: list[Any]) -> dict[str, Any]:
    """Values by `scope/Class.parameter`, or the name of a macro, without the names of modules."""
    table: dict[str, Any] = {}
    for statement in parsed:
        if isinstance(statement, config_parser.IncludeStatement):
            table |= _read(folder, statement.filename)
        elif isinstance(statement, config_parser.BindingStatement):
            name = _short(f"{statement.scope}/{statement.selector}" if statement.scope else statement.selector)
            table[f"{name}.{statement.arg_name}" if statement.arg_name else name] = statement.value
    return table


def _short(name: str) -> str:
    scope, slash, selector = name.rpartition("/")
    return scope + slash + selector.rpartition(".")[2]


def _resolve(value: Any, theirs: dict[str, Any]) -> Any:
    """A value with the values of its macros, and references without the names of modules."""
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(item, theirs) for item in value)
    if isinstance(value, Placeholder) and value.startswith("@"):
        return Placeholder("@" + _short(value[1:]))
    if isinstance(value, Placeholder) and value[1:] in theirs:
        return _resolve(theirs[value[1:]], theirs)
    return value


def _rule(key: str, value: Any) -> str | None:
    scoped, _, parameter = key.rpartition(".")
    names = [f"{owner}.{name}" for owner in (scoped, scoped.rpartition("/")[2]) for name in (parameter, "*")]
    return next((RULES[rule] for name in names for rule in ((name, repr(value)), (name, "")) if rule in RULES), None)


def _in_use(theirs: dict[str, Any]) -> dict[str, Any]:
    """The bindings, without classes that are only used where a value refers to them, and no value does."""
    references = {value[1:] for value in theirs.values() if isinstance(value, Placeholder)}

    def is_used(name: str) -> bool:
        scope, _, owner = name.rpartition("/")
        if not BY_REFERENCE & {name, owner}:
            return True
        return name in references or (not scope and any(_short(reference) == owner for reference in references))

    used = {key: value for key, value in theirs.items() if is_used(key.rpartition(".")[0])}
    # Nor are those used to which only the classes that were left out refer.
    return used if len(used) == len(theirs) else _in_use(used)


def _complete(ours: dict[str, Any], problems: list[str]) -> Recipe:
    """A recipe, with bindings that follow from several of theirs, or from a default of theirs that is not ours."""

    def drop(*owners: str) -> None:
        for key in [key for key in ours if key.partition(".")[0] in owners]:
            del ours[key]

    batch, tests, segment = ours.pop("batch_size", 0), ours.pop("num_test_steps", 0), "ReaderConfig.segment_length"
    if batch and segment in ours:
        # Theirs is the number of lanes of one device.
        ours["ReaderConfig.tokens_per_step"] = batch * ours[segment]
        ours["TrainingConfig.evaluate_max_tokens"] = tests * batch * ours[segment] or None
    window, feedback = ours.pop("stack_window", 0), ours.pop("feedback", True)
    if window not in (0, ours.get("DecoderConfig.window_length")):
        problems.append(f"DecoderStack.dstack_window_length = {window}: blocks are windows")
    layers = {"RecurrentStates": ours.pop("recurrent_layers", ()), "ExternalMemory": ours.pop("memory_layers", ())}
    others = "sliding_window+feedforward"
    if layers["RecurrentStates"]:
        ours = {"RecurrentStates.gate": "fixed", "RecurrentStates.cell": "dual"} | ours
        if feedback and window:
            others = "sliding_window+state_reader+feedforward"
    side = ours.pop("side_layers", ())
    if side and "DenseMemory.horizon" in ours:
        # The additional layer comes after the layer of this index.
        layers["DenseMemory"] = (side[0] + 1,)
        ours |= {"DecoderConfig.extra_layers": 1, "DecoderConfig.doubled_inputs": layers["DenseMemory"]}
        if len(side) > 1:
            problems.append(f"TransformerStack.side_layer_indices = {side}: layers don't share their parameters")
    without_positions = ours.pop("memory_without_positions", False)
    if layers["ExternalMemory"] and not without_positions:
        problems.append("DecoderStack.disable_position_encoding_for_memory_layers = False: they have no positions")
    drop(*(name for name, indices in layers.items() if not indices), *({"DenseMemory"} - layers.keys()))
    names = {mixer.__name__: name for name, mixer in MIXERS.items()}
    pairs = [(indices, f"{names[mixer]}+feedforward") for mixer, indices in layers.items() if indices]
    if ours.get("DecoderConfig.position") == "alibi":
        ours.setdefault("Alibi.bound", "fixed" if "Alibi.fixed_bound" in ours else "learned")
    else:
        drop("Alibi")
    if ours.get("RunConfig.schedule") in ("inverse_square_root", "constant"):
        drop("DecayingScheduleConfig")
    ours["DecoderConfig.mask_empty_cache"] = False
    melodi = any(key.startswith("MelodiConfig.") for key in ours)
    ours |= {"RunConfig.model": "melodi"} if melodi else {"DecoderConfig.pattern": (others, *pairs)}
    task, size = ours.pop("task", None), ours.pop("vocabulary_size", None)
    if task and size:
        ours["VocabularyConfig.size_multiple"] = size
    return Recipe(ours, problems, task, size)


def convert_meliad_gin(folder: str, gin_files: Sequence[str], gin_params: Sequence[str], output: str) -> None:
    """Writes our gin file, and prints bindings without a counterpart and the number of parameters."""
    if not gin_files:
        raise UserError(f"name their files in {folder}: --gin_file=base_memory.gin --gin_file=recurrent/bias_skip.gin")
    recipe = recipe_of(read_bindings(folder, gin_files, gin_params))
    write_whole(output, recipe.text())
    for problem in recipe.problems:
        print(f"has no counterpart: {problem}")
    model = parse([output]).model
    if recipe.vocabulary_size:
        count = Model(model, recipe.vocabulary_size).num_parameters
        print(f"{count:,} parameters with their vocabulary of {recipe.vocabulary_size:,} tokens")
