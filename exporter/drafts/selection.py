"""From `--draft` and `--draft-layer` to the drafts of a bundle and the points where the decoder is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...runtime.common.errors import OptionError
from ..common.aliases import Alias
from ..families.common.layer_skip import Sublayers
from . import KINDS, draft_kind, draft_kinds
from .common.base import Draft, DraftKind
from .common.files import draft_name
from .folders import open_draft, shipped_drafts
from .named import NONE, check_named, check_precisions


@dataclass
class DraftSelection:
    """The drafts of a bundle in the order of its list. `default` is used where a request names none (None: no draft
    at all), `speculative` says whether it is used then. `notices` are for the user."""

    drafts: list[Draft] = field(default_factory=list)
    default: Draft | None = None
    speculative: bool = False
    notices: list[str] = field(default_factory=list)

    def cuts(self, num_layers: int) -> list[int]:
        """Sorted cut points, both ends included."""
        return sorted({0, num_layers, *(cut for draft in self.drafts for cut in draft.cuts)})

    @property
    def precisions(self) -> dict[str, str]:
        """Drafts whose matrices are stored as integers → their type."""
        return {draft.name: draft.precision for draft in self.drafts if draft.precision is not None}

    @property
    def draft_length(self) -> int:
        """Tokens per cycle that suit the default draft."""
        kind = DraftKind if self.default is None else draft_kind(self.default.kind)
        return kind.draft_length


def check_layer(layer: int, num_layers: int) -> None:
    """OptionError unless `layer` cuts the decoder."""
    if not 1 <= layer <= num_layers - 1:
        raise OptionError(
            f"--draft-layer {layer} is out of range: this decoder has {num_layers} layers, choose 1..{num_layers - 1} "
            f"(at most {max(1, num_layers // 2)} is recommended)"
        )


def select_drafts(
    model: str,
    alias: Alias | None,
    wanted: Sequence[str],
    layer: int | None,
    num_layers: int,
    skip: Sublayers | None = None,
) -> DraftSelection:
    """Resolves what the user asked for.

    `wanted` holds kinds or draft folders, the default first; a folder brings its own layer, kinds that need one use
    `layer`. Without `wanted` the default is a draft that comes with the model: at `layer`, if given, else one that needs
    no cut, else the shallowest; or else the first kind that needs neither training nor a layer. Untrained kinds join the list beside those asked for: they need
    nothing but, for those with a layer, the cut. `skip` is what a kind that leaves sublayers out is to leave out. Raises OptionError naming the value.
    """
    if layer is not None:
        check_layer(layer, num_layers)
    check_named(wanted)
    if NONE in wanted:
        return DraftSelection()
    shipped = shipped_drafts(alias)
    usual = layer if layer is not None else min((d.layer for d in shipped if d.layer), default=None)
    n = usual if usual is not None else max(1, num_layers // 3)
    selection = DraftSelection(speculative=True)
    drafts = [_wanted(value, model, shipped, n, skip).fitted(num_layers) for value in wanted]
    if skip is not None and not any(value in KINDS and draft_kind(value).searched for value in wanted):
        kinds = " or ".join(kind.name for kind in draft_kinds() if kind.searched)
        raise OptionError(f"--skip-attention and --skip-mlp need --draft {kinds}")
    if not wanted:
        drafts = _shipped_for(shipped, layer)
        if not drafts:
            drafts = [_anywhere()]
            selection.notices.append(_untrained_notice(model, n if n < num_layers else None, drafts[0]))
            layer = n if n < num_layers else None
    for draft in drafts:
        if draft.layer is not None:
            check_layer(draft.layer, num_layers)
    cuts = {d.layer for d in drafts if d.layer is not None}
    if layer is not None and layer not in cuts:
        if cuts:
            raise OptionError(
                f"--draft-layer {layer} matches none of the drafts ({', '.join(d.name for d in drafts)}); "
                "leave it out or change it"
            )
        cuts.add(layer)
    names = [d.name for d in drafts]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"draft {name} is given twice")
    selection.default = drafts[0]
    for kind in draft_kinds():
        for place in sorted(cuts) if kind.has_layer else [None]:
            if not kind.trained and draft_name(kind.name, place) not in names:
                drafts.append(kind.at(place))
    selection.notices += [line for draft in drafts for line in draft.notices]
    selection.drafts = _in_order(drafts)
    for cut in sorted(cuts):
        if cut > num_layers // 2:
            selection.notices.append(
                f"draft layer {cut} is beyond half of {num_layers} layers: drafting will cost more than it saves"
            )
    return selection


def set_precisions(selection: DraftSelection, wanted: Sequence[str]) -> None:
    """Lets drafts of `selection` store their matrices as integers: `int4` says so of every draft that brings weights,
    `NAME=int4` of the one of that name in the manifest. Raises OptionError naming the value."""
    check_precisions(wanted)
    every = [draft.name for draft in selection.drafts if draft.brings_weights]
    precisions: dict[str, str] = {}
    named: dict[str, str] = {}
    for value in wanted:
        name, _, precision = value.rpartition("=")
        if "=" in value and name not in every:
            raise OptionError(
                f"--draft-precision {value!r:.80} names no draft with weights of its own ({', '.join(every) or 'there is none'})"
            )
        if "=" not in value and not every:
            raise OptionError(
                f"--draft-precision {value}: no draft of this bundle has weights of its own; leave it out, or give --draft "
                "one that was trained"
            )
        target = named if "=" in value else precisions
        for each in [name] if name else every:
            if each in target:
                raise OptionError(f"--draft-precision is given twice for {each}; choose one")
            target[each] = precision
    precisions |= named
    made = {draft.name: draft.with_precision(precisions.get(draft.name)) for draft in selection.drafts}
    selection.drafts = [made[draft.name] for draft in selection.drafts]
    selection.default = None if selection.default is None else made[selection.default.name]


def _shipped_for(shipped: Sequence[Draft], layer: int | None) -> list[Draft]:
    """At most one draft of those that come with a model. Without a layer asked for, heads on the last hidden state come first: a
    decoder in one piece, and one small pass per cycle. Among kinds without a layer the order is that of `KINDS`."""
    if layer is not None:
        return [draft for draft in shipped if draft.layer == layer][:1]
    return sorted(_in_order(shipped), key=lambda draft: draft.layer or 0)[:1]


def _in_order(drafts: Sequence[Draft]) -> list[Draft]:
    """As a bundle lists them, those of one kind as they are given."""
    order = list(KINDS)
    return sorted(drafts, key=lambda draft: order.index(draft.kind))


def _wanted(
    value: str, model: str, shipped: Sequence[Draft], layer: int, skip: Sublayers | None = None
) -> Draft:
    """The draft that one `--draft` names."""
    if value not in KINDS:
        return open_draft(Path(value))
    kind = draft_kind(value)
    if kind.native:
        return kind.of_model(model)
    place = layer if kind.has_layer else None
    if not kind.trained:
        return kind.at(place)
    if kind.searched and skip is not None:
        return kind.skipping(skip)
    for draft in shipped:
        if (draft.kind, draft.layer) == (kind.name, place):
            return draft
    where = "" if place is None else f" at layer {place}"
    if kind.searched:
        raise OptionError(
            f"{kind.name} needs the sublayers that it leaves out: --skip-attention and --skip-mlp, or the folder of a search: "
            f"{kind.train_command(model, place)}"
        )
    raise OptionError(
        f"no trained {kind.name} draft for {model}{where} comes with this version; train one: "
        f"{kind.train_command(model, place)}, then give its folder to --draft"
    )


def _anywhere() -> Draft:
    """The draft that every bundle can have."""
    return next(kind.at(None) for kind in draft_kinds() if not kind.trained and not kind.has_layer)


def _untrained_notice(model: str, layer: int | None, default: Draft) -> str:
    where = "" if layer is None else f" at layer {layer}"
    notice = f"no trained draft for {model}{where}: {default.name} proposes"
    for kind in draft_kinds():
        if kind.trained and (layer is not None or not kind.has_layer):
            return f"{notice}. One that is right more often: {kind.train_command(model, layer)}"
    return notice
