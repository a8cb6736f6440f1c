"""Small checkpoints of three kinds for the tests of studies, and a look at their pages."""

import functools
from html.parser import HTMLParser

import jax
import pytest

from meliad_like import config
from meliad_like.conversion.parameters import write_checkpoint
from meliad_like.data.preparation import prepare
from meliad_like.mesh import make_mesh
from meliad_like.models.model import Model
from meliad_like.run import opening
from meliad_like.studies.page import write_study
from meliad_like.studies.readings import StudyRequest
from meliad_like.vocabularies.base import ByteVocabulary

EVIL = "</script><script>alert('document')</script><img src=x onerror=alert(1)> & Gomin met Gomin.\n\n"
DOCUMENTS = {"one": EVIL * 4, "two": "A rose is a rose. " * 20, "three": "é" * 50}
WINDOW, SEGMENT = 16, 64


@pytest.fixture(scope="module", autouse=True)
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:1]))
        yield


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Folders of untrained checkpoints by name, on the same documents; created on first use."""
    root = tmp_path_factory.mktemp("studies")
    (root / "documents" / "test").mkdir(parents=True)
    for name, text in DOCUMENTS.items():
        (root / "documents" / "test" / f"{name}.txt").write_text(text)

    @functools.cache
    def make(row):
        settings = {
            "ReaderConfig.store": root / "store",
            "RunConfig.source": "text",
            "FolderSourceConfig.folder": root / "documents",
        }
        bindings = [f"{key} = '{value}'" for key, value in settings.items()] + ["DecoderConfig.num_layers = 2"]
        run = config.parse(["size/tiny.gin", f"block_recurrent/{row}.gin"], bindings)
        vocabulary = ByteVocabulary()
        prepare(run.source, run.vocabulary, root / "store", num_workers=1)
        folder = root / f"{row}<b>"
        params = jax.jit(Model(run.model, vocabulary.size).init)(jax.random.key(len(row)))
        write_checkpoint(folder / "checkpoints", params, run, vocabulary, step=3)
        return str(folder)

    return make


def make(study, checkpoint, folder, own=None, **changes):
    """Runs a study with its own flags and those of all studies, and writes what it finds into the folder."""
    write_study(study.run(StudyRequest(checkpoint, **changes), **(own or {})), folder)


class Page(HTMLParser):
    """The parsed content of a page."""

    def __init__(self, folder):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed((folder / "index.html").read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def assert_safe(folder):
    """Asserts that a page runs no code and loads nothing but the pictures next to it, all of them, whatever is in a
    document or a name."""
    page = Page(folder)
    assert not {"script", "link", "iframe", "object", "b"} & set(page.tags)
    for name, value in page.attributes:
        assert name not in ("srcset", "data", "href") and not name.startswith("on")
        assert name != "src" or (folder / value).stat().st_size > 1000
    shown = {value for name, value in page.attributes if name == "src"}
    assert shown == {path.name for path in folder.glob("*.png")}
