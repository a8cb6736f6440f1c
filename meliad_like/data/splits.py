"""The rule that assigns documents to splits."""

import hashlib
from dataclasses import dataclass

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class SplitRule:
    """Assigns documents to splits by the first of these that applies:

    1. Lists of names, if there are any: all documents that they do not name are for training.
    2. The folder or file of the document, if it is named after a split.
    3. A hash of the document's name, so that a document stays in its split when the collection grows.
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
        """The split of the document `name`; `found_in` is the split after which its folder is named, if any."""
        if self.listed:
            if name in self.test_documents:
                return "test"
            return "validation" if name in self.validation_documents else "train"
        if found_in is not None:
            return found_in
        # The first 64 bits of SHA-256, as a fraction: [0, test) [test, test + validation) [the rest: train).
        # A name from JSON may contain half a surrogate pair.
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).digest()
        fraction = int.from_bytes(digest[:8], "big") / 2**64
        if fraction < self.test_share:
            return "test"
        return "validation" if fraction < self.test_share + self.validation_share else "train"

    @property
    def listed(self) -> frozenset[str]:
        """All names in the lists."""
        return self.validation_documents | self.test_documents
