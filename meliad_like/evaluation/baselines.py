"""General-purpose compressors on the same documents, for comparison.

Each document is compressed separately, because the model also reads each document with an empty memory. All documents
together would compress better, as they might with a model that is not reset between documents.
"""

import functools
import lzma
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from meliad_like.data.subset import Documents
from meliad_like.data.vocabulary import Vocabulary

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip -9": functools.partial(zlib.compress, level=9, wbits=zlib.MAX_WBITS | 16),
    "xz -9": functools.partial(lzma.compress, preset=9),
}


def compressed_bits_per_byte(split: Documents, documents: Iterable[int], vocabulary: Vocabulary) -> dict[str, float]:
    """Bits per byte of each compressor, file headers included.

    The vocabulary decodes the documents' tokens into the text that the model has to predict. If that is not exactly the
    original text (`lossless` is False), both model and compressors are spared the difference, and the bytes are still
    those of the original.
    """
    documents = np.asarray(list(documents))

    def sizes(document: int) -> list[int]:
        text = vocabulary.decode_bytes(split.tokens(document, 0, int(split.lengths[document])))
        return [len(compress(text)) for compress in COMPRESSORS.values()]

    # zlib and lzma release the interpreter lock.
    with ThreadPoolExecutor() as pool:
        totals = np.sum(list(pool.map(sizes, documents.tolist())), axis=0)
    num_bytes = int(np.asarray(split.num_bytes)[documents].sum())
    return {name: 8 * int(total) / num_bytes for name, total in zip(COMPRESSORS, totals, strict=True)}
