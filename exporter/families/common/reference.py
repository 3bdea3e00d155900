"""Arguments for a transformers model: requests of one family, padded and stacked; the same for parity and training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ....runtime.common.errors import ExportError
from .base import Family
from .parts import ReferencePrompt
from .sample_inputs import SENTENCE, odd_picture


def collate(
    family: Family,
    prompts: Sequence[ReferencePrompt],
    texts: Sequence[Sequence[int]] | None = None,
    *,
    left: bool = False,
) -> dict[str, torch.Tensor]:
    """Arguments of the model's `forward` over `texts` behind the prompts, or without texts of its `generate`.

    What the decoder reads is padded on the right, where causal attention never sees it from a real token; with `left` on
    the left, as `generate` wants it. A text encoder's prompts are masked and padded on the right.
    """
    arguments: dict[str, torch.Tensor] = {}
    seen = [p.vision for p in prompts if p.vision is not None]  # some may be text alone
    for name in dict.fromkeys(name for vision in seen for name in vision):
        arguments[name] = torch.cat([vision[name] for vision in seen if name in vision])
    decoded = [decoder_prefix(p) for p in prompts]
    sequences = [(*ids, *text) for ids, text in zip(decoded, texts or [()] * len(prompts), strict=True)]
    if prompts[0].decoder_ids is None:
        ids, mask = padded(sequences, pad_id(family), left)
        begins = [ids.shape[1] - len(sequence) if left else 0 for sequence in sequences]
        spans = [slice(begin, begin + len(own)) for begin, own in zip(begins, decoded, strict=True)]
        arguments |= {"input_ids": ids, "attention_mask": mask}
        return arguments | family.forward_arguments(ids, spans)
    if prompts[0].input_ids:
        ids_and_mask = padded([p.input_ids for p in prompts], pad_id(family))
        arguments["input_ids"], arguments["attention_mask"] = ids_and_mask
    if texts is not None or len(decoded[0]) > 1:  # `generate` starts with the start token by itself
        arguments["decoder_input_ids"], _ = padded(sequences, pad_id(family))
    return arguments


def decoder_prefix(prompt: ReferencePrompt) -> tuple[int, ...]:
    """What the decoder reads before the first token of an answer."""
    return prompt.input_ids if prompt.decoder_ids is None else prompt.decoder_ids


def pad_id(family: Family) -> int:
    """A token to fill short texts with: which one does not matter, for it is masked or behind every real token."""
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(family.checkpoint.tokenizer, name, None)
        if token is not None:
            return token
    return 0


def padded(
    sequences: Sequence[Sequence[int]], pad: int, left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), both int64 [B, longest]."""
    width = max(map(len, sequences))
    ids = torch.full((len(sequences), width), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for b, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[b, place] = torch.tensor(sequence, dtype=torch.long)
        mask[b, place] = 1
    return ids, mask


def reference_inputs(
    family: Family, kind: str, seed: int, length: int = 21, *, pictures: bool = True
) -> dict[str, torch.Tensor]:
    """Arguments of the model's own forward whose decoder text is `length` long (more with image embeddings or a prompt).

    `random`: two sequences of random tokens and pixels, one of them with padding where the model has an encoder;
    without `pictures` of tokens alone. `realistic`: one picture of an odd size and a sentence, through the model's own
    processor. Raises KeyError for another `kind`.
    """
    make = {"random": functools.partial(_random_inputs, pictures=pictures), "realistic": _realistic_inputs}
    return make[kind](family, seed, length)


def _random_inputs(family: Family, seed: int, length: int, pictures: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.tensor(_ordinary(family, range(family.language.embedding.shape[0])))

    def draw(count: int) -> tuple[int, ...]:
        return tuple(allowed[torch.randint(len(allowed), (count,), generator=generator)].tolist())

    crossing = family.decoder.cross_attention
    prompts = []
    for short in (0, 3):
        drawn = None if family.vision is None or not pictures else family.vision.random(generator)
        vision, num_embeds = drawn or (None, 0)
        slots = () if family.image_token_id is None else (family.image_token_id,) * num_embeds
        if not crossing:
            prompts.append(ReferencePrompt((*slots, *draw(_limit(family, length, len(slots)))), vision))
            continue
        ids = (*slots, *draw(length - short)) if family.encoder() is not None else ()
        prompts.append(ReferencePrompt(ids, vision, (family.decoder_start or 0,)))
    texts = [draw(_limit(family, length, 1) - 1) if crossing else () for _ in prompts]
    return collate(family, prompts, texts)


def _realistic_inputs(family: Family, seed: int, length: int) -> dict[str, torch.Tensor]:
    image = None if family.vision is None else odd_picture(seed)
    words = SENTENCE.split()
    prompt = family.reference_prompt(image, " ".join(words[:6]))
    written = f"{' '.join(words[6:])} {SENTENCE * (1 + length // 8)}"
    ids = _ordinary(family, family.checkpoint.tokenizer(written, add_special_tokens=False)["input_ids"])
    used = len(decoder_prefix(prompt))
    count = _limit(family, used + length - 1, 0) - used
    if len(ids) < count:
        raise ExportError(
            f"the tokenizer of {family.checkpoint.folder} turns a sentence into {len(ids)} tokens; is it the model's own?"
        )
    return collate(family, [prompt], [ids[:count]])


def _limit(family: Family, length: int, before: int) -> int:
    """`length`, or as many as a table of positions has left behind `before` others."""
    most = family.decoder.max_positions
    return length if most is None else min(length, most - before)


def _ordinary(family: Family, ids: Any) -> list[int]:
    """The ids that neither end a text nor stand for something else."""
    barred = {*family.checkpoint.tokenizer.all_special_ids, family.image_token_id}
    ends = family.checkpoint.generation_config.get("eos_token_id")
    barred |= set(ends) if isinstance(ends, list) else {ends}
    return [i for i in ids if i not in barred]
