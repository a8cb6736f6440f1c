"""Makes golden/llama_tiny.npz with transformers and PyTorch, which this project does not require:

    python tests/make_golden_llama.py

It adds the models that the file doesn't have yet. They are random, and their parameters follow from their names
alone, so that they need not be kept. `tied` has a config.json of the form of older versions, three heads for each head
of keys, and gradients; `apart` has newer fields, one head of keys for all, heads that don't add up to the width, and
logits of their own. Each of the others has a scaling of rotary positions, or a sliding window.
"""

import copy
import json
import math
import zlib
from pathlib import Path

import numpy as np

PATH = Path(__file__).parent / "golden" / "llama_tiny.npz"
VOCABULARY, LENGTH, FROM = 32, 16, 10
COMMON = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32,
    "attention_bias": False,
    "mlp_bias": False,
}
CONFIGS = {
    "tied": COMMON
    | {
        "hidden_size": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 20,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    },
    "apart": COMMON
    | {
        "hidden_size": 12,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "intermediate_size": 14,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        "tie_word_embeddings": False,
    },
}
WHOLE = tuple(CONFIGS)
"""The models of which more than logits and text is kept."""
SCALED = COMMON | {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 14,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50.0,
    "tie_word_embeddings": True,
}
LONGER = {"factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS |= {
    "linear": SCALED | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    # Its window is twice as long as in pretraining.
    "dynamic": SCALED | {"max_position_embeddings": 8, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
    "llama3": SCALED
    | {
        "max_position_embeddings": 128,
        "rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONGER},
    },
    "yarn": SCALED
    | {
        "max_position_embeddings": 128,
        "rope_scaling": {"rope_type": "yarn", "beta_fast": 4.0, "beta_slow": 1.0, **LONGER},
    },
    "mistral": SCALED | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 5},
}


def numbers(name: str, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Uniform in [-scale, scale], the same for a name on every machine: 16 bits of a congruential generator each."""
    state, found = zlib.crc32(name.encode()), np.zeros(math.prod(shape), np.float32)
    for i in range(len(found)):
        state = (1_664_525 * state + 1_013_904_223) % 2**32
        found[i] = (state >> 16) / 2**15 - 1
    return found.reshape(shape) * np.float32(scale)


def tensors(kind: str) -> dict[str, np.ndarray]:
    """The parameters of a model, by the names in its file."""
    config = CONFIGS[kind]
    d, f, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    k = config.get("head_dim", d // heads)
    queries, keys = heads * k, config["num_key_value_heads"] * k
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, d)
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (queries, d),
                "self_attn.k_proj": (keys, d),
                "self_attn.v_proj": (keys, d),
                "self_attn.o_proj": (d, queries),
                "mlp.gate_proj": (f, d),
                "mlp.up_proj": (f, d),
                "mlp.down_proj": (d, f),
                "input_layernorm": (d,),
                "post_attention_layernorm": (d,),
            }.items()
        }
    return {name: 1 + numbers(name, s, 0.5) if "norm" in name else numbers(name, s, 0.7) for name, s in shapes.items()}


def tokens() -> np.ndarray:
    """Two sequences, [2, LENGTH]."""
    return ((numbers("tokens", (2, LENGTH), 1) + 1) * (VOCABULARY / 2)).astype(np.int32) % VOCABULARY


def outputs(kind: str) -> dict[str, np.ndarray]:
    """What transformers makes of a model and the tokens.

    `hidden0` is the embedding, the others the layers' outputs (the last one without the final norm), `normed` the last
    after it; `cached` are the logits from token FROM on, each of which is read alone; `greedy` continues from there.
    """
    import torch
    import transformers

    # transformers writes into what it is given.
    config = transformers.AutoConfig.for_model(**copy.deepcopy(CONFIGS[kind]))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    missing = model.load_state_dict({name: torch.tensor(x) for name, x in tensors(kind).items()}, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys
    model.tie_weights()
    inputs, blocks = torch.tensor(tokens(), dtype=torch.long), []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda *call: blocks.append(call[-1][0] if isinstance(call[-1], tuple) else call[-1])
        )
    result = model(inputs, labels=inputs, output_hidden_states=True)
    found = {"logits": result.logits}
    if kind in WHOLE:
        found |= {"loss": result.loss, "normed": result.hidden_states[-1]}
        found |= {"hidden0": result.hidden_states[0]} | {f"hidden{i + 1}": x for i, x in enumerate(blocks)}
    if kind == "tied":
        result.loss.backward()
        found |= {f"gradient/{name}": x.grad for name, x in model.named_parameters()}
    if kind == "dynamic":
        # Read in parts, it would rotate each part by the length of the text up to there.
        return {name: x.detach().numpy() for name, x in found.items()}
    with torch.no_grad():
        cache = model(inputs[:, :FROM], use_cache=True).past_key_values
        steps = []
        for i in range(FROM, LENGTH):
            step = model(inputs[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            steps.append(step.logits[:, 0])
        found["cached"] = torch.stack(steps, dim=1)
        found["greedy"] = model.generate(inputs[:1, :FROM], max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
    return {name: x.detach().numpy() for name, x in found.items()}


def main() -> None:
    with np.load(PATH) as file:
        arrays = dict(file)
    for kind in CONFIGS:
        if f"{kind}/config" not in arrays:
            arrays |= {f"{kind}/{name}": x for name, x in outputs(kind).items()}
            arrays[f"{kind}/config"] = np.array(json.dumps(CONFIGS[kind]))
    np.savez_compressed(PATH, allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
