"""Reads and continues documents with an exported model, where only jax and flatbuffers are installed.

    model = Model("FOLDER")
    log_probabilities, state = model.read(model.encode("import os"))
    tokens, state = model.generate(state, 200, temperature=0.7)
    print(model.decode(tokens[0]))
    model.save("place.npz", state)  # and another time: state = model.load("place.npz")

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
    """The memory of `b` documents, in a constant size. It can be continued any number of times."""

    carry: list[jax.Array]
    token: np.ndarray  # the last one, int32[b], which the carry has not read
    num_read: int


class Model:
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
        """Reads tokens that begin documents or continue the documents of `state`: segments, then parts of blocks.
        Returns the log-probability of each token, [b, n], NaN for a document's first, and the state after them."""
        rows, window = np.atleast_2d(self._checked(tokens)), self.facts["window_length"]
        new, segment = window - self.facts["overlap"], self.facts["programs"].get("segment", np.inf)
        if state is None:
            carry, num_read = self._programs["begin"](self._parameters, np.zeros(len(rows), np.int32)), 0
        else:
            carry, token, num_read = copy.deepcopy(state)
            rows = np.append(token[:, None], rows, axis=1)
        results = [np.full((len(rows), int(state is None)), np.nan, np.float32)]
        while (rest := rows.shape[1] - 1) > 0:
            left = window - num_read if num_read < window else new - (num_read - window) % new
            name, count = ("segment", segment) if left == window and rest >= segment else ("block", min(left, rest))
            result, _, carry = self._run(name, carry, rows, count)
            results.append(result[:, :count])
            rows, num_read = rows[:, count:], num_read + count
        return np.concatenate(results, axis=1)[:, : np.shape(tokens)[-1]], State(carry, rows[:, -1], num_read)

    def generate(self, state: State, length: int, temperature: float = 0, seed: int = 0) -> tuple[np.ndarray, State]:
        """Continues documents by at most `length` tokens, until all have ended; 0: always by the most likely token.
        Returns the tokens, [b, n], which have no meaning after a document's end, and the state after them."""
        carry, rows, random = copy.deepcopy(state.carry), state.token[:, None], np.random.default_rng(seed)
        while rows.shape[1] <= length and not np.isin(rows[:, 1:], self.vocabulary["end_tokens"]).any(axis=1).all():
            _, logits, carry = self._run("token", carry, rows[:, [-1, -1]], 1)
            noise = random.gumbel(size=logits.shape) if temperature else 0
            logits = np.asarray(logits) / (temperature or 1) + noise
            logits[:, self.vocabulary["unwritable"]] = -np.inf
            rows = np.append(rows, logits.argmax(axis=1).astype(np.int32)[:, None], axis=1)
        return rows[:, 1:], State(carry, rows[:, -1], state.num_read + rows.shape[1] - 1)

    def _checked(self, tokens: np.ndarray) -> np.ndarray:
        tokens, size = np.asarray(tokens), self.vocabulary["size"]
        if not tokens.size:
            raise ValueError("there are no tokens to read")
        if not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"token ids must be integers, not {tokens.dtype}")
        if (wrong := tokens[(tokens < 0) | (tokens >= size)]).size:
            raise ValueError(f"token {wrong[0]} is not in the vocabulary, which has {size:,} tokens")
        return tokens.astype(np.int32)

    def _run(self, name: str, carry: list[jax.Array], rows: np.ndarray, count: int) -> tuple:
        n = self.facts["programs"][name]
        rows, counts = rows[:, : n + 1], np.full(len(rows), count, np.int32)
        rows = np.pad(rows, ((0, 0), (0, n + 1 - rows.shape[1])))
        return self._programs[name](self._parameters, carry, rows[:, :n], rows[:, 1:], counts)

    def save(self, path: str | Path, state: State) -> None:
        carry = {leaf["name"]: np.asarray(x) for leaf, x in zip(self.facts["carry"], state.carry)}
        np.savez(path, model=self.facts["identity"], token=state.token, num_read=state.num_read, **carry)

    def load(self, path: str | Path) -> State:
        with np.load(path) as file:  # bfloat16 as raw bytes
            assert str(file["model"]) == self.facts["identity"], f"{path} is a state of another model"
            carry = [jax.device_put(file[leaf["name"]].view(leaf["dtype"])) for leaf in self.facts["carry"]]
            return State(carry, file["token"], int(file["num_read"]))
