"""A decoder that was trained with `meliad_like`, in PyTorch, for Hugging Face's transformers.

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
    book = model(**tokenizer(text, return_tensors="pt"))  # book.logits; and book.cache, which continues the document

A document is read in blocks of `w` tokens (`window_length`). All that the model remembers of it has a constant size: the
keys and values of the block before and of the present block so far, and what else its layers pass on. So a document of any
length can be read at once, in parts of any lengths, or token by token; the logits are the same.

Shapes: `b` documents, `n` tokens, `d` channels (`model_width`), `h` heads of `k` channels, `i` channels of all heads
together, `s` keys, `r` recurrent states, `p` channels of a value of the delta rule, `f` channels of a hidden layer.
"""

import dataclasses
from typing import Any

import torch  # type: ignore[import-not-found]  # only where the model is used
import torch.nn.functional as F  # type: ignore[import-not-found]
from torch import Tensor, nn  # type: ignore[import-not-found]
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel  # type: ignore[import-not-found]
from transformers.modeling_outputs import CausalLMOutputWithPast  # type: ignore[import-not-found]

EPSILON, LOWEST = 1e-6, torch.finfo(torch.float32).min
CHUNK = 64
"""The number of tokens that the delta rule reads in parallel."""
OUTPUTS = [field.name for field in dataclasses.fields(CausalLMOutputWithPast)]
CACHE = "cache" if "cache" in OUTPUTS else "past_key_values"
"""The name of the memory in transformers, which changed in version 5.24."""

Memory = dict[str, Tensor]
"""What one mixer of one layer remembers of `b` documents. Tensors are never changed in place."""


class MeliadLikeConfig(PretrainedConfig):
    """The sizes of a decoder. `layers` has the mixers of each layer by name, with their settings, and `feedforward`.

    `max_position_embeddings` is no limit of the model: tools cut longer texts.
    """

    model_type = "meliad_like"
    attribute_map = {"hidden_size": "model_width", "num_attention_heads": "num_heads"}
    keys_to_ignore_at_inference = ["cache", "past_key_values"]


class DocumentsMemory:
    """What all layers remember of `b` documents (`past_key_values`). It can be continued any number of times."""

    is_compileable = False
    is_linear = ()

    def __init__(self, position: int = 0, layers: list[dict[str, Memory]] | None = None):
        self.position, self.layers = position, layers
        """The number of tokens that were read, and the memory of each mixer of each layer."""

    def map(self, function) -> list[dict[str, Memory]]:
        """The memories with a function of each tensor."""
        return [
            {name: {key: function(x) for key, x in memory.items()} for name, memory in layer.items()}
            for layer in self.layers or ()
        ]

    def get_seq_length(self, layer_index: int = 0) -> int:
        return self.position

    def reorder_cache(self, lanes: Tensor) -> None:
        """Takes the documents at these indices, for a beam search."""
        self.layers = self.map(lambda x: x.index_select(0, lanes.to(x.device)))


def unit(x: Tensor) -> Tensor:
    """Vectors of unit length, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[b, n, i] -> [b, h, n, k]."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, h, n, k] -> [b, n, i]."""
    return x.transpose(1, 2).flatten(2).to(dtype)


def attend(scores: Tensor, value: Tensor) -> Tensor:
    """The average of values [b, h, s, k] by the softmax of scores [b, h, n, s]; 0 where all scores are minus infinity."""
    largest = scores.detach().amax(-1, keepdim=True).clamp(min=LOWEST)
    weights = (scores - largest).exp()
    return weights @ value / weights.sum(-1, keepdim=True).clamp(min=1)


def rotate(x: Tensor, place: Tensor, first_angle: float) -> Tensor:
    """Rotary embedding of [b, h, s, k] at places [s]; a place turns the first pair by `first_angle`."""
    half = x.shape[-1] // 2
    rate = first_angle / 10_000 ** (torch.arange(half, device=x.device) / half)
    angle = place[:, None] * rate
    first, second = x.chunk(2, dim=-1)
    sine, cosine = angle.sin(), angle.cos()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def linear(size_in: int, size_out: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(size_in, size_out, bias=bias)


class Mixer(nn.Module):
    """One way in which the tokens of a layer see earlier tokens."""

    def begin(self, b: int) -> Memory:
        """The memory of `b` documents before their first token."""
        raise NotImplementedError

    def forward(self, x: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """The results [b, n, i] for tokens [b, n, d] that lie in one block, and the memory after them."""
        raise NotImplementedError

    def end_block(self, memory: Memory) -> Memory:
        """The memory after a block's last token."""
        return memory


class SlidingWindow(Mixer):
    """Attention of every token to the `w` tokens before it; not to itself.

    scores = scale (unit(query) unit(key) + bias by distance), with a scale for each head.
    """

    def __init__(self, config: MeliadLikeConfig):
        super().__init__()
        self.config, i = config, config.num_heads * config.head_size
        self.key, self.value, self.query = (linear(config.model_width, i) for _ in range(3))
        self.attention_scale = nn.Parameter(torch.ones(config.num_heads))
        self.bias = nn.Parameter(torch.zeros(config.num_heads, config.window_length))
        """The bias at the distances 1 to w."""

    def begin(self, b):
        config = self.config
        # Tokens of a document's first block see nothing before it, or zeros.
        size = b, config.num_heads, 0 if config.mask_empty_cache else config.window_length, config.head_size
        return {"key": self.bias.new_zeros(size, dtype=torch.float32), "value": self.bias.new_zeros(size)}

    def forward(self, x, memory):
        h, w, n = self.config.num_heads, self.config.window_length, x.shape[1]
        query, key = (unit(split_heads(projection(x), h)) for projection in (self.query, self.key))
        keys = torch.cat([memory["key"], key], dim=2)
        values = torch.cat([memory["value"], split_heads(self.value(x), h)], dim=2)
        place = torch.arange(keys.shape[2], device=x.device)
        distance = place[-n:, None] - place
        visible = (distance >= 1) & (distance <= w)
        bias = self.bias.float()[:, (distance - 1).clamp(0, w - 1)]
        # Only differences of biases matter. Without the largest one they keep their digits at a large scale.
        bias = bias - bias.detach().masked_fill(~visible, LOWEST).amax(-1, keepdim=True)
        placed = keys
        if self.config.rotary_angle:
            query, placed = (rotate(y, at, self.config.rotary_angle) for y, at in ((query, place[-n:]), (keys, place)))
        scale = self.attention_scale.float().abs()[:, None, None]
        scores = ((scale * query) @ placed.mT + scale * bias).masked_fill(~visible, -torch.inf)
        return merge_heads(attend(scores, values.float()), x.dtype), {"key": keys, "value": values}

    def end_block(self, memory):
        return {name: memory[name][:, :, -self.config.window_length :] for name in ("key", "value")}


class FixedGate(nn.Module):
    """g state + (1 - g) update, with g = sigmoid(bias)."""

    def __init__(self, hidden_width: int, d: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(d))

    def forward(self, state: Tensor, hidden: Tensor, update: Tensor) -> Tensor:
        gate = self.bias.sigmoid()
        return gate * state + (1 - gate) * update


class LstmGate(nn.Module):
    """f state + i update; both gates are functions of `hidden`."""

    def __init__(self, hidden_width: int, d: int):
        super().__init__()
        self.forget, self.input = (linear(hidden_width, d, bias=True) for _ in range(2))

    def forward(self, state: Tensor, hidden: Tensor, update: Tensor) -> Tensor:
        return (self.forget(hidden) + 1).sigmoid() * state + (self.input(hidden) - 1).sigmoid() * update


class FeedForward(nn.Module):
    """relu(x W1 + b1) W2 + b2; the biases may be missing."""

    def __init__(self, size_in: int, f: int, d: int, bias: bool = False):
        super().__init__()
        self.hidden, self.output = linear(size_in, f, bias), linear(f, d, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.hidden(x).relu())


class StateCell(nn.Module):
    """States [b, r, d] attend to themselves and to the tokens of a block and of the block before, and pass gates.

    `skip`: a gate after the attention. `single`: a gate after a feed-forward network behind the attention. `dual`: both,
    as the two residual connections of a transformer layer.
    """

    def __init__(self, config: MeliadLikeConfig, num_states: int, gate: str, cell: str):
        super().__init__()
        self.h, self.cell, d, f = config.num_heads, cell, config.model_width, config.feedforward_width
        i, gate_class = self.h * config.head_size, {"fixed": FixedGate, "lstm": LstmGate}[gate]
        self.initial, self.identity = (nn.Parameter(torch.zeros(num_states, d)) for _ in range(2))
        self.norm = nn.RMSNorm(d, EPSILON)
        self.key, self.value, self.query, self.cross_query = (linear(d, i) for _ in range(4))
        self.attention_scale, self.cross_attention_scale = (nn.Parameter(torch.ones(self.h)) for _ in range(2))
        if cell in ("skip", "dual"):
            self.output, self.attention_gate = linear(2 * i, d), gate_class(2 * i, d)
        if cell == "dual":
            self.feedforward_norm = nn.RMSNorm(d, EPSILON)
        if cell in ("single", "dual"):
            self.feedforward = FeedForward(d if cell == "dual" else 2 * i, f, d)
            self.feedforward_gate = gate_class(f, d)

    def project(self, states: Tensor, *projections: nn.Linear) -> list[Tensor]:
        """Projections [b, h, r, k] of the states with their ids."""
        x = self.norm(states) + self.identity
        return [split_heads(projection(x), self.h) for projection in projections]

    def forward(self, states: Tensor, memory: Memory) -> Tensor:
        """The states after a block. `memory` has the keys and values of the states before it, and of 2 w tokens."""
        query, cross_query = self.project(states, self.query, self.cross_query)
        mixed = torch.cat(
            [
                read(query, self.attention_scale, memory["state_key"], memory["state_value"]),
                read(cross_query, self.cross_attention_scale, memory["key"], memory["value"]),
            ],
            dim=-1,
        )
        if self.cell in ("skip", "dual"):
            states = self.attention_gate(states, mixed, self.output(mixed))
        if self.cell == "dual":
            hidden = self.feedforward.hidden(self.feedforward_norm(states)).relu()
            states = self.feedforward_gate(states, hidden, self.feedforward.output(hidden))
        if self.cell == "single":
            hidden = self.feedforward.hidden(mixed).relu()
            states = self.feedforward_gate(states, hidden, self.feedforward.output(hidden).tanh())
        return states


def read(query: Tensor, scale: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of queries [b, h, n, k] to all keys, of unit length, and values [b, h, s, k]: [b, n, i]."""
    scores = (scale.float().abs()[:, None, None] * unit(query)) @ key.mT
    return merge_heads(attend(scores, value.float()), query.dtype)


class StateReader(nn.Module):
    """The queries with which tokens attend to states."""

    def __init__(self, config: MeliadLikeConfig):
        super().__init__()
        self.query = linear(config.model_width, config.num_heads * config.head_size)
        self.attention_scale = nn.Parameter(torch.ones(config.num_heads))


class RecurrentStates(Mixer):
    """Tokens attend to the window and to states, which every block updates (Block-Recurrent Transformers)."""

    def __init__(self, config: MeliadLikeConfig, num_states: int, gate: str, cell: str):
        super().__init__()
        self.window, self.reader = SlidingWindow(config), StateReader(config)
        self.cell = StateCell(config, num_states, gate, cell)

    def _before_block(self, states: Tensor, window: Memory) -> Memory:
        """The memory before a block, with the keys and values of the states, which stay the same for the block."""
        key, value = self.cell.project(states, self.cell.key, self.cell.value)
        return window | {"states": states, "state_key": unit(key), "state_value": value}

    def begin(self, b):
        return self._before_block(self.cell.initial.expand(b, -1, -1), self.window.begin(b))

    def forward(self, x, memory):
        mixed, window = self.window(x, memory)
        query = split_heads(self.reader.query(x), self.cell.h)
        of_states = read(query, self.reader.attention_scale, memory["state_key"], memory["state_value"])
        return torch.cat([mixed, of_states], dim=-1), memory | window

    def end_block(self, memory):
        return self._before_block(self.cell(memory["states"], memory), self.window.end_block(memory))


class GatedDeltaRule(Mixer):
    """A matrix S for each head, which maps keys to values, forgets, and is corrected by every token (Yang et al. 2024):

    S_t = S_{t-1} alpha_t (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t / sqrt(k)
    """

    def __init__(self, config: MeliadLikeConfig, num_heads: int, value_size: int, conv_length: int):
        super().__init__()
        self.h, self.groups, d = num_heads, config.num_heads, config.model_width
        of_keys, of_values = config.num_heads * config.head_size, num_heads * value_size
        self.query, self.key, self.value = (linear(d, width) for width in (of_keys, of_keys, of_values))
        self.query_filter, self.key_filter, self.value_filter = (
            nn.Parameter(torch.zeros(conv_length, width)) for width in (of_keys, of_keys, of_values)
        )
        self.strength, self.decay, self.gate = (linear(d, width) for width in (num_heads, num_heads, of_values))
        self.log_rate, self.step_bias = (nn.Parameter(torch.zeros(num_heads)) for _ in range(2))
        self.norm_scale = nn.Parameter(torch.ones(value_size))

    def begin(self, b):
        (taps, of_keys), of_values = self.key_filter.shape, self.value_filter.shape[1]
        matrix = self.log_rate.new_zeros(b, self.h, of_values // self.h, of_keys // self.groups, dtype=torch.float32)
        return {"matrix": matrix, "recent": self.key_filter.new_zeros(b, taps - 1, 2 * of_keys + of_values)}

    def forward(self, x, memory):
        inputs = torch.cat([self.query(x), self.key(x), self.value(x)], dim=-1)
        inputs = torch.cat([memory["recent"], inputs], dim=1)
        filters = torch.cat([self.query_filter, self.key_filter, self.value_filter], dim=-1)
        taps, of_keys = self.key_filter.shape
        convolved = F.conv1d(inputs.float().mT, filters.float().T[:, None], groups=filters.shape[1]).mT
        query, key, value = F.silu(convolved).split([of_keys, of_keys, filters.shape[1] - 2 * of_keys], dim=-1)
        query, key = (
            unit(split_heads(y, self.groups)).repeat_interleave(self.h // self.groups, dim=1) for y in (query, key)
        )
        query, value = query * query.shape[-1] ** -0.5, split_heads(value, self.h)
        strength = self.strength(x).float().sigmoid().mT  # beta, [b, h, n]
        log_decay = -(self.log_rate.float().exp() * F.softplus(self.decay(x).float() + self.step_bias)).mT
        matrix, results = memory["matrix"], []
        for chunk in zip(*(y.split(CHUNK, dim=2) for y in (query, key, value, strength, log_decay))):
            matrix, y = self.read_chunk(matrix, *chunk)
            results.append(y)
        y = torch.cat(results, dim=2)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPSILON) * self.norm_scale
        y = y * F.silu(split_heads(self.gate(x), self.h).float())
        return merge_heads(y, x.dtype), {"matrix": matrix, "recent": inputs[:, inputs.shape[1] - taps + 1 :]}

    @staticmethod
    def read_chunk(matrix, query, key, value, strength, log_decay) -> tuple[Tensor, Tensor]:
        """The matrices [b, h, p, k] after some tokens, and what each of them reads, [b, h, n, p].

        With g_t, the product of the decays up to t, S_t = g_t S_0 + sum_{s <= t} (g_t / g_s) u_s k_s^T, and the
        corrections u_t solve u_t + beta_t sum_{s < t} (g_t / g_s) (k_t k_s) u_s = beta_t (v_t - g_t S_0 k_t).
        """
        ones = torch.ones(key.shape[2], key.shape[2], device=key.device)
        # Sums of logarithms, without differences, which would lose digits after a strong decay.
        decays = (ones.tril() @ (log_decay[..., None] * ones.tril(-1))).exp().tril()  # g_t / g_s
        decay = log_decay.cumsum(-1).exp()[..., None]  # g_t
        strength = strength[..., None]
        system = (strength * decays * (key @ key.mT)).tril(-1) + torch.eye(len(ones), device=key.device)
        known = strength * (value - decay * (key @ matrix.mT))
        update = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        results = (decays * (query @ key.mT)) @ update + decay * (query @ matrix.mT)
        return decay[:, :, -1:] * matrix + update.mT @ (decays[:, :, -1, :, None] * key), results


MIXERS = {"sliding_window": SlidingWindow, "recurrent_states": RecurrentStates, "gated_delta_rule": GatedDeltaRule}


class Layer(nn.Module):
    """x + output(mixers(norm(x))), then x + feedforward(norm(x)); a layer may lack either of the two."""

    def __init__(self, config: MeliadLikeConfig, mixers: dict[str, Any], width: int, feedforward: bool):
        super().__init__()
        d, self.has_feedforward = config.model_width, feedforward
        self.mixers = nn.ModuleDict({name: MIXERS[name](config, **mixers[name]) for name in sorted(mixers)})
        if mixers:
            self.norm, self.output = nn.RMSNorm(d, EPSILON), linear(width, d)
        if feedforward:
            self.feedforward_norm = nn.RMSNorm(d, EPSILON)
            self.feedforward = FeedForward(d, config.feedforward_width, d, config.feedforward_bias)

    def forward(self, x: Tensor, memories: dict[str, Memory]) -> tuple[Tensor, dict[str, Memory]]:
        """The layer's output [b, n, d] for tokens that lie in one block, and the memories of its mixers."""
        if self.mixers:
            normed = self.norm(x)
            results = {name: mixer(normed, memories[name]) for name, mixer in self.mixers.items()}
            x = x + self.output(torch.cat([result for result, _ in results.values()], dim=-1))
            memories = {name: memory for name, (_, memory) in results.items()}
        return x + self.feedforward(self.feedforward_norm(x)) if self.has_feedforward else x, memories


class MeliadLikeForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder. It reads one block, or a part of it, after the other, with one memory for all lanes."""

    config_class = MeliadLikeConfig
    _no_split_modules = ["Layer"]
    _is_stateful = True  # The memory can't be cut back to fewer tokens.

    def __init__(self, config: MeliadLikeConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.model_width)
        self.layers = nn.ModuleList(Layer(config, **layer) for layer in config.layers)
        self.final_norm = nn.RMSNorm(config.model_width, EPSILON)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def set_input_embeddings(self, value):
        self.embedding = value

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def forward(
        self,
        input_ids: Tensor,
        cache: DocumentsMemory | None = None,
        past_key_values: DocumentsMemory | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        **loss_settings,
    ) -> CausalLMOutputWithPast:
        """Reads tokens [b, n], which begin documents or continue those of a memory (under either name).

        Returns the logits [b, n, v] of the next tokens, or of the last few, and the memory; the gradient stops there.
        """
        if attention_mask is not None and (attention_mask.diff(dim=1) > 0).any():
            raise ValueError("documents begin at their first token: pad them on the right, or read them one by one")
        memory = cache or past_key_values or DocumentsMemory()
        position, w = memory.position, self.config.window_length
        layers = memory.map(Tensor.detach) or [
            {name: mixer.begin(len(input_ids)) for name, mixer in layer.mixers.items()} for layer in self.layers
        ]
        # Up to the end of the present block, then block by block.
        ends, outputs = range(w - position % w, input_ids.shape[1], w), []
        for tokens in input_ids.tensor_split(list(ends), dim=1):
            x = self.embedding(tokens)
            for i, layer in enumerate(self.layers):
                x, layers[i] = layer(x, layers[i])
            outputs.append(x)
            position += tokens.shape[1]
            if position % w == 0:
                layers = [
                    {name: mixer.end_block(layers[i][name]) for name, mixer in layer.mixers.items()}
                    for i, layer in enumerate(self.layers)
                ]
        hidden = self.final_norm(torch.cat(outputs, dim=1)[:, -logits_to_keep:])
        logits = self.config.logit_scale * F.linear(hidden, self.embedding.weight).float()
        loss = None if labels is None else self.loss_function(logits, labels, logits.shape[-1], **loss_settings)
        memory = DocumentsMemory(position, layers)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **({CACHE: memory} if use_cache else {}))

    def prepare_inputs_for_generation(self, input_ids, cache=None, past_key_values=None, use_cache=True, **inputs):
        """The tokens that the memory has not read, of documents from their beginning."""
        memory = cache or past_key_values
        read = memory.position if memory else 0
        kept = {name: inputs[name] for name in ("attention_mask", "logits_to_keep") if name in inputs}
        return {"input_ids": input_ids[:, read:], "cache": memory, "use_cache": use_cache, **kept}
