"""The imitation network of FastVLM (arXiv 2510.22641, section 3.1 and appendix B): 1 or 2 linear layers, with attention over the
exit hidden states of earlier positions or without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from ....runtime.common.errors import OptionError
from ..common.attention_cache import Joined, rotary_angles
from ..common.trained import check_width

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "none": nn.Identity,
}
NORMS = ("layer_norm", "rms_norm", "none")
OPERATIONS = {"gelu": 5, "silu": 4, "relu": 1, "layer_norm": 7, "rms_norm": 4, "none": 0}
"""Of an activation or a norm, per number; a function such as exp or erf is one."""
ROTARY_BASE = 10_000.0
"""Of the positions of an attention."""
SEEN = 64
"""Earlier positions that FLOPs of an attention are counted for: about a caption."""


@dataclass(frozen=True)
class ImitationConfig:
    """Shape of an `ImitationNetwork`; see there."""

    hidden_size: int
    num_linear: int = 2
    activation: str = "gelu"
    norm: str = "layer_norm"
    residual: bool = True
    attention_heads: int = 0
    """0: none."""

    added = ("attention_heads",)
    """Fields that the first version had not: folders and fingerprints leave them out where they have their default."""

    def __post_init__(self) -> None:
        check_width("an imitation network", self.hidden_size)
        if self.num_linear not in (1, 2) or type(self.num_linear) is not int:
            raise OptionError(f"an imitation network has 1 or 2 linear layers, not {self.num_linear!r:.40}")
        if self.activation not in ACTIVATIONS:
            raise OptionError(
                f"unknown activation {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}"
            )
        if self.norm not in NORMS:
            raise OptionError(f"unknown norm {self.norm!r}; choose one of {', '.join(NORMS)}")
        heads, width = self.attention_heads, self.hidden_size
        if type(heads) is not int or heads < 0:
            raise OptionError(f"an imitation network has 0 or more attention heads, not {heads!r:.40}")
        if heads and (width % heads or width // heads % 2):
            raise OptionError(
                f"{heads} attention heads do not divide the width {width} into pairs, which rotary positions need; give a "
                "number that does, or 0 for none"
            )

    @property
    def head_dim(self) -> int:
        """Numbers of a head of the attention, where there is one."""
        return self.hidden_size // self.attention_heads

    @property
    def attention_norm(self) -> str:
        """Of what the attention reads: unlike a linear layer it needs one, for scores grow with the hidden states' size."""
        return "rms_norm" if self.norm == "none" else self.norm

    @property
    def flops(self) -> int:
        """Floating-point operations per position: a multiplication and an addition for every weight, and what is done number by
        number; of an attention that sees `SEEN` positions."""
        width = self.hidden_size
        singly = self.num_linear + OPERATIONS[self.norm] + self.residual
        singly += OPERATIONS[self.activation] * (self.num_linear - 1)
        total = 2 * width * width * self.num_linear + width * singly
        if not self.attention_heads:
            return total
        turned = 3 * 2 * width  # queries and keys by their angles
        seen = SEEN * (
            4 * width + 5 * self.attention_heads
        )  # two products with every position, and the softmax
        return total + 8 * width * width + width * (OPERATIONS[self.attention_norm] + 1) + turned + seen


class ExitAttention(nn.Module):
    """Self-attention over exit hidden states, each of which sees itself and the earlier ones: norm, Llama's attention, plus the input.

    Positions are rotary: the hidden states themselves carry none where the target's are rotary or a bias, and what matters here is
    how long ago something was said. They need no table, which would bound a text, and no parameters; and they are
    relative, so that it is all the same whether slots or the target's own positions are counted. Untrained it gives its
    input: the last matrix starts at zero.
    """

    def __init__(self, config: ImitationConfig) -> None:
        super().__init__()
        self._config = config
        width, heads = config.hidden_size, config.attention_heads
        self.norm = norm_named(config.attention_norm, width)
        self.self_attn = LlamaAttention(
            LlamaConfig(
                hidden_size=width,
                num_attention_heads=heads,
                num_key_value_heads=heads,
                head_dim=config.head_dim,
                num_hidden_layers=1,
            ),
            0,
        )
        self.self_attn.config._attn_implementation = "sdpa"
        nn.init.zeros_(self.self_attn.o_proj.weight)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, T, head_dim / 2] float32 of positions int64 [B, T]."""
        return rotary_angles(positions, self._config.head_dim, ROTARY_BASE)

    def forward(self, hidden: Tensor, mask: Tensor, angles: tuple[Tensor, Tensor], cache: Any) -> Tensor:
        """[B, T, E] to [B, T, E]. `mask` bool [B, 1, T, S] (True: visible), `angles` as the attention takes them, `cache`
        gets the keys and values of the positions and gives those of all S."""
        attention_output, _ = self.self_attn(
            self.norm(hidden), attention_mask=mask, position_embeddings=angles, past_key_values=cache
        )
        return hidden + attention_output


class ImitationNetwork(nn.Module):
    """Maps hidden states after decoder layer n to those that enter the target's own final norm and LM head.

    `norm`, then one or two linear layers of the model's width with `activation` between them (after the only
    one there is none), plus the input itself when `residual`. With `residual` the last linear layer starts
    at zero, so that an untrained network equals an early exit. With `attention_heads` an `ExitAttention` stands before all
    of that: a hidden state then depends on those of earlier positions, too.

    Args:
        hidden_size: E, width of the target's decoder.
        num_linear: 1 or 2. activation: a key of `ACTIVATIONS`. norm: one of `NORMS`, on the input.
        residual: add the input to the output.
        attention_heads: of the attention, 0 for none; they divide E into even parts.
    """

    def __init__(
        self,
        hidden_size: int,
        num_linear: int = 2,
        activation: str = "gelu",
        norm: str = "layer_norm",
        residual: bool = True,
        attention_heads: int = 0,
    ) -> None:
        super().__init__()
        self.config = ImitationConfig(hidden_size, num_linear, activation, norm, residual, attention_heads)
        self.norm = norm_named(norm, hidden_size)
        self.linear = nn.ModuleList([nn.Linear(hidden_size, hidden_size) for _ in range(num_linear)])
        self.activation = ACTIVATIONS[activation]()
        self.residual = residual
        if residual:
            last = self.linear[-1]
            nn.init.zeros_(last.weight)  # type: ignore[arg-type]
            nn.init.zeros_(last.bias)  # type: ignore[arg-type]
        # Made last: what is drawn for the other layers is then the same with and without.
        self.attention = ExitAttention(self.config) if attention_heads else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., E] float to [..., E], position by position; with attention [..., T, E], T positions of one text from its first one on."""
        if self.attention is None:
            return self.mapped(hidden)
        texts = hidden.reshape(-1, *hidden.shape[-2:])
        return self.behind(texts)[0].view(hidden.shape)

    def mapped(self, hidden: Tensor) -> Tensor:
        """[..., E] to [..., E], position by position: everything but the attention."""
        output = self.linear[0](self.norm(hidden))
        for layer in list(self.linear)[1:]:
            output = layer(self.activation(output))
        return hidden + output if self.residual else output

    def behind(
        self, hidden: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(hidden states [B, T, E], keys and values [B, heads, S + T, head_dim]) of a network with attention, for exit hidden states
        [B, T, E] behind those that gave `past`, keys and values [B, heads, S, head_dim]."""
        assert self.attention is not None, "the network has no attention"
        before = 0 if past is None else past[0].shape[2]
        positions = torch.arange(before, before + hidden.shape[1], device=hidden.device)
        slots = torch.arange(before + hidden.shape[1], device=hidden.device)
        mask = (slots <= positions[:, None])[None, None]
        cos, sin = (torch.cat([half, half], -1) for half in self.attention.angles(positions[None]))
        cache = Joined(past)
        hidden_states = self.attention(hidden, mask, (cos.to(hidden.dtype), sin.to(hidden.dtype)), cache)
        assert cache.key_values is not None
        return self.mapped(hidden_states), cache.key_values


def norm_named(name: str, width: int) -> nn.Module:
    """One of `NORMS`."""
    norms = {
        "layer_norm": lambda: nn.LayerNorm(width, eps=1e-5),
        "rms_norm": lambda: nn.RMSNorm(width, eps=1e-6),
        "none": nn.Identity,
    }
    return norms[name]()
