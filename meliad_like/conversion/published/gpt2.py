"""GPT-2 (`model_type` gpt2), which reads by windows alone: its positions are a table."""

import numpy as np

from meliad_like.conversion.published.family import SAME, Family, Part, linear
from meliad_like.conversion.published.parts import CONSTANTS
from meliad_like.conversion.published.windows import read_config
from meliad_like.errors import UserError
from meliad_like.layers.rotary import RotaryScaling

LINEAR = {"output": "attn.c_proj", "feedforward/network/hidden": "mlp.c_fc", "feedforward/network/output": "mlp.c_proj"}


class GPT2Family(Family):
    """Linear maps are [in, out] in the file, as ours are."""

    model_types = ("gpt2",)
    embedding, final_norm, layers = "transformer.wte", "transformer.ln_f", "transformer.h"
    norms = "ln_1", "ln_2"

    def name(self, tensor, config):
        if tensor.endswith(CONSTANTS):
            return None
        # A model without its output layer is saved without the prefix.
        return tensor if tensor.startswith(("transformer.", "lm_head.")) else f"transformer.{tensor}"

    def decoder(self, fields):
        raise UserError(f"{fields.owner}: a gpt2 model reads by windows alone: leave out RunConfig.model")

    def by_windows(self, fields):
        return read_config(fields, rotary_scaling=RotaryScaling())

    def places(self, fields, config):
        return {**super().places(fields, config), "positions": Part("transformer.wpe.weight")}

    def in_layer(self, fields, config, mixers, ours, theirs):
        rows = np.split(np.arange(3 * config.shape.inner_width), 3)
        places = {}
        for name, of_name in zip(("query", "key", "value"), rows):
            places |= linear(f"{ours}mixers/dot_product_attention/{name}", f"{theirs}attn.c_attn", rows=of_name)
        for name, of_name in LINEAR.items():
            places |= linear(f"{ours}{name}", f"{theirs}{of_name}")
        return {path: part._replace(layout=SAME) for path, part in places.items()}
