"""Which split a document belongs to."""

import hashlib
from dataclasses import dataclass

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class SplitRule:
    """Assigns documents to splits by the first of these that applies:

    1. Lists of names, if there are any: what they do not name is for training.
    2. The folder or file that the document lies in, where those are named after splits.
    3. A hash of the document's name, so that a document stays in its split while a collection grows.
    """

    validation_documents: frozenset[str]
    """Names listed for validation."""
    test_documents: frozenset[str]
    """Names listed for test."""
    validation_share: float
    """Share of documents that rule 3 gives to validation."""
    test_share: float
    """Share of documents that rule 3 gives to test."""

    def __call__(self, name: str, found_in: str | None = None) -> str:
        """The split of the document `name`, which lies in a folder of the split `found_in` (None: in none)."""
        if self.listed:
            if name in self.test_documents:
                return "test"
            return "validation" if name in self.validation_documents else "train"
        if found_in is not None:
            return found_in
        # The first 64 bits of SHA-256, as a fraction: [0, test) [test, test + validation) [the rest: train).
        # JSON may put half a surrogate pair into a name.
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).digest()
        fraction = int.from_bytes(digest[:8], "big") / 2**64
        if fraction < self.test_share:
            return "test"
        return "validation" if fraction < self.test_share + self.validation_share else "train"

    @property
    def listed(self) -> frozenset[str]:
        """All names that the lists have."""
        return self.validation_documents | self.test_documents
