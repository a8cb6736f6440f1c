"""Makes golden/hybrids_tiny.npz with transformers and PyTorch, which this project does not require:

    python tests/make_golden_hybrids.py

The models are random, and their parameters follow from their names and shapes alone, as in `make_golden_llama.py`.
"""

import copy
import json
import tempfile
from pathlib import Path

import numpy as np
from make_golden_llama import numbers

PATH = Path(__file__).parent / "golden" / "hybrids_tiny.npz"
VOCABULARY, LENGTH = 32, 24
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "bamba": COMMON
    | {
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 6,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_proj_bias": True,
        "mlp_bias": True,
    },
    # A smaller smallest step than there is (`conversion/published/nemotron_h.py`).
    "nemotron_h": COMMON
    | {
        "hybrid_override_pattern": "M-*-M",
        "head_dim": 8,
        "mamba_num_heads": 6,
        "mamba_head_dim": 4,
        "n_groups": 2,
        "ssm_state_size": 8,
        "use_bias": True,
        "time_step_min": 1e-6,
    },
    "qwen3": COMMON
    | {"num_hidden_layers": 3, "head_dim": 6, "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 2},
    # Windows that end inside of a block, and a scaling for full attention alone.
    "olmo3": COMMON
    | {
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 50.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    },
    "gemma3_text": COMMON
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": 6,
        "query_pre_attn_scalar": 10,
        "sliding_window": 6,
        "final_logit_softcapping": 5.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    },
}


def parameter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return 1 + numbers(name, shape, 0.5) if "norm" in name else numbers(name, shape, 0.7)


def tokens() -> np.ndarray:
    """Two sequences, [2, LENGTH]."""
    return ((numbers("tokens", (2, LENGTH), 1) + 1) * (VOCABULARY / 2)).astype(np.int32) % VOCABULARY


def outputs(kind: str) -> dict[str, np.ndarray]:
    """The config.json that transformers writes for a model, the shapes of the tensors in its file, and the logits."""
    import safetensors.numpy
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        # transformers writes into what it is given.
        config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(CONFIGS[kind]))
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {name: x.shape for name, x in safetensors.numpy.load_file(file).items()}
        tensors = {name: parameter(name, shape) for name, shape in shapes.items()}
        safetensors.numpy.save_file(tensors, file, {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        saved = (Path(folder) / "config.json").read_text()
    with torch.no_grad():
        logits = model(torch.tensor(tokens(), dtype=torch.long)).logits.numpy()
    return {"config": np.array(saved), "shapes": np.array(json.dumps(shapes)), "logits": logits}


def main() -> None:
    arrays = {f"{kind}/{name}": x for kind in CONFIGS for name, x in outputs(kind).items()}
    np.savez_compressed(PATH, allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
