"""The head for multi-token prediction that Qwen3.5's checkpoints hold (`mtp.*`): one layer of attention over [embedding,
feature], as EAGLE's, with norms before and behind it (DeepSeek-V3, arXiv 2412.19437, section 2.2).

A feature is what the target's LM head reads, and what the head's own norm gives. Pair i is the feature of position i with the
embedding of token i + 1, at position i. The structure is that of vLLM's `Qwen3_5MultiTokenPredictor`; transformers has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from ....runtime.common.errors import OptionError
from ..common.attention_cache import checked_sections, mrope_axes, rotary_angles, run_layer
from ..common.trained import check_number, check_width
from .eagle_network import LARGEST, LARGEST_BASE, SMALLEST_EPS


@dataclass(frozen=True)
class MtpConfig:
    """Shape of `MtpNetwork`, which is that of the target's layers with attention. `rotary_dim` numbers of a head turn."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    mrope_section: tuple[int, ...]
    qkv_bias: bool = False
    head: ClassVar[str] = "shared"
    trimmed: ClassVar[int | None] = None
    axes: ClassVar[int] = 3

    def __post_init__(self) -> None:
        check_width("MTP", self.hidden_size)
        for name in (
            "vocab_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "rotary_dim",
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LARGEST:
                raise OptionError(f"MTP: {name} {value!r:.40} is not in 1..{LARGEST}")
        if self.num_heads % self.num_kv_heads:
            raise OptionError(
                f"MTP: {self.num_kv_heads} key/value heads do not divide {self.num_heads} heads"
            )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise OptionError(
                f"MTP: of heads of {self.head_dim} numbers {self.rotary_dim} cannot turn in pairs"
            )
        check_number("MTP: rope_theta", self.rope_theta, 1.0, LARGEST_BASE)
        check_number("MTP: norm_eps", self.norm_eps, SMALLEST_EPS, 1.0)
        object.__setattr__(self, "mrope_section", checked_sections("MTP", self.mrope_section))

    @property
    def proposed(self) -> int:
        """Tokens that it chooses from."""
        return self.vocab_size


class MtpNetwork(nn.Module):
    """See the module; tensors are named as in the checkpoint, without `mtp.`. Embeddings and the LM head are the target's."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        shape = Qwen3_5TextConfig(
            hidden_size=width,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            num_hidden_layers=1,
            layer_types=["full_attention"],
            attention_bias=config.qkv_bias,
        )
        layer = Qwen3_5DecoderLayer(shape, 0)
        layer.self_attn.config._attn_implementation = "sdpa"
        self.layers = nn.ModuleList([layer])
        self.norm = Qwen3_5RMSNorm(width, eps=config.norm_eps)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps=config.norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps=config.norm_eps)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, T, rotary_dim / 2] float32 of positions int64 [3, B, T]; the axes are interleaved."""
        config = self.config
        axes = mrope_axes(config.mrope_section, True, config.rotary_dim // 2)
        return rotary_angles(positions, config.rotary_dim, config.rope_theta, axes)

    def joined(self, embedded: Tensor, features: Tensor) -> Tensor:
        """What enters the layer, [B, T, E], of embeddings and features [B, T, E]."""
        parts = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(features))
        return self.fc(torch.cat(parts, -1))

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(features [B, T, E] of the next positions, keys and values of all S + T); as `EagleNetwork.forward`."""
        entered = self.joined(embedded, features)
        out, key_values = run_layer(self.layers[0], entered, self.angles(positions), mask, past)
        return self.norm(out), key_values

    def logits(self, features: Tensor, lm_head: Tensor) -> Tensor:
        """Logits [.., V] of features [.., E]; `lm_head` [V, E] is the target's."""
        return F.linear(features, lm_head)
