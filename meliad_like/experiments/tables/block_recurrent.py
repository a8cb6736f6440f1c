"""The rows of tables 1, 3, 4 and 5 of Block-Recurrent Transformers (arXiv:2203.07852), and the paper's own figures."""

from collections.abc import Iterator, Sequence

from meliad_like.config import shipped_files
from meliad_like.experiments.tables.table import MEASURES, Panel, Row, Table

FOLDER = "block_recurrent"


def _table1() -> Table:
    columns = ("step time", "PG19 bytes", "PG19 tokens", "arXiv", "GitHub")
    figures: Sequence[tuple] = (
        ("xl_512", "XL:512", 0.88, 1.01, 3.62, 1.45, 1.21),
        ("xl_1024", "XL:1024", 1.20, 0.997, 3.59, 1.37, 1.08),
        ("xl_2048", "XL:2048", 2.11, 0.990, 3.58, 1.31, 1.01),
        ("slide_12l", "Slide:12L", 0.93, 0.989, 3.60, 1.43, 1.19),
        ("slide_13l", "Slide:13L", 1.00, 0.989, 3.58, 1.42, 1.17),
        ("lstm_dual", "Rec:lstm:dual", 1.06, 0.985, 3.54, 1.26, 1.01),
        ("lstm_single", "Rec:lstm:single", 1.05, 0.962, 3.54, 1.29, 1.03),
        ("lstm_skip", "Rec:lstm:skip", 1.00, 0.969, 3.56, 1.31, 1.10),
        ("fixed_dual", "Rec:fixed:dual", 1.01, 0.957, 3.52, 1.27, 0.991),
        ("fixed_single", "Rec:fixed:single", 1.02, 0.966, 3.58, 1.25, 1.00),
        ("fixed_skip", "Rec:fixed:skip", 0.99, 0.952, 3.53, 1.24, 0.976),
        ("feedback_lstm_single", "Feedback:lstm:single", 1.40, 0.977, 3.50, 1.22),
        ("feedback_fixed_skip", "Feedback:fixed:skip", 1.35, 0.935, 3.49, 1.24),
        ("memorizing_64k", "Memorizing Trans. 64k", 1.94, 0.950, 3.53, 1.22),
    )
    rows = tuple(
        Row(name, label, (f"{FOLDER}/{name}.gin",), "slide_13l", dict(zip(columns, values)))
        for name, label, *values in figures
    )
    rows += tuple(_further_rows())
    panels = (Panel("bits_per_byte", "PG19 bytes"), Panel("step_time", "step time", comparable=True))
    return Table("table1", "Table 1: recurrence and its baselines", rows, panels)


def _further_rows() -> Iterator[Row]:
    """Mechanisms that came after the paper, each in a gin file of `gin/mechanism`, at the same sizes."""
    for file in shipped_files():
        if file.startswith("mechanism/"):
            name = file.removeprefix("mechanism/").removesuffix(".gin")
            yield Row(name, name.replace("_", " ").capitalize(), (file,), "slide_13l")


def _table3() -> Table:
    column, folder = "PG19 tokens", f"{FOLDER}/table3"
    windows = {128: (3.58, 3.69), 256: (3.54, 3.64), 512: (3.53, 3.60)}
    states = {128: 3.54, 256: 3.535, 512: 3.53, 1024: 3.51, 2048: 3.55}
    models = {"recurrent": "Rec:fixed:skip", "slide": "Slide:12L"}
    rows, by_window = [], {}
    for i, (kind, model) in enumerate(models.items()):
        by_window[f"{model}, by window"] = names = [f"{kind}_window_{window}" for window in windows]
        for name, (window, values) in zip(names, windows.items(), strict=True):
            label, baseline = f"{model}, window {window}", f"slide_window_{window}"
            rows.append(Row(name, label, (f"{folder}/{name}.gin",), baseline, {column: values[i]}))
    for number, value in states.items():
        name, shares = f"states_{number}", "recurrent_window_512" if number == 512 else ""
        label, files = f"Rec:fixed:skip, {number} states", (f"{folder}/{name}.gin",)
        rows.append(Row(name, label, files, "states_512", {column: value}, shares))
    window_of = {f"{kind}_window_{window}": window for kind in models for window in windows}
    states_of = {f"states_{number}": number for number in states}
    panels = (
        Panel("bits_per_token", column, "window_length", by_window, window_of),
        Panel("bits_per_token", column, "num_states", {"Rec:fixed:skip, by states": [*states_of]}, states_of),
    )
    return Table("table3", "Table 3: the window's size and the number of states", tuple(rows), panels)


def _table4() -> Table:
    column = "PG19 tokens"
    figures = {
        "40m": (40.6e6, 3.96, 4.03),
        "81m": (81.2e6, 3.79, 3.86),
        "162m": (162e6, 3.59, 3.67),
        "325m": (325e6, 3.44, 3.51),
        "650m": (650e6, 3.29, 3.39),
        "1300m": (1.3e9, 3.22, 3.31),
    }
    models = {"recurrent": "Rec:fixed:skip", "xl": "XL:512"}
    # Of the four smaller sizes and of the two larger ones.
    num_layers = {"recurrent": (12, 24), "xl": (13, 26)}
    rows, paper_x, lines = [], {}, {}
    for i, (kind, model) in enumerate(models.items()):
        lines[model] = [f"{kind}_{size}" for size in figures]
        for name, (size, (parameters, *values)) in zip(lines[model], figures.items(), strict=True):
            label = f"{model}, {num_layers[kind][parameters > 5e8]} layers, {size.upper()}"
            paper = {"parameters": parameters, column: values[i]}
            rows.append(Row(name, label, (f"{FOLDER}/table4/{name}.gin",), f"xl_{size}", paper))
            paper_x[name] = parameters
    panel = Panel("bits_per_token", column, "parameters_without_embedding", lines, paper_x)
    return Table("table4", "Table 4 and figure 3: sizes", tuple(rows), (panel,))


def _table5() -> Table:
    columns = ("token count", "scale factor", "bits per token", "word perplexity")
    figures = {
        "bytes": (256, 41_288_269, 5.9267, 0.960, 51.61),
        "sentencepiece_512": (512, 18_124_332, 2.6016, 2.125, 46.16),
        "sentencepiece_1k": (1_000, 15_865_499, 2.2774, 2.477, 49.91),
        "sentencepiece_4k": (4_000, 12_622_101, 1.8118, 3.021, 44.43),
        "sentencepiece_8k": (8_000, 11_559_455, 1.6593, 3.289, 43.94),
        "sentencepiece_32k": (32_000, 10_229_476, 1.4684, 3.647, 40.93),
        "sentencepiece_64k": (64_000, 9_856_687, 1.4149, 3.766, 40.18),
        "sentencepiece_96k": (96_000, 9_711_259, 1.3940, 3.801, 39.36),
        "sentencepiece_128k": (128_000, 9_638_472, 1.3835, 3.830, 39.37),
    }
    rows = tuple(
        Row(
            name,
            name.replace("_", " ").replace("sentencepiece", "SentencePiece"),
            (f"{FOLDER}/table5/{name}.gin",),
            "bytes",
            dict(zip(columns, values)),
            vocabulary_size=size,
        )
        for name, (size, *values) in figures.items()
    )
    paper_x = {row.name: row.vocabulary_size for row in rows}
    measured = {"tokens_per_word": "scale factor", "bits_per_token": "bits per token"}
    panels = tuple(
        Panel(measure, paper, "vocabulary_size", {"Rec:fixed:skip": [*paper_x]}, paper_x)
        for measure, paper in measured.items()
    )
    measures = (*MEASURES, "vocabulary_size", "num_tokens", "tokens_per_word", "word_perplexity")
    return Table("table5", "Table 5 and figure 7: vocabularies", rows, panels, measures)


TABLES = {table.name: table for table in (_table1(), _table3(), _table4(), _table5())}
