"""Where pictures and videos stand in the prompts of a batch, and which of a vision tower's embeddings belong there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ...exporter.families.common.base import Family
from ...exporter.families.common.parts import ReferencePrompt
from ...exporter.families.common.prompt_text import token_runs
from ...exporter.families.common.reference import decoder_prefix

Span: TypeAlias = "tuple[int, int, int]"
"""A picture or a video in a prompt: the token that holds its place, its first position, the end."""


def placeholder_tokens(family: Family) -> tuple[int, ...]:
    """Tokens that hold the places of pictures and of videos, in the order in which the tower reads these; one where both have
    the same, and are read as they stand."""
    known = (family.image_token_id, family.video_token_id)
    return tuple(token for token in dict.fromkeys(known) if token is not None)


def pictures_of(
    family: Family, prompts: Sequence[ReferencePrompt], image_embeds: Sequence[Tensor]
) -> list[list[tuple[int, Tensor]]]:
    """Of each prompt: (first position, embeddings [time steps, n, E]) of every picture and video, and of one with text
    between its embeddings of every run of them, as the runtime shows them to a draft.

    Args:
        image_embeds: what the tower gave of the batch, [..., E] each.
    """
    spans = [_spans(family, prompt) for prompt in prompts]
    flat = [embeds.reshape(-1, embeds.shape[-1]) for embeds in image_embeds]
    left = _by_token(family, torch.cat(flat), spans) if any(spans) else {}
    pictures: list[list[tuple[int, Tensor]]] = []
    for prompt, own in zip(prompts, spans, strict=True):
        steps = iter(prompt.video_steps)
        pictures.append([])
        for token, first, end in own:
            count = next(steps, 1) if token == family.video_token_id else 1
            embeds = left[token][: end - first].clone()
            pictures[-1].append((first, embeds.reshape(count, -1, embeds.shape[-1])))
            left[token] = left[token][end - first :]
    return pictures


def _spans(family: Family, prompt: ReferencePrompt) -> list[Span]:
    """Every picture and video in what the decoder reads."""
    if family.decoder.cross_attention:
        return []
    return token_runs(decoder_prefix(prompt), placeholder_tokens(family))


def _by_token(family: Family, image_embeds: Tensor, spans: Sequence[Sequence[Span]]) -> dict[int, Tensor]:
    """What the tower gave of a batch [n, E], by what holds its place: it reads all pictures, then all videos."""
    tokens = placeholder_tokens(family)
    sizes = [sum(end - first for own in spans for t, first, end in own if t == token) for token in tokens]
    return dict(zip(tokens, image_embeds.split(sizes), strict=True))
