"""Acceptance of several drafts of one target on the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from ...exporter.drafts.imitation import ImitationDraft
from ...runtime.errors import OptionError
from ..data.records import RecordSet
from ..targets.target import Target
from ..training.features import LiveFeatures
from ..training.run import check_writer
from .acceptance import Acceptance, measure

_BATCH = 64


def evaluate_drafts(
    target: Target,
    records: RecordSet,
    drafts: Sequence[str],
    draft_length: int = 5,
    max_new_tokens: int | None = 96,
) -> dict[str, Acceptance]:
    """Acceptance by draft name.

    Args:
        drafts: draft folders, or `early-exit@N`.
        max_new_tokens: the target first answers the records greedily, up to this limit, unless they are its own
            generations already; None teacher-forces the records' own texts.

    Raises:
        ExportError: a draft belongs to another target. OptionError: `early-exit@N` with no such layer.
    """
    found = [(name, *open_draft(target, name)) for name in drafts]
    check_writer(target, records)
    if max_new_tokens is not None and records.generated_by is None:
        answers = []
        for at in range(0, len(records), _BATCH):
            answers += target.generate(records[at : at + _BATCH], max_new_tokens)
        told = [replace(r, tokens=a) for r, a in zip(records, answers, strict=True)]
        records = RecordSet(records.name, told)
    return {
        name: measure(LiveFeatures(target, records, layer), network, target.head, draft_length, _BATCH)
        for name, network, layer in found
    }


def open_draft(target: Target, name: str) -> tuple[nn.Module, int]:
    """(network, layer) of a draft folder or `early-exit@N`, checked against the target."""
    kind, _, layer = name.partition("@")
    if kind == "early-exit":
        if not layer.isdigit():
            raise OptionError(f"--draft {name!r}: write early-exit@N")
        target.check_layer(int(layer))
        return nn.Identity(), int(layer)
    draft = ImitationDraft.load(Path(name))
    draft.check_target(target.name, target.fingerprint, target.num_layers, target.hidden_size)
    return draft.network.to(target.device), draft.layer
