"""The language model on image rows: teacher-forced logits, greedy text, and what its layers would say early."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Blip2ForConditionalGeneration

LONGEST = 160  # tokens of a caption; the longest of 30,000 have 149


def encoder_input(
    model: Blip2ForConditionalGeneration, rows: Tensor, prompts: Tensor
) -> tuple[Tensor, Tensor]:
    """Embeddings [B, 8 + p, width] and mask of image rows [B, 8, width] and prompts [B, p] padded with 0."""
    embeds = torch.cat([model.language_projection(rows), model.language_model.shared(prompts)], 1)
    mask = torch.cat([torch.ones(rows.shape[:2], dtype=torch.long), (prompts != 0).long()], 1)
    return embeds, mask


def logits(model: Blip2ForConditionalGeneration, rows: Tensor, prompts: Tensor, targets: Tensor) -> Tensor:
    """Teacher-forced logits [B, t, V] of targets [B, t], which are padded with 0."""
    embeds, mask = encoder_input(model, rows, prompts)
    inputs = F.pad(targets[:, :-1], (1, 0))
    return model.language_model(
        inputs_embeds=embeds, attention_mask=mask, decoder_input_ids=inputs, use_cache=False
    ).logits


def cross_entropy(found: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens that are not padding, in float32."""
    return F.cross_entropy(found.flatten(0, 1).float(), targets.masked_fill(targets == 0, -100).flatten())


@torch.no_grad()
def speak(
    model: Blip2ForConditionalGeneration, rows: Tensor, prompts: Tensor, longest: int = LONGEST
) -> list[list[int]]:
    """Greedy token ids, ending in </s> (1) unless cut at `longest`."""
    embeds, mask = encoder_input(model, rows, prompts)
    output = model.language_model.generate(
        inputs_embeds=embeds,
        attention_mask=mask,
        max_new_tokens=longest,
        do_sample=False,
        num_beams=1,
        decoder_start_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    found = output[:, 1:].tolist()
    return [row[: row.index(1) + 1] if 1 in row else row for row in found]


@torch.no_grad()
def layer_logits(
    model: Blip2ForConditionalGeneration,
    rows: Tensor,
    prompts: Tensor,
    targets: Tensor,
    layers: Sequence[int],
) -> list[Tensor]:
    """Teacher-forced logits [B, t, V] after each of `layers` (1 to L) through the final norm and the head."""
    seen: dict[int, Tensor] = {}
    decoder = model.language_model.decoder

    def keep(layer: int):
        def hook(module: object, inputs: object, output: object) -> None:
            seen[layer] = output[0] if isinstance(output, tuple) else output  # type: ignore[assignment]

        return hook

    hooks = [decoder.block[n - 1].register_forward_hook(keep(n)) for n in layers]
    try:
        logits(model, rows, prompts, targets)
    finally:
        for hook in hooks:
            hook.remove()
    return [model.language_model.lm_head(decoder.final_layer_norm(seen[n])) for n in layers]
