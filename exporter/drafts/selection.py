"""From `--draft` and `--draft-layer` to the drafts of a bundle and the points where the decoder is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...runtime.errors import OptionError
from ..checkpoint.aliases import Alias
from .early_exit import EARLY_EXIT, early_exit_name
from .imitation import ImitationDraft

IMITATION = "imitation"
NONE = "none"
KINDS = (EARLY_EXIT, IMITATION, NONE)


@dataclass(frozen=True)
class DraftPlan:
    """One draft of a bundle. `network` and `folder` are set for trained drafts."""

    name: str
    kind: str
    layer: int
    network: ImitationDraft | None = None
    folder: Path | None = None

    @property
    def graph(self) -> str | None:
        """Name of the draft's graph, None when it needs none."""
        return None if self.network is None else f"imitation.{self.layer}"

    @property
    def trained(self) -> bool:
        """Whether the draft was trained for this target."""
        return self.network is not None


@dataclass
class DraftSelection:
    """The drafts of a bundle, the default one first. `notices` are for the user."""

    drafts: list[DraftPlan] = field(default_factory=list)
    speculative: bool = False
    notices: list[str] = field(default_factory=list)

    def cuts(self, num_layers: int) -> list[int]:
        """Sorted cut points, both ends included."""
        return sorted({0, num_layers, *(d.layer for d in self.drafts)})


def check_layer(layer: int, num_layers: int) -> None:
    """OptionError unless `layer` cuts the decoder."""
    if not 1 <= layer <= num_layers - 1:
        raise OptionError(
            f"--draft-layer {layer} is out of range: this decoder has {num_layers} layers, choose 1..{num_layers - 1} "
            f"(at most {max(1, num_layers // 2)} is recommended)"
        )


def select_drafts(
    model: str, alias: Alias | None, wanted: Sequence[str], layer: int | None, num_layers: int
) -> DraftSelection:
    """Resolves what the user asked for.

    `wanted` holds kinds or draft folders; a folder brings its own layer, kinds use `layer`. Without `wanted` the draft
    registered for (model, layer) is used, else early exit with speculation off. Raises OptionError naming the value.
    """
    registered = alias.drafts() if alias else {}
    if layer is not None:
        check_layer(layer, num_layers)
    selection = DraftSelection()
    if NONE in wanted:
        if len(wanted) > 1:
            raise OptionError("--draft none excludes other drafts")
        return selection
    layer_of_kinds = layer if layer is not None else next(iter(registered), None)
    if not wanted:
        n = layer_of_kinds if layer_of_kinds is not None else max(1, num_layers // 3)
        if n in registered:
            _add_folder(selection, registered[n])
            selection.speculative = True
        else:
            selection.drafts.append(DraftPlan(early_exit_name(n), EARLY_EXIT, n))
            selection.notices.append(
                f"no trained draft for {model} at layer {n}: early exit is included, speculation is off. A better one: "
                f"{train_command(model, n)}"
            )
    for value in wanted:
        n = layer_of_kinds if layer_of_kinds is not None else max(1, num_layers // 3)
        if value == EARLY_EXIT:
            selection.drafts.append(DraftPlan(early_exit_name(n), EARLY_EXIT, n))
        elif value == IMITATION:
            if n not in registered:
                raise OptionError(
                    f"no trained imitation draft for {model} at layer {n} comes with this version; train one: "
                    f"{train_command(model, n)}, then give its folder to --draft"
                )
            _add_folder(selection, registered[n])
        elif Path(value).is_dir():
            _add_folder(selection, Path(value))
        else:
            raise OptionError(
                f"--draft {value!r} is neither a kind ({', '.join(KINDS)}) nor a folder of a trained draft"
            )
    if wanted:
        selection.speculative = True
    layers = {d.layer for d in selection.drafts}
    for draft in selection.drafts:
        check_layer(draft.layer, num_layers)
    if layer is not None and layer not in layers:
        found = ", ".join(f"{d.name}" for d in selection.drafts)
        raise OptionError(
            f"--draft-layer {layer} matches none of the drafts ({found}); leave it out or change it"
        )
    names = [d.name for d in selection.drafts]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"draft {name} is given twice")
    # Early exit needs nothing but the cut, so every trained draft comes with it as a baseline.
    for n in sorted(layers):
        if early_exit_name(n) not in names:
            selection.drafts.append(DraftPlan(early_exit_name(n), EARLY_EXIT, n))
    for n in sorted(layers):
        if n > num_layers // 2:
            selection.notices.append(
                f"draft layer {n} is beyond half of {num_layers} layers: drafting will cost more than it saves"
            )
    return selection


def train_command(model: str, layer: int) -> str:
    """The command that trains a draft for this model and layer."""
    return f"vlmexport train --model {model} --draft imitation --draft-layer {layer} --data DATA -o DIR"


def _add_folder(selection: DraftSelection, folder: Path) -> None:
    draft = ImitationDraft.load(folder)
    selection.drafts.append(DraftPlan(f"{IMITATION}@{draft.layer}", IMITATION, draft.layer, draft, folder))
