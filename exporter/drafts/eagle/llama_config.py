"""A layer's shape in the words of a Llama's `config.json`, as others read it."""

from __future__ import annotations

from typing import Any

from ..common.verifier import Verifier
from .eagle_network import EagleConfig


def llama_config(layer: EagleConfig, verifier: Verifier) -> dict[str, Any]:
    """The keys that say what one layer of a Llama is, and how many positions its target was made for."""
    document: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": layer.hidden_size,
        "vocab_size": layer.vocab_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "intermediate_size": layer.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": layer.norm_eps,
        "rope_theta": layer.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if layer.mrope_section is not None:
        axes = {"mrope_section": list(layer.mrope_section), "mrope_interleaved": layer.mrope_interleaved}
        document["rope_scaling"] = {"rope_type": "default", **axes}
    if verifier.positions is not None:
        document["max_position_embeddings"] = verifier.positions
    return document
