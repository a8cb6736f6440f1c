"""The levels of the packages: imports go down only, and files stay small."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "meliad_like"

LEVELS = [
    {"__main__"},
    {"train", "evaluate", "generate", "prepare", "convert", "plan", "plot", "describe", "harness"},
    {"experiments"},
    {"history"},
    {"studies", "planning", "conversion"},
    {"families"},
    {"library"},
    {"run"},
    {"evaluation", "generation"},
    {"training"},
    {"command_line"},
    {"config"},
    {"mesh", "optimization", "trackers"},
    {"models"},
    {"mixers"},
    {"kernels"},
    {"layers"},
    {"data"},
    {"sources", "vocabularies"},
    {"resumable"},
    {"caches", "registry", "remote", "tables", "validation"},
    {"errors"},
]
"""Sub-packages, and modules of the package itself, from the top; those of one level don't know each other."""
LEVEL_OF = {package: number for number, level in enumerate(LEVELS) for package in level}

MAX_LINES = 450

FILES = sorted(path for path in PACKAGE.rglob("*.py"))
MODULES = {path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".") for path in FILES}


def package_of(module: str) -> str | None:
    """The sub-package of a module by its full name; None: the package itself, which holds names and its version."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__init__" else None


def imported_modules(path: Path) -> set[str]:
    """Full names of the package's modules that a file imports, inside functions and for annotations too."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name if name in MODULES or node.module == "meliad_like" else node.module for name in names}
    return {name for name in modules if name.split(".")[0] == "meliad_like"}


def test_imports_go_down():
    upwards = []
    for path in FILES:
        importer = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for module in imported_modules(path):
            imported = package_of(module)
            if importer == "__init__" or imported in (None, importer, "__version__"):
                continue
            if LEVEL_OF[imported] <= LEVEL_OF[importer]:
                upwards.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert not upwards, "\n".join(upwards)


def test_no_circle_of_files():
    """Also of those that import each other when a function is called."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        name = path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
        graph[name] = {module if module in MODULES else f"{module}.__init__" for module in imported_modules(path)}

    def reached_from(name: str) -> set[str]:
        reached, waiting = set(), [name]
        while waiting:
            new = graph.get(waiting.pop(), set()) - reached
            reached |= new
            waiting += new
        return reached

    reached = {name: reached_from(name) for name in graph}
    inside = {name for name in graph if name in reached[name]}
    circles = {frozenset(other for other in reached[name] & inside if name in reached[other]) for name in inside}
    assert not circles


def test_every_package_has_a_level():
    packages = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES} - {"__init__"}
    assert packages <= LEVEL_OF.keys()


def test_files_are_short():
    long = {path.relative_to(PACKAGE).as_posix() for path in FILES if len(path.read_text().splitlines()) > MAX_LINES}
    assert not long


def test_gin_is_read_in_config_alone():
    """Everything else takes configs, or opaque changes of them that a command has read from its flags; but for the
    conversion of another program's gin files."""
    inside = ("meliad_like.config.bindings", "meliad_like.config.construction")
    outside = [path for path in FILES if path.relative_to(PACKAGE).parts[0] != "config"]
    readers = {
        path.relative_to(PACKAGE).as_posix()
        for path in outside
        if any(module.startswith(inside) for module in imported_modules(path)) or "import gin" in path.read_text()
    }
    assert readers == {"conversion/meliad_gin.py"}
