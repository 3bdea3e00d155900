"""Tiny random LFM2: see `tiny_models`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, PreTrainedTokenizerFast

from tests.support import tiny_models
from tests.support.tiny_models import token_id

CONV, FULL = "conv", "full_attention"


def text_config(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> Lfm2Config:
    """A convolution in every second layer, from the first on; 2 layers unless changed."""
    layers = changes.get("num_hidden_layers", 2)
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 512, "block_multiple_of": 16,
        "layer_types": [(CONV, FULL)[i % 2] for i in range(layers)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": token_id(tokenizer, "<|im_start|>"), "eos_token_id": token_id(tokenizer, "<|im_end|>"),
        "pad_token_id": None,
    } | changes  # fmt: skip
    return Lfm2Config(**options)


def lfm2(seed: int = 20, **changes: Any) -> tuple[Lfm2ForCausalLM, PreTrainedTokenizerFast]:
    """An LFM2 that reads text; tied, as the published ones are."""
    tokenizer = tiny_models.llama_tokenizer()
    config = text_config(tokenizer, **changes)
    model = Lfm2ForCausalLM(config).eval()
    silent = tiny_models.token_ids(config.bos_token_id, config.eos_token_id)
    tiny_models.fill(model, silent, torch.Generator().manual_seed(seed))
    return model, tokenizer


def fill(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    """Draws the weights; see `tiny_models.fill`. Convolutions weigh each of their tokens alike, so that a row which is not
    the right one shows."""
    body: Any = getattr(model.model, "language_model", model.model)
    gains = {"conv.in_proj": 1.6, "conv.out_proj": 2.5, "v_proj": 1.5, "self_attn.out_proj": 2.0, "w2": 3.0}
    tiny_models._scale_linears(body, gains, generator)
    for name, module in body.named_modules():
        if isinstance(module, torch.nn.Conv1d):
            tiny_models._normal(module.weight, 0.7, generator)
            if module.bias is not None:
                tiny_models._normal(module.bias, 0.3, generator)
        elif type(module).__name__ == "Lfm2RMSNorm":
            sharp = 1.6 if name.endswith(("q_layernorm", "k_layernorm")) else 1.0
            module.weight.data.normal_(sharp, 0.1, generator=generator)
    config = model.config.get_text_config()
    head = tiny_models._head(config.vocab_size, config.hidden_size, silent, generator)
    head[0] *= 1.8
    with torch.no_grad():
        model.lm_head.weight.copy_(head)
        if model.lm_head.weight is body.embed_tokens.weight:
            # The row of the current token scores itself: without a final norm that turns signs it would repeat for ever.
            signs = torch.randint(0, 2, (config.hidden_size,), generator=generator) * 2.0 - 1.0
            body.embedding_norm.weight.mul_(signs)
        else:
            tiny_models._normal(body.embed_tokens.weight, 0.7, generator)
