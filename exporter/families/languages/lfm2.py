"""LFM2: layers of attention with normed queries and keys among layers of short, gated convolutions (Lfm2ForCausalLM).

A convolution sees a token's own row and those of the last tokens before it on its way. Its layers keep these rows in slots,
as attention keeps keys and values.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import torch
from transformers import Lfm2ForCausalLM
from transformers.models.lfm2 import modeling_lfm2

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.graphs.values import CONV, CONV_CACHE
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.caches import ConvCache
from ...graphs.hooks import replaced
from ..common.parts import CacheShape
from .llama import LlamaLanguage


def _gated_convolution(
    self: Any, hidden_states: torch.Tensor, past_key_values: Any, **_: Any
) -> torch.Tensor:
    """Lfm2ShortConv's forward over the rows of a `ConvCache`."""
    entering, leaving, rows = self.in_proj(hidden_states).chunk(3, dim=-1)
    mixed = past_key_values.convolved(entering * rows, self.conv.weight, self.conv.bias)
    return self.out_proj(leaving * mixed)


class Lfm2Language(LlamaLanguage):
    """See the module."""

    name: ClassVar[str] = "lfm2"
    kind: ClassVar[Any] = Lfm2ForCausalLM
    norm_path: ClassVar[str] = "model.embedding_norm"
    mlp_path: ClassVar[str] = "feed_forward"
    convolution_path: ClassVar[str | None] = "conv"
    further_kinds: ClassVar[tuple[str, ...]] = (CONV,)
    modeling: ClassVar[Any] = modeling_lfm2
    norm: ClassVar[Any] = modeling_lfm2.Lfm2RMSNorm
    angles: ClassVar[Any] = modeling_lfm2.Lfm2RotaryEmbedding

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str, body: str = "model.") -> None:
        super().__init__(checkpoint, config, prefix, body)
        kinds, kernel = list(config.layer_types), config.conv_L_cache
        if len(kinds) != config.num_hidden_layers:
            raise UnsupportedModelError(
                f"{self.kind.__name__}: layer_types names {len(kinds)} layers, num_hidden_layers is "
                f"{config.num_hidden_layers}; correct config.json"
            )
        if CONV not in kinds:
            return
        if type(kernel) is not int or kernel < 2:
            raise UnsupportedModelError(
                f"{self.kind.__name__}: conv_L_cache={kernel!r:.40} is not at least 2 tokens; correct config.json"
            )
        self.decoder = replace(
            self.decoder,
            layer_types=kinds,
            layer_caches={CONV: [CacheShape(CONV_CACHE, 1, config.hidden_size)]},
            conv_kernel=kernel,
        )

    def hooks(self) -> AbstractContextManager[None]:
        """Llama's, and convolutions over cached rows."""
        stack = ExitStack()
        stack.enter_context(super().hooks())
        stack.enter_context(replaced(modeling_lfm2.Lfm2ShortConv, "forward", _gated_convolution))
        return stack  # type: ignore[return-value]

    def run_layer(self, module: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """See `Language`."""
        if module.is_attention_layer:
            return super().run_layer(module, given)
        cache = ConvCache(given["conv_cache"], given["write_indices"], given["conv_slots"])
        out = module(given["hidden"], past_key_values=cache)
        return out, cache.rows
