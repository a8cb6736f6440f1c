"""Reads and continues documents with an exported model, where only jax and flatbuffers are installed.

    model = Model("FOLDER")
    log_probabilities, state = model.read(model.encode("import os"))
    tokens, state = model.generate(state, 200, temperature=0.7)
    print(model.decode(tokens[0]))
    model.save("place.npz", state)
    state = model.load("place.npz")

Tokens are ids: [n], or [b, n] for several documents that are read in step. Text goes in and out in the vocabulary of
bytes alone; for others the folder has the vocabulary's files. `model.json` says what the programs take and return.
"""

import copy
import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax import export


class State(NamedTuple):
    """All that a model remembers of `b` documents, in a constant size. It can be continued any number of times."""

    carry: list[jax.Array]
    logits: np.ndarray  # of the next token, float32[b, v]; NaN before the first one
    num_tokens: int


class Model:
    """An exported model, on the first device."""

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        self.facts = json.loads((folder / "model.json").read_text())
        self.vocabulary, self._parameters, self._programs = self.facts["vocabulary"], [], {}
        with open(folder / "parameters.safetensors", "rb") as file:
            places = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            content = np.memmap(file, np.uint8, "r", file.tell())
        for leaf in self.facts["parameters"]:
            array = content[slice(*places[leaf["name"]]["data_offsets"])].view(leaf["dtype"])
            self._parameters.append(jax.device_put(array.reshape(leaf["shape"])))
        for name in self.facts["programs"]:
            program = export.deserialize(bytearray((folder / f"{name}.stablehlo").read_bytes()))
            self._programs[name] = jax.jit(program.call, donate_argnums=1)  # The next carry takes its buffers.

    def encode(self, text: str) -> np.ndarray:
        assert self.vocabulary["kind"] == "bytes", "only the vocabulary of bytes is built in: give token ids"
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        assert self.vocabulary["kind"] == "bytes", "only the vocabulary of bytes is built in: take token ids"
        return bytes(token for token in tokens.tolist() if token < 256).decode(errors="replace")

    def read(self, tokens: np.ndarray, state: State | None = None) -> tuple[np.ndarray, State]:
        """Reads tokens that begin documents or continue those of `state`: segments, then blocks, then one by one.
        Returns the log-probability of each token, [b, n], NaN for a document's first, and the state after them."""
        tokens = np.atleast_2d(np.asarray(tokens, np.int32))
        if state is None:
            carry = self._programs["begin"](self._parameters, np.zeros(len(tokens), np.int32))
            state = State(carry, np.full((len(tokens), self.vocabulary["size"]), np.nan, np.float32), 0)
        state, results = copy.deepcopy(state), [np.zeros((len(tokens), 0))]
        while tokens.size:
            lengths = self.facts["programs"] if state.num_tokens % self.facts["window_length"] == 0 else {"token": 1}
            name = next(name for name, length in lengths.items() if 0 < length <= tokens.shape[1])
            piece, tokens = np.split(tokens, [lengths[name]], axis=1)
            shifted = state.logits - state.logits.max(axis=1, keepdims=True)
            first = np.take_along_axis(shifted, piece[:, :1], axis=1)
            state, after_first = self._run(name, state, piece)
            results += [first - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), after_first]
        return np.concatenate(results, axis=1), state

    def generate(self, state: State, length: int, temperature: float = 0, seed: int = 0) -> tuple[np.ndarray, State]:
        """Continues documents by at most `length` tokens, until all have ended; 0: always by the most likely token.
        Returns the tokens, [b, n], which have no meaning after a document's end, and the state after them."""
        state, random = copy.deepcopy(state), np.random.default_rng(seed)
        tokens, end = np.zeros((len(state.logits), 0), np.int32), self.vocabulary["end_of_document"]
        while tokens.shape[1] < length and not (tokens == end).any(axis=1).all():
            noise = random.gumbel(size=state.logits.shape) if temperature else 0
            logits = state.logits / (temperature or 1) + noise
            logits[:, self.vocabulary["unwritable"]] = -np.inf
            tokens = np.append(tokens, logits.argmax(axis=1).astype(np.int32)[:, None], axis=1)
            state, _ = self._run("token", state, tokens[:, -1:])
        return tokens, state

    def _run(self, name: str, state: State, tokens: np.ndarray) -> tuple[State, np.ndarray]:
        logits, results, carry = self._programs[name](self._parameters, state.carry, tokens)
        return State(carry, np.asarray(logits), state.num_tokens + tokens.shape[1]), np.asarray(results)

    def save(self, path: str | Path, state: State) -> None:
        carry = {leaf["name"]: np.asarray(x) for leaf, x in zip(self.facts["carry"], state.carry)}
        np.savez(path, model=self.facts["identity"], logits=state.logits, num_tokens=state.num_tokens, **carry)

    def load(self, path: str | Path) -> State:
        with np.load(path) as file:  # bfloat16 as raw bytes
            assert str(file["model"]) == self.facts["identity"], f"{path} is a state of another model"
            carry = [jax.device_put(file[leaf["name"]].view(leaf["dtype"])) for leaf in self.facts["carry"]]
            return State(carry, file["logits"], int(file["num_tokens"]))
