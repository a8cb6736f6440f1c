"""Documents in memory whose tokens encode their document and position."""

import numpy as np

from meliad_like.data.split import Documents

STRIDE = 1000


class FakeSplit(Documents):
    """Token `position` of document `document` is STRIDE * document + position."""

    def __init__(self, lengths):
        lengths, indices = np.array(lengths, np.int64), np.arange(len(lengths))
        super().__init__([f"document_{index}" for index in indices], lengths, lengths, lengths, self.read, indices)

    def read(self, document, start, stop):
        return np.arange(start, stop, dtype=np.int32) + STRIDE * document
