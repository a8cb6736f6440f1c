"""The rows of tables 1, 3, 4 and 5 of Block-Recurrent Transformers (arXiv:2203.07852), and the paper's own figures."""

from collections.abc import Mapping

from meliad_like.config import shipped_files
from meliad_like.experiments.tables.table import MEASURES, Panel, Row, Table

TOKENS = "PG19 tokens"


def _row(name: str, label: str, baseline: str, paper: Mapping[str, float], folder: str = "", **more) -> Row:
    return Row(name, label, (f"block_recurrent/{folder}{name}.gin",), baseline, paper, **more)


def _table1() -> Table:
    columns = ("step time", "PG19 bytes", TOKENS, "arXiv", "GitHub")
    figures = (
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
    rows = [_row(name, label, "slide_13l", dict(zip(columns, values))) for name, label, *values in figures]
    # Mechanisms that came after the paper, each in a gin file of its own, at the same sizes.
    for file in shipped_files():
        if file.startswith("mechanism/"):
            name = file.removeprefix("mechanism/").removesuffix(".gin")
            rows.append(Row(name, name.replace("_", " ").capitalize(), (file,), "slide_13l"))
    panels = (Panel("bits_per_byte", "PG19 bytes"), Panel("step_time", "step time", comparable=True))
    return Table("table1", "Table 1: recurrence and its baselines", tuple(rows), panels)


def _table3() -> Table:
    windows = {128: (3.58, 3.69), 256: (3.54, 3.64), 512: (3.53, 3.60)}
    states = {128: 3.54, 256: 3.535, 512: 3.53, 1024: 3.51, 2048: 3.55}
    rows, by_window = [], {}
    for i, (kind, model) in enumerate({"recurrent": "Rec:fixed:skip", "slide": "Slide:12L"}.items()):
        by_window[f"{model}, by window"] = {f"{kind}_window_{window}": window for window in windows}
        for window, values in windows.items():
            name, label = f"{kind}_window_{window}", f"{model}, window {window}"
            rows.append(_row(name, label, f"slide_window_{window}", {TOKENS: values[i]}, "table3/"))
    for number, value in states.items():
        name, label = f"states_{number}", f"Rec:fixed:skip, {number} states"
        same = "recurrent_window_512" if number == 512 else ""
        rows.append(_row(name, label, "states_512", {TOKENS: value}, "table3/", trained_as=same))
    by_states = {"Rec:fixed:skip, by states": {f"states_{number}": number for number in states}}
    panels = (
        Panel("bits_per_token", TOKENS, "window_length", by_window),
        Panel("bits_per_token", TOKENS, "num_states", by_states),
    )
    return Table("table3", "Table 3: the window's size and the number of states", tuple(rows), panels)


def _table4() -> Table:
    figures = {
        "40m": (40.6e6, 3.96, 4.03),
        "81m": (81.2e6, 3.79, 3.86),
        "162m": (162e6, 3.59, 3.67),
        "325m": (325e6, 3.44, 3.51),
        "650m": (650e6, 3.29, 3.39),
        "1300m": (1.3e9, 3.22, 3.31),
    }
    rows, lines = [], {}
    # The last two are the numbers of layers of the four smaller sizes and of the two larger ones.
    for i, (kind, model, *layers) in enumerate((("recurrent", "Rec:fixed:skip", 12, 24), ("xl", "XL:512", 13, 26))):
        lines[model] = {f"{kind}_{size}": parameters for size, (parameters, *_) in figures.items()}
        for size, (parameters, *values) in figures.items():
            label = f"{model}, {layers[parameters > 5e8]} layers, {size.upper()}"
            paper = {"parameters": parameters, TOKENS: values[i]}
            rows.append(_row(f"{kind}_{size}", label, f"xl_{size}", paper, "table4/"))
    panel = Panel("bits_per_token", TOKENS, "parameters_without_embedding", lines)
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
    rows = []
    for name, (size, *values) in figures.items():
        label, paper = name.replace("_", " ").replace("sentencepiece", "SentencePiece"), dict(zip(columns, values))
        rows.append(_row(name, label, "bytes", paper, "table5/", vocabulary_size=size))
    line = {"Rec:fixed:skip": {row.name: row.vocabulary_size for row in rows}}
    panels = (
        Panel("tokens_per_word", "scale factor", "vocabulary_size", line),
        Panel("bits_per_token", "bits per token", "vocabulary_size", line),
    )
    measures = (*MEASURES, "vocabulary_size", "num_tokens", "tokens_per_word", "word_perplexity")
    return Table("table5", "Table 5 and figure 7: vocabularies", tuple(rows), panels, measures)


TABLES = {table.name: table for table in (_table1(), _table3(), _table4(), _table5())}
