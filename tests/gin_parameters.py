"""The number of parameters of every shipped gin file's model: the only place that states them."""

import fnmatch

SLIDE = 183_791_712
"""The default: 151M without the embedding, as the paper has it."""
LAYER = 12_585_224
"""A layer more, 1024 wide."""
WITHOUT_POSITIONS = SLIDE - 12 * 8 * 32
# A query, a scale and an output as wide again, in each of eleven more layers that read states.
FEEDBACK = 11 * (2 * 1024**2 + 8)
FIXED_SKIP = 193_230_968
STATE = 2 * 1024
"""A state more: its initial value and its name."""
MELODI = 184_834_624
"""The reference has 38,976 more, with which its last layer mixes summaries that nothing reads."""
GPT2_SMALL = 124_439_808

PARAMETERS = {
    # Slide, fixed:skip and lstm:dual have what the reference's models have.
    "block_recurrent/slide_13l.gin": SLIDE + LAYER,
    "block_recurrent/fixed_skip.gin": FIXED_SKIP,
    "block_recurrent/fixed_single.gin": 203_716_728,
    "block_recurrent/fixed_dual.gin": 201_621_624,
    "block_recurrent/lstm_skip.gin": 197_426_296,
    "block_recurrent/lstm_single.gin": 212_106_360,
    "block_recurrent/lstm_dual.gin": 214_206_584,
    "block_recurrent/feedback_lstm_single.gin": 212_106_360 + FEEDBACK,
    "block_recurrent/feedback_fixed_skip.gin": FIXED_SKIP + FEEDBACK,
    # A gate for each head instead of a position bias.
    "block_recurrent/memorizing_*.gin": SLIDE - 8 * 32 + 8,
    "block_recurrent/table3/recurrent_window_*.gin": FIXED_SKIP,
    "block_recurrent/table3/states_128.gin": FIXED_SKIP - 384 * STATE,
    "block_recurrent/table3/states_256.gin": FIXED_SKIP - 256 * STATE,
    "block_recurrent/table3/states_512.gin": FIXED_SKIP,
    "block_recurrent/table3/states_1024.gin": FIXED_SKIP + 512 * STATE,
    "block_recurrent/table3/states_2048.gin": FIXED_SKIP + 1536 * STATE,
    "block_recurrent/table4/recurrent_40m.gin": 56_771_192,
    "block_recurrent/table4/recurrent_81m.gin": 96_617_080,
    "block_recurrent/table4/recurrent_162m.gin": FIXED_SKIP,
    "block_recurrent/table4/recurrent_325m.gin": 352_617_712,
    "block_recurrent/table4/recurrent_650m.gin": 672_466_400,
    "block_recurrent/table4/recurrent_1300m.gin": 1_344_920_032,
    "block_recurrent/table4/xl_40m.gin": 57_295_720,
    "block_recurrent/table4/xl_81m.gin": 98_190_184,
    "block_recurrent/table4/xl_162m.gin": SLIDE + LAYER,
    "block_recurrent/table4/xl_325m.gin": 359_958_224,
    "block_recurrent/table4/xl_650m.gin": 687_147_424,
    "block_recurrent/table4/xl_1300m.gin": 1_374_281_120,
    "block_recurrent/table5/*": FIXED_SKIP,
    "block_recurrent/*": SLIDE,
    "mixer/gated_delta_rule.gin": 189_063_408,
    "mixer/kimi_delta_attention.gin": 188_702_688,
    "mixer/lightning.gin": 195_334_408,
    "mixer/mamba2.gin": 198_224_496,
    # Twelve layers of 6,601,056, the norm, and the embedding.
    "mixer/mamba2_alone.gin": 12 * 6_601_056 + 1024 + 32_000 * 1024,
    "mixer/qwen3_next.gin": 221_981_880,
    "mixer/retention.gin": 234_120_192,
    "mixer/rg_lru.gin": 177_588_256,
    "melodi/s192_l32.gin": 200_098_888,
    "melodi/s128_l64.gin": 198_719_016,
    "melodi/s192_l96.gin": 200_144_008,
    "melodi/short_only.gin": MELODI - 19_488,
    "melodi/two_long_32.gin": MELODI + 19_488,
    # Mixing has fewer numbers: 11 for the layer above and 12 for the next window, and one for the long-term memory.
    "melodi/window_256.gin": MELODI
    - 23 * (576 * 64 + 64 - (288 * 32 + 32))
    - (576 * 32 + 32 - (288 * 16 + 16))
    - 32 * 1024,
    "melodi/window_128.gin": MELODI
    - 23 * (576 * 64 + 64 - (144 * 16 + 16))
    - (576 * 32 + 32 - (144 * 8 + 8))
    - 48 * 1024,
    "melodi/dense_*.gin": 196_443_240,
    "melodi/xl.gin": SLIDE + LAYER,
    "melodi/block_recurrent.gin": FIXED_SKIP,
    "melodi/*": MELODI,
    "memory_map/training.gin": SLIDE,
    "memory_map/dense.gin": 2_113_924,
    "memory_map/fixed_skip_all.gin": 2_187_984,
    "memory_map/fixed_skip_states_128.gin": 2_150_986 + 96 * 128,
    "memory_map/fixed_skip_states_8.gin": 2_150_986 - 24 * 128,
    "memory_map/fixed_skip_*.gin": 2_150_986,
    "memory_map/gated_delta_rule_first.gin": 2_135_528,
    "memory_map/lstm_skip_*.gin": 2_167_434,
    "memory_map/melodi.gin": 2_118_132,
    "memory_map/melodi_long.gin": 2_118_588,
    "memory_map/memorizing*.gin": 2_113_926,
    "memory_map/window_summary.gin": 2_223_386,
    "memory_map/rg_lru_first.gin": 2_114_626,
    "memory_map/mamba2_first.gin": 2_140_680,
    "memory_map/retention_first.gin": 2_130_306,
    "memory_map/lightning_first.gin": 2_118_082,
    "memory_map/qwen3_next_first.gin": 2_131_882,
    "memory_map/kimi_delta_attention_first.gin": 2_123_108,
    "memory_map/*": 2_113_988,
    "option/alibi.gin": WITHOUT_POSITIONS,
    "option/alibi_fixed_bound.gin": WITHOUT_POSITIONS + 12,
    "option/alibi_learned.gin": WITHOUT_POSITIONS + 12 * 2,
    "option/fourier.gin": WITHOUT_POSITIONS + 12 * 8 * 128,
    "option/infused.gin": WITHOUT_POSITIONS,
    "option/nn_positions.gin": WITHOUT_POSITIONS + 12 * (8 + 2) * 128,
    "option/no_positions.gin": WITHOUT_POSITIONS,
    "option/orthogonal.gin": WITHOUT_POSITIONS + 12 * 8 * 7,
    "option/rotary*.gin": WITHOUT_POSITIONS,
    "option/extra_layers.gin": SLIDE + LAYER,
    "option/clear_states.gin": FIXED_SKIP,
    "option/sharp_states.gin": FIXED_SKIP,
    "option/states_128.gin": FIXED_SKIP - 384 * STATE,
    "option/states_256.gin": FIXED_SKIP - 256 * STATE,
    "option/states_512.gin": FIXED_SKIP,
    "option/states_1024.gin": FIXED_SKIP + 512 * STATE,
    "option/states_2048.gin": FIXED_SKIP + 1536 * STATE,
    "option/*": SLIDE,
    "pretrained/gpt2_medium.gin": 354_823_168,
    "pretrained/gpt2_large.gin": 774_030_080,
    "pretrained/gpt2_xl.gin": 1_557_611_200,
    "pretrained/smollm2_135m.gin": 134_515_008,
    "pretrained/*": GPT2_SMALL,
    "quickstart*.gin": 5_031_566,
    "optimizer/*.gin": 5_031_566,
    "recurrence_study.gin": 2_442_832,
    "needles.gin": 4_490_380,
    # 768 -> 200 -> 200 -> 200 -> 768, and a score for each of 12 layers.
    "recurrent_pretrained/quiet_start.gin": GPT2_SMALL + 388_568 + 12,
    "recurrent_pretrained/*recurrent*_*.gin": GPT2_SMALL + 388_568 + 12,
    "recurrent_pretrained/recurrent.gin": GPT2_SMALL + 388_568 + 12,
    "recurrent_pretrained/*": GPT2_SMALL,
    # The book corpus has one table of 29,000 x 1024 for embedding and softmax, in addition to the same 16 layers.
    "shortformer/book_corpus.gin": 231_235_584,
    "shortformer/table11/*": 231_235_584,
    "shortformer/table12/*": 231_235_584,
    # The paper's 247M.
    "shortformer/*": 246_933_504,
    "size/tiny.gin": 24_998 + 32_000 * 32,
    "size/quickstart.gin": 787_848 + 32_000 * 128,
    "size/laptop.gin": 3_148_560 + 32_000 * 256,
    "size/small_37m.gin": 54_148_704,
    "size/small_75m.gin": 91_897_440,
    "size/medium_150m.gin": SLIDE,
    "size/medium_300m.gin": 334_789_824,
    "size/large_600m.gin": 669_573_312,
    "size/large_1200m.gin": 1_273_559_424,
    "size/tall_600m.gin": 636_810_624,
    "size/tall_1200m.gin": 1_273_608_576,
    "ancient_history/*": SLIDE,
    "base.gin": SLIDE,
    "task/*": SLIDE,
}
"""From patterns of names to numbers; the first pattern that fits counts. The vocabulary is `vocabulary_size`."""


def pattern_of(name: str) -> str:
    """The pattern that a shipped gin file has its number by."""
    return next((pattern for pattern in PARAMETERS if fnmatch.fnmatchcase(name, pattern)), "")


def parameters(name: str) -> int:
    """The number of parameters of a shipped gin file's model."""
    return PARAMETERS[pattern_of(name)]


def vocabulary_size(name: str) -> int:
    """The vocabulary with which a gin file's parameters are counted: 32,000, or that of the corpus or the model."""
    if name.startswith(("pretrained/", "recurrent_pretrained/")):
        return 49_152 if "smollm2" in name else 50_257
    if name.startswith("shortformer/"):
        return 29_000 if "book_corpus" in name or "table11" in name or "table12" in name else 267_744
    return 32_000


def needs(name: str) -> list[str]:
    """The gin files without which a shipped file says nothing: options of recurrent states need a row that has them."""
    of_states = name.startswith(("option/states_", "option/clear_states", "option/sharp_states"))
    return ["block_recurrent/fixed_skip.gin"] if of_states else []
