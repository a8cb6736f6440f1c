"""A reimplementation of pretrained decoders and the recurrence between windows: numpy, float64, window by window.

Parameters have the names and layouts of Hugging Face's files, and loops go over heads and windows as the papers do.
"""

import numpy as np


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def attention(query, key, value, num_inserted):
    """One head: query [t, k]; key and value [num_inserted + t, k], of which all see the inserted ones."""
    t = len(query)
    scores = query @ key.T / np.sqrt(query.shape[1])
    mask = np.concatenate([np.ones((t, num_inserted)), np.tri(t)], axis=1)
    return softmax(np.where(mask > 0, scores, -np.inf)) @ value


class NumpyLlama:
    """Llama: RMS norms, rotary positions by complex numbers, grouped heads, a gated feed-forward network."""

    def __init__(self, tensors, config):
        self.tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        self.config = config
        self.table = self.tensors["model.embed_tokens.weight"]

    def norm(self, x, name):
        scale = self.tensors[f"{name}.weight"]
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.config.norm_epsilon) * scale

    final_norm = property(lambda self: lambda x: self.norm(x, "model.norm"))

    def embed(self, tokens):
        return self.table[tokens]

    def turn(self, x):
        """Rotates [t, k]: element j and element j + k/2 are a complex number."""
        half = x.shape[1] // 2
        angle = np.arange(len(x))[:, None] * self.config.rotary_base ** (-np.arange(half) / half)
        turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], axis=1)

    def block(self, i, x, inserted=None):
        """inserted: [e, d], or None; `WindowSummary.insertion_point` says where."""
        name, k = f"model.layers.{i}", self.config.head_size

        def weight(part):
            return self.tensors[f"{name}.{part}.weight"].T

        y = self.norm(x, f"{name}.input_layernorm")
        extra = np.zeros((0, x.shape[1])) if inserted is None else inserted
        if self.config.summary and self.config.summary.insertion_point == "before_norm":
            extra = self.norm(extra, f"{name}.input_layernorm")
        group = self.config.num_heads // self.config.num_key_value_heads
        heads = []
        for h in range(self.config.num_heads):
            own, of_group = np.s_[:, h * k : (h + 1) * k], np.s_[:, h // group * k : (h // group + 1) * k]
            query = self.turn((y @ weight("self_attn.q_proj"))[own])
            key = self.turn((y @ weight("self_attn.k_proj"))[of_group])
            key = np.concatenate([(extra @ weight("self_attn.k_proj"))[of_group], key])
            value = (np.concatenate([extra, y]) @ weight("self_attn.v_proj"))[of_group]
            heads.append(attention(query, key, value, len(extra)))
        x = x + np.concatenate(heads, axis=1) @ weight("self_attn.o_proj")
        y = self.norm(x, f"{name}.post_attention_layernorm")
        gate = y @ weight("mlp.gate_proj")
        return x + (gate / (1 + np.exp(-gate)) * (y @ weight("mlp.up_proj"))) @ weight("mlp.down_proj")


class NumpyGPT2:
    """GPT-2: layer norms, learned positions, one tensor for queries, keys and values, gelu by tanh."""

    def __init__(self, tensors, config):
        self.tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        self.config = config
        self.table = self.tensors["transformer.wte.weight"]

    def norm(self, x, name):
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.config.norm_epsilon)
        return x * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    final_norm = property(lambda self: lambda x: self.norm(x, "transformer.ln_f"))

    def linear(self, x, name):
        return x @ self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    def embed(self, tokens):
        return self.table[tokens] + self.tensors["transformer.wpe.weight"][: len(tokens)]

    def block(self, i, x, inserted=None):
        name, d, k = f"transformer.h.{i}", x.shape[1], self.config.head_size
        y = self.norm(x, f"{name}.ln_1")
        extra = np.zeros((0, d)) if inserted is None else inserted
        if self.config.summary and self.config.summary.insertion_point == "before_norm":
            extra = self.norm(extra, f"{name}.ln_1")
        projected = self.linear(np.concatenate([extra, y]), f"{name}.attn.c_attn")
        query, key, value = projected[:, :d], projected[:, d : 2 * d], projected[:, 2 * d :]
        heads = [
            attention(query[len(extra) :, h], key[:, h], value[:, h], len(extra))
            for h in (np.s_[h * k : (h + 1) * k] for h in range(self.config.num_heads))
        ]
        x = x + self.linear(np.concatenate(heads, axis=1), f"{name}.attn.c_proj")
        y = self.linear(self.norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        return x + self.linear(y, f"{name}.mlp.c_proj")


def window(model, tokens, inserted=None):
    """One window: logits [t, v], and the layers' outputs. `inserted` [e, d] is for the config's insertion layers."""
    x, outputs = model.embed(tokens), []
    for i in range(model.config.num_layers):
        x = model.block(i, x, inserted if i in model.config.insertion_indices else None)
        outputs.append(x)
    hidden = model.final_norm(x)
    if model.config.summary and model.config.summary.pooled_layers == "final_norm":
        outputs[-1] = hidden
    return hidden @ model.tensors.get("lm_head.weight", model.table).T, outputs


def summary(recurrence, config, outputs):
    """Computes the vectors inserted into the next window, [e, d], from the outputs of a window's layers."""
    if config.summary.normalise_pooled:
        outputs = [y / np.sqrt((y**2).mean(axis=1, keepdims=True) + config.norm_epsilon) for y in outputs]
    weighed = np.tensordot(softmax(np.asarray(recurrence["layer_scores"], np.float64)), np.stack(outputs), axes=1)
    z = {
        "mean": lambda: weighed.mean(axis=0),
        "sum": lambda: weighed.sum(axis=0),
        "max": lambda: weighed.max(axis=0),
        "attention": lambda: softmax(weighed @ recurrence["pooling_key"] / np.sqrt(weighed.shape[1])) @ weighed,
    }[config.summary.pooling]()
    for i in range(config.summary.depth + 1):
        z = z @ recurrence["layers"][i]["kernel"] + recurrence["layers"][i]["bias"]
        if i < config.summary.depth:
            z = {"relu": lambda z: np.maximum(z, 0), "tanh": np.tanh}[config.summary.activation](z)
    return z.reshape(config.summary.num_inserted, -1)


def document(model, recurrence, tokens):
    """The losses (nats) of a document's tokens after its first, read by windows that overlap; section 4.2."""
    config, losses, inserted, first = model.config, [], None, 0
    while first == 0 or len(losses) < len(tokens) - 1:
        inputs = tokens[first : min(first + config.window_length, len(tokens) - 1)]
        logits, outputs = window(model, inputs, inserted)
        probabilities = softmax(logits)
        for i, target in enumerate(tokens[first + 1 : first + 1 + len(inputs)]):
            if first + i >= len(losses):
                losses.append(-np.log(probabilities[i, target]))
        if recurrence is not None:
            inserted = summary(recurrence, config, outputs)
        first += config.window_length - config.overlap
    return np.asarray(losses)
