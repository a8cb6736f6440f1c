"""Documents in memory whose tokens encode their document and position."""

import numpy as np

STRIDE = 1000


class FakeSplit:
    """Token `position` of document `document` is STRIDE * document + position."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths, np.int64)
        self.num_bytes = self.num_words = self.lengths
        self.names = [f"document_{index}" for index in range(len(lengths))]

    @property
    def vocabulary_size(self):
        return STRIDE * len(self.lengths)

    def tokens(self, document, start, stop):
        assert 0 <= start < stop <= self.lengths[document]
        return np.arange(start, stop, dtype=np.int32) + STRIDE * document
