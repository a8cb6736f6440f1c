"""The floors of the package: imports go down only, and files and functions stay small."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "meliad_like"

FLOORS = [
    {"__main__"},
    {"train", "evaluate", "generate", "prepare", "convert", "plan", "plot", "configs", "describe", "smoke", "harness"},
    {"library"},
    {"experiments"},
    {"history"},
    {"studies", "planning", "conversion"},
    {"run"},
    {"evaluation", "generation"},
    {"training"},
    {"command_line"},
    {"config"},
    {"mesh", "optimization", "trackers"},
    {"models"},
    {"mixers"},
    {"layers"},
    {"data"},
    {"resumable"},
    {"registry", "remote", "tables", "validation"},
    {"errors"},
]
"""Rooms (sub-packages, and modules of the package itself) from the top; those of one floor don't know each other."""
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}

MAX_FILE, MAX_FUNCTION = 450, 60

FILES = sorted(path for path in PACKAGE.rglob("*.py"))
MODULES = {path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".") for path in FILES}


def room_of(module: str) -> str | None:
    """The room of a module by its full name; None: the package itself, which holds only names and its version."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__init__" else None


def imported_modules(path: Path) -> set[str]:
    """Full names of the package's modules that a file imports, inside functions and for annotations too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES or node.module == "meliad_like" else node.module for name in names}
    return {name for name in found if name.split(".")[0] == "meliad_like"}


def climbs() -> list[str]:
    """Imports that don't go down."""
    found = []
    for path in FILES:
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for module in imported_modules(path):
            room = room_of(module)
            if own == "__init__" or room in (None, own) or room == "__version__":
                continue
            if FLOOR_OF[room] <= FLOOR_OF[own]:
                found.append(f"{path.relative_to(PACKAGE)} imports {module}")
    return found


def test_imports_go_down():
    assert not climbs(), "\n".join(climbs())


def test_every_room_has_a_floor():
    rooms = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES} - {"__init__"}
    assert rooms <= FLOOR_OF.keys()


def test_files_are_short():
    long = {path.relative_to(PACKAGE).as_posix() for path in FILES if len(path.read_text().splitlines()) > MAX_FILE}
    assert not long


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its docstring left out."""
    assert function.end_lineno is not None
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    documented = docstring.end_lineno - docstring.lineno + 1 if docstring and docstring.end_lineno else 0
    return function.end_lineno - function.lineno + 1 - documented


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_functions_are_short(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f"{path.relative_to(PACKAGE)}:{f.name}" for f in functions if code_lines(f) > MAX_FUNCTION}
    assert not long


def test_gin_is_read_in_config_alone():
    """Everything else takes configs, or opaque changes of them that a command has read from its flags."""
    inside = ("meliad_like.config.bindings", "meliad_like.config.construction")
    outside = [path for path in FILES if path.relative_to(PACKAGE).parts[0] != "config"]
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in outside
        if any(module.startswith(inside) for module in imported_modules(path)) or "import gin" in path.read_text()
    }
    assert not found
