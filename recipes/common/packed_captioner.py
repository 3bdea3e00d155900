"""Captioners whose decoder reads several texts about the same pictures in one sequence; see `packing`."""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .inside import InsideCaptioner, unpadded
from .packing import Head, Media, Packed, packed

if TYPE_CHECKING:
    from typing_extensions import Self


class PackedCaptioner(InsideCaptioner):
    """Prompts are what the user says and all up to the answer; what stands before them is laid out here.

    What the base class does with a picture, `answering` does with any `Media`.
    """

    picture: ClassVar[Media]
    """What a single picture is."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self.media = self.picture
        self.head_of = cache(self.lay_head)
        self._tail: list[int] = tokenizer(self.split_turn(self.picture)[1])["input_ids"]

    @abstractmethod
    def split_turn(self, media: Any) -> tuple[str, str]:
        """See `packing.split_turn`, of what is seen."""

    @abstractmethod
    def lay_head(self, media: Any) -> Head:
        """What stands before a text about such media; `head_of` remembers it."""

    @abstractmethod
    def decode(self, embeds: Tensor, positions: Tensor, mask: Tensor, **cache: Any) -> Any:
        """The decoder's output without a head.

        Args:
            embeds: [B, S, width]. positions: int64 [axes, B, S]. mask: bool [B, 1, S, all that is cached and S].
        """

    def answering(self, media: Media) -> Self:
        """The same model where the embeddings are those of `media`."""
        other = type(self)(self.model, self.tokenizer)
        other.media = media
        return other

    @property
    def before(self) -> int:
        """See `InsideCaptioner`."""
        return len(self.head_of(self.media).ids)

    def prompt_ids(self, text: str) -> list[int]:
        """See `Captioner`; with the end of the user's turn and the beginning of the answer."""
        return [*super().prompt_ids(text), *self._tail]

    def hidden(self, head: Head, image_embeds: Tensor, batch: Packed, **cache: Any) -> Any:
        """What the decoder gives for a batch, normed: [B, S, width]. The batch may lie on the CPU."""
        batch = batch.to(self.device)
        seen = self.language.embed_tokens(batch.ids)
        seen = seen.index_copy(1, head.places.to(self.device), image_embeds.to(self.device, seen.dtype))
        return self.decode(seen, batch.positions, batch.mask, **(cache or {"use_cache": False}))

    def hidden_of(self, image_embeds: Tensor, prompts: Tensor, targets: Tensor) -> Tensor:
        """See `InsideCaptioner`."""
        head = self.head_of(self.media)
        batch = packed(head, [[pair] for pair in zip(unpadded(prompts), unpadded(targets), strict=True)])
        return self.hidden(head, image_embeds, batch).last_hidden_state

    def generate(self, image_embeds: Tensor, prompts: Tensor, longest: int) -> Tensor:
        """See `Captioner`; greedy with a cache."""
        head = self.head_of(self.media)
        batch = packed(head, [[(prompt, [])] for prompt in unpadded(prompts)]).to(self.device)
        out = self.hidden(head, image_embeds, batch, use_cache=True)
        keep = batch.group >= 0
        last = keep.sum(1) - 1
        each = torch.arange(len(last), device=self.device)
        row, place = out.last_hidden_state[each, last], batch.positions[0, each, last]
        tokens: list[Tensor] = []
        ended = torch.zeros(len(last), dtype=torch.bool, device=self.device)
        while True:
            token = self.model.lm_head(row).argmax(-1)
            tokens.append(token)
            ended |= token == self.end
            if ended.all() or len(tokens) == longest:
                return torch.stack(tokens, 1).cpu()
            place = place + 1
            keep = torch.cat([keep, torch.ones(len(keep), 1, dtype=torch.bool, device=self.device)], 1)
            out = self.decode(
                self.language.embed_tokens(token[:, None]),
                place[None, :, None].expand(len(batch.positions), -1, -1),
                keep[:, None, None],
                past_key_values=out.past_key_values,
                use_cache=True,
            )
            row = out.last_hidden_state[:, -1]
