"""What recurrent states hold: what a model's wrong answers say of it, and how alike the states are.

    python benchmarks/memory_contents.py FOLDER/fixed_skip-0 FOLDER/fixed_skip-1 FOLDER/fixed_skip-2

Reads the test documents of associative recall by models of `experiments memory_map`, and prints two tables. The first
has by the number of pairs, with one and two blocks of filler, the share of right answers, that of the wrong ones which
are the value of another pair of the document, and the same for guesses among all wrong values. The second has, by model
and layer, of what the states after two blocks with 8 pairs differ by between documents: the share that all states have
in common, and the effective number of different states, exp of the entropy of the squared singular values.
"""

import argparse
from collections.abc import Sequence

import numpy as np

import meliad_like
from meliad_like.data.memory_source import ANSWERS, PAIRS, VALUES, Cell, MemoryTasksSource
from meliad_like.tables import Table

DISTANCES = (1, 2)
NUM_PAIRS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="+", help="of several seeds, whose answers are counted together")
    names = parser.parse_args().checkpoint
    models = [meliad_like.load(name) for name in names]
    source = models[0].opened.run.source
    assert isinstance(source, MemoryTasksSource)
    header = ("pairs", "questions", "right", "of the wrong: another pair's value", "of guesses")
    print(Table("", header, [_answers(models, source, items) for items in source.items]).to_markdown())
    rows = [row for name, model in zip(names, models, strict=True) for row in _states(name, model, source)]
    print(Table("", ("model", "states", "in common", "different states"), rows).to_markdown())


def _texts(source: MemoryTasksSource, items: int, distances: Sequence[int]) -> list[str]:
    cells = [Cell("recall", items, distance) for distance in distances]
    return [source.document("test", cell, number).text for cell in cells for number in range(source.cell_documents)]


def _answers(models: Sequence[meliad_like.LanguageModel], source: MemoryTasksSource, items: int) -> tuple[str, ...]:
    texts = _texts(source, items, DISTANCES)
    right = np.array([ANSWERS.index(text[-1]) for text in texts])
    # By document and value: whether it is the value of a pair, and another one than the right one.
    others = np.zeros((len(texts), len(VALUES)), bool)
    for document, text in enumerate(texts):
        others[document, [PAIRS.index(pair) % len(VALUES) for pair in text[:items]]] = True
        others[document, right[document]] = False
    given = np.concatenate([_given(model, texts) for model in models])
    right, others = np.tile(right, len(models)), np.tile(others, (len(models), 1))
    wrong = given != right
    if not wrong.any():
        return f"{items}", f"{len(given)}", "1.00", "-", "-"
    misplaced, guessed = others[np.arange(len(given)), given][wrong].mean(), others[wrong].sum(axis=1).mean()
    shares = 1 - wrong.mean(), misplaced, guessed / (len(VALUES) - 1)
    return f"{items}", f"{len(given)}", *(f"{share:.2f}" for share in shares)


def _given(model: meliad_like.LanguageModel, texts: list[str]) -> np.ndarray:
    """The most likely of all values as the answer to each document's question."""
    answers = np.concatenate([model.vocabulary.encode(answer) for answer in ANSWERS])
    return np.array([np.argmax(model.forward(text[:-1]).logits[-1][answers]) for text in texts])


def _states(name: str, model: meliad_like.LanguageModel, source: MemoryTasksSource) -> list[tuple[str, ...]]:
    # The last token is not read yet, so the states are those after two blocks.
    texts = [text[: 2 * source.block_length + 1] for text in _texts(source, NUM_PAIRS, DISTANCES[1:])]
    found = [model.read(text).arrays for text in texts]
    rows = []
    for place in (place for place in found[0] if place.endswith("/recurrent_states/states")):
        states = np.stack([arrays[place] for arrays in found]).astype(float)
        own = states - states.mean(axis=0)
        common = own.mean(axis=1, keepdims=True)
        in_common = (common**2).sum() * own.shape[1] / (own**2).sum()
        energy = np.linalg.svd(own, compute_uv=False) ** 2
        energy /= energy.sum(axis=1, keepdims=True)
        number = np.exp(-(energy * np.log(energy + 1e-30)).sum(axis=1)).mean()
        rows.append((f"{name}, {place}", f"{own.shape[1]}", f"{in_common:.3f}", f"{number:.1f}"))
    return rows


if __name__ == "__main__":
    main()
