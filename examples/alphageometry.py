"""AlphaGeometry's language model in this library: the interface that its prover calls, over batched beam search.

AlphaGeometry (Trinh et al. 2024; github.com/google-deepmind/alphageometry) is the best-known client of meliad. Its
prover calls `LanguageModelInference.beam_decode(inputs, eos_tokens, mask_tokens, dstate)` on a decoder of 12 layers,
width 1024, 8 heads of 128, a vocabulary of 1024, a window of 1024 and T5 positions.

    python examples/alphageometry.py                                                 # 3 GB of memory
    python examples/alphageometry.py --gin_param=DecoderConfig.num_layers=2

THE WEIGHTS ARE RANDOM, and so is what the model says: the trained ones are not distributed with this project. The
random weights are written under the names and in the shapes of meliad's checkpoints, and converted by the same code as

    python -m meliad_like.convert meliad --input=CHECKPOINT --output=DIR --gin_file=size/medium_150m.gin ...

with `FILES` and `PARAMS` below, and AlphaGeometry's vocabulary: --gin_param="RunConfig.vocabulary = 'sentencepiece'"
and --gin_param="FileVocabularyConfig.model_file = 'geometry.757.model'". `--checkpoint=DIR` opens the result. Here the
vocabulary is a list of the words of a few problems.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import meliad_like
from meliad_like import config
from meliad_like.conversion.meliad import convert_from_meliad, to_meliad
from meliad_like.errors import UserError
from meliad_like.library import LanguageModel, State
from meliad_like.models.model import Model

FILES = ("size/medium_150m.gin", "option/unmasked_empty_cache.gin")
PARAMS = ("DecoderConfig.window_length = 1024", "ReaderConfig.segment_length = 1024")
VOCABULARY_SIZE = 1024
PROBLEM = "{S} a : ; b : ; c : ; d : T a b c d 00 T a c b d 01 ? T a d b c {F1} x00"
WORDS = [*"abcdefghijklmnopqrstuvwxyz", *"CDIMOPTS^:;.?=/", "{S}", "{F1}", "x00", *(f"{i:02}" for i in range(100))]


class LanguageModelInference:
    """The interface of AlphaGeometry's class of this name, for a checkpoint of this library."""

    def __init__(self, checkpoint: str | Path, beams: int, tokens: int = 512, length_penalty: float = 0.6):
        """
        Args:
          checkpoint: a folder of `convert meliad`.
          beams: the width of the beam, which is also the batch.
          tokens: the largest number of tokens of a sequence.
          length_penalty: see `BeamConfig`.
        """
        self.lm: LanguageModel = meliad_like.load(checkpoint)
        self._settings: dict[str, Any] = {"width": beams, "tokens": tokens, "length_penalty": length_penalty}
        # The vocabulary is rounded up to 1024 ids, of which the last have no text.
        self._unused = [token for token in range(self.lm.vocabulary.size) if not self.decode([token])]

    def encode_list(self, words: Sequence[str]) -> list[int]:
        """The token of each word. Raises a UserError if a word has several."""
        tokens = [self.lm.vocabulary.encode(word).tolist() for word in words]
        for word, its in zip(words, tokens, strict=True):
            if len(its) != 1:
                raise UserError(f"{word!r} has {len(its)} tokens, and must be one")
        return [token for [token] in tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.lm.vocabulary.decode(tokens).strip()

    def beam_decode(
        self,
        inputs: str,
        eos_tokens: Sequence[str] | None = None,
        mask_tokens: Sequence[str] | None = None,
        dstate: State | None = None,
    ) -> dict[str, list]:
        """Continues a problem by its most likely constructions.

        Args:
          inputs: the problem, or what is added to what `dstate` has read.
          eos_tokens: words that end a construction; None: "." and ";".
          mask_tokens: words that no construction contains.
          dstate: the state of one of the sequences of an earlier call.

        Returns:
          Lists with an entry for each sequence that has ended, in the prover's order, which ends with the best:
          `finished_seqs` (tokens), `finished_scores` and `scores`, `seqs_str` (text), `dstate` (states).
        """
        found = self.lm.search(
            self.lm.read(inputs, dstate),
            end_tokens=self.encode_list([".", ";"] if eos_tokens is None else eos_tokens),
            forbidden_tokens=[*self._unused, *self.encode_list(mask_tokens or [])],
            **self._settings,
        )
        finished = [one for one in reversed(found) if one.ended]
        scores = [one.score for one in finished]
        return {
            "finished_seqs": [one.tokens for one in finished],
            "finished_scores": scores,
            "scores": scores,
            "seqs_str": [self.decode(one.tokens) for one in finished],
            "dstate": [one.state for one in finished],
        }


def make_random_checkpoint(folder: Path, changes: Sequence[str] = ()) -> Path:
    """Writes random weights as a checkpoint of meliad, and converts it; returns the converted checkpoint."""
    (folder / "words.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
    vocabulary = [
        "RunConfig.vocabulary = 'dictionary'",
        f"FileVocabularyConfig.model_file = '{folder / 'words.txt'}'",
        f"VocabularyConfig.size_multiple = {VOCABULARY_SIZE}",
    ]
    run = config.parse(FILES, [*PARAMS, *vocabulary, *changes])
    params = Model(run.model, VOCABULARY_SIZE).init(jax.random.key(0))
    np.savez(folder / "theirs.npz", **to_meliad(params))
    convert_from_meliad(folder / "theirs.npz", run, folder / "converted")
    return folder / "converted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="A converted checkpoint. Default: one with random weights is made.")
    parser.add_argument("--beams", type=int, default=2, help="The width of the beam.")
    parser.add_argument("--tokens", type=int, default=32, help="The largest number of tokens of a sequence.")
    parser.add_argument("--gin_param", action="append", default=[], help="Changes of the model with random weights.")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, ends = flags.checkpoint, [";"]
        if checkpoint is None:
            # A random model hardly says ";", so other words end its sequences, too.
            print("The weights are random: these are no constructions.")
            checkpoint, ends = make_random_checkpoint(Path(folder), flags.gin_param), WORDS[26:]
        model = LanguageModelInference(checkpoint, flags.beams, flags.tokens)
    outputs = model.beam_decode(PROBLEM, eos_tokens=ends)
    for text, score in zip(outputs["seqs_str"], outputs["scores"], strict=True):
        print(f"{score:9.4f}  {text}")
    print(f"{len(outputs['scores'])} of {flags.beams} sequences ended within {flags.tokens} tokens")


if __name__ == "__main__":
    main()
