"""One whole greedy generation through the runtime against transformers' `generate`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.manifest import Manifest
from ...runtime.common.errors import ExportError
from ..families.common.base import Family
from ..families.common.reference import collate
from ..families.common.sample_inputs import odd_picture
from .tally import ParityRow

NEAR_TIE = 1e-4
"""A divergence is accepted only where the reference's two best scores are closer than this."""


def compare_generation(bundle: Bundle, family: Family, model: Any, max_new_tokens: int = 24) -> ParityRow:
    """Plain greedy decoding of one request in both; raises ExportError where the tokens differ without a near-tie."""
    from ...runtime.engines.onnxruntime import OnnxRuntimeCpu
    from ...runtime.session.session import Session

    limits = bundle.manifest.limits
    prompt = compared_prompt(bundle.manifest)
    image = None if family.vision is None else odd_picture(0)
    budget = min(max_new_tokens, max(1, limits.max_length // 2))
    # Integer weights as floats: what an engine makes of them on a device is compared with itself.
    engine = OnnxRuntimeCpu(bundle.path, bundle.manifest, reading=bundle.reading, float_weights=True)
    with Session.on(engine, bundle) as session:
        result = session.generate(image=image, prompt=prompt, max_new_tokens=budget, speculative=False)
    tokens = [int(t) for t in result.tokens]
    inputs = collate(family, [family.reference_prompt(image, prompt)], left=True)
    with torch.no_grad(), _without(model, bundle.manifest.generation.ignored):
        output = model.generate(
            **inputs, do_sample=False, num_beams=1, max_new_tokens=budget, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    expected = output.sequences[0, -len(output.scores) :].tolist()
    compared = first_difference(tokens, expected)
    if compared is not None:
        if compared >= len(expected) or compared >= len(tokens):
            raise ExportError(
                f"the runtime stopped after {len(tokens)} tokens, transformers after {len(expected)}: {tokens} and {expected}"
            )
        best = torch.topk(output.scores[compared][0].float(), 2).values
        margin = float(best[0] - best[1])
        if margin >= NEAR_TIE:
            raise ExportError(
                f"the bundle's greedy output differs from transformers' at token {compared} ({tokens[compared]} instead of "
                f"{expected[compared]}, margin {margin:.3g})"
            )
    count = len(expected) if compared is None else compared
    return ParityRow("generation", "transformers", "realistic", count, 0.0, 0.0, 0.0)


def compared_prompt(manifest: Manifest) -> str:
    """The prompt of the compared request."""
    text = manifest.text
    return text.default_prompt or (
        "a small robot puts the red cube on the table" if not text.chat_template else "Say hello."
    )


@contextmanager
def _without(model: Any, ignored: Sequence[str]) -> Iterator[None]:
    """The model without the settings of its generation configuration that the runtime does not follow (a bundle names
    them). BLIP-2 hands generation on to its language model, which has settings of its own."""
    owner = getattr(model, "language_model", model)
    before = owner.generation_config
    owner.generation_config = copy.deepcopy(before)
    for name in ignored:
        setattr(owner.generation_config, name, None)
    try:
        yield
    finally:
        owner.generation_config = before


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Index of the first unequal token; None for equal lists."""
    for index in range(max(len(one), len(other))):
        if index >= len(one) or index >= len(other) or one[index] != other[index]:
            return index
    return None
