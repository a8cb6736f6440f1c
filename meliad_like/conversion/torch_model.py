"""A decoder of meliad_like in PyTorch, for Hugging Face's transformers.

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
    outputs = model(**tokenizer(text, return_tensors="pt"))
    more = model(next_tokens, past_key_values=outputs.past_key_values)

A document is read in blocks of `w` tokens (`window_length`): at once, in parts of any lengths, or token by token, with
the same logits. What is remembered has a constant size: keys and values since the block before, and states.

Shapes: `b` documents, `n` tokens, `d` channels (`model_width`), `h` heads of `k` channels, `i` channels of all heads
together, `s` keys, `r` recurrent states, `f` channels of a hidden layer, `p` channels of a value of the delta rule.
"""

import functools

import torch  # type: ignore[import-not-found]  # not a requirement of the package
import torch.nn.functional as F  # type: ignore[import-not-found]
from torch import Tensor, nn  # type: ignore[import-not-found]
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel  # type: ignore[import-not-found]
from transformers.modeling_outputs import CausalLMOutputWithPast  # type: ignore[import-not-found]

EPSILON, LOWEST = 1e-6, torch.finfo(torch.float32).min
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of the memory in transformers, which newer versions have changed."""
Memory = dict[str, Tensor]
"""A layer's memory of `b` documents, by the names that its mixers give. Tensors are never changed in place."""
Linear, Norm = functools.partial(nn.Linear, bias=False), functools.partial(nn.RMSNorm, eps=EPSILON)


class MeliadLikeConfig(PretrainedConfig):
    """The sizes of a decoder, and in `layers` the arguments of each `Layer`. It has no largest number of positions."""

    model_type = "meliad_like"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012


class DocumentsMemory:
    """The model's memory of `b` documents (`past_key_values`), which can be continued any number of times."""

    is_compileable, is_linear = False, ()

    def __init__(self, position: int, layers: list[Memory]):
        self.position, self.layers = position, layers

    def map(self, function) -> list[Memory]:
        """The memories of the layers with a function of each tensor."""
        return [{name: function(x) for name, x in memory.items()} for memory in self.layers]

    def get_seq_length(self) -> int:
        return self.position

    def reorder_cache(self, lanes: Tensor) -> None:
        """Takes the documents at these indices, for a beam search."""
        self.layers = self.map(lambda x: x.index_select(0, lanes))


def unit(x: Tensor) -> Tensor:
    """Vectors of unit length, float32."""
    return x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + EPSILON)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[b, n, i] -> [b, h, n, k]."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, h, n, k] -> [b, n, i]."""
    return x.transpose(1, 2).flatten(2).to(dtype)


def attend(scores: Tensor, value: Tensor) -> Tensor:
    """The averages of values [b, h, s, k] by the softmax of scores [b, h, n, s]; 0 where all scores are -infinity."""
    weights = (scores - scores.detach().amax(-1, keepdim=True).clamp(min=LOWEST)).exp()
    return weights @ value.float() / weights.sum(-1, keepdim=True).clamp(min=1)


def rotate(x: Tensor, place: Tensor, first_angle: float) -> Tensor:
    """Rotary embedding of [b, h, s, k] at places [s]; one place turns the first pair of channels by `first_angle`."""
    half = x.shape[-1] // 2
    angle = (place[:, None] / (10_000 ** (torch.arange(half, device=x.device) / half) / first_angle)).repeat(1, 2)
    return angle.cos() * x + angle.sin() * torch.cat([-x[..., half:], x[..., :half]], dim=-1)


class SlidingWindow(nn.Module):
    """Attention of each token to the `w` tokens before it, with scores |scale| (unit(query) unit(key) + bias)."""

    def __init__(self, config: MeliadLikeConfig):
        super().__init__()
        self.config, self.h, self.w = config, config.num_heads, config.window_length
        self.key, self.value, self.query = (Linear(config.model_width, self.h * config.head_size) for _ in range(3))
        self.attention_scale = nn.Parameter(torch.ones(self.h))
        self.bias = nn.Parameter(torch.zeros(self.h, self.w))

    def begin(self, b: int) -> Memory:
        # The first tokens see nothing before the document, or zeros.
        size = b, self.h, 0 if self.config.mask_empty_cache else self.w, self.config.head_size
        return {"key": self.bias.new_zeros(size, dtype=torch.float32), "value": self.bias.new_zeros(size)}

    def forward(self, x: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        query, key = (unit(split_heads(projection(x), self.h)) for projection in (self.query, self.key))
        key = torch.cat([memory["key"], key], dim=2)
        value = torch.cat([memory["value"], split_heads(self.value(x), self.h)], dim=2)
        of_keys, of_queries = (torch.arange(key.shape[2], device=x.device)[-n:] for n in (key.shape[2], x.shape[1]))
        distance = of_queries[:, None] - of_keys
        visible = (distance >= 1) & (distance <= self.w)
        bias = self.bias.float()[:, (distance - 1).clamp(0, self.w - 1)]
        # Only differences matter, and without the largest bias they keep their digits at any scale.
        bias = bias - bias.detach().masked_fill(~visible, LOWEST).amax(-1, keepdim=True)
        angle, scale = self.config.rotary_angle, self.attention_scale.float().abs()[:, None, None]
        rotated, query = (rotate(key, of_keys, angle), rotate(query, of_queries, angle)) if angle else (key, query)
        scores = ((scale * query) @ rotated.mT + scale * bias).masked_fill(~visible, -torch.inf)
        return merge_heads(attend(scores, value), x.dtype), memory | {"key": key, "value": value}

    def end_block(self, memory: Memory) -> Memory:
        return memory | {name: memory[name][:, :, -self.w :] for name in ("key", "value")}


class Reader(nn.Module):
    """Attention of vectors [b, n, d] to all of some keys of unit length, and values, [b, h, s, k]: [b, n, i]."""

    def __init__(self, config: MeliadLikeConfig):
        super().__init__()
        self.query = Linear(config.model_width, config.num_heads * config.head_size)
        self.attention_scale = nn.Parameter(torch.ones(config.num_heads))

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scale = self.attention_scale.float().abs()[:, None, None]
        query = scale * unit(split_heads(self.query(x), len(scale)))
        return merge_heads(attend(query @ key.mT, value), x.dtype)


class FeedForward(nn.Module):
    """relu(x W1 + b1) W2 + b2, perhaps without the biases."""

    def __init__(self, size_in: int, f: int, d: int, bias: bool = False):
        super().__init__()
        self.hidden, self.output = nn.Linear(size_in, f, bias), nn.Linear(f, d, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.hidden(x).relu())


class Gate(nn.Module):
    """keep state + take update: learned numbers, keep = sigmoid(bias) and take = 1 - keep, or functions of `hidden`."""

    def __init__(self, kind: str, hidden_width: int, d: int):
        super().__init__()
        if kind == "fixed":
            self.bias = nn.Parameter(torch.zeros(d))
        else:
            self.forget, self.input = nn.Linear(hidden_width, d), nn.Linear(hidden_width, d)

    def forward(self, state: Tensor, hidden: Tensor, update: Tensor) -> Tensor:
        if hasattr(self, "bias"):
            return self.bias.sigmoid() * state + (1 - self.bias.sigmoid()) * update
        return (self.forget(hidden) + 1).sigmoid() * state + (self.input(hidden) - 1).sigmoid() * update


class RecurrentStates(nn.Module):
    """Tokens attend to the window and to states [b, r, d] (Block-Recurrent Transformers).

    After a block the states attend to themselves and to the tokens of this block and the one before, and pass a gate
    behind the attention (`skip`), or behind a feed-forward network that follows it (`single`), or both gates (`dual`).
    """

    def __init__(self, config: MeliadLikeConfig, num_states: int, gate: str, cell: str):
        super().__init__()
        self.h, self.cell, i = config.num_heads, cell, config.num_heads * config.head_size
        d, f = config.model_width, config.feedforward_width
        self.initial, self.identity = (nn.Parameter(torch.zeros(num_states, d)) for _ in range(2))
        self.norm, self.key, self.value = Norm(d), Linear(d, i), Linear(d, i)
        self.window = SlidingWindow(config)
        self.reader, self.state_reader, self.cross_reader = (Reader(config) for _ in range(3))
        if cell in ("skip", "dual"):
            self.output, self.attention_gate = Linear(2 * i, d), Gate(gate, 2 * i, d)
        if cell in ("single", "dual"):
            self.feedforward_norm = Norm(d) if cell == "dual" else nn.Identity()
            self.feedforward = FeedForward(d if cell == "dual" else 2 * i, f, d)
            self.feedforward_gate = Gate(gate, f, d)

    def begin(self, b: int) -> Memory:
        return self._before_block(self.initial.expand(b, -1, -1), self.window.begin(b))

    def _before_block(self, states: Tensor, memory: Memory) -> Memory:
        x = self.norm(states) + self.identity
        key, value = unit(split_heads(self.key(x), self.h)), split_heads(self.value(x), self.h)
        return memory | {"states": states, "state_key": key, "state_value": value}

    def forward(self, x: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        of_window, memory = self.window(x, memory)
        of_states = self.reader(x, memory["state_key"], memory["state_value"])
        return torch.cat([of_window, of_states], dim=-1), memory

    def end_block(self, memory: Memory) -> Memory:
        states = memory["states"]
        x = self.norm(states) + self.identity
        of_states = self.state_reader(x, memory["state_key"], memory["state_value"])
        mixed = torch.cat([of_states, self.cross_reader(x, memory["key"], memory["value"])], dim=-1)
        if self.cell in ("skip", "dual"):
            states = self.attention_gate(states, mixed, self.output(mixed))
        if self.cell in ("single", "dual"):
            hidden = self.feedforward.hidden(mixed if self.cell == "single" else self.feedforward_norm(states)).relu()
            update = self.feedforward.output(hidden)
            states = self.feedforward_gate(states, hidden, update.tanh() if self.cell == "single" else update)
        return self._before_block(states, self.window.end_block(memory))


class GatedDeltaRule(nn.Module):
    """A matrix S for each head that maps keys to values, forgets, and is corrected by every token (Yang et al. 2024):

    S_t = S_{t-1} alpha_t (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t / sqrt(k)
    """

    def __init__(self, config: MeliadLikeConfig, num_heads: int, value_size: int, conv_length: int):
        super().__init__()
        self.h, self.groups, d = num_heads, config.num_heads, config.model_width
        self.widths = [config.num_heads * config.head_size] * 2 + [num_heads * value_size]
        # The projections to queries, keys and values, and the filters of their convolution.
        self.inputs = nn.Parameter(torch.zeros(d, sum(self.widths)))
        self.filters = nn.Parameter(torch.zeros(conv_length, sum(self.widths)))
        self.strength, self.decay, self.gate = Linear(d, num_heads), Linear(d, num_heads), Linear(d, self.widths[2])
        self.log_rate, self.step_bias = nn.Parameter(torch.zeros(num_heads)), nn.Parameter(torch.zeros(num_heads))
        self.norm_scale = nn.Parameter(torch.ones(value_size))

    def begin(self, b: int) -> Memory:
        size = b, self.h, len(self.norm_scale), self.widths[0] // self.groups
        recent = self.filters.new_zeros(b, len(self.filters) - 1, sum(self.widths))
        return {"matrix": self.log_rate.new_zeros(size, dtype=torch.float32), "recent": recent}

    def forward(self, x: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        inputs = torch.cat([memory["recent"], x @ self.inputs], dim=1)
        filters = self.filters.float().T[:, None]
        convolved = F.silu(F.conv1d(inputs.float().mT, filters, groups=len(filters))).mT
        query, key, value = convolved.split(self.widths, dim=-1)
        shared = self.h // self.groups  # Heads of values with the same query and key.
        query, key = (unit(split_heads(y, self.groups)).repeat_interleave(shared, dim=1) for y in (query, key))
        strength = self.strength(x).float().sigmoid().mT  # [b, h, n], as the logarithms of alpha.
        log_decay = -(self.log_rate.float().exp() * F.softplus(self.decay(x).float() + self.step_bias)).mT
        matrix, results = memory["matrix"], []
        by_token = query / key.shape[-1] ** 0.5, key, split_heads(value, self.h), strength, log_decay
        for chunk in zip(*(y.split(64, dim=2) for y in by_token)):
            matrix, read = self.read_chunk(matrix, *chunk)
            results.append(read)
        y = F.rms_norm(torch.cat(results, dim=2), self.norm_scale.shape, self.norm_scale.float(), EPSILON)
        y = y * F.silu(split_heads(self.gate(x), self.h).float())
        return merge_heads(y, x.dtype), memory | {"matrix": matrix, "recent": inputs[:, x.shape[1] :]}

    end_block = staticmethod(lambda memory: memory)

    @staticmethod
    def read_chunk(matrix, query, key, value, strength, log_decay) -> tuple[Tensor, Tensor]:
        """The matrices [b, h, p, k] after some tokens, and what each of these reads, [b, h, n, p].

        With g_t, the product of the decays up to t, S_t = g_t S_0 + sum_{s <= t} (g_t / g_s) u_s k_s^T, and the
        corrections u_t solve u_t + beta_t sum_{s < t} (g_t / g_s) (k_t k_s) u_s = beta_t (v_t - g_t S_0 k_t).
        """
        ones, strength = torch.ones(key.shape[2], key.shape[2], device=key.device), strength[..., None]
        # Logarithms are only added: a difference of sums would have no digits left after a strong decay.
        between = (ones.tril() @ (log_decay[..., None] * ones.tril(-1))).exp().tril()  # g_t / g_s
        decay = log_decay.cumsum(-1).exp()[..., None]  # g_t
        system = (strength * between * (key @ key.mT)).tril(-1)
        known = strength * (value - decay * (key @ matrix.mT))
        update = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        results = (between * (query @ key.mT)) @ update + decay * (query @ matrix.mT)
        return decay[:, :, -1:] * matrix + update.mT @ (between[:, :, -1, :, None] * key), results


MIXERS = {"sliding_window": SlidingWindow, "recurrent_states": RecurrentStates, "gated_delta_rule": GatedDeltaRule}


class Layer(nn.Module):
    """x + output(mixers(norm(x))), then x + feedforward(norm(x)); a layer may lack either of the two.

    A mixer is one way in which tokens see earlier ones. `begin(b)` is its memory of `b` documents before their first
    token. `mixer(x, memory)` are its results for the next tokens of a block, [b, n, d] -> [b, n, i], and its memory
    then. `end_block(memory)` is its memory after a whole block.
    """

    def __init__(self, config: MeliadLikeConfig, mixers: dict[str, dict], width: int, feedforward: bool):
        """`mixers`: the arguments of each. `width`: the number of channels of all their results."""
        super().__init__()
        d, self.has_feedforward = config.model_width, feedforward
        self.mixers = nn.ModuleDict({name: MIXERS[name](config, **mixers[name]) for name in sorted(mixers)})
        self.norm, self.output = (Norm(d), Linear(width, d)) if mixers else (nn.Identity(), nn.Identity())
        if feedforward:
            self.feedforward_norm = Norm(d)
            self.feedforward = FeedForward(d, config.feedforward_width, d, config.feedforward_bias)

    def begin(self, b: int) -> Memory:
        return {name: x for mixer in self.mixers.values() for name, x in mixer.begin(b).items()}

    def forward(self, x: Tensor, memory: Memory, ends: bool) -> tuple[Tensor, Memory]:
        """The layer's output [b, n, d] for tokens of a block, which may end with them, and the memory after them."""
        normed, results = self.norm(x), []
        for mixer in self.mixers.values():
            result, memory = mixer(normed, memory)
            memory = mixer.end_block(memory) if ends else memory
            results.append(result)
        x = x + self.output(torch.cat(results, dim=-1)) if results else x
        return x + self.feedforward(self.feedforward_norm(x)) if self.has_feedforward else x, memory


class MeliadLikeForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder: it reads a document block by block through all layers."""

    config_class = MeliadLikeConfig
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _input_embed_layer = "embedding"
    _is_stateful = True
    accepts_loss_kwargs = True  # `num_items_in_batch`, for transformers' Trainer.
    _supports_default_dynamic_cache = classmethod(lambda cls: False)

    def __init__(self, config: MeliadLikeConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.model_width)
        self.layers = nn.ModuleList(Layer(config, **layer) for layer in config.layers)
        self.final_norm = Norm(config.model_width)
        self.post_init()

    def forward(
        self, input_ids, cache=None, past_key_values=None, attention_mask=None, position_ids=None, labels=None,
        use_cache=True, logits_to_keep=0, output_hidden_states=None, output_attentions=None, return_dict=None,
        num_items_in_batch=None,
    ) -> CausalLMOutputWithPast | tuple:  # fmt: skip
        """Reads tokens [b, n] of documents, from their beginning or after what a memory has read (under either name).

        Documents that are packed side by side in one row, whose `position_ids` begin again, are read apart.

        Returns the logits [b, n, v] of the next tokens, or of the last `logits_to_keep` or at these places, and the
        memory, none where texts are padded; the gradient ends there. `hidden_states` are [b, n, d] of the embedding and
        of each layer, the last one after the final norm.
        """
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError("attention_mask may only say what is padding, [b, n]: position_ids pack documents")
        if attention_mask is not None and (attention_mask.int().diff(dim=1) > 0).any():
            raise ValueError("documents of different lengths can't be padded on the left: read them one by one")
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError("output_attentions: not all layers have attention, and none keeps its weights")
        wants_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        memory, parts = cache or past_key_values, []
        for tokens in input_ids.tensor_split(self._beginnings(input_ids, memory, position_ids), dim=1):
            # After the first, each part is a document of its own.
            outputs, memory = self._read(tokens, None if parts else memory, every_layer=wants_hidden)
            parts.append(outputs)
        *outputs, last = [torch.cat(layer, dim=1) for layer in zip(*parts)]
        last = self.final_norm(last)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.config.logit_scale * F.linear(last[:, keep], self.embedding.weight).float()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, logits.shape[-1], num_items_in_batch=num_items_in_batch)
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=(*outputs, last) if wants_hidden else None,
            # It would have read the padding.
            **{CACHE: memory if use_cache and (attention_mask is None or attention_mask.all()) else None},
        )
        return result.to_tuple() if return_dict is False else result

    def _read(
        self, input_ids: Tensor, memory: DocumentsMemory | None, every_layer: bool
    ) -> tuple[list[Tensor], DocumentsMemory]:
        """The outputs of the last layer, [b, n, d], or with `every_layer` of the embedding and all layers, and the
        memory after the tokens."""
        w, position, blocks = self.config.window_length, memory.position if memory else 0, []
        layers = memory.map(Tensor.detach) if memory else [layer.begin(len(input_ids)) for layer in self.layers]
        for tokens in input_ids.tensor_split([*range(w - position % w, input_ids.shape[1], w)], dim=1):
            outputs, position = [self.embedding(tokens)], position + tokens.shape[1]
            for i, layer in enumerate(self.layers):
                x, layers[i] = layer(outputs[-1], layers[i], ends=position % w == 0)
                outputs.append(x)
            blocks.append(outputs if every_layer else outputs[-1:])
        return [torch.cat(layer, dim=1) for layer in zip(*blocks)], DocumentsMemory(position, layers)

    @staticmethod
    def _beginnings(input_ids: Tensor, memory: DocumentsMemory | None, position_ids: Tensor | None) -> list[int]:
        """The places in the rows at which documents begin, except for the first token."""
        if position_ids is None:
            return []
        n = input_ids.shape[1]
        begins = [i for i in range(1, n) if position_ids[0, i] == 0]
        positions = torch.arange(n, device=position_ids.device)
        for first, end in zip([0, *begins], [*begins, n]):
            positions[first:end] -= first - (memory.position if memory and first == 0 else 0)
        if not torch.equal(position_ids, positions.expand_as(position_ids)):
            raise ValueError("position_ids must count the tokens of each document, from what the memory has read or 0")
        return begins

    def prepare_inputs_for_generation(self, input_ids, cache=None, past_key_values=None, attention_mask=None, **kwargs):
        if attention_mask is not None and not attention_mask.all():
            raise ValueError("texts of different lengths can't be continued side by side: continue them one by one")
        memory = cache or past_key_values
        inputs = {"input_ids": input_ids[:, memory.position if memory else 0 :], "attention_mask": attention_mask}
        passed = ("use_cache", "logits_to_keep", "output_hidden_states", "output_attentions")
        return inputs | {CACHE: memory} | {key: kwargs[key] for key in passed if key in kwargs}
