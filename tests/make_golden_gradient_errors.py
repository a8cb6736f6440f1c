"""Adds to `golden/published/*/expected.npz` the errors of transformers' own gradients in float32.

    python tests/make_golden_gradient_errors.py

`gradient_error/TENSOR` is the largest of five errors, relative to the largest entry of the gradient: with the
parameters as they are, and four times with parameters of which each is changed by its last digit at random. It needs
torch and transformers 5.24.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

GOLDEN = Path(__file__).parent / "golden" / "published"


def gradients(folder: Path, ids: np.ndarray, seed: int | None) -> dict[str, np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for x in model.parameters():
                x.mul_(1 + 6e-8 * (2 * torch.randint(0, 2, x.shape, generator=generator) - 1))
    model(torch.tensor(ids).long(), labels=torch.tensor(ids).long(), use_cache=False).loss.backward()
    tensors = {}
    for name, x in model.named_parameters():
        name, gradient = name.replace("language_model.", ""), x.grad.numpy()
        tensors[name] = gradient
        # OLMo-Hybrid's three convolutions are one parameter in memory, and three equal parts of it in the file.
        if name.endswith("linear_attn.conv1d.weight") and folder.name == "olmo_hybrid":
            tensors |= {name.replace("conv1d", f"{part}_conv1d"): x for part, x in zip("qkv", np.split(gradient, 3))}
    return tensors


def main():
    for folder in sorted(GOLDEN.iterdir()):
        with np.load(folder / "expected.npz") as file:
            expected = dict(file)
        computed = [gradients(folder, expected["ids"], seed) for seed in (None, 0, 1, 2, 3)]
        for key, wanted in list(expected.items()):
            if key.startswith("gradient/"):
                name = key.removeprefix("gradient/")
                errors = [np.abs(x[name] - wanted).max() / np.abs(wanted).max() for x in computed]
                expected[f"gradient_error/{name}"] = np.float32(max(errors))
                print(folder.name, name, *(f"{x:.1e}" for x in errors))
        np.savez_compressed(folder / "expected.npz", **expected)


if __name__ == "__main__":
    main()
