"""Small checkpoints of three kinds for the tests of studies, and a look at the pages."""

import base64
import functools
import hashlib
from html.parser import HTMLParser
from pathlib import Path

import jax
import pytest

from meliad_like import config
from meliad_like.data.preparation import prepare
from meliad_like.data.vocabulary import ByteVocabulary
from meliad_like.mesh import make_mesh
from meliad_like.models.model import Model
from meliad_like.run import opening
from meliad_like.run.opening import write_checkpoint
from meliad_like.studies.readings import StudyRequest

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


def request(checkpoint, output, **changes):
    default = {
        "step": None, "other": (), "other_step": None, "gin_param": (), "store": None, "split": "test",
        "document": (), "num_documents": None, "unit": "auto", "top": 12,
        "kind": ("shuffled", "earlier", "cleared", "frozen"), "part": (), "every": None,
    }  # fmt: skip
    return StudyRequest(checkpoint=checkpoint, output=Path(output), **(default | changes))


class Page(HTMLParser):
    """The parsed content of a page."""

    def __init__(self, folder):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.text, self.policy = [], [], [], "", ""
        self.feed((folder / "index.html").read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag in ("script", "style"):
            self.scripts.append([tag, dict(attrs), ""])
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"]

    def handle_data(self, data):
        # Of a script or style.
        if self.cdata_elem:
            self.scripts[-1][2] += data
        else:
            self.text += data


def assert_safe(page):
    """Asserts that a page loads no external resource and runs no code from a document or a folder."""
    assert not {"link", "iframe", "object", "b"} & set(page.tags)
    for name, value in page.attributes:
        assert name not in ("srcset", "data") and not name.startswith("on")
        assert name != "src" or value.startswith("data:image/svg+xml;base64,")
        assert name != "href" or value.startswith("#")
    running = [text for tag, attributes, text in page.scripts if tag == "style" or "type" not in attributes]
    assert len(running) == 2
    for text in running:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page.policy
        assert "@import" not in text and "url(" not in text and "innerHTML" not in text
    assert "default-src 'none'" in page.policy and "unsafe" not in page.policy
