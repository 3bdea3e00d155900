"""Acceptance of several drafts of one target on the same answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...exporter.drafts import KINDS, draft_kind, open_draft
from ...exporter.drafts.base import SelfDraft
from ...runtime.errors import InputError, OptionError
from ..data.records import RecordSet
from ..generation.answers import GenerationOptions
from ..generation.torch_answers import TorchAnswers
from ..targets.target import Target
from ..training.run import check_writer
from .acceptance import Acceptance, Count

_BATCH = 64

Report = Callable[[str], None]


@torch.no_grad()
def evaluate_drafts(
    target: Target,
    records: RecordSet,
    drafts: Sequence[str],
    draft_length: int = 5,
    max_new_tokens: int | None = 96,
    report: Report | None = None,
) -> dict[str, Acceptance]:
    """Acceptance by draft name; the target runs once for all drafts.

    Args:
        drafts: draft folders, or `KIND@N` of an untrained kind, such as `early-exit@3`.
        max_new_tokens: the target first answers the records greedily, up to this limit, unless they are its own
            generations already; None teacher-forces the records' own texts.
        report: receives a line now and then.

    Raises:
        ExportError: a draft belongs to another target. OptionError: a name that is no such draft, or a layer that the
            target has not.
    """
    say = report or (lambda line: None)
    found = {name: open_self_draft(target, name) for name in drafts}
    check_writer(target, records)
    if max_new_tokens is not None:
        records = answered(target, records, max_new_tokens, say)
    layers = sorted({draft.layer for draft in found.values()})
    counts = {name: Count(draft_length, target.eos_token_ids) for name in found}
    for at in range(0, len(records), _BATCH):
        rows, trunks = target.rows(records[at : at + _BATCH], layers)
        if len(rows):
            own = target.head(rows.residuals[:, -1])
            for name, draft in found.items():
                counts[name].add(target.head(draft.network(trunks[draft.layer])), own, rows)
        say(f"measured {min(at + _BATCH, len(records))}/{len(records)} answers")
    return {name: count.result() for name, count in counts.items()}


def answered(target: Target, records: RecordSet, max_new_tokens: int, report: Report) -> RecordSet:
    """The records with the target's own greedy answers; those that have tokens already keep them."""
    answers, options = TorchAnswers(target, _BATCH), GenerationOptions(max_new_tokens)
    open_ = [i for i, record in enumerate(records) if record.tokens is None]
    told, cut = list(records), 0
    for done, (place, found) in enumerate(answers.answer([records[i] for i in open_], options), 1):
        if isinstance(found, InputError):
            raise found
        (answer,), index = found, open_[place]
        told[index] = replace(records[index], tokens=answer)
        cut += answers.is_cut(answer)
        if done % _BATCH == 0 or done == len(open_):
            report(f"answered {done}/{len(open_)} records")
    if cut:
        report(f"{cut} of {len(open_)} answers were cut at --max-new-tokens {max_new_tokens}")
    return replace(records, records=told)


def open_self_draft(target: Target, name: str) -> SelfDraft:
    """A draft folder, or `KIND@N` of an untrained kind, checked against the target and on its device."""
    kind, at, layer = name.partition("@")
    if kind in KINDS and not draft_kind(kind).trained:
        if not draft_kind(kind).has_layer:
            raise OptionError(
                f"--draft {name!r}: {kind} drafts from the text alone; measure it on a bundle, with vlmexport bench"
            )
        if not at or not layer.isdecimal():
            raise OptionError(f"--draft {name!r}: write {kind}@N")
        target.check_layer(int(layer))
        draft = draft_kind(kind).at(int(layer))
    else:
        draft = open_draft(Path(name))
        draft.check_target(target.name, target.fingerprint, target.num_layers, target.hidden_size)
    if not isinstance(draft, SelfDraft):
        raise OptionError(
            f"--draft {name!r}: {draft.kind} does not branch off the target, so eval cannot measure it"
        )
    draft.network.to(target.device).eval()
    return draft
