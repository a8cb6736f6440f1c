"""What a token costs a pretrained decoder: as counted from the model, and as the paper counts it."""

import itertools

from meliad_like.models.pretrained.config import PretrainedConfig


def forward_flops_per_token(config: PretrainedConfig, vocabulary_size: int) -> float:
    """One token of a window read by all layers, its logits, and its share of the recurrence.

    All matrix products, in the meaning of `models/flops.py`: attention counts every key of the window, as it is
    computed, although a query sees half of them. Tokens that a window repeats are computed like any others: what a
    *predicted* token costs is this times `repetition`.
    """
    d, w = config.model_width, config.window_length
    queries, keys = config.num_heads * config.head_size, config.num_key_value_heads * config.head_size
    projections = 2 * d * (2 * queries + 2 * keys)
    attention = 2 * 2 * w * queries
    num_products = 3 if config.architecture == "llama" else 2
    flops = config.num_layers * (projections + attention + num_products * 2 * d * config.feedforward_width)
    return flops + 2 * d * vocabulary_size + recurrence_flops_per_token(config)


def recurrence_flops_per_token(config: PretrainedConfig) -> float:
    """A token's share of what the recurrence adds to a window.

    All of its matrix products as they are computed: the weighing of the layers' outputs, the pooling by attention, the
    network, the inserted vectors' keys and values, and what every query of a window does with these.
    """
    if not config.recurrent:
        return 0.0
    d, w, e = config.model_width, config.window_length, config.num_inserted
    queries, keys = config.num_heads * config.head_size, config.num_key_value_heads * config.head_size
    sizes = [d, *[config.recurrence_width] * config.recurrence_depth, e * d]
    network = sum(2 * size_in * size_out for size_in, size_out in itertools.pairwise(sizes))
    weighing = 2 * config.num_layers * d * w
    pooling = 2 * 2 * w * d if config.pooling == "attention" else 0
    insertion = 2 * d * 2 * keys * e + 2 * 2 * w * e * queries
    return (network + weighing + pooling + len(config.insertion_indices) * insertion) / w


def repetition(config: PretrainedConfig) -> float:
    """Tokens read for each token predicted, in the long run: w / (w - overlap)."""
    return config.window_length / config.stride


def paper_flops_per_token(config: PretrainedConfig) -> float:
    """What a predicted token costs by the count of Yoshida et al. 2020 (tables 1 and 2).

    Two operations for each parameter that is no embedding, and 2 l w d for attention (Kaplan et al. 2020, table 1),
    rounded to three digits, times w / (w - overlap). Logits, biases, norms and the recurrence are not counted. For
    GPT-2 small and a window of 300, the paper's 1.75e8 at overlap 0.
    """
    d, f = config.model_width, config.feedforward_width
    queries, keys = config.num_heads * config.head_size, config.num_key_value_heads * config.head_size
    num_products = 3 if config.architecture == "llama" else 2
    parameters = config.num_layers * (d * (2 * queries + 2 * keys) + num_products * d * f)
    disjoint = 2 * parameters + 2 * config.num_layers * config.window_length * queries
    # The paper rounds first: of 1.754e8, three of table 2's figures would have another last digit.
    return repetition(config) * float(f"{disjoint:.3g}")
