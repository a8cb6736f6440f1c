"""The cost of a token in a pretrained decoder: counted from the model, and as the paper counts it."""

import itertools

from meliad_like.models.pretrained.config import PretrainedConfig


def forward_flops_per_token(config: PretrainedConfig, vocabulary_size: int) -> float:
    """The operations of one token of a window in all layers, of its logits, and of its share of the recurrence.

    All matrix products, in the meaning of `layers/flops.py`: attention counts every key of the window, as it is
    computed, although a query sees half of them. Tokens that a window repeats are computed like any others: what a
    *predicted* token costs is this times `repetition`.
    """
    layers = config.num_layers * (linear_flops(config) + attention_flops(config))
    return layers + 2 * config.model_width * vocabulary_size + recurrence_flops_per_token(config)


def training_flops_per_token(config: PretrainedConfig, vocabulary_size: int) -> float:
    """Forward and backward pass: a product has two more in the backward pass, one for the gradient of each factor.

    A decoder that is not trained (`train_decoder=False`) has no gradients of kernels, and none at all below the first
    layer with inserted vectors, because nothing there depends on a trained parameter. In that layer the tokens' own
    queries, keys and values need none either; the gradients of attention's keys and values are computed for all.
    """
    forward = forward_flops_per_token(config, vocabulary_size)
    if config.train_decoder:
        return 3 * forward
    d, queries, attention = config.model_width, config.num_heads * config.head_size, attention_flops(config)
    first = min(config.insertion_indices)
    # The attention's output, the feed-forward network, and the gradients of attention weights, keys and values.
    in_first = 2 * d * queries + feedforward_flops(config) + 1.5 * attention
    above = (config.num_layers - 1 - first) * (linear_flops(config) + 2 * attention)
    kernels = len(config.insertion_indices) * inserted_kernel_flops(config) / config.window_length
    recurrence = 2 * recurrence_flops_per_token(config) - kernels
    return forward + in_first + above + 2 * d * vocabulary_size + recurrence


def feedforward_flops(config: PretrainedConfig) -> float:
    """The operations of one token in the feed-forward network of a layer."""
    num_products = 3 if config.architecture == "llama" else 2
    return num_products * 2 * config.model_width * config.feedforward_width


def linear_flops(config: PretrainedConfig) -> float:
    """The operations of one token in the linear maps of a layer."""
    queries, keys = config.num_heads * config.head_size, config.num_key_value_heads * config.head_size
    return 2 * config.model_width * (2 * queries + 2 * keys) + feedforward_flops(config)


def attention_flops(config: PretrainedConfig) -> float:
    """The operations of one token's attention to its window."""
    return 2 * 2 * config.window_length * config.num_heads * config.head_size


def inserted_kernel_flops(config: PretrainedConfig) -> float:
    """The operations of the keys and values that a layer inserts into a window."""
    return 2 * config.model_width * 2 * config.num_key_value_heads * config.head_size * config.num_inserted


def recurrence_flops_per_token(config: PretrainedConfig) -> float:
    """A token's share of what the recurrence adds to a window.

    All of its matrix products as they are computed: the weighing of the layers' outputs, the pooling by attention, the
    network, the inserted vectors' keys and values, and what every query of a window does with these.
    """
    if not config.recurrent:
        return 0.0
    d, w, e = config.model_width, config.window_length, config.num_inserted
    queries = config.num_heads * config.head_size
    sizes = [d, *[config.recurrence_width] * config.recurrence_depth, e * d]
    network = sum(2 * size_in * size_out for size_in, size_out in itertools.pairwise(sizes))
    weighing = 2 * config.num_layers * d * w
    pooling = 2 * 2 * w * d if config.pooling == "attention" else 0
    insertion = inserted_kernel_flops(config) + 2 * 2 * w * e * queries
    return (network + weighing + pooling + len(config.insertion_indices) * insertion) / w


def repetition(config: PretrainedConfig) -> float:
    """Tokens read for each token predicted, in the long run: w / (w - overlap)."""
    return config.window_length / config.stride


def paper_flops_per_token(config: PretrainedConfig) -> float:
    """The operations of a predicted token as counted by Yoshida et al. 2020 (tables 1 and 2).

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
