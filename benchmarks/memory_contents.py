"""What recurrent states hold: how alike they are, and what the wrong answers of a memory map say.

    python benchmarks/memory_contents.py FOLDER/fixed_skip-0 FOLDER/fixed_skip-1 FOLDER/fixed_skip-2

The first table has, by model and layer, of what the states differ by from text to text: the share that all states of
the layer have in common, and the effective number of different states, exp of the entropy of the squared singular
values. The texts are of a segment's length, from 40 places of the test split; for `experiments memory_map` they are
the first two blocks of test documents with 8 pairs.

For such models, a second table has by the number of pairs, with one and two blocks of filler, the share of right
answers, that of the wrong ones which are the value of another pair of the document, and the same for guesses among all
wrong values.
"""

import argparse
from collections.abc import Sequence

import numpy as np

import meliad_like
from meliad_like.data.token_store import TokenStore
from meliad_like.studies.memory_source import ANSWERS, PAIRS, VALUES, Cell, MemoryTasksSource
from meliad_like.tables import Table

DISTANCES = (1, 2)
NUM_PAIRS = 8
NUM_TEXTS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="+", help="of several seeds, whose answers are counted together")
    names = parser.parse_args().checkpoint
    models = [meliad_like.load(name) for name in names]
    rows = [row for name, model in zip(names, models, strict=True) for row in _states(name, model)]
    print(Table("", ("model and layer", "states", "in common", "different states"), rows).to_markdown())
    source = models[0].opened.run.source
    if isinstance(source, MemoryTasksSource):
        header = ("pairs", "questions", "right", "of the wrong: another pair's value", "of guesses")
        print(Table("", header, [_answers(models, source, items) for items in source.items]).to_markdown())


def _texts(source: MemoryTasksSource, items: int, distances: Sequence[int]) -> list[str]:
    cells = [Cell("recall", items, distance) for distance in distances]
    return [source.document("test", cell, number).text for cell in cells for number in range(source.cell_documents)]


def _answers(models: Sequence[meliad_like.LanguageModel], source: MemoryTasksSource, items: int) -> tuple[str, ...]:
    texts = _texts(source, items, DISTANCES)
    right = np.array([ANSWERS.index(text[-1]) for text in texts])
    # By document and value: whether it is the value of a pair, and another one than the right one.
    other_values = np.zeros((len(texts), len(VALUES)), bool)
    for document, text in enumerate(texts):
        other_values[document, [PAIRS.index(pair) % len(VALUES) for pair in text[:items]]] = True
        other_values[document, right[document]] = False
    answers = np.concatenate([_given(model, texts) for model in models])
    right, other_values = np.tile(right, len(models)), np.tile(other_values, (len(models), 1))
    wrong = answers != right
    if not wrong.any():
        return f"{items}", f"{len(answers)}", "1.00", "-", "-"
    misplaced, guessed = (
        other_values[np.arange(len(answers)), answers][wrong].mean(),
        other_values[wrong].sum(axis=1).mean(),
    )
    shares = 1 - wrong.mean(), misplaced, guessed / (len(VALUES) - 1)
    return f"{items}", f"{len(answers)}", *(f"{share:.2f}" for share in shares)


def _given(model: meliad_like.LanguageModel, texts: list[str]) -> np.ndarray:
    """The most likely of all values as the answer to each document's question."""
    answers = np.concatenate([model.vocabulary.encode(answer) for answer in ANSWERS])
    return np.array([np.argmax(model.forward(text[:-1]).logits[-1][answers]) for text in texts])


def _beginnings(model: meliad_like.LanguageModel) -> Sequence[str | np.ndarray]:
    """Texts of which the last token is not in the states yet."""
    run = model.opened.run
    if isinstance(run.source, MemoryTasksSource):
        return [text[: 2 * run.source.block_length + 1] for text in _texts(run.source, NUM_PAIRS, DISTANCES[1:])]
    split, length = TokenStore(run.data.store).split("test"), run.data.segment_length + 1
    whole = split.concatenated(model.vocabulary.end_of_document)
    starts = np.linspace(1, whole.lengths[0] - length, NUM_TEXTS).astype(int).tolist()
    return [whole.tokens(0, start, start + length) for start in starts]


def _states(name: str, model: meliad_like.LanguageModel) -> list[tuple[str, ...]]:
    texts = _beginnings(model)
    states_of_texts = [model.read(text).arrays for text in texts]
    rows = []
    for place in (place for place in states_of_texts[0] if place.endswith("/recurrent_states/states")):
        states = np.stack([arrays[place] for arrays in states_of_texts]).astype(float)
        centred = states - states.mean(axis=0)
        common = centred.mean(axis=1, keepdims=True)
        in_common = (common**2).sum() * centred.shape[1] / (centred**2).sum()
        energy = np.linalg.svd(centred, compute_uv=False) ** 2
        energy /= energy.sum(axis=1, keepdims=True)
        number = np.exp(-(energy * np.log(energy + 1e-30)).sum(axis=1)).mean()
        rows.append(
            (f"{name}, layer {place.split('/')[1]}", f"{centred.shape[1]}", f"{in_common:.3f}", f"{number:.1f}")
        )
    return rows


if __name__ == "__main__":
    main()
