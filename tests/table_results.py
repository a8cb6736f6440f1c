"""Results of a table's rows, as a training and evaluation leave them."""

import json

from meliad_like.experiments.report import result_file

FIGURES = {
    "bits_per_token": 2.0, "bits_per_byte": 1.0, "perplexity": 7.5, "word_perplexity": 40.0, "tokens_per_word": 1.5,
    "num_documents": 2, "num_bytes": 5000, "num_tokens": 2500, "max_tokens": None, "tokens_per_second": 5000.0,
}  # fmt: skip
FACTS = {
    "segment_length": 256, "window_length": 32, "num_states": 32, "cache_length": 0, "share_of_first_stage": 0.25,
    "tokens_per_step": 512, "num_steps": 1800, "parameters": 1000, "parameters_without_embedding": 900,
    "training_flops_per_token": 2_000_000.0, "vocabulary_size": 257, "device": "CPU with 2 cores", "seconds": 60.0,
}  # fmt: skip


def write_result(folder, row, seed: int = 0, **figures) -> None:
    """Writes a row's result on the test split; `figures` replace some of FIGURES."""
    path = result_file(folder, row, seed)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(FACTS | {"seed": seed, "splits": {"test": FIGURES | figures}}))


def table_rows(markdown: str) -> dict[str, dict[str, str]]:
    """The cells of a report's first table by label and header."""
    header, _, *lines = [line.strip("| ").split(" | ") for line in markdown.splitlines() if " | " in line]
    return {line[0]: dict(zip(header, line)) for line in lines}
