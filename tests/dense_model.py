"""The decoder once more, in plain numpy: dense attention, a literal mask, a loop over blocks, one document.

Written from the specification of the reference, with its parameter names, and shares no code with the package.
"""

import numpy as np

# The smallest distance in each of T5's buckets.
BUCKETS = [*range(17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def unit(x):
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def softmax_of_seen(scores, seen):
    """Rows that see nothing are 0."""
    weights = np.where(seen, np.exp(scores), 0)
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)


def attend(query, key, value, scale, bias=0.0, seen=True):
    """[h, t, k], [h, s, k]: the scale multiplies the bias as well."""
    scores = (np.einsum("htk,hsk->hts", query, key) + bias) * np.abs(scale)[:, None, None]
    return np.einsum("hts,hsk->htk", softmax_of_seen(scores, seen), value)


def rotate(x, position):
    half = x.shape[-1] // 2
    angle = position[:, None] / 10_000 ** (np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


class DenseModel:
    def __init__(self, config, theirs):
        self.config, self.theirs = config, {name: value.astype(np.float64) for name, value in theirs.items()}

    def __call__(self, tokens):
        """Logits [n, v], and the states of recurrent layers after the last block."""
        embedding = self.theirs["embed/embedding"]
        x, states = embedding[tokens], {}
        for i in range(self.config.total_layers):
            parameters = {
                name.removeprefix(f"transformer{i}/"): value
                for name, value in self.theirs.items()
                if name.startswith(f"transformer{i}/")
            }
            x, states[i] = self.layer(parameters, x, i in self.config.recurrent_indices)
        logits = norm(x, self.theirs["final_layernorm/scale"]) @ embedding.T / np.sqrt(self.config.model_width)
        return logits, states

    def heads(self, x):
        return x.reshape(len(x), self.config.num_heads, self.config.head_size).transpose(1, 0, 2)

    def layer(self, p, x, recurrent):
        config, w, n = self.config, self.config.window_length, len(x)
        y = norm(x, p["tbase/_kvq/pre_attn_layernorm/scale"])
        key = unit(self.heads(y @ p["tbase/_kvq/keys_layer/kernel"]))
        query = unit(self.heads(y @ p["tbase/_kvq/queries_layer/kernel"]))
        value = self.heads(y @ p["tbase/_kvq/values_layer/kernel"])
        # Before the document there are w zeros.
        key, value = (np.pad(z, ((0, 0), (w, 0), (0, 0))) for z in (key, value))
        t, s = np.arange(n), np.arange(-w, n)
        distance = t[:, None] - s[None, :]
        seen = (distance >= 1) & (distance <= w) & ((s >= 0) | (not config.mask_empty_cache))
        bias = 0.0
        if config.position == "t5":
            bias = p["relative_positions/rel_embedding"][
                :, np.searchsorted(BUCKETS, np.maximum(distance, 0), "right") - 1
            ]
        turned_query, turned_key = query, key
        if config.position == "rotary":
            turned_query, turned_key = rotate(query, t), rotate(key, s)
        mixed = attend(turned_query, turned_key, value, p["tbase/_kvq/attention_scale"], bias, seen)
        states = None
        if recurrent:
            cross_query = unit(self.heads(y @ p["tbase/_kvq/queries2_layer/kernel"]))
            crossed, states = self.recur(p, cross_query, key, value)
            mixed = np.concatenate([mixed, crossed])
        x = x + mixed.transpose(1, 0, 2).reshape(n, -1) @ p["tbase/post_attn_mlp/output_layer/kernel"]
        hidden = np.maximum(norm(x, p["tbase/pre_ffn_layernorm/scale"]) @ p["tbase/ffn/hidden0/kernel"], 0)
        return x + hidden @ p["tbase/ffn/output_layer/kernel"], states

    def recur(self, p, cross_query, key, value):
        """What the tokens read from the states [h, n, k], and the last states."""
        w, states, crossed = self.config.window_length, p["recurrent_initial_state"], []
        kvq = {name: value for name, value in p.items() if name.startswith("recurrent_tbase/_kvq/")}
        kvq = {name.removeprefix("recurrent_tbase/_kvq/"): value for name, value in kvq.items()}
        for begin in range(0, cross_query.shape[1], w):
            y = norm(states, kvq["pre_attn_layernorm/scale"]) + kvq["position_embeddings"]
            state_key = unit(self.heads(y @ kvq["keys_layer/kernel"]))
            state_value = self.heads(y @ kvq["values_layer/kernel"])
            state_query = unit(self.heads(y @ kvq["queries_layer/kernel"]))
            state_cross_query = unit(self.heads(y @ kvq["queries2_layer/kernel"]))
            block = np.s_[:, begin : begin + w]
            crossed.append(attend(cross_query[block], state_key, state_value, p["tbase/attention_scale2"]))
            # The block before and the block itself; the zeros before the document are w long.
            tile = np.s_[:, begin : begin + 2 * w]
            seen = np.arange(begin, begin + 2 * w) >= (w if self.config.mask_empty_cache else 0)
            own = attend(state_query, state_key, state_value, kvq["attention_scale"])
            cross = attend(state_cross_query, key[tile], value[tile], p["recurrent_tbase/attention_scale2"], 0.0, seen)
            mixed = np.concatenate([own, cross]).transpose(1, 0, 2).reshape(len(states), -1)
            states = self.update(p, states, mixed)
        return np.concatenate(crossed, axis=1), states

    def update(self, p, states, mixed):
        config = self.config

        def gate(place, old, hidden, new):
            names = {name.removeprefix(place): value for name, value in p.items() if name.startswith(place)}
            if config.gate == "fixed":
                share = sigmoid(names["gate_bias"])
                return share * old + (1 - share) * new
            forget = sigmoid(hidden @ names["forget_gate/kernel"] + names["forget_gate/bias"] + 1)
            take = sigmoid(hidden @ names["input_gate/kernel"] + names["input_gate/bias"] - 1)
            return forget * old + take * new

        attention, feedforward = "recurrent_tbase/post_attn_mlp/", "recurrent_tbase/ffn/"
        if config.cell != "single":
            states = gate(attention, states, mixed, mixed @ p[attention + "output_layer/kernel"])
        if config.cell == "skip":
            return states
        dual = config.cell == "dual"
        y = norm(states, p["recurrent_tbase/pre_ffn_layernorm/scale"]) if dual else mixed
        hidden = np.maximum(y @ p[feedforward + "hidden0/kernel"], 0)
        new = hidden @ p[feedforward + "output_layer/kernel"]
        return gate(feedforward, states, hidden, new if dual else np.tanh(new))
