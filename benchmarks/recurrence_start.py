"""The cost of a recurrence before training, by the layer that it is inserted into.

    python benchmarks/recurrence_start.py runs/smollm2 --text persuasion.txt --text revelation.txt --text hamlet.txt

Reads texts in sequences of five windows, and prints the loss in nats per token minus that of the same model without a
recurrence, over the tokens of all windows but the first: with a vector of zeros inserted after a layer's norm, and with
the vector of a network with the usual initial weights inserted before it.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import cast

import jax
import numpy as np

from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.families.pretrained.recurrence import WindowSummary
from meliad_like.models.model import Model
from meliad_like.run.opening import open_checkpoint

WINDOWS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--layer", type=int, action="append", help="counted from 0; default: some of all")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=2, help="of each text, after its first fifth")
    arguments = parser.parse_args()
    opened = open_checkpoint(arguments.checkpoint)
    decoder = cast(PretrainedConfig, opened.run.model)
    length, sequences = WINDOWS * arguments.window, []
    for path in arguments.text:
        text = path.read_text()
        tokens = opened.vocabulary.encode(text[len(text) // 5 :][: 20 * arguments.sequences * length])
        places = np.arange(arguments.sequences)[:, None] * length + np.arange(length + 1)
        sequences.append(tokens[places])
    tokens = np.concatenate(sequences)
    start = np.arange(WINDOWS) == np.zeros((len(tokens), 1))

    def loss(*recurrence: WindowSummary) -> float:
        config = dataclasses.replace(decoder, window_length=arguments.window, recurrence=recurrence)
        model = Model(config, opened.model.vocabulary_size)

        @jax.jit
        def losses(params):
            module = model.bind(params)
            carry = module.init_carry(len(tokens))
            return module.losses(tokens[:, :-1], tokens[:, 1:], carry, start, slice_length=arguments.window)[0].nats

        return float(np.asarray(losses(model.init(jax.random.key(0)) | opened.params))[:, arguments.window :].mean())

    plain = loss()
    print(f"without a recurrence {plain:.4f} nats a token, {len(tokens)} sequences of {length} tokens", flush=True)
    for layer in arguments.layer or range(1, decoder.num_layers, 6):
        zeros = loss(WindowSummary(layers=(layer,), insertion_point="after_norm", scale=0.0)) - plain
        usual = loss(WindowSummary(layers=(layer,))) - plain
        print(f"layer {layer}: zeros {zeros:+.4f}, usual initial weights {usual:+.4f}", flush=True)


if __name__ == "__main__":
    main()
