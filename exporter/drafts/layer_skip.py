"""Draft & Verify (Zhang et al., arXiv 2309.08168): the target with some of its own sublayers left out drafts.

Its folder (see `files`) names the sublayers, by layers from 0:
`{"attention": [3, 5], "mlp": [2, 5]}`; `vlmexport search` writes it, and there are
no tensors. In a bundle it is the graph `skipped`, the decoder without them in one piece, over the target's own weights and
its own keys and values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.common.errors import ExportError, OptionError
from ...runtime.drafts.layer_skip_options import SkipOptions
from ..families.common.layer_skip import Sublayers
from .common.base import Draft, DraftKind
from .common.files import draft_folder, read_document, write_document
from .common.trained import check_identity

if TYPE_CHECKING:
    from ...runtime.bundle.manifest import DraftInfo
    from ..families.common.base import Family
    from ..families.common.parts import GraphSpec
    from ..graphs.weights import WeightStore

ROLE = "skipped"


@dataclass(kw_only=True)
class DraftAndVerify(Draft):
    """The target without `skip`. `target` is the model that it was searched for; empty for a set that was given by hand,
    which is good for any decoder that has these layers."""

    skip: Sublayers
    target: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)

    kind = "draft-and-verify"
    layer = None

    @property
    def fingerprint(self) -> str | None:
        """Of the sublayers of a searched set."""
        if not self.target:
            return None
        return f"sha256:{hashlib.sha256(json.dumps(asdict(self.skip), sort_keys=True).encode()).hexdigest()}"

    def fitted(self, num_layers: int) -> Draft:
        self.skip.check(num_layers)
        return self

    def check_target(self, name: str, fingerprint: str, num_layers: int, hidden_size: int) -> None:
        if self.target:
            check_identity(self, self.target, name, fingerprint)
        try:
            self.skip.check(num_layers)
        except OptionError as error:
            raise ExportError(f"the draft {self.name} does not fit {name!r}: {error}") from error

    def check_family(self, family: Family) -> None:
        """OptionError for a decoder whose state a pass over a part of its layers would advance."""
        if family.decoder.linear_attention is not None:
            raise OptionError(
                f"--draft {self.kind}: layers with linear attention keep a state, which a draft without some of them would need "
                "a second time; choose another draft"
            )

    def graph_names(self) -> dict[str, str]:
        return {ROLE: ROLE}

    @property
    def brings_weights(self) -> bool:
        return False

    def graphs(self, store: WeightStore, family: Family) -> list[GraphSpec]:
        with family.language.hooks():
            return [family.language.skipped(store, self.skip)]

    def entry(self, weights_dtype: str) -> dict[str, Any]:
        own = {"attention": list(self.skip.attention), "mlp": list(self.skip.mlp)}
        return super().entry(weights_dtype) | {"skipped": own}

    def save(self, folder: Path) -> None:
        """Writes the draft folder, which holds its description alone."""
        folder.mkdir(parents=True, exist_ok=True)
        write_document(
            folder,
            {
                "kind": self.kind,
                "layer": None,
                "network": {name: list(layers) for name, layers in asdict(self.skip).items()},
                "target": self.target,
                "provenance": self.provenance,
                "evaluation": self.evaluation,
            },
        )

    @classmethod
    def load(cls, folder: Path) -> DraftAndVerify:
        """Reads a draft folder. Raises ExportError for one that is unreadable, or says something else."""
        folder = draft_folder(folder)
        document = read_document(folder)
        try:
            skip = _read(document["network"])
        except OptionError as error:
            raise ExportError(f"{folder / 'draft.json'}: {error}") from error
        return cls(
            skip=skip,
            target=document["target"],
            provenance=document.get("provenance") or {},
            evaluation=document.get("evaluation") or {},
        )


def _read(network: Mapping[str, Any]) -> Sublayers:
    layers = {name: network.get(name) for name in ("attention", "mlp")}
    if network.keys() != layers.keys() or not all(isinstance(each, list) for each in layers.values()):
        raise OptionError(f"network {network!r:.120} is not two lists of layers, attention and mlp")
    return Sublayers.of(**layers)  # type: ignore[arg-type]


class DraftAndVerifyKind(DraftKind):
    """See the module."""

    name = DraftAndVerify.kind
    title = "the model without some of its own sublayers"
    trained = True
    searched = True
    has_layer = False
    draft_length = 4

    def load(self, folder: Path) -> DraftAndVerify:
        return DraftAndVerify.load(folder)

    def at(self, layer: int | None) -> Draft:
        raise ExportError(
            f"{self.name} needs the sublayers that it leaves out: --skip-attention and --skip-mlp, or a folder of "
            f"{self.train_command('M', None)}"
        )

    def skipping(self, skip: Sublayers) -> DraftAndVerify:
        return DraftAndVerify(skip=skip)

    def left_out(self, draft: DraftInfo) -> Sublayers | None:
        options = draft.options
        skipped = options.skipped if isinstance(options, SkipOptions) else None
        return None if skipped is None else Sublayers.of(skipped.attention, skipped.mlp)

    def train_command(self, model: str, layer: int | None) -> str:
        return f"vlmexport search --model {model} --draft {self.name} --data DATA -o DIR"
