"""ViSpec's layer (arXiv 2509.15235, sections 3.1 and 3.2, with what the code beside it does): EAGLE's, which reads a
picture as a few compressed tokens and one global feature.

The adaptor is one cross-attention from learned queries over a picture's embeddings as they enter the target. What all queries
but the last give are tokens of the draft: they enter its layer as they are, at the last positions of the picture. What
the last one gives is mixed into the feature of every text position behind the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....runtime.common.errors import OptionError
from .eagle_network import EagleConfig, EagleNetwork

MOST_QUERIES = 256


@dataclass(frozen=True)
class VispecConfig:
    """Shape of `VispecNetwork`: that of its `layer`, and of the adaptor's attention. `queries` counts the global one."""

    layer: EagleConfig
    adaptor_heads: int
    queries: int = 2
    adaptor_bias: bool = False

    def __post_init__(self) -> None:
        if self.layer.mrope_section is not None:
            raise OptionError("ViSpec: mrope_section of its layer; its positions have one axis")
        if type(self.queries) is not int or not 2 <= self.queries <= MOST_QUERIES:
            raise OptionError(f"ViSpec: {self.queries!r:.40} queries are not in 2..{MOST_QUERIES}")
        heads, width = self.adaptor_heads, self.layer.hidden_size
        if type(heads) is not int or heads < 1 or width % heads:
            raise OptionError(f"ViSpec: {heads!r:.40} heads of the adaptor do not divide the width {width}")
        if type(self.adaptor_bias) is not bool:
            raise OptionError(f"ViSpec: adaptor_bias {self.adaptor_bias!r:.40} is neither true nor false")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> VispecConfig:
        """From plain values. OptionError or TypeError for ones that do not fit."""
        given = dict(options)
        layer = given.pop("layer", None)
        if not isinstance(layer, dict):
            raise OptionError(f"ViSpec: layer {layer!r:.40} is no mapping of options")
        return cls(EagleConfig(**layer), **given)

    @property
    def hidden_size(self) -> int:
        """E."""
        return self.layer.hidden_size


class ImageAdaptor(nn.Module):
    """Learned queries over a picture's embeddings: no projection of the queries, no norm, no residual, no positions."""

    def __init__(self, width: int, heads: int, queries: int, bias: bool) -> None:
        super().__init__()
        size = width // heads
        self.q = nn.Parameter(torch.randn(queries, heads, size) * size**-0.5)
        self.k_proj = nn.Linear(width, width, bias=bias)
        self.v_proj = nn.Linear(width, width, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(
        self, image_embeds: Tensor, attention: Callable[..., Tensor] = F.scaled_dot_product_attention
    ) -> Tensor:
        """Embeddings [n, E] of one picture to [queries, E], the global feature last.

        `attention` takes queries, keys, values [1, heads, .., head_dim], no mask and the scale.
        """
        queries, heads, size = self.q.shape
        keys, values = (
            each.view(1, -1, heads, size).transpose(1, 2)
            for each in (self.k_proj(image_embeds), self.v_proj(image_embeds))
        )
        attention_output = attention(self.q.transpose(0, 1)[None], keys, values, None, scale=size**-0.5)
        return self.o_proj(attention_output.transpose(1, 2).reshape(queries, heads * size))


class VispecNetwork(nn.Module):
    """EAGLE's layer `layer`, the adaptor `imadpt` and the linear mixer `img_fc` of [feature, global feature].

    Tensors of the last two are named as in the published checkpoints. Untrained it leaves features as they are, so that
    text is drafted as by an untrained EAGLE layer.
    """

    def __init__(self, config: VispecConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.layer = EagleNetwork(config.layer)
        self.imadpt = ImageAdaptor(width, config.adaptor_heads, config.queries, config.adaptor_bias)
        self.img_fc = nn.Linear(2 * width, width)
        with torch.no_grad():
            self.img_fc.weight.zero_()
            self.img_fc.weight[:, :width] = torch.eye(width)
            self.img_fc.bias.zero_()

    def entering(self, embedded: Tensor, features: Tensor, visual: Tensor, compressed: Tensor) -> Tensor:
        """What enters the layer, [B, T, E], of embeddings and features [B, T, E].

        `visual` [B, T, E] is the global feature that a place knows (zero before the first picture), or, where
        `compressed` (bool [B, T]), the picture's token that stands there.
        """
        mixed = self.img_fc(torch.cat([features, visual], -1))
        return torch.where(compressed[..., None], visual, self.layer.joined(embedded, mixed))

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
        visual: Tensor | None = None,
        compressed: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """As `EagleNetwork.forward`; `visual` and `compressed` as for `entering`, by default no picture."""
        if visual is None:
            visual = torch.zeros_like(features)
        if compressed is None:
            compressed = torch.zeros(features.shape[:2], dtype=torch.bool, device=features.device)
        hidden_states = self.entering(embedded, features, visual.to(features.dtype), compressed)
        return self.layer.attended(hidden_states, positions, mask, past)

    def logits(self, features: Tensor, lm_head: Tensor) -> Tensor:
        """As `EagleNetwork.logits`."""
        return self.layer.logits(features, lm_head)
