"""EAGLE-3's layer: from hidden states of three of the target's layers and the token that follows to the token after that (Li et al.,
arXiv 2503.01840).

The three hidden states (low, middle, high) are joined by a linear layer to what stands for EAGLE's feature; behind the target's hidden states the
layer goes on from its own output. Queries, keys and values read [norm(embedding), norm(feature)], twice the width; the
residual is the feature's alone. A norm of its own stands before a head of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ....runtime.common.errors import OptionError
from .eagle_network import EagleConfig, EagleNetwork

ROWS = ("low", "middle", "high")


@dataclass(frozen=True)
class Eagle3Config(EagleConfig):
    """Shape of `Eagle3Network`. `taps`: after how many layers the three hidden states are taken; None: `default_taps`."""

    fc_bias: bool = False
    head: str = "own"
    taps: tuple[int, ...] | None = None
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fc_bias or self.qkv_bias or self.head == "shared":
            raise OptionError("EAGLE-3: its matrices have no biases, and its LM head is its own or trimmed")
        if type(self.norm_before_residual) is not bool:
            raise OptionError(
                f"EAGLE-3: norm_before_residual {self.norm_before_residual!r:.40} is neither true nor false"
            )
        if self.taps is not None:
            object.__setattr__(self, "taps", tuple(self.taps))
            if len(self.taps) != len(ROWS) or not all(type(n) is int and 0 < n < 1024 for n in self.taps):
                raise OptionError(f"EAGLE-3: taps {self.taps!r:.80} are not three numbers of layers")
            if list(self.taps) != sorted(self.taps):
                raise OptionError(f"EAGLE-3: taps {self.taps!r:.80} do not rise")


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The published places, 2, L / 2 and L − 3; of fewer than 8 layers after the first, half of them, and all but one."""
    if num_layers >= 8:
        return 2, num_layers // 2, num_layers - 3
    return 1, max(1, num_layers // 2), max(1, num_layers - 1)


class Wide(nn.Module):
    """EAGLE-3's decoder layer over [embedding, feature] [B, T, 2E], made of a Llama's."""

    def __init__(self, layer: Any, config: Eagle3Config) -> None:
        super().__init__()
        width, heads, size = config.hidden_size, config.num_heads, config.head_dim
        self.config = config
        self.self_attn = layer.self_attn
        self.self_attn.q_proj = nn.Linear(2 * width, heads * size, bias=False)
        self.self_attn.k_proj = nn.Linear(2 * width, config.num_kv_heads * size, bias=False)
        self.self_attn.v_proj = nn.Linear(2 * width, config.num_kv_heads * size, bias=False)
        self.mlp = layer.mlp
        self.input_layernorm = LlamaRMSNorm(width, eps=config.norm_eps)
        self.hidden_norm = LlamaRMSNorm(width, eps=config.norm_eps)
        self.post_attention_layernorm = layer.post_attention_layernorm

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """[B, T, 2E] to [B, T, E]; `given` as a layer of transformers takes it."""
        embedded, features = hidden_states.chunk(2, -1)
        normed = self.hidden_norm(features)
        residual = normed if self.config.norm_before_residual else features
        attention_output, _ = self.self_attn(
            hidden_states=torch.cat([self.input_layernorm(embedded), normed], -1), **given
        )
        hidden_states = residual + attention_output
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Eagle3Network(EagleNetwork):
    """See the module. Tensors are named as in the published checkpoints, `layers.0.*` where those say `midlayer.*`, `head` for
    `lm_head`; `d2t` holds the target's ids. Untrained it repeats the highest of the three hidden states."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.layers[0] = Wide(self.layers[0], config)
        self.fc = nn.Linear(len(ROWS) * width, width, bias=False)
        self.norm = LlamaRMSNorm(width, eps=config.norm_eps)
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -width:] = torch.eye(width)

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """After how many of so many layers the hidden states are taken."""
        return self.config.taps or default_taps(num_layers)

    def fused(self, *hidden_states: Tensor) -> Tensor:
        """What stands for the feature, [B, T, E], of the three hidden states [B, T, E] each."""
        return self.fc(torch.cat(hidden_states, -1))

    def given(self, features: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        return self.fused(*(taps[tap] for tap in self.config.taps or ()))

    def joined(self, embedded: Tensor, features: Tensor) -> Tensor:
        return torch.cat([embedded, features], -1)

    def logits(self, features: Tensor, lm_head: Tensor | None = None) -> Tensor:
        """Logits [.., proposed] of features [.., E]; the target's LM head is not read."""
        return self.head(self.norm(features))
