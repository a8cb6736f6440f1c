"""GPT-2 and Llama as carry-passing language models that read a document by windows.

A block of the contract (docs/design.md) is a window. Its positions begin at 0, and its attention ends at its first
token: nothing passes from one window to the next but, where there is a recurrence, a few vectors. Windows may overlap:
then the reader (`data/windows.py`) repeats in each window the last tokens of the one before.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.layers.basic import LINEAR, check_tokens, dropout, embed, parameter, product, rematerialise, rows
from meliad_like.layers.losses import TokenLosses, token_losses
from meliad_like.layers.sharding import constrain
from meliad_like.models.pretrained.config import PretrainedConfig
from meliad_like.models.pretrained.parts import Block, Inserted, KeyValueCache, make_norm, normal
from meliad_like.models.recurrent_pretrained import Recurrence


class WindowCarry(NamedTuple):
    """The state of the current window while decoding."""

    tokens: Int[Array, "b w"]
    caches: list[KeyValueCache]
    weighed: Float[Array, "b w d"] | None
    """The layers' outputs, weighted: the recurrence pools them at the window's end."""


class PretrainedCarry(NamedTuple):
    """The carry of a pretrained decoder: everything that it remembers of the documents in its lanes."""

    position: Int[Array, " b"]
    """Tokens read since the lane's document began; those that a window repeats are not counted again."""
    inserted: Float[Array, "b e d"] | None = None
    """The vectors for the next window, if there is a recurrence."""
    window: WindowCarry | None = None
    """The state of the current window, only for decoding."""


class PretrainedDecoder(nnx.Module):
    """A pretrained language model with a window of `w` tokens, and perhaps a recurrence that reaches further."""

    def __init__(self, config: PretrainedConfig, vocabulary_size: int, *, rngs: nnx.Rngs):
        self.config = config
        d, shape = config.model_width, (vocabulary_size, config.model_width)
        self.embedding = parameter(rngs.params(), normal, shape, ("vocabulary", "model"))
        self.positions = (
            parameter(rngs.params(), normal, (config.max_positions, d), (None, "model"))
            if config.architecture == "gpt2"
            else None
        )
        self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.num_layers))
        self.final_norm = make_norm(config, rngs)
        self.output_embedding = (
            None if config.tied_embedding else parameter(rngs.params(), normal, shape, ("vocabulary", "model"))
        )
        self.recurrence = Recurrence(config, rngs=rngs) if config.recurrent else None

    @property
    def dtype(self):
        return jnp.dtype(self.config.activation_dtype)

    def init_carry(self, b: int, *, decoding: bool = False) -> PretrainedCarry:
        """The carry of `b` lanes before their first token; `decoding` adds the arrays that `decode_step` needs."""
        config, inserted, window = self.config, None, None
        w, d = config.window_length, config.model_width
        if self.recurrence is not None:
            inserted = jnp.zeros((b, config.num_inserted, d), jnp.float32)
        if decoding:
            window = WindowCarry(
                tokens=jnp.zeros((b, w), jnp.int32),
                caches=[block.init_cache(b, self.dtype) for block in self.blocks],
                weighed=None if self.recurrence is None else jnp.zeros((b, w, d), self.dtype),
            )
        return PretrainedCarry(jnp.zeros((b,), jnp.int32), inserted, window)

    def read_window(
        self,
        tokens: Int[Array, "b t"],
        first: Int[Array, " b"],
        caches: list[KeyValueCache] | None = None,
        inserted: Inserted | None = None,
        dropout_key: PRNGKeyArray | None = None,
    ) -> tuple[list[Float[Array, "b t d"]], list[KeyValueCache] | None]:
        """Some tokens of a window: the embedding and the layers, without the final norm.

        Args:
            tokens: at most w.
            first: position in the window of the first token.
            caches: of the window's tokens before `first`; None: there are none, and none is kept.
            inserted: the vectors from the window before.
            dropout_key: random key in training; None: no dropout.

        Returns:
            The embedding and each layer's output, and the caches with these tokens in them.
        """
        keys = [None] * (len(self.blocks) + 1)
        if dropout_key is not None:
            keys = list(jax.random.split(dropout_key, len(keys)))
        position = first[:, None] + jnp.arange(tokens.shape[1])
        x = embed(constrain(self.embedding[...].astype(self.dtype), "vocabulary", None), tokens)
        if self.positions is not None:
            # Gathered whole, as the embedding: the compiler would otherwise gather what was looked up in it.
            x = x + constrain(self.positions[...].astype(self.dtype), None, None)[position]
        x = constrain(dropout(x, self.config.dropout_rate, keys[-1]), "lanes", None, None)
        outputs, new_caches = [x], []
        for i, block in enumerate(self.blocks):
            here = inserted if i in self.config.insertion_indices else None
            call = rematerialise(Block.__call__, self.config.remat)
            x, cache = call(block, x, position, None if caches is None else caches[i], here, keys[i])
            x = constrain(x, "lanes", None, None)
            outputs.append(x)
            new_caches.append(cache)
        return outputs, None if caches is None else new_caches

    def _weigh(self, outputs: list[Float[Array, "b t d"]], hidden: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        assert self.recurrence is not None
        last = hidden if self.config.pooled_layers == "final_norm" else outputs[-1]
        return self.recurrence.weigh([*outputs[1:-1], last])

    def __call__(
        self,
        tokens: Int[Array, "b n"],
        carry: PretrainedCarry,
        start: Bool[Array, "b c"],
        dropout_key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n d"], PretrainedCarry]:
        """Reads a segment.

        Args:
            tokens: whole windows, each with the tokens that it repeats. A carry for decoding gets them without
                repetition, and must be at the beginning of a window.
            carry: from the segment before, or `init_carry`.
            start: windows with which a new document begins; nothing before them is remembered.
            dropout_key: random key in training; None: no dropout.

        Returns:
            Hidden vectors for `logits`, and the carry for the next segment.
        """
        check_tokens(tokens, self.embedding.shape[0])
        if carry.window is not None and self.config.overlap:
            return self._read_one_by_one(tokens, carry, start)
        windows = _cut(tokens, start, self.config.window_length)
        if self.recurrence is None:
            b, c = start.shape
            merged = rearrange(windows, "b c w -> (b c) w")
            outputs, _ = self.read_window(merged, jnp.zeros((b * c,), jnp.int32), dropout_key=dropout_key)
            hidden = rearrange(self.final_norm(outputs[-1]), "(b c) w d -> b (c w) d", b=b)
            return hidden, carry._replace(position=self._advance(carry.position, start))

        hidden, carry = self._scan(windows, carry, start, dropout_key, lambda hidden, _: hidden)
        return rearrange(hidden, "c b w d -> b (c w) d"), carry

    def losses(
        self,
        tokens: Int[Array, "b n"],
        targets: Int[Array, "b n"],
        carry: PretrainedCarry,
        start: Bool[Array, "b c"],
        dropout_key: PRNGKeyArray | None = None,
        *,
        slice_length: int,
    ) -> tuple[TokenLosses, PretrainedCarry]:
        """`__call__` and then the loss of every target; see `models.losses.segment_losses`.

        With a recurrence all of a window, its losses included, is computed again in the backward pass, and only the
        vectors that pass between windows are kept (section 3.2): memory is that of one window.
        """
        if self.recurrence is None:
            hidden, carry = self(tokens, carry, start, dropout_key)
            return token_losses(self, hidden, targets, slice_length), carry
        w = self.config.window_length
        windows = jnp.stack([_cut(tokens, start, w), _cut(targets, start, w)], axis=-1)
        losses, carry = self._scan(
            windows,
            carry,
            start,
            dropout_key,
            lambda hidden, targets: token_losses(self, hidden, targets, slice_length),
        )
        return jax.tree.map(lambda x: rearrange(x, "c b w -> b (c w)"), losses), carry

    def _scan(self, windows, carry: PretrainedCarry, start, dropout_key, finish):
        """`finish(hidden, targets)` of one window after the other; the windows' last axis may hold their targets."""
        recurrence = self.recurrence
        assert recurrence is not None

        def read(state, window):
            (inserted, position), (tokens, start, index) = state, window
            tokens, targets = (tokens, None) if tokens.ndim == 2 else (tokens[..., 0], tokens[..., 1])
            position = jnp.where(start, 0, position)
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, index)
            outputs, _ = self.read_window(tokens, jnp.zeros_like(position), None, Inserted(inserted, position > 0), key)
            hidden = self.final_norm(outputs[-1])
            inserted = recurrence(self._weigh(outputs, hidden))
            return (inserted, self._advance(position, start[:, None])), finish(hidden, targets)

        by_window = (jnp.moveaxis(windows, 1, 0), start.T, jnp.arange(start.shape[1]))
        keep = jax.checkpoint_policies.save_only_these_names(*([LINEAR] if self.config.remat == "dots" else []))
        (inserted, position), results = jax.lax.scan(
            jax.checkpoint(read, prevent_cse=False, policy=keep), (carry.inserted, carry.position), by_window
        )
        return results, carry._replace(position=position, inserted=inserted)

    def _advance(self, position: Int[Array, " b"], start: Bool[Array, "b c"]) -> Int[Array, " b"]:
        """Tokens read after these windows: w of a document's first, w - overlap of each further one."""
        c, stride = start.shape[1], self.config.stride
        windows_since = jnp.min(jnp.where(start, c - jnp.arange(c), c + 1), axis=1)
        fresh = self.config.overlap + windows_since * stride
        going_on = jnp.where(position == 0, self.config.overlap, position) + c * stride
        return jnp.where(windows_since <= c, fresh, going_on)

    def logits(self, hidden: Float[Array, "... d"]) -> Float[Array, "... v"]:
        """The logits of the next token, float32."""
        table = (self.embedding if self.output_embedding is None else self.output_embedding)[...]
        if self.config.matmul_dtype is None:
            table = table.astype(hidden.dtype)
            logits = jnp.einsum("nd,vd->nv", rows(hidden), table, preferred_element_type=jnp.float32)
        else:
            logits = product(rows(hidden).astype(jnp.float32), table.T, self.config.matmul_dtype)
        return jnp.reshape(logits, (*hidden.shape[:-1], -1))

    def decode_step(
        self, token: Int[Array, " b"], carry: PretrainedCarry
    ) -> tuple[Float[Array, "b v"], PretrainedCarry]:
        """Reads one more token per lane, and returns the logits of the next.

        Where a window is full the next one begins by itself, with the last `overlap` tokens read again: so texts of any
        length are written by the very windows that they are evaluated in. Lanes may be at different positions. The
        carry comes from `init_carry(b, decoding=True)`.
        """
        hidden, carry = self._read_token(token, carry)
        return self.logits(hidden), carry

    def _read_token(
        self, token: Int[Array, " b"], carry: PretrainedCarry
    ) -> tuple[Float[Array, "b d"], PretrainedCarry]:
        config, window, position = self.config, carry.window, carry.position
        assert window is not None
        place = jnp.where(
            position < config.window_length, position, config.overlap + (position - config.overlap) % config.stride
        )
        inserted = self._inserted(carry)
        outputs, caches = self.read_window(token[:, None], place, window.caches, inserted)
        hidden = self.final_norm(outputs[-1])
        lanes = jnp.arange(len(token))
        weighed = window.weighed
        if weighed is not None:
            weighed = weighed.at[lanes, place].set(self._weigh(outputs, hidden)[:, 0])
        window = WindowCarry(window.tokens.at[lanes, place].set(token), caches, weighed)
        carry = PretrainedCarry(position + 1, carry.inserted, window)
        full = place == config.window_length - 1
        carry = jax.lax.cond(jnp.any(full), self._begin_window, lambda carry, _: carry, carry, full)
        return hidden[:, 0], carry

    def _inserted(self, carry: PretrainedCarry) -> Inserted | None:
        if self.recurrence is None:
            return None
        return Inserted(carry.inserted, carry.position >= self.config.window_length)

    def _begin_window(self, carry: PretrainedCarry, full: Bool[Array, " b"]) -> PretrainedCarry:
        """Begins the next window of the lanes whose window is full."""
        new, window = carry, carry.window
        assert window is not None
        if self.recurrence is not None:
            new = new._replace(inserted=self.recurrence(window.weighed))
        if o := self.config.overlap:
            tokens = window.tokens[:, -o:]
            outputs, caches = self.read_window(
                tokens, jnp.zeros_like(carry.position), window.caches, self._inserted(new)
            )
            weighed = window.weighed
            if weighed is not None:
                weighed = weighed.at[:, :o].set(self._weigh(outputs, self.final_norm(outputs[-1])))
            new = new._replace(window=WindowCarry(window.tokens.at[:, :o].set(tokens), caches, weighed))
        return jax.tree.map(lambda x, y: jnp.where(full.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, carry)

    def _read_one_by_one(self, tokens, carry: PretrainedCarry, start):
        """A segment without repetition, of windows that overlap: they begin within the blocks of w."""
        begins = jnp.zeros(tokens.shape, bool).at[:, :: self.config.window_length].set(start)

        def read(carry: PretrainedCarry, token):
            token, begins = token
            hidden, carry = self._read_token(token, carry._replace(position=jnp.where(begins, 0, carry.position)))
            return carry, hidden

        carry, hidden = jax.lax.scan(read, carry, (tokens.T, begins.T))
        return jnp.moveaxis(hidden, 0, 1), carry


def _cut(tokens: Int[Array, "b n"], start: Bool[Array, "b c"], w: int) -> Int[Array, "b c w"]:
    n = tokens.shape[1]
    if n % w or start.shape[1] != n // w:
        raise ValueError(f"{n} tokens with {start.shape[1]} start flags are not whole windows of window_length={w}")
    return tokens.reshape(tokens.shape[0], -1, w)
