"""A trained model in Python: score texts, read them, and continue from what was read any number of times.

    import meliad_like

    lm = meliad_like.load("runs/quickstart")
    lm.score("import os").bits_per_byte
    book = lm.read(open("book.txt").read())
    print(lm.generate(book, tokens=200, temperature=0.7))
    book.save("book.npz")
    book = lm.resume("book.npz")

`read_batch`, `score_batch` and so on take lists of texts or states, compute them as one batch, and return lists. A text
in a batch has the results of this text alone, up to rounding.
"""

from meliad_like.library.language_model import LanguageModel, SearchSettings, Text, WritingSettings, load
from meliad_like.library.results import Continuation, Hypothesis, Outputs, Score, State

__all__ = [
    "Continuation",
    "Hypothesis",
    "LanguageModel",
    "Outputs",
    "Score",
    "SearchSettings",
    "State",
    "Text",
    "WritingSettings",
    "load",
]
