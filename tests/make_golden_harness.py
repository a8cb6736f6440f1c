"""Compares the harness's adapter for transformers with ours, on a random Llama of the architecture of SmolLM2-135M.

    python tests/make_golden_harness.py                        # makes golden/harness.json, of a small model
    python tests/make_golden_harness.py --questions=200        # prints the differences for this number of questions
    python tests/make_golden_harness.py --questions=4 --full   # with the sizes of SmolLM2-135M, and bytes as tokens

It needs lm_eval, transformers, PyTorch and accelerate. The model is written as a folder by our own export, which both
adapters open; its tokens are bytes.
"""

import argparse
import dataclasses
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from harness_items import Item, items

from meliad_like.config import RunConfig
from meliad_like.conversion.parameters import write_checkpoint
from meliad_like.conversion.pretrained import convert_to_huggingface
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.models.model import Model
from meliad_like.vocabularies.base import BytesVocabularyConfig, ByteVocabulary

PATH = Path(__file__).parent / "golden" / "harness.json"
SMALL = PretrainedConfig(
    architecture="llama",
    num_layers=3,
    model_width=36,
    num_heads=9,
    num_key_value_heads=3,
    head_size=4,
    feedforward_width=96,
    activation="silu",
    max_positions=512,
    window_length=512,
    norm_epsilon=1e-5,
    rotary_base=100_000.0,
)
FULL = {"num_layers": 30, "model_width": 576, "head_size": 64, "feedforward_width": 1536}


def write_folder(config: PretrainedConfig, folder: Path) -> Path:
    """Writes a random model as a folder of transformers. Each tensor is drawn by its name there, so that it is the same
    on every machine, whatever our parameters are called."""
    vocabulary, run = ByteVocabulary(), RunConfig(model=config, vocabulary=BytesVocabularyConfig())
    write_checkpoint(folder / "ours", Model(config, vocabulary.size).init(jax.random.key(0)), run, vocabulary)
    convert_to_huggingface(folder / "ours", folder / "theirs")
    path = folder / "theirs" / "model.safetensors"

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        # Embeddings and norms of about 1, and matrices that keep that size.
        drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
        return (1 + drawn if len(shape) == 1 else drawn * shape[-1] ** -0.5).astype(np.float32)

    tensors = {name: tensor(name, old.shape) for name, old in safetensors.numpy.load_file(path).items()}
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    return folder / "theirs"


def answers(lm: Any, questions: list[Item]) -> dict[str, Any]:
    """What an adapter says of these questions."""
    from lm_eval.api.instance import Instance

    pairs = [(item.context, choice) for item in questions for choice in item.choices]
    texts = [item.context + item.choices[item.answer] for item in questions[:10]]
    settings = {"until": ["e"], "max_gen_toks": 20}
    found = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    return {
        "nats": [float(nats) for nats, _ in found],
        "greedy": [bool(greedy) for _, greedy in found],
        "rolling": lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]),
        "written": lm.generate_until([Instance("generate_until", {}, (text, settings), 0) for text in texts]),
    }


def theirs(folder: Path, questions: list[Item]) -> dict[str, Any]:
    """What the harness's own adapter says, on the CPU in float32."""
    from lm_eval.models.huggingface import HFLM

    return answers(HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=8), questions)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=int)
    parser.add_argument("--full", action="store_true")
    flags = parser.parse_args()
    questions = items(flags.questions or 12)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_folder(dataclasses.replace(SMALL, **FULL) if flags.full else SMALL, Path(temporary))
        expected = theirs(folder, questions)
        if flags.questions is None:
            PATH.write_text(json.dumps({"items": questions, **expected}, indent=1) + "\n")
            return
        from meliad_like.harness.model import HarnessModel

        found = answers(HarnessModel(folder, first_tokens=True), questions)
    for name in ("nats", "rolling"):
        ours, others = np.array(found[name]), np.array(expected[name])
        most = np.abs(ours - others).max()
        print(f"{name}: {len(ours)} differ by at most {most:.1e} nats, and are up to {-others.min():.0f}")
    for name in ("greedy", "written"):
        same = sum(ours == others for ours, others in zip(found[name], expected[name], strict=True))
        print(f"{name}: {same} of {len(found[name])} are the same")
    chosen = (np.array(x["nats"]).reshape(len(questions), -1).argmax(axis=1) for x in (found, expected))
    print("accuracy:", *(np.mean(one == [item.answer for item in questions]) for one in chosen))


if __name__ == "__main__":
    main()
