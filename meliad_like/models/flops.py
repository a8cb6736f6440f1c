"""What a token costs, counted from the config: the floating-point operations of all matrix products.

A product of [i, j] and [j, k] is 2 i j k operations. Attention counts its tiles of `w` queries by `2w` keys in full, as
they are computed, although a query sees half of its tile. Norms, softmax, activations and the gather of embeddings are
not matrix products and are not counted; nor is what rematerialisation computes twice.
"""

from meliad_like.models.decoder_config import DecoderConfig


def forward_flops_per_token(config: DecoderConfig, vocabulary_size: int) -> float:
    """One token read by all layers, and its logits."""
    num_recurrent = len(config.recurrent_indices)
    num_others = config.total_layers - num_recurrent
    layers = num_others * (layer_flops(config) + reading_flops(config, config.num_read_states))
    layers += num_recurrent * recurrent_layer_flops(config)
    layers += len(config.memory_indices) * (search_flops(config) + recall_flops(config))
    return layers + 2 * config.model_width * vocabulary_size


def training_flops_per_token(config: DecoderConfig, vocabulary_size: int) -> float:
    """Forward and backward pass: every product has two more in the backward pass, one for each of its factors.

    But a memory's search has none, and attention to what it found only those for its query and its weights.
    """
    saved = len(config.memory_indices) * (2 * search_flops(config) + recall_flops(config))
    return 3 * forward_flops_per_token(config, vocabulary_size) - saved


def layer_flops(config: DecoderConfig) -> float:
    """One token in an ordinary layer."""
    d, inner = config.model_width, config.num_heads * config.head_size
    projections = 2 * d * 3 * inner
    attention = 2 * 2 * (2 * config.window_length) * inner
    return projections + attention + 2 * inner * d + 4 * d * config.feedforward_width


def reading_flops(config: DecoderConfig, num_states: int) -> float:
    """One token's cross-attention to states, where a layer reads any."""
    d, inner = config.model_width, config.num_heads * config.head_size
    if num_states == 0:
        return 0
    cross_query, cross_attention, wider_output = 2 * d * inner, 2 * 2 * num_states * inner, 2 * inner * d
    return cross_query + cross_attention + wider_output


def search_flops(config: DecoderConfig) -> int:
    """One token's search of an external memory, slot by slot."""
    return 2 * config.memory_size * config.num_heads * config.head_size


def recall_flops(config: DecoderConfig) -> int:
    """One token's attention to the memories that it found."""
    return 2 * 2 * config.memory_neighbors * config.num_heads * config.head_size


def recurrent_layer_flops(config: DecoderConfig) -> float:
    """One token in a recurrent layer, and its share of the states' update, which happens once a block."""
    tokens = layer_flops(config) + reading_flops(config, config.num_states)
    return tokens + state_flops(config) / config.window_length


def state_flops(config: DecoderConfig) -> int:
    """The update of all states of a recurrent layer by one block."""
    d, inner, r, f = (
        config.model_width,
        config.num_heads * config.head_size,
        config.num_states,
        config.feedforward_width,
    )
    mixed = 2 * inner
    flops = 2 * r * d * 4 * inner
    flops += 2 * 2 * r * (r + 2 * config.window_length) * inner
    num_gate_products = 2 if config.gate == "lstm" else 0
    if config.cell in ("skip", "dual"):
        flops += (1 + num_gate_products) * 2 * r * mixed * d
    if config.cell in ("single", "dual"):
        size_in = mixed if config.cell == "single" else d
        flops += 2 * r * size_in * f + (1 + num_gate_products) * 2 * r * f * d
    return flops
