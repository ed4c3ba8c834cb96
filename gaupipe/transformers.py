"""Attentions of this project for Hugging Face's transformers: the names that users import.

Importing this module registers ``gau_belief``, ``gau_xsa`` and ``gau_attentionx`` as values of
``attn_implementation``, and the ``gau_*`` language models with ``AutoConfig`` and ``AutoModel``.
"""

from gaupipe.vit.transformers import (
    GauGPT2Config,
    GauGPT2LMHeadModel,
    GauLlamaConfig,
    GauLlamaForCausalLM,
    GauMistralConfig,
    GauMistralForCausalLM,
    GauQwen2Config,
    GauQwen2ForCausalLM,
    GauQwen3Config,
    GauQwen3ForCausalLM,
    convert,
)

__all__ = [
    "GauGPT2Config",
    "GauGPT2LMHeadModel",
    "GauLlamaConfig",
    "GauLlamaForCausalLM",
    "GauMistralConfig",
    "GauMistralForCausalLM",
    "GauQwen2Config",
    "GauQwen2ForCausalLM",
    "GauQwen3Config",
    "GauQwen3ForCausalLM",
    "convert",
]
