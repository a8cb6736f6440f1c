"""Documents that measure a memory, and the study that counts a model's right answers."""

import csv
import json
import re
from itertools import permutations

import jax
import numpy as np
import pytest
from study_runs import Page, assert_safe, make, one_device
from tiny_run import ONE_LAYER, train

from meliad_like import config
from meliad_like.conversion.parameters import write_checkpoint
from meliad_like.data.preparation import prepare
from meliad_like.data.readers import LanesReader
from meliad_like.errors import UserError
from meliad_like.experiments.maps import draw_maps, gather_maps, maps_to_markdown
from meliad_like.experiments.report import scores_file
from meliad_like.experiments.tables import SUBJECTS
from meliad_like.models.model import Model
from meliad_like.studies import memory_map
from meliad_like.studies.memory_map import accuracies, bits_of_answer, grids, summary, wilson
from meliad_like.studies.memory_source import (
    ANSWERS,
    FILLER,
    KEYS,
    PAIRS,
    PERMUTATIONS,
    TASKS,
    VALUES,
    Cell,
    MemoryTasksSource,
)
from meliad_like.studies.readings import StudyRequest

__all__ = ["one_device"]  # a fixture

WINDOW = 16
SMALL = MemoryTasksSource(
    tasks=tuple(TASKS), items=(2, 4), distances=(0, 3), block_length=WINDOW, train_documents=60, cell_documents=2
)


def documents(source):
    return [reference() for reference in source.open().references()]


@pytest.fixture(scope="module")
def small():
    return documents(SMALL)


def parts(document):
    """What is written, the filler, and the pairs (question, answer) of a document."""
    cell = Cell.of_name(document.name)
    size = cell.items * (2 if cell.task == "overwritten" else 1)
    first = size + cell.distance * SMALL.block_length
    asked = re.findall(rf"([^{ANSWERS}]+)([{ANSWERS}])", document.text[first:])
    return document.text[:size], document.text[size:first], asked


def solve(task, written, question):
    """The answer, from the text alone."""
    if task == "parity":
        return sum(int(value, 16) % 2 for value in written) % 2
    if task == "permutations":
        place = VALUES.index(question[1])
        for value in written:
            place = PERMUTATIONS[VALUES.index(value)][place]
        return place
    asked = [pair for pair in map(PAIRS.index, written) if pair // len(VALUES) == KEYS.index(question)]
    return asked[-1] % len(VALUES)


def test_answers_are_right(small):
    for document in small:
        task = Cell.of_name(document.name).task
        written, _, asked = parts(document)
        assert asked, document
        for question, answer in asked:
            assert solve(task, written, question) == ANSWERS.index(answer), document


def test_documents_depend_on_the_seed_alone(small):
    assert documents(SMALL) == small
    assert documents(MemoryTasksSource(items=(4,), train_documents=9, seed=1)) != documents(
        MemoryTasksSource(items=(4,), train_documents=9)
    )


def test_a_phone_book_needs_no_distance():
    source = MemoryTasksSource(tasks=("phone_book", "recall"), distances=(1,), train_documents=20, cell_documents=1)
    assert {Cell.of_name(document.name)[::2] for document in documents(source)} == {("phone_book", 0), ("recall", 1)}


def test_splits_share_no_problem():
    """Of one key and value there are only 1,024 problems, so that training sees nearly all that are its own."""
    source = MemoryTasksSource(items=(1,), distances=(0,), train_documents=2000, cell_documents=50)
    made = documents(source)
    found = {split: {d.text[0] for d in made if d.split == split} for split in ("train", "test")}
    assert len(found["train"]) > 700 and len(found["test"]) > 15
    assert not found["train"] & found["test"]
    with pytest.raises(UserError, match="parity with 1 items has no problem for test: leave 1 out of"):
        documents(MemoryTasksSource(tasks=("parity",), items=(1,), train_documents=1, test_share=1e-9))


def test_the_filler_gives_nothing_away():
    """The best linear guess of the answer from the filler stays at chance; from the written values it does not."""
    source = MemoryTasksSource(items=(8,), distances=(1,), train_documents=3000, train_questions=1, cell_documents=1)
    found = [document for document in documents(source) if document.split == "train"]
    answers = np.array([ANSWERS.index(document.text[-1]) for document in found])

    def deviations(symbols, place, number):
        """How many standard deviations the right guesses of the last 1,000 answers are above chance."""
        read = np.array([[symbols.index(symbol) % number for symbol in document.text[place]] for document in found])
        inputs = np.eye(number)[read].reshape(len(found), -1)
        weights = np.linalg.lstsq(inputs[:2000], np.eye(len(ANSWERS))[answers[:2000]], rcond=None)[0]
        correct = np.sum(np.argmax(inputs[2000:] @ weights, axis=1) == answers[2000:])
        chance = 1 / len(ANSWERS)
        return (correct - 1000 * chance) / np.sqrt(1000 * chance * (1 - chance))

    assert abs(deviations(FILLER, np.s_[8:40], len(FILLER))) < 4
    assert deviations(PAIRS, np.s_[:8], len(VALUES)) > 8  # the values of the pairs


def test_the_permutations_generate_all_of_five():
    reached = {tuple(range(5))}
    while True:
        further = {tuple(move[place] for place in found) for found in reached for move in PERMUTATIONS}
        if further <= reached:
            break
        reached |= further
    assert reached == set(permutations(range(5)))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory") / "store"
    run = config.parse(["task/memory_map.gin"])
    return prepare(SMALL, run.vocabulary, folder, num_workers=1)


def test_answers_alone_cost_loss(store, small):
    split = store.split("train")
    reader = LanesReader(split, 3, 64, WINDOW, epochs=1, shuffle=False)
    batches = [reader.batch(step, range(3)) for step in range(reader.num_steps)]
    targets = np.concatenate([batch.targets[batch.loss_mask] for batch in batches])
    expected = "".join(answer for d in small if d.split == "train" for _, answer in parts(d)[2])
    assert sorted(store.vocabulary.decode(targets)) == sorted(expected)
    # Everything is still read.
    assert KEYS[0] in store.vocabulary.decode(np.concatenate([batch.inputs.ravel() for batch in batches]))


def parse(store, *more):
    """A tiny run on the documents of `SMALL`."""
    source = {
        "tasks": SMALL.tasks, "items": SMALL.items, "distances": SMALL.distances, "block_length": WINDOW,
        "train_documents": SMALL.train_documents, "cell_documents": SMALL.cell_documents,
    }  # fmt: skip
    bindings = [f"MemoryTasksSource.{name} = {value!r}" for name, value in source.items()]
    bindings += [f"ReaderConfig.store = '{store.folder}'", *ONE_LAYER, *more]
    return config.parse(["size/tiny.gin", "block_recurrent/fixed_skip.gin", "task/memory_map.gin"], bindings)


@pytest.mark.thorough
def test_losses_are_not_by_byte(store, tmp_path, capsys):
    """Only answers cost loss, and the bytes are those of everything that is read."""
    run = parse(store, "TrainingConfig.num_steps = 1", "TrainingConfig.evaluate_every = 1", "MeshConfig.data = 1")
    train(run, tmp_path)
    assert re.search(r"step 1/1  0:00:00 left  [\d.]+ bits/token", printed := capsys.readouterr().out)
    assert re.search(r"step 1: [\d.]+ bits/token on validation", printed)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [row["kind"] for row in rows] == ["train", "validation"]
    assert all(row["bits_per_byte"] is None and row["bits_per_token"] > 0 for row in rows)
    assert rows[1]["word_perplexity"] is None


def test_the_study(store, tmp_path):
    run = parse(store)
    params = jax.jit(Model(run.model, store.vocabulary.size).init)(jax.random.key(0))
    write_checkpoint(tmp_path / "run" / "checkpoints", params, run, store.vocabulary, step=3)
    output = tmp_path / "map"
    make(memory_map, str(tmp_path / "run"), output)
    assert_safe(output)
    page = Page(output)
    assert "states cleared at every block" in page.text and "permutations, chance 0.200" in page.text
    rows = list(csv.DictReader((output / "map.csv").open(newline="")))
    # The phone book has no filler. Each cell has its documents, with one question each.
    assert len(rows) == 2 * (5 * 2 * 2 + 2) and {row["questions"] for row in rows} == {"2"}
    assert all(float(row["low"]) <= float(row["accuracy"]) <= float(row["high"]) for row in rows)
    with pytest.raises(UserError, match="--split=train has no whole grid"):
        memory_map.run(StudyRequest(str(tmp_path / "run"), split="train"))


def known(right):
    """The cells of a map of 4 and 8 items at distances 0 and 2, of 100 questions each: (items, distance) -> right."""
    return accuracies((f"recall/{p}/{d}/{i}", 1, int(i < n)) for (p, d), n in right.items() for i in range(100))


def test_cells_and_their_summary():
    cells = known({(4, 0): 100, (4, 2): 100, (8, 0): 80, (8, 2): 5})
    assert cells.accuracy.tolist() == [1, 1, 0.8, 0.05] and set(cells.chance) == {1 / 16}
    totals = summary(cells, block_length=32).set_index("items")
    low = wilson(np.array([100, 80]), np.array([100, 100]))[0]
    expected = [4 * bits_of_answer(low[0], 16), 8 * bits_of_answer(low[1], 16)]
    np.testing.assert_allclose(totals["capacity (bits)"], expected)
    # What 5 of 100 say is below chance.
    np.testing.assert_allclose(totals["beyond a block (bits)"], [expected[0], 0])
    np.testing.assert_array_equal(totals["halved at (tokens)"], [np.nan, 64])
    [(title, grid)] = grids({"a model": cells}).items()
    assert title == "a model: recall, chance 0.062"
    assert list(grid) == ["items", "0 blocks", "2 blocks"] and list(grid["items"]) == [4, 8]
    assert [text.split()[0] for _, *texts in grid.to_numpy() for text in texts] == ["1.00", "1.00", "0.80", "0.05"]


def test_a_map_counts_the_answers_of_all_seeds(tmp_path):
    rows = [SUBJECTS["memory_map"].row(name) for name in ("fixed_skip", "fixed_skip_cleared", "lstm_dual")]
    for row, seed, correct in ((rows[0], 0, 1), (rows[0], 1, 0), (rows[1], 1, 1)):
        file = scores_file(tmp_path, row, seed, "test")
        file.parent.mkdir(exist_ok=True)
        score = {"name": "recall/4/2/0", "num_tokens": 1, "num_correct": correct}
        file.write_text(json.dumps({"documents": [score, score | {"name": "recall/4/0/0"}]}))
    maps = gather_maps(rows, tmp_path, (0, 1), "test")
    # A row without results has no map; the control is evaluated by itself, and shares the folder of the training.
    assert list(maps) == ["Rec:fixed:skip", "Rec:fixed:skip, states cleared"]
    cells = maps["Rec:fixed:skip"]
    assert cells.questions.tolist() == [2, 2] and cells.accuracy.tolist() == [0.5, 0.5]
    text = maps_to_markdown(maps, block_length=32)
    assert "| Rec:fixed:skip | 0.50 | 0.50 |\n| Rec:fixed:skip, states cleared | 1.00 | 1.00 |" in text
    assert "Rec:fixed:skip, states cleared: recall, chance 0.062" in text and "| 4 | 0.50 (" in text
    draw_maps(maps, tmp_path / "maps.png")
    assert (tmp_path / "maps.png").stat().st_size > 1000


def test_intervals_and_bits():
    low, high = wilson(np.array([0, 5, 10]), np.array([10, 10, 10]))
    np.testing.assert_allclose(low, [0, 0.2366, 0.7225], atol=1e-4)
    np.testing.assert_allclose(high, [0.2775, 0.7634, 1], atol=1e-4)
    assert bits_of_answer(1.0, 16) == 4 and bits_of_answer(1 / 16, 16) == bits_of_answer(0, 16) == 0
    assert bits_of_answer(0.75, 2) == pytest.approx(1 - 0.8113, abs=1e-4)
