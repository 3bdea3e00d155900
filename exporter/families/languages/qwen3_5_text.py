"""The language model of Qwen3.5: three of four layers are linear attention, whose state a bundle keeps beside the caches; the
others are attention with an output gate, whose heads turn by a quarter of their size."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from transformers import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5 import modeling_qwen3_5

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.graphs.values import FULL, LINEAR
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.hooks import centered_rms_forward, replaced, rotary
from ...graphs.linear_attention import WINDOW, StateCache, gated_delta_net, gated_norm
from ...graphs.traced_module import LEAST_SIZES
from ..common.parts import LinearAttentionShape
from .qwen2_5_vl_text import Qwen2_5_VLLanguage
from .qwen3_vl_text import check_interleaved, interleaved


class Qwen3_5Language(Qwen2_5_VLLanguage):
    """See the module; it is taken out of the whole model."""

    name: ClassVar[str] = "qwen3_5_text"
    kind: ClassVar[Any] = Qwen3_5ForConditionalGeneration
    modeling: ClassVar[Any] = modeling_qwen3_5
    norm: ClassVar[Any] = None
    angles: ClassVar[Any] = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding
    further_kinds: ClassVar[tuple[str, ...]] = (LINEAR,)
    partial_rotary: ClassVar[bool] = True

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str, body: str = "model.") -> None:
        super().__init__(checkpoint, config, prefix, body)
        if config.linear_num_value_heads % config.linear_num_key_heads:
            raise UnsupportedModelError(
                f"{self.kind.__name__}: linear_num_value_heads={config.linear_num_value_heads} is no multiple of "
                f"linear_num_key_heads={config.linear_num_key_heads}; correct config.json"
            )
        if config.linear_conv_kernel_dim not in range(2, LEAST_SIZES["recent"] + 2):
            raise UnsupportedModelError(
                f"{self.kind.__name__}: linear_conv_kernel_dim={config.linear_conv_kernel_dim} is not in 2..{LEAST_SIZES['recent'] + 1}"
            )
        if FULL not in config.layer_types:
            raise UnsupportedModelError(f"{self.kind.__name__}: layer_types without {FULL} are not supported")
        linear = LinearAttentionShape(
            num_key_heads=config.linear_num_key_heads,
            num_value_heads=config.linear_num_value_heads,
            key_head_dim=config.linear_key_head_dim,
            value_head_dim=config.linear_value_head_dim,
            conv_kernel=config.linear_conv_kernel_dim,
            window=WINDOW,
        )
        if LINEAR in config.layer_types:
            self.decoder = dataclasses.replace(
                self.decoder,
                layer_types=list(config.layer_types),
                linear_attention=linear,
            )

    @property
    def angles_per_head(self) -> int:
        """See `Language`; as transformers' `compute_default_rope_parameters` counts them."""
        part = self.ropes[FULL].get("partial_rotary_factor") or 1.0
        return int(self.decoder.head_dim * part) // 2

    def check_sections(self, sections: Any) -> None:
        """See `Qwen3VLLanguage`."""
        check_interleaved(self.kind.__name__, sections)

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Llama's; norms whose weight is centered at 0, positions without strided writes, the window of linear attention."""
        modeling = self.modeling
        with (
            super().hooks(),
            attention_hooks(),
            replaced(modeling.Qwen3_5RMSNormGated, "forward", gated_norm),
            replaced(modeling.Qwen3_5GatedDeltaNet, "forward", gated_delta_net),
            replaced(self.angles, "recomposition_frequencies", interleaved),
        ):
            yield

    def run_layer(self, module: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """See `Language`."""
        if "recurrent_state" not in given:
            return super().run_layer(module, given)
        cache = StateCache(*(given[name] for name in ("recent_rows", "recurrent_state", "pending", "folded")))
        out = module(given["hidden"], position_embeddings=None, past_key_values=cache)
        return out, cache.recent, cache.state


@contextlib.contextmanager
def attention_hooks() -> Iterator[None]:
    """Norms whose weight is centered at 0, and angles that turn a part of a head: those of layers with attention."""
    with (
        replaced(modeling_qwen3_5.Qwen3_5RMSNorm, "forward", centered_rms_forward),
        replaced(modeling_qwen3_5, "apply_rotary_pos_emb", _turned),
    ):
        yield


def _turned(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, ...]:
    """`apply_rotary_pos_emb` with every angle once; what of a head they are too few for stays as it is."""
    size = 2 * cos.shape[-1]
    return tuple(torch.cat((rotary(x[..., :size], cos, sin), x[..., size:]), -1) for x in (q, k))
