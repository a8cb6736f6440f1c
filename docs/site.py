"""The pages of the documentation site that are not files of this folder: the README and others of the checkout, and a
reference page for each sub-package. `mkdocs.yml` names this file as a hook of mkdocs."""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "meliad_like"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "gin/README.md": "gin.md",
    "benchmarks/results/README.md": "measurements.md",
    "examples/read_a_book.ipynb": "read_a_book.md",
    "meliad_like/__init__.py": "reference/meliad_like.md",
}
"""Files of the checkout and the pages of the site that show them."""
OWN_PAGES = {page: file for file, page in PAGES.items()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the reference to the navigation."""
    assert config.nav is not None
    config.nav.append({"Reference": [f"reference/{package}.md" for package in packages()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages to those of the folder."""
    for file, page in PAGES.items():
        if not file.endswith(".py"):
            content = (ROOT / file).read_text()
            files.append(
                File.generated(config, page, content=as_markdown(content) if file.endswith(".ipynb") else content)
            )
    for package, modules in packages().items():
        content = "\n\n".join([f"# {package}", *(f"::: {module}" for module in modules)])
        files.append(File.generated(config, f"reference/{package}.md", content=content + "\n"))
    return files


def as_markdown(notebook: str) -> str:
    """The cells of a notebook, each followed by the outputs that the notebook is kept with."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                parts.append(f'<img alt="" src="data:image/png;base64,{output["data"]["image/png"].strip()}">')
            elif text := "".join(output.get("text", ())):
                parts.append(f"```text\n{text}```")
    return "\n\n".join(parts) + "\n"


def packages() -> dict[str, list[str]]:
    """The full names of all modules, by page: the package itself, its top-level modules and its sub-packages."""
    modules: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names = parts[:-1] if parts[-1] == "__init__" else parts
        if parts[-1] == "__main__" or not path.read_text().strip():
            continue
        modules.setdefault(names[min(1, len(names) - 1)], []).append(".".join(names))
    return modules


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the checkout become links between pages of the site; of others only the text stays."""
    here = page.file.src_uri
    folder = posixpath.dirname(OWN_PAGES.get(here, f"docs/{here}"))

    def translated(match: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(folder, match["path"]))
        if not (ROOT / target).exists():
            return match[0]  # code that looks like a link
        if target not in PAGES and not target.startswith("docs/"):
            return match["text"]
        uri = PAGES.get(target, target.removeprefix("docs/"))
        return f"[{match['text']}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{match['anchor'] or ''})"

    return re.sub(r"\[(?P<text>[^\[\]]*)\]\((?P<path>[^)#:]+)(?P<anchor>#[^)]+)?\)", translated, markdown)
