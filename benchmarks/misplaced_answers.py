"""What wrong answers say: whether a memory has lost the values, or only to which keys they belong.

    python benchmarks/misplaced_answers.py FOLDER/fixed_skip-0 FOLDER/fixed_skip-1 FOLDER/fixed_skip-2

Reads the test documents of associative recall with one and two blocks of filler, by models of `experiments memory_map`,
and prints by the number of pairs the share of right answers, that of the wrong ones which are the value of another
pair of the document, and how many of the other values these are, which is what a guess of a wrong value would give.
"""

import argparse

import numpy as np

import meliad_like
from meliad_like.data.memory_source import ANSWERS, PAIRS, VALUES, Cell, MemoryTasksSource
from meliad_like.tables import Table

DISTANCES = (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="+", help="of several seeds, whose answers are counted together")
    models = [meliad_like.load(checkpoint) for checkpoint in parser.parse_args().checkpoint]
    source = models[0].opened.run.source
    assert isinstance(source, MemoryTasksSource)
    rows = []
    for items in source.items:
        cells = [Cell("recall", items, distance) for distance in DISTANCES]
        texts = [source.document("test", cell, i).text for cell in cells for i in range(source.cell_documents)]
        right = np.array([ANSWERS.index(text[-1]) for text in texts])
        # By document and value: whether it is the value of a pair, and another one than the right one.
        others = np.zeros((len(texts), len(VALUES)), bool)
        for document, text in enumerate(texts):
            others[document, [PAIRS.index(pair) % len(VALUES) for pair in text[:items]]] = True
            others[document, right[document]] = False
        given = np.concatenate([_answers(model, texts) for model in models])
        right, others = np.tile(right, len(models)), np.tile(others, (len(models), 1))
        wrong = given != right
        misplaced = others[np.arange(len(given)), given][wrong].mean()
        guess = others[wrong].mean() * len(VALUES) / (len(VALUES) - 1)
        rows.append((f"{items}", f"{len(given)}", f"{1 - wrong.mean():.2f}", f"{misplaced:.2f}", f"{guess:.2f}"))
    header = ("pairs", "questions", "right", "of the wrong: another pair's value", "by a guess")
    print(Table("", header, rows).to_markdown())


def _answers(model: meliad_like.LanguageModel, texts: list[str]) -> np.ndarray:
    """The most likely of all values as the answer to each document's question."""
    answers = np.concatenate([model.vocabulary.encode(answer) for answer in ANSWERS])
    return np.array([np.argmax(model.forward(text[:-1]).logits[-1][answers]) for text in texts])


if __name__ == "__main__":
    main()
