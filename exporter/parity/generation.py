"""One whole greedy generation through the runtime against transformers' `generate`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...runtime.bundle.folder import Bundle
from ...runtime.errors import ExportError
from ..checkpoint import Checkpoint
from .capture import sample_picture
from .compare import ParityRow

NEAR_TIE = 1e-4
"""A divergence is accepted only where the reference's two best logits are closer than this."""


def compare_generation(
    bundle: Bundle, checkpoint: Checkpoint, manifest: dict[str, Any], model: Any, max_new_tokens: int = 24
) -> ParityRow:
    """Plain greedy decoding of one request in both; raises ExportError where the tokens differ without a near-tie."""
    from ...runtime.session import Session

    text, limits = manifest["text"], manifest["limits"]
    prompt = text.get("default_prompt") or (
        "a small robot puts the red cube on the table" if not text["chat_template"] else "Say hello."
    )
    image = (
        sample_picture(manifest["image"]["height"], manifest["image"]["width"]) if manifest["image"] else None
    )
    budget = min(max_new_tokens, max(1, limits["max_length"] // 2))
    session = Session.load(bundle, device="cpu")
    result = session.generate(image=image, prompt=prompt, max_new_tokens=budget, speculative=False)
    found = [int(t) for t in result.tokens]
    inputs = reference_inputs(checkpoint, manifest, prompt, image)
    with torch.no_grad():
        output = model.generate(
            **inputs, do_sample=False, num_beams=1, max_new_tokens=budget, min_new_tokens=0, min_length=0,
            repetition_penalty=1.0, no_repeat_ngram_size=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    expected = output.sequences[0, -len(output.logits) :].tolist()
    compared = first_difference(found, expected)
    if compared is not None:
        if compared >= len(expected) or compared >= len(found):
            raise ExportError(
                f"the runtime stopped after {len(found)} tokens, transformers after {len(expected)}: {found} and {expected}"
            )
        best = torch.topk(output.logits[compared][0].float(), 2).values
        margin = float(best[0] - best[1])
        if margin >= NEAR_TIE:
            raise ExportError(
                f"the bundle's greedy output differs from transformers' at token {compared} ({found[compared]} instead of "
                f"{expected[compared]}, margin {margin:.3g})"
            )
    count = len(expected) if compared is None else compared
    return ParityRow("generation", "transformers", "realistic", count, 0.0, 0.0, 0.0)


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Index of the first unequal token; None for equal lists."""
    for index in range(max(len(one), len(other))):
        if index >= len(one) or index >= len(other) or one[index] != other[index]:
            return index
    return None


def reference_inputs(
    checkpoint: Checkpoint, manifest: dict[str, Any], prompt: str, image: np.ndarray | None
) -> dict[str, Any]:
    """What transformers' `generate` takes for a prompt and an image [H, W, 3] uint8 of the model's own size."""
    text = manifest["text"]
    tokenizer = checkpoint.tokenizer
    if image is not None:
        ids = [text["image_token_id"]] * text["image_rows"] + tokenizer(prompt)["input_ids"]
        values = (
            image * manifest["image"]["rescale_factor"] - np.array(manifest["image"]["mean"])
        ) / np.array(manifest["image"]["std"])
        pixels = torch.tensor(values.transpose(2, 0, 1)[None], dtype=torch.float32)
        return {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
            "pixel_values": pixels,
        }
    if text["chat_template"]:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
