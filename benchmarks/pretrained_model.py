"""Loads a real pretrained model: time, memory, a continuation, losses on texts, and the size of its outputs.

    python benchmarks/pretrained_model.py SmolLM2-135M-Instruct --text emma.txt --text moby_dick.txt

The model is a folder of transformers. Memory is the peak of this process minus its memory before loading; parameters
are float32.
"""

import argparse
import dataclasses
import resource
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meliad_like.config import read_changes
from meliad_like.conversion.published.folder import open_published
from meliad_like.layers.losses import token_losses
from meliad_like.models.model import Model
from meliad_like.vocabularies.tokenizers import TokenizersVocabularyConfig


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def root_mean_square(x):
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=-1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder of transformers")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--text", type=Path, action="append", default=[], help="whose perplexity is measured")
    parser.add_argument("--skip_characters", type=int, default=0, help="of a text, before its tokens are made")
    parser.add_argument("--skip", type=int, default=0, help="tokens of a text before the window")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=8, help="of a text, whose outputs are measured")
    arguments = parser.parse_args()

    jnp.zeros(1).block_until_ready()  # what jax itself needs
    before, began = peak_bytes(), time.perf_counter()
    pretrained = open_published(arguments.model, read_changes())
    jax.block_until_ready(pretrained.params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(pretrained.params))
    print(
        f"{size // 4:,} parameters, loaded in {time.perf_counter() - began:.1f} s, "
        f"with {(peak_bytes() - before) / size:.2f} times their memory",
        flush=True,
    )
    vocabulary = TokenizersVocabularyConfig(model_file=str(arguments.model)).make()
    # A window has one more token than inputs: its last target.
    config = dataclasses.replace(pretrained.run.model, window_length=arguments.window)
    model = Model(config, pretrained.model.vocabulary_size)

    @jax.jit
    def read_window(params, tokens, targets):
        module = model.bind(params)
        outputs = module.read_window(tokens)
        hidden = module.final_norm(outputs[-1])
        return module.logits(hidden[:, -1]), token_losses(module, hidden, targets, 256).nats

    @jax.jit
    def sizes(params, tokens):
        outputs = jnp.stack(model.bind(params).read_window(tokens)[1:])
        pooled = outputs.mean((0, 2))
        return root_mean_square(outputs).mean(1), root_mean_square(pooled), root_mean_square(pooled - pooled.mean(0))

    prompt = vocabulary.encode(arguments.prompt)[None]
    logits, _ = read_window(pretrained.params, prompt, prompt)
    print(f"{arguments.prompt!r} -> {vocabulary.decode([int(jnp.argmax(logits))])!r}", flush=True)
    for path in arguments.text:
        everything = vocabulary.encode(path.read_text()[arguments.skip_characters :])[arguments.skip :]
        tokens = everything[: arguments.window + 1]
        _, nats = read_window(pretrained.params, tokens[None, :-1], tokens[None, 1:])
        print(f"{path}: perplexity {np.exp(np.mean(nats)):.2f} over {len(tokens) - 1:,} tokens", flush=True)
        if len(everything) < arguments.windows * arguments.window:
            continue
        windows = everything[: arguments.windows * arguments.window].reshape(arguments.windows, -1)
        by_layer, pooled, differing = (np.asarray(size) for size in sizes(pretrained.params, windows))
        print(
            f"  root mean squares in {arguments.windows} windows: a window's first token {by_layer[:, 0].max():.0f} in "
            f"the layer where it is largest, other tokens {by_layer[0, 1:].mean():.1f} after the first layer and "
            f"{by_layer[-1, 1:].mean():.1f} after the last; the mean over layers and tokens {pooled.mean():.1f}, "
            f"what differs in it between windows {differing.mean():.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
