"""A reimplementation of the decoder in plain numpy: dense attention, a literal mask, a loop over blocks, one document.

With the parameter names of google-research/meliad; shares no code with the package but its configs.
"""

import numpy as np
from decoders import mixer_of

from meliad_like.mixers.external_memory import ExternalMemory
from meliad_like.mixers.positions import POSITIONS
from meliad_like.mixers.recurrent_states import RecurrentStates, StateReader

# The smallest distance in each of T5's buckets.
BUCKETS = [*range(17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def unit(x):
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def softmax_of_seen(scores, seen):
    """The softmax over visible keys; rows without visible keys are 0."""
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
        self.recurrent = mixer_of(config, RecurrentStates) or RecurrentStates()
        self.feedback = mixer_of(config, StateReader) is not None
        self.memory = mixer_of(config, ExternalMemory) or ExternalMemory()
        self.position = POSITIONS.name_of(config.position)
        self.config, self.theirs = config, {name: value.astype(np.float64) for name, value in theirs.items()}
        self.layers = [
            {n.removeprefix(f"transformer{i}/"): v for n, v in self.theirs.items() if n.startswith(f"transformer{i}/")}
            for i in range(config.total_layers)
        ]

    def __call__(self, tokens):
        """Logits [n, v], and the states of each layer after the last block, or None."""
        w, config, embedding = self.config.window_length, self.config, self.theirs["embed/embedding"]
        # Before the document there are w zeros.
        nothing = np.zeros((config.num_heads, w, config.head_size))
        past = [(nothing, nothing)] * config.total_layers
        states = [p.get("recurrent_initial_state") for p in self.layers]
        blocks = []
        for begin in range(0, len(tokens), w):
            x = embedding[tokens[begin : begin + w]]
            read = [None if s is None else self.state_heads(p, s) for p, s in zip(self.layers, states)]
            shared = [heads for heads in read if heads is not None][-1:] if self.feedback else []
            new_states = list(states)
            for i, p in enumerate(self.layers):
                sources = [read[i]] if read[i] is not None else shared
                x, past[i], new_states[i] = self.layer(p, x, past[i], states[i], sources, begin)
            states = new_states
            blocks.append(x)
        y = norm(np.concatenate(blocks), self.theirs["final_layernorm/scale"])
        return y @ embedding.T / np.sqrt(config.model_width), states

    def heads(self, x):
        return x.reshape(len(x), self.config.num_heads, self.config.head_size).transpose(1, 0, 2)

    def state_heads(self, p, states):
        """The keys, values, queries and cross-queries of the states."""
        place = "recurrent_tbase/_kvq/"
        y = norm(states, p[place + "pre_attn_layernorm/scale"]) + p[place + "position_embeddings"]
        names = ("keys_layer", "values_layer", "queries_layer", "queries2_layer")
        heads = [self.heads(y @ p[f"{place}{name}/kernel"]) for name in names]
        return [unit(z) if name != "values_layer" else z for name, z in zip(names, heads)]

    def layer(self, p, x, past, states, sources, begin):
        """One block, whose first token is at position `begin`."""
        config, w = self.config, self.config.window_length
        y = norm(x, p["tbase/_kvq/pre_attn_layernorm/scale"])
        to_query, to_key = (p[f"tbase/_kvq/{name}_layer/kernel"] for name in ("queries", "keys"))
        query, new_key = unit(self.heads(y @ to_query)), unit(self.heads(y @ to_key))
        scale = p["tbase/_kvq/attention_scale"]
        memory_key, memory_value = (z[:, w:][:, -self.memory.num_slots :] for z in past)
        key, value = past = (
            np.concatenate([past[0], new_key], axis=1),
            np.concatenate([past[1], self.heads(y @ p["tbase/_kvq/values_layer/kernel"])], axis=1),
        )
        t, s = np.arange(begin, begin + w), np.arange(-w, begin + w)
        distance = t[:, None] - s[None, :]
        seen = (distance >= 1) & (distance <= w) & ((s >= 0) | (not config.mask_empty_cache))
        bias, turned_query, turned_key = 0.0, query, key
        if "external_memory_bias" not in p and self.position == "t5":
            bucket = np.searchsorted(BUCKETS, np.maximum(distance, 0), "right") - 1
            bias = p["relative_positions/rel_embedding"][:, bucket]
        if "external_memory_bias" not in p and self.position == "rotary":
            turned_query, turned_key = rotate(query, t), rotate(key, s)
        mixed = attend(turned_query, turned_key, value, scale, bias, seen)
        if "external_memory_bias" in p:
            share = sigmoid(p["external_memory_bias"])[:, None, None]
            mixed = (1 - share) * mixed + share * self.attend_memories(query, memory_key, memory_value, scale, begin)
        if sources:
            cross_query = unit(self.heads(y @ p["tbase/_kvq/queries2_layer/kernel"]))
            state_key, state_value = (np.concatenate([source[i] for source in sources], axis=1) for i in (0, 1))
            mixed = np.concatenate([mixed, attend(cross_query, state_key, state_value, p["tbase/attention_scale2"])])
        if states is not None:
            # The block before and the block itself.
            tile = np.s_[:, -2 * w :]
            valid = s[-2 * w :] >= (0 if config.mask_empty_cache else -w)
            states = self.recur(p, states, sources[0], key[tile], value[tile], valid)
        x = x + mixed.transpose(1, 0, 2).reshape(w, -1) @ p["tbase/post_attn_mlp/output_layer/kernel"]
        hidden = np.maximum(norm(x, p["tbase/pre_ffn_layernorm/scale"]) @ p["tbase/ffn/hidden0/kernel"], 0)
        return x + hidden @ p["tbase/ffn/output_layer/kernel"], past, states

    def attend_memories(self, query, key, value, scale, begin):
        """One query after the other, over its nearest memories; a missing one is zero where zeros are not masked."""
        config, mixed = self.config, np.zeros_like(query)
        missing = np.zeros((self.memory.num_neighbors, config.head_size))
        for h, t in np.ndindex(query.shape[:2]):
            products = key[h] @ query[h, t]
            if self.memory.search == "exact":
                nearest = np.argsort(-products)[: self.memory.num_neighbors]
            else:
                # A memory's slot, and so its bucket, follows from its position.
                bucket = np.arange(begin - len(products), begin) % self.memory.num_slots % self.memory.num_neighbors
                members = [np.flatnonzero(bucket == j) for j in range(self.memory.num_neighbors)]
                nearest = np.array([m[np.argmax(products[m])] for m in members if len(m)], int)
            k, v = key[h][nearest], value[h][nearest]
            if not config.mask_empty_cache:
                k, v = (np.concatenate([z, missing])[: self.memory.num_neighbors] for z in (k, v))
            if len(k):
                weights = np.exp(k @ query[h, t] * abs(scale[h]))
                mixed[h, t] = weights @ v / weights.sum()
        return mixed

    def recur(self, p, states, heads, key, value, valid):
        own_key, own_value, query, cross_query = heads
        own = attend(query, own_key, own_value, p["recurrent_tbase/_kvq/attention_scale"])
        cross = attend(cross_query, key, value, p["recurrent_tbase/attention_scale2"], 0.0, valid)
        return self.update(p, states, np.concatenate([own, cross]).transpose(1, 0, 2).reshape(len(states), -1))

    def update(self, p, states, mixed):
        def gate(place, old, hidden, new):
            names = {name.removeprefix(place): value for name, value in p.items() if name.startswith(place)}
            if self.recurrent.gate == "fixed":
                share = sigmoid(names["gate_bias"])
                return share * old + (1 - share) * new
            forget = sigmoid(hidden @ names["forget_gate/kernel"] + names["forget_gate/bias"] + 1)
            take = sigmoid(hidden @ names["input_gate/kernel"] + names["input_gate/bias"] - 1)
            return forget * old + take * new

        attention, feedforward = "recurrent_tbase/post_attn_mlp/", "recurrent_tbase/ffn/"
        if self.recurrent.cell != "single":
            states = gate(attention, states, mixed, mixed @ p[attention + "output_layer/kernel"])
        if self.recurrent.cell == "skip":
            return states
        dual = self.recurrent.cell == "dual"
        y = norm(states, p["recurrent_tbase/pre_ffn_layernorm/scale"]) if dual else mixed
        hidden = np.maximum(y @ p[feedforward + "hidden0/kernel"], 0)
        new = hidden @ p[feedforward + "output_layer/kernel"]
        return gate(feedforward, states, hidden, new if dual else np.tanh(new))
