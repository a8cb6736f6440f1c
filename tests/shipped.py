"""What `--gin_file` names among the shipped files, for tests of everything."""

from meliad_like.config import shipped_files, shipped_rows

NAMES = [*shipped_files(), *shipped_rows()]


def needs(name: str) -> list[str]:
    """The gin files without which a shipped file says nothing: options of recurrent states need a row that has them."""
    return ["block_recurrent/fixed_skip.gin"] if name.startswith(("option/clear_states", "option/sharp_states")) else []


def vocabulary_size(name: str) -> int:
    """The vocabulary with which parameters are counted: 32,000, or that of the model or the corpus."""
    if name.startswith(("pretrained/", "recurrent_pretrained/")):
        return 49_152 if "smollm2" in name else 50_257
    if name.startswith(("shortformer/table11/", "shortformer/table12/", "shortformer/book_corpus")):
        return 29_000
    return 267_744 if name.startswith("shortformer/") else 32_000
