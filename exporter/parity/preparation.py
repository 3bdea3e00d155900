"""The runtime's own preparation of a request against the model's own processor, on pictures of odd sizes."""

from __future__ import annotations

import numpy as np

from ...runtime.errors import ExportError
from ...runtime.families import get_family
from ...runtime.families.base import Source
from ..families.base import Family
from ..families.reference import decoder_prefix
from ..families.samples import ODD_SIZES, SENTENCE, odd_picture
from .tally import ParityRow, Tally

PIXELS = 1e-5
"""Largest accepted difference of a normalised pixel, relative to the largest one."""


def compare_preparation(bundle: Source, family: Family) -> ParityRow:
    """Token ids, decoder ids and inputs of the vision tower for several requests.

    Ids must be equal: ExportError names the first that is not. Pixels are compared like the rows of a graph.
    """
    prepare = get_family(bundle.manifest.model.family).prepare
    words, tally = SENTENCE.split(), Tally()
    for index in range(1 if family.vision is None else len(ODD_SIZES)):
        image = None if family.vision is None else odd_picture(index)
        prompt = " ".join(words[: 2 + index])
        found, expected = prepare(bundle, image, prompt), family.reference_prompt(image, prompt)
        decoded = found.token_ids if found.decoder_ids is None else found.decoder_ids
        for what, ids, wanted in (
            ("prompt", found.token_ids, expected.input_ids),
            ("decoder's prompt", decoded, decoder_prefix(expected)),
        ):
            if wanted and tuple(ids.tolist()) != wanted:
                raise ExportError(
                    f"parity failed: the runtime's {what} of {prompt!r} is {ids.tolist()}, the model's own processor "
                    f"makes {list(wanted)}"
                )
            tally.values += len(wanted)
        if expected.positions is not None:
            places = found.positions if found.positions is not None else np.arange(len(found.token_ids))
            if not np.array_equal(np.broadcast_to(places, expected.positions.shape), expected.positions):
                raise ExportError(
                    f"parity failed: the runtime's positions of {prompt!r} and a picture are not the model's own"
                )
        if family.vision is None or expected.vision is None:
            continue
        runs = family.vision.runs({name: values.numpy() for name, values in expected.vision.items()})
        for inputs, wanted in zip(found.vision, runs, strict=True):
            for name, values in wanted.items():
                tally.add(name, inputs[name], values)
    return tally.row("preparation", "transformers", "realistic", floor=PIXELS)
