"""The runtime's own preparation of a request against the model's own processor, on pictures of odd sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ...runtime.common.errors import ExportError, PromptError
from ...runtime.families import get_family
from ...runtime.families.base import Prepared, Source
from ..families.common.base import Family
from ..families.common.reference import decoder_prefix
from ..families.common.sample_inputs import CONVERSATIONS, ODD_SIZES, SENTENCE, Sample, odd_picture
from .tally import ParityRow, Tally

PIXELS = 1e-5
"""Largest accepted difference of a normalised pixel, relative to the largest one."""


def compare_preparation(bundle: Source, family: Family) -> ParityRow:
    """Token ids, decoder ids and inputs of the vision tower for several requests, and for conversations where the bundle
    has a chat template.

    Ids must be equal: ExportError names the first that is not. Pixels are compared like the outputs of a graph.
    """
    runtime, tally = get_family(bundle.manifest.model.family), Tally()
    words = SENTENCE.split()
    for index in range(1 if family.vision is None else len(ODD_SIZES)):
        image = None if family.vision is None else odd_picture(index)
        prompt = " ".join(words[: 2 + index])
        _compare(runtime.prepare(bundle, image, prompt), family, image, prompt, tally)
    for image, messages in _conversations(bundle, family):
        try:
            prepared = runtime.prepare(_without_limit(bundle), image, messages)
        except PromptError:
            continue  # a template without such turns: the runtime refuses them, and nothing is to compare
        _compare(prepared, family, image, messages, tally)
    return tally.row("preparation", "transformers", "realistic", floor=PIXELS)


def _without_limit(bundle: Source) -> Source:
    """The bundle with a limit of length that no conversation meets."""
    limits = replace(bundle.manifest.limits, max_length=1 << 20)
    return Sample(replace(bundle.manifest, limits=limits), bundle.tokenizer)


def _conversations(bundle: Source, family: Family) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """A picture, where the model sees any, and messages; it stands in the user's first turn."""
    if not bundle.manifest.text.chat_template:
        return
    for messages in CONVERSATIONS:
        if family.vision is None:
            yield None, messages
            continue
        turns = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        first = next(turn for turn in turns if turn["role"] == "user")
        first["content"].insert(0, {"type": "image"})
        yield odd_picture(0), turns


def _compare(prepared: Prepared, family: Family, image: Any, prompt: Any, tally: Tally) -> None:
    """One request as the runtime laid it out, against the model's own processor."""
    expected = family.reference_prompt(image, prompt)
    decoded = prepared.token_ids if prepared.decoder_ids is None else prepared.decoder_ids
    for what, ids, wanted in (
        ("prompt", prepared.token_ids, expected.input_ids),
        ("decoder's prompt", decoded, decoder_prefix(expected)),
    ):
        if wanted and tuple(ids.tolist()) != wanted:
            raise ExportError(
                f"parity failed: the runtime's {what} of {prompt!r} is {ids.tolist()}, the model's own processor "
                f"makes {list(wanted)}"
            )
        tally.values += len(wanted)
    if expected.positions is not None:
        places = prepared.positions if prepared.positions is not None else np.arange(len(prepared.token_ids))
        if not np.array_equal(np.broadcast_to(places, expected.positions.shape), expected.positions):
            raise ExportError(
                f"parity failed: the runtime's positions of {prompt!r} and a picture are not the model's own"
            )
    if family.vision is None or expected.vision is None:
        return
    runs = family.vision.runs({name: values.numpy() for name, values in expected.vision.items()})
    for inputs, wanted in zip(prepared.vision, runs, strict=True):
        for name, values in wanted.items():
            tally.add(name, inputs[name], values)
