"""Pretrained decoders, GPT-2 and Llama, that read documents by windows, with or without a recurrence between them."""

from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.families.pretrained.decoder import PretrainedDecoder

__all__ = ["PretrainedConfig", "PretrainedDecoder"]
