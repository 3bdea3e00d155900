"""How a draft of each kind is measured against its target: what it reads of a text, and what it drafts there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial, singledispatch
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...exporter.drafts import KINDS, draft_kind
from ...exporter.drafts.common.base import Draft, SelfDraft
from ...exporter.drafts.eagle.layer_draft import LayerDraft
from ...exporter.drafts.eagle.vispec import VispecDraft
from ...exporter.drafts.folders import open_draft
from ...exporter.drafts.imitation.imitation import ImitationDraft
from ...exporter.drafts.layer_skip import DraftAndVerify
from ...exporter.drafts.medusa.medusa import MedusaDraft
from ...exporter.families.common.layer_skip import Sublayers
from ...runtime.common.errors import OptionError
from ...runtime.speedup.stats import Stats
from ..features.full_sequences import rows_of, unrolled_over_pictures, unrolled_over_texts
from ..objectives.medusa import ahead
from ..targets.layer_weights import Weights
from ..targets.target import Target
from ..targets.teacher_forcing import Rows, Texts
from .acceptance import Acceptance, Count, likeliest
from .heads import HeadCount
from .layers import LayerCount, Unroll
from .skipped import Known, SkippedCount


class Measured(Protocol):
    """A draft that is being measured: its name in a manifest, and how many layers of the target's size it reads for a
    drafted token (heads are not counted)."""

    name: str
    layers: float

    @property
    def cycles(self) -> Stats:
        """All cycles so far."""
        ...

    def result(self) -> Acceptance:
        """The figures over everything that was added."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """Where what is done inside fails, nothing of it is counted."""
        ...


@runtime_checkable
class MeasuredRows(Measured, Protocol):
    """A draft that reads the hidden states after `layer`, each by itself."""

    layer: int

    def add(self, trunk: Tensor, own: Tensor, batch: Rows) -> None:
        """Hidden states [N, E] after `layer`, the target's logits [N, V], and what they belong to."""
        ...


@runtime_checkable
class MeasuredTexts(Measured, Protocol):
    """A draft that reads whole texts, and the hidden states after layers `taps`."""

    taps: Sequence[int]

    def add(self, texts: Texts) -> None:
        """Whole texts."""
        ...


class _OnTrunk:
    """A draft on the target's trunk; chains of its best tokens."""

    def __init__(self, target: Target, draft: SelfDraft, draft_length: int) -> None:
        self._target, self._network = target, draft.network.to(target.device).eval()
        self.name = draft.name
        self.layers: float = draft.layer
        self._count = Count(draft_length, target.eos_token_ids)
        self.result, self.whole = self._count.result, self._count.whole

    @property
    def cycles(self) -> Stats:
        return self._count.cycles


class MeasuredSelfDraft(_OnTrunk):
    """One that reads each hidden state by itself."""

    def __init__(self, target: Target, draft: SelfDraft, draft_length: int) -> None:
        super().__init__(target, draft, draft_length)
        self.layer = draft.layer

    def add(self, trunk: Tensor, own: Tensor, batch: Rows) -> None:
        self._count.add(self._target.head(self._network(trunk)), own, batch)


class MeasuredAttending(_OnTrunk):
    """One that looks back at earlier hidden states."""

    def __init__(self, target: Target, draft: ImitationDraft, draft_length: int) -> None:
        super().__init__(target, draft, draft_length)
        self.taps: Sequence[int] = (draft.layer,)

    def add(self, texts: Texts) -> None:
        """Whole texts."""
        (layer,), head = self.taps, self._target.head
        places, batch = rows_of(texts, layer)
        if len(batch):
            drafted = head(self._network(texts.taps[layer])[places])
            self._count.add(drafted, head(batch.residuals[:, -1]), batch)


class MeasuredHeads:
    """Medusa heads; chains of their best tokens, no longer than there are heads."""

    def __init__(self, target: Target, draft: MedusaDraft, draft_length: int) -> None:
        self.layer, self._target, self._network = (
            target.num_layers,
            target,
            draft.network.to(target.device).eval(),
        )
        self.name = draft.name
        self.layers: float = 0
        length = min(draft_length, draft.network.config.heads)
        self._count = HeadCount(length, target.eos_token_ids)
        self.result, self.whole = self._count.result, self._count.whole

    @property
    def cycles(self) -> Stats:
        return self._count.cycles

    def add(self, trunk: Tensor, own: Tensor, batch: Rows) -> None:
        network, lm_head = self._network, self._target.lm_head.weight
        logits = network(self._target.features(trunk), lm_head)  # [N, heads, V]
        best, first = likeliest(logits), logits[:, 0]
        if network.config.trimmed is not None:
            best = network.d2t[best]
            first = torch.full_like(own, -torch.inf).index_copy_(1, network.d2t, first)
        self._count.add(best, ahead(batch, network.config.heads), first, own, batch)


class MeasuredLayer:
    """A layer that drafts, which reads whole texts; chains of its likeliest tokens."""

    def __init__(self, target: Target, draft: LayerDraft, draft_length: int, unroll: Unroll) -> None:
        self._target = target
        self.taps: Sequence[int] = draft.cuts
        self.name = draft.name
        self.layers: float = 1
        draft.network.to(target.device).eval()
        self._count = LayerCount(draft.drafter, unroll, target, draft_length, target.eos_token_ids)
        self.result, self.whole = self._count.result, self._count.whole

    @property
    def cycles(self) -> Stats:
        return self._count.cycles

    def add(self, texts: Texts) -> None:
        """Whole texts."""
        self._count.add(texts, self._target.features)


class MeasuredSkipped:
    """A target without some of its sublayers, which drafts record by record."""

    def __init__(self, target: Target, draft: DraftAndVerify, draft_length: int) -> None:
        weights = Weights.of(target)
        self.name = draft.name
        self.layers: float = target.num_layers * weights.kept(draft.skip) / weights.kept(Sublayers())
        self._count = SkippedCount(target, draft.skip, draft_length)
        self.result, self.whole = self._count.result, self._count.whole

    @property
    def cycles(self) -> Stats:
        return self._count.cycles

    def add(self, text: Known) -> None:
        """A record's answer, and what the target made of it."""
        self._count.add(text)


@singledispatch
def measured(draft: Draft, target: Target, draft_length: int) -> Measured:
    """How a draft is measured: by the function that is registered for its class. OptionError where there is none."""
    raise OptionError(
        f"--draft {draft.name!r}: eval does not know how {draft.kind} is measured; use vlmexport bench"
    )


@measured.register
def _(draft: SelfDraft, target: Target, draft_length: int) -> Measured:
    return MeasuredSelfDraft(target, draft, draft_length)


@measured.register
def _(draft: ImitationDraft, target: Target, draft_length: int) -> Measured:
    if not draft.attends:
        return MeasuredSelfDraft(target, draft, draft_length)
    return MeasuredAttending(target, draft, draft_length)


@measured.register
def _(draft: MedusaDraft, target: Target, draft_length: int) -> Measured:
    return MeasuredHeads(target, draft, draft_length)


@measured.register
def _(draft: LayerDraft, target: Target, draft_length: int) -> Measured:
    return MeasuredLayer(target, draft, draft_length, partial(unrolled_over_texts, draft.drafter))


@measured.register
def _(draft: VispecDraft, target: Target, draft_length: int) -> Measured:
    return MeasuredLayer(target, draft, draft_length, partial(unrolled_over_pictures, draft.network))


@measured.register
def _(draft: DraftAndVerify, target: Target, draft_length: int) -> Measured:
    return MeasuredSkipped(target, draft, draft_length)


def open_measured(target: Target, name: str, draft_length: int) -> Measured:
    """A draft folder, or `KIND@N` of an untrained kind, checked against the target and on its device."""
    kind, at, layer = name.partition("@")
    if kind in KINDS and not draft_kind(kind).trained:
        if not draft_kind(kind).has_layer:
            raise OptionError(
                f"--draft {name!r}: {kind} drafts from the text alone; measure it on a bundle, with vlmexport bench"
            )
        if not at or not layer.isdecimal():
            raise OptionError(f"--draft {name!r}: write {kind}@N")
        target.check_layer(int(layer), f"--draft {name}")
        draft = draft_kind(kind).at(int(layer))
    else:
        draft = open_draft(Path(name))
        draft.check_family(target.family)
        draft.check_target(target.name, target.fingerprint, target.num_layers, target.hidden_size)
        draft = draft.fitted(target.num_layers)
    return measured(draft, target, draft_length)
