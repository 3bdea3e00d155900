"""What a draft kind, and one draft of a bundle, offer to a build, a dry run, parity, `verify`, `models` and `train`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import nn

from ....runtime.common.errors import ExportError, OptionError
from .files import draft_name

if TYPE_CHECKING:
    from ....runtime.bundle.manifest import DraftInfo
    from ...families.common.base import Family
    from ...families.common.layer_skip import Sublayers
    from ...families.common.parts import GraphSpec
    from ...graphs.weights import WeightRef, WeightStore
    from ...parity.capture import Captured

Run = Callable[[Mapping[str, np.ndarray]], "dict[str, np.ndarray]"]
"""Runs one graph: inputs by name → outputs by name."""


class Draft(ABC):
    """One draft of a bundle. `layer` is the cut after which it branches off, None for one that needs no cut."""

    kind: ClassVar[str]
    layer: int | None
    precision: str | None = None
    """"int8" or "int4": what its matrices are stored as in a bundle; None: as the bundle's."""
    reads_lm_head: bool = False
    """Whether `parity` needs the target's LM head."""

    @property
    def name(self) -> str:
        """Its name in a manifest: `kind@layer`, or the kind alone."""
        return draft_name(self.kind, self.layer)

    @property
    def cuts(self) -> tuple[int, ...]:
        """After which layers it needs the target's hidden states."""
        return () if self.layer is None else (self.layer,)

    def fitted(self, num_layers: int) -> Draft:
        """The draft for a target of so many layers. ExportError where it reads layers that this has not."""
        return self

    @property
    def notices(self) -> list[str]:
        """Lines for the user."""
        return []

    @property
    def trained(self) -> bool:
        """Whether it was trained for one target."""
        return self.fingerprint is not None

    @property
    def fingerprint(self) -> str | None:
        """`sha256:` of what was trained, None where nothing was."""
        return None

    @property
    def trained_from(self) -> Mapping[str, Any] | None:
        """Name and fingerprint of the model that its target was before it changed with this draft; None where it did
        not."""
        return None

    def check_target(self, name: str, fingerprint: str, num_layers: int, hidden_size: int) -> None:
        """Raises ExportError, naming both, unless the draft fits this target."""
        if self.layer is not None and not 0 < self.layer < num_layers:
            raise ExportError(f"the draft {self.name} does not fit {name!r}, which has {num_layers} layers")

    def check_family(self, family: Family) -> None:
        """Raises ExportError, naming what to do, where a draft of this kind has nothing to read of such a model."""
        return

    def graph_names(self) -> dict[str, str]:
        """Role → name of every graph it adds to a bundle."""
        return {}

    @property
    def brings_weights(self) -> bool:
        """Whether its graphs have weights that are not the target's."""
        return bool(self.graph_names())

    def graphs(self, store: WeightStore, family: Family) -> list[GraphSpec]:
        """Traces its graphs; no weight is read. Weights of its own come to `store` through a reader that it adds."""
        return []

    def tensors(self, family: Family) -> dict[str, WeightRef]:
        """Tensors that the runtime reads itself, or that an engine cannot share between two of its graphs, by their name
        in the manifest."""
        return {}

    def parity(
        self, graph: str, run: Run, captures: Sequence[Captured]
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        """For each of the captured inputs: (kind of value, what `graph` gives, what the draft's PyTorch network gives, and
        how far that is from float64), as `Tally.add` takes them."""
        raise NotImplementedError(f"{self.kind} has no graph {graph!r}")

    def with_precision(self, precision: str | None) -> Draft:
        """The draft with its matrices stored in `precision`. OptionError for one that has none."""
        if precision is None:
            return self
        raise OptionError(
            f"--draft-precision {precision}: {self.name} has no weights of its own; leave it out, or name the draft that has "
            f"(NAME={precision})"
        )

    def stored_as(self, dtype: str) -> Draft:
        """The draft with its weights as a bundle of `dtype` holds them, those of its own precision in float32 again."""
        return self

    def entry(self, weights_dtype: str) -> dict[str, Any]:
        """Its entry in the manifest's `drafts`; `weights_dtype` is that of the bundle."""
        return {
            "name": self.name,
            "kind": self.kind,
            "layer": self.layer,
            "graphs": self.graph_names(),
            "trained": self.trained,
            "fingerprint": self.fingerprint,
            "weights_dtype": weights_dtype if self.graph_names() else None,
        }

    def save(self, folder: Path) -> None:
        """Writes the draft folder; only trained drafts have one."""
        raise ExportError(f"{self.name} has nothing to save: it is not trained")


class SelfDraft(Draft):
    """A draft that branches off the target itself: `network` maps its hidden states after `layer` [..., E] to those that enter
    its final norm and LM head. Whether a token is proposed rightly depends on accepted tokens alone."""

    layer: int
    network: nn.Module


class DraftKind(ABC):
    """A kind of draft. Instances have no state."""

    name: ClassVar[str]
    title: ClassVar[str]
    """What it is, in a few words for `vlmexport models`."""
    trained: ClassVar[bool]
    """Whether its drafts are trained, and therefore folders."""
    searched: ClassVar[bool] = False
    """Whether a search makes those folders, out of what the target has, in place of training."""
    native: ClassVar[bool] = False
    """Whether they come with the target's own checkpoint, in place of training."""
    has_layer: ClassVar[bool]
    """Whether its drafts branch off the decoder after a layer, which is a cut of the bundle."""
    forms: ClassVar[tuple[str, ...]] = ()
    """Formats of others, of `early_checks.FORMS`, that its drafts can be written in."""
    draft_length: ClassVar[int] = 5
    """Tokens per cycle where it is a bundle's default and the request names no number."""

    @abstractmethod
    def load(self, folder: Path) -> Draft:
        """The draft in a folder that `vlmexport train` wrote. Raises ExportError for anything else."""

    @abstractmethod
    def at(self, layer: int | None) -> Draft:
        """The untrained draft at `layer` (None for a kind without one). Raises ExportError for a trained kind."""

    def skipping(self, skip: Sublayers) -> Draft:
        """The draft that leaves out these sublayers of the target. OptionError for a kind that leaves out none."""
        raise OptionError(f"--skip-attention and --skip-mlp are not for {self.name}; leave them out")

    def of_model(self, model: str) -> Draft:
        """Of a `native` kind, the draft that the checkpoint `model` holds. OptionError where it holds none."""
        raise OptionError(f"{self.name} comes with no checkpoint; train it")

    def left_out(self, draft: DraftInfo) -> Sublayers | None:
        """What a draft of a manifest leaves out of the target, for a kind of which the manifest says all; else None."""
        return None

    def recognises(self, folder: Path) -> bool:
        """Whether `folder` holds a draft of this kind in somebody else's format, which `load` reads too."""
        return False

    def train_command(self, model: str, layer: int | None) -> str:
        """The command that trains such a draft for `model`."""
        place = "" if layer is None else f" --draft-layer {layer}"
        return f"vlmexport train --model {model} --draft {self.name}{place} --data DATA -o DIR"


class UntrainedKind(DraftKind):
    """Base of kinds that need no training."""

    trained = False

    def load(self, folder: Path) -> Draft:
        raise ExportError(f"{folder}: {self.name} has no folder, it is not trained; give --draft {self.name}")


class TrainedKind(DraftKind):
    """Base of kinds whose drafts are folders."""

    trained = True

    def at(self, layer: int | None) -> Draft:
        raise ExportError(f"{draft_name(self.name, layer)} must be trained: {self.train_command('M', layer)}")
