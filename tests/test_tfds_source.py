import subprocess
import sys

import pytest

from meliad_like.errors import UserError
from meliad_like.sources.base import open_source
from meliad_like.sources.records import TfdsSource

tfds = pytest.importorskip("tensorflow_datasets")


class Books(tfds.core.GeneratorBasedBuilder):
    """PG-19's fields."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict({"book_text": text, "book_title": text})
        )

    def _split_generators(self, dl_manager):
        return {
            split: self._generate_examples(split, size)
            for split, size in {"train": 3, "validation": 1, "test": 1}.items()
        }

    def _generate_examples(self, split, size):
        for i in range(size):
            yield f"{split}{i}", {"book_text": f"Once, in {split}…\n" * 1000, "book_title": f"{split} {i}"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensorflow_datasets")
    Books(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def config(folder, **settings):
    return TfdsSource(folder=str(folder), dataset="books", text_field="book_text", **settings)


@pytest.mark.parametrize("place", ["", "books/1.0.0"])
def test_documents(data_dir, place):
    source = open_source(config(data_dir / place, name_field="book_title"))
    found = [reference() for reference in source.references()]
    assert source.num_documents == len(found) == 5
    assert [document.split for document in found] == ["train"] * 3 + ["validation", "test"]
    assert sorted(document.name for document in found) == ["test 0", "train 0", "train 1", "train 2", "validation 0"]
    assert found[4].text == "Once, in test…\n" * 1000


def test_needs_no_tensorflow(data_dir):
    script = (
        "import sys\n"
        "from meliad_like.sources.base import open_source\n"
        "from meliad_like.sources.records import TfdsSource\n"
        f"source = open_source({config(data_dir)!r})\n"
        "print(sum(len(reference().text) for reference in source.references()))\n"
        "assert 'tensorflow' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 3 * 16_000 + 21_000 + 15_000


def test_missing_dataset(data_dir):
    with pytest.raises(UserError, match="has no dataset 'pg19' .* tfds build pg19 --file_format=array_record"):
        open_source(TfdsSource(folder=str(data_dir)))


def test_a_bucket():
    with pytest.raises(UserError, match="is read from a disk alone: copy gs://bucket/books to one"):
        open_source(TfdsSource(folder="gs://bucket/books"))


def test_missing_field(data_dir):
    source = open_source(TfdsSource(folder=str(data_dir), dataset="books"))
    with pytest.raises(UserError, match="has no field 'text'; it has 'book_text', 'book_title'"):
        next(iter(source.references()))()


def test_format_that_needs_tensorflow(data_dir, tmp_path):
    folder = tmp_path / "1.0.0"
    folder.mkdir()
    for file in (data_dir / "books/1.0.0").glob("*.json"):
        (folder / file.name).write_text(file.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(UserError, match="tfrecord format, which needs TensorFlow"):
        open_source(config(folder))
