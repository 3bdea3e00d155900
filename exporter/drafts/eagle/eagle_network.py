"""EAGLE's layer: from the target's feature and the token that follows to the next feature (Li et al., arXiv 2401.15077,
section 3.1; EAGLE-2, arXiv 2406.16858, changes nothing in it).

A feature is what the target's LM head reads: a hidden state after the final norm. Pair i is the feature of position i with the
embedding of token i + 1, at position i; its output stands for feature i + 1, through the LM head for token i + 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from ....runtime.common.errors import OptionError
from ..common.attention_cache import checked_sections, mrope_axes, rotary_angles, run_layer
from ..common.trained import WIDEST, check_number, check_width

HEADS = ("own", "shared", "trimmed")
LARGEST = 10_000_000
LARGEST_BASE = 1e12
"""Of rotary positions. Real ones are 1e4 to 1e9; with what float32 cannot hold a draft would give NaN."""
SMALLEST_EPS = 1e-12
"""Added to a norm's mean square; real ones are 1e-8 to 1e-5."""


@dataclass(frozen=True)
class EagleConfig:
    """Shape of `EagleNetwork`; see there. `vocab_size` is V of the target."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    fc_bias: bool = True
    head: str = "shared"
    trimmed: int | None = None
    qkv_bias: bool = False
    """Whether queries, keys and values have biases, as those of the draft published for Qwen2 have."""
    mrope_section: tuple[int, ...] | None = None
    """Of rotary positions with three axes, the target's: how many angles turn with each (`mrope_axes`). None: with one axis."""
    mrope_interleaved: bool = False
    added: ClassVar[tuple[str, ...]] = ("qkv_bias", "mrope_section", "mrope_interleaved")
    """See `described`."""

    def __post_init__(self) -> None:
        check_width("EAGLE", self.hidden_size)
        for name, most in (
            ("vocab_size", LARGEST),
            ("num_heads", 4096),
            ("num_kv_heads", 4096),
            ("head_dim", 8192),
            ("intermediate_size", 16 * WIDEST),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise OptionError(f"EAGLE: {name} {value!r:.40} is not in 1..{most}")
        if self.num_heads % self.num_kv_heads:
            raise OptionError(
                f"EAGLE: {self.num_kv_heads} key/value heads do not divide {self.num_heads} heads"
            )
        if self.hidden_size % self.num_heads:  # transformers' Llama layer asks for it, whatever head_dim is
            raise OptionError(f"EAGLE: {self.num_heads} heads do not divide the width {self.hidden_size}")
        if self.head_dim % 2:
            raise OptionError(f"EAGLE: head_dim {self.head_dim} is odd, rotary positions need pairs")
        check_number("EAGLE: rope_theta", self.rope_theta, 1.0, LARGEST_BASE)
        check_number("EAGLE: norm_eps", self.norm_eps, SMALLEST_EPS, 1.0)
        for name in ("fc_bias", "qkv_bias", "mrope_interleaved"):
            if type(getattr(self, name)) is not bool:
                raise OptionError(f"EAGLE: {name} {getattr(self, name)!r:.40} is neither true nor false")
        if self.head not in HEADS:
            raise OptionError(f"unknown --head {self.head!r:.40}; choose one of {', '.join(HEADS)}")
        if (self.head == "trimmed") != (self.trimmed is not None):
            raise OptionError("EAGLE: a trimmed vocabulary has a size, and only it has one")
        if self.trimmed is not None and (
            type(self.trimmed) is not int or not 1 <= self.trimmed <= self.vocab_size
        ):
            raise OptionError(
                f"EAGLE: a trimmed vocabulary of {self.trimmed!r:.40} of {self.vocab_size} tokens"
            )

        self._check_sections()

    def _check_sections(self) -> None:
        sections = self.mrope_section
        if sections is None:
            if self.mrope_interleaved:
                raise OptionError("EAGLE: mrope_interleaved without mrope_section; give both or neither")
            return
        half = self.head_dim // 2
        object.__setattr__(self, "mrope_section", checked_sections("EAGLE", sections))
        if not self.mrope_interleaved and sum(sections) != half:
            raise OptionError(
                f"EAGLE: mrope_section {sections!r:.80} is not three numbers whose sum is {half}, half a head"
            )

    @property
    def axes(self) -> int:
        """Of a position: 1, or 3 with M-RoPE."""
        return 1 if self.mrope_section is None else len(self.mrope_section)

    @property
    def proposed(self) -> int:
        """Tokens that it chooses from."""
        return self.vocab_size if self.trimmed is None else self.trimmed


class EagleNetwork(nn.Module):
    """A linear layer over [embedding, feature], and one Llama layer without a norm on its input.

    The LM head is the target's (`shared`), a copy of it that is trained (`own`), or one over the `trimmed` most frequent
    tokens, whose ids are in `d2t`. Tensors are named as in the published checkpoints: `fc.*`, `layers.0.*`; the head
    is `head.weight`. Untrained it repeats the feature that it is given.
    """

    d2t: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        layer = LlamaDecoderLayer(
            LlamaConfig(
                hidden_size=width,
                intermediate_size=config.intermediate_size,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                rms_norm_eps=config.norm_eps,
                num_hidden_layers=1,
                attention_bias=config.qkv_bias,
            ),
            0,
        )
        layer.self_attn.config._attn_implementation = "sdpa"
        layer.self_attn.o_proj.register_parameter("bias", None)  # a Llama with biases has one here, too
        layer.input_layernorm = nn.Identity()  # type: ignore[assignment]
        self.layers = nn.ModuleList([layer])
        if config.head != "shared":
            self.head = nn.Linear(width, config.proposed, bias=False)
        if config.trimmed is not None:
            self.register_buffer("d2t", torch.arange(config.trimmed))
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, width:] = torch.eye(width)
            for value in (self.fc.bias, layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                if value is not None:
                    value.zero_()

    def start_from(self, lm_head: Tensor, d2t: Tensor | None = None) -> None:
        """Begin with the LM head's table [V, E], or its rows `d2t` int64 [trimmed]."""
        with torch.no_grad():
            if d2t is not None:
                self.d2t.copy_(d2t)
                lm_head = lm_head[d2t.to(lm_head.device)]
            if self.config.head != "shared":
                self.head.weight.copy_(lm_head)

    def given(self, features: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        """What it goes on from, [B, T, E]: the target's `features`; another kind reads the hidden states after some layers, `taps`."""
        return features

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, T, head_dim / 2] float32 of positions int64 [B, T], with M-RoPE [3, B, T]."""
        config, axes = self.config, None
        if config.mrope_section is not None:
            axes = mrope_axes(config.mrope_section, config.mrope_interleaved, config.head_dim // 2)
        return rotary_angles(positions, config.head_dim, config.rope_theta, axes)

    def joined(self, embedded: Tensor, features: Tensor) -> Tensor:
        """What enters the layer, [B, T, E], of embeddings and features [B, T, E]."""
        return self.fc(torch.cat([embedded, features], -1))

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(features [B, T, E] of the next positions, keys and values of all S + T).

        `embedded` and `features` [B, T, E], `positions` int64 [B, T] or with M-RoPE [3, B, T], `mask` bool [B, 1, T, S + T]
        (True: visible), `past` keys and values [B, kv heads, S, head_dim].
        """
        return self.attended(self.joined(embedded, features), positions, mask, past)

    def attended(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The layer alone over `hidden_states` [B, T, E] that enter it; as `forward`."""
        return run_layer(self.layers[0], hidden_states, self.angles(positions), mask, past)

    def logits(self, features: Tensor, lm_head: Tensor) -> Tensor:
        """Logits [.., proposed] of features [.., E]; `lm_head` [V, E] is the target's, read where it is shared."""
        return F.linear(features, lm_head) if self.config.head == "shared" else self.head(features)
