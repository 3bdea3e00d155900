"""`vlmexport quantize`: from a float checkpoint and data to a checkpoint of integers, and what that costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...exporter.checkpoint.origin import Origin
from ...exporter.output import replaced_folder
from ...exporter.quantization.blocks import BLOCK
from ...exporter.quantization.choice import HEAD, WeightsChoice, check_no_states
from ...runtime.common.errors import OptionError
from ..data.reading.records import RecordSet
from ..targets.target import Target
from .facts import facts_of
from .layerwise import Group, Quantized, Report, quantize_layers
from .loss_limit import limit_loss
from .matrices import head_matrix, stacks
from .options import QuantizeOptions
from .packed import PackedTensors, quantization_config, write_packed
from .quality import FloatReference
from .report import Measured, document

HELD_OUT = 0.25
"""Share of the data that quality is measured on where no other data are given."""


def quantize(
    target: Target,
    records: RecordSet,
    held: RecordSet | None,
    options: QuantizeOptions,
    out: Path,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Writes the folder `out` and returns its report; the target's matrices have the integers' values then. Quality is measured on
    `held`, or on the last part of the records.

    Raises:
        OptionError: `weights` names no matrix, or leaves all float; a `max_loss` that 8 bits do not reach.
        InputError: records without text.
    """
    begin = time.monotonic()
    check_weights(target, options.weights)
    if held is None:
        records, held = records.split(HELD_OUT)
    records = replace(records, records=records.records[: options.samples])
    used, measured_on = (_cut(target, some, options.max_tokens) for some in (records, held))
    report(f"reading {len(measured_on)} held-out records")
    reference = FloatReference(target, measured_on, head_changes=head_matrix(target) is not None)
    facts = facts_of(target, measured_on, report)
    quantized = quantize_layers(target, options.weights, used.records, options.method, options.block, report)
    widened: Sequence[Group] = ()
    if options.max_loss is not None:
        widened = limit_loss(target, quantized, reference.measure, options.max_loss, options.block, report)
    quality = reference.measure()
    both = None if facts is None else (facts, facts_of(target, measured_on, report) or 0.0)
    tensors = packed_tensors(target, quantized)
    measured = Measured(reference.quality, quality, both, widened, time.monotonic() - begin)
    told = document(target, used, measured_on, options, quantized, tensors, measured, out)
    origin = Origin(target.name, target.fingerprint, target.checkpoint.default_prompt)
    ignore = (
        []
        if HEAD in (group.layer for group in quantized.groups if _all_integers(quantized, group))
        else ["lm_head"]
    )
    config = quantization_config(quantized.matrices, quantized.integers, ignore, options.block)
    with replaced_folder(out, force=False) as folder:
        kept = {name: value for name, value in told.items() if name != "output"}  # a folder may be moved
        write_packed(folder, target.checkpoint, tensors, config, origin, kept)
    return told


def check_weights(target: Target, choice: WeightsChoice) -> None:
    """OptionError for parts that name no matrix of the target, for a choice that leaves all of them float, and for a target that
    no bundle computes with integers."""
    matrices = [m for stack in stacks(target) for layer in stack.matrices for m in layer]
    if not matrices:
        raise OptionError(
            f"{target.name} has no matrix whose inputs are a multiple of {BLOCK}: none can become integers"
        )
    head = head_matrix(target)
    choice.check_parts(m.name for m in matrices)
    if not any(choice.dtype_of(m.name) for m in (*matrices, *([] if head is None else [head]))):
        raise OptionError(f"--weights {choice}: every matrix stays float; choose int8 or int4 for some")
    check_no_states(target.family.decoder.linear_attention, str(choice))


def packed_tensors(target: Target, quantized: Quantized) -> PackedTensors:
    """The checkpoint's tensors with the integers in the place of matrices."""
    stored = {
        m.tensor: quantized.integers[m.name] for m in quantized.matrices if m.name in quantized.integers
    }
    return PackedTensors(target.checkpoint, stored)


def _all_integers(quantized: Quantized, group: Group) -> bool:
    return all(m.name in quantized.integers for m in group.matrices)


def _cut(target: Target, records: RecordSet, max_tokens: int) -> RecordSet:
    """The records with their texts as tokens, at most so many each."""
    return replace(records, records=[replace(r, tokens=target.answer(r)[:max_tokens]) for r in records])
