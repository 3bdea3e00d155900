"""OPT: a learned table of positions, layer norms with bias before attention and MLP (OPTForCausalLM, arXiv 2205.01068).

The table is added to every embedding, images' too, and its first two rows belong to no position.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import OPTForCausalLM

from ....runtime.common.errors import UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.caches import LayerCache
from ...graphs.traced_module import TraceInput, trace
from ..common.decoder_graphs import Prologue
from .base import Language, learned_positions


def _add_positions(module: Any, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor]:
    return (hidden + torch.nn.functional.embedding(positions + module.offset, module.weight),)


class OPTLanguage(Language):
    """See the module."""

    name: ClassVar[str] = "opt"
    kind: ClassVar[Any] = OPTForCausalLM
    layers_path: ClassVar[str] = "model.decoder.layers"
    norm_path: ClassVar[str] = "model.decoder.final_layer_norm"
    embed_path: ClassVar[str] = "model.decoder.embed_tokens"
    mlp_path: ClassVar[str] = "fc2"
    reads_image_embeds: ClassVar[bool] = True

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str) -> None:
        super().__init__(checkpoint, config, prefix)
        if config.word_embed_proj_dim != config.hidden_size:
            raise UnsupportedModelError(
                f"OPT: word_embed_proj_dim={config.word_embed_proj_dim} differs from hidden_size={config.hidden_size}; "
                "projections around the decoder (opt-350m) are not supported"
            )
        if not config.do_layer_norm_before:
            raise UnsupportedModelError("OPT: do_layer_norm_before=false (opt-350m) is not supported")
        if config._remove_final_layer_norm:
            raise UnsupportedModelError("OPT: _remove_final_layer_norm=true is not supported")
        self.max_positions = config.max_position_embeddings
        self.decoder = learned_positions(config, cross_attention=False)

    def prologue(self) -> Prologue:
        """Rows with the table of positions added."""
        table = self.model.model.decoder.embed_positions
        inputs = [
            TraceInput("hidden", ("batch", "width", self.decoder.hidden_size)),
            TraceInput("positions", ("batch", "width"), torch.int64),
        ]
        template = trace(table, _add_positions, inputs, ("hidden_out",))
        return template, self.named("model.decoder.embed_positions.")

    def run_layer(self, module: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """See `Language`."""
        cache = LayerCache(given["key_cache"], given["value_cache"], given["write_indices"])
        out = module(given["hidden"], attention_mask=given["attn_mask"], past_key_values=cache)
        return out, cache.keys, cache.values
