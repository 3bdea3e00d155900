"""What a draft kind says of a draft beside the fields that every draft has (`draft_info.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .schema import FLOATS, Part, checked, integer, string

if TYPE_CHECKING:
    from .draft_info import DraftInfo
    from .manifest import Manifest

_COUNT = integer(1, 1024)


@dataclass(kw_only=True)
class DraftCache(Part):
    """Key/value cache of a draft's own layers."""

    num_layers: int = checked(_COUNT)
    num_kv_heads: int = checked(_COUNT)
    head_dim: int = checked(integer(1, 8192))
    dtype: str = checked(string(20, FLOATS))
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class DraftVocabulary(Part):
    """A draft's trimmed vocabulary: `d2t`, an int64 [size] tensor of the bundle, gives the target's ids."""

    size: int = checked(integer(1, 10_000_000))
    d2t: str = checked(string(200))
    extra: dict[str, Any] = field(default_factory=dict)


class DraftPasses(NamedTuple):
    """Names of the graphs that a draft's own passes run: `once` per cycle, and to `propose` each token."""

    once: Sequence[str] = ()
    propose: Sequence[str] = ()


class DraftShares(NamedTuple):
    """What these passes cost in passes of the target over one token."""

    once: float = 0.0
    propose: float = 0.0


@dataclass(kw_only=True)
class DraftOptions(Part):
    """Options of a kind that has none, and of kinds that this version does not know; what those say is in `extra`.

    A kind with options is a subclass whose fields are `checked`. They lie in a draft's entry in the manifest, beside the
    fields that every draft has. What others want to know of a draft they ask by the properties and methods here.
    """

    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def most_tokens(self) -> int | None:
        """Most tokens that it looks ahead; None: as many as it is asked for."""
        return None

    @property
    def offers_trees(self) -> bool:
        """Whether it can propose several tokens for one place."""
        return False

    @property
    def static_tree(self) -> Sequence[int] | None:
        """Of a tree whose shape never changes, parents of its nodes in their order of growth, −1 below the root."""
        return None

    @property
    def own_cache(self) -> DraftCache | None:
        """Keys and values of its own."""
        return None

    @property
    def tap_layers(self) -> Sequence[int]:
        """Cuts whose hidden states it reads, beside its layer's."""
        return ()

    def check(self, where: str, draft: DraftInfo, manifest: Manifest) -> None:
        """What depends on other fields of the manifest; `where` names the draft. Raises `BundleError`."""

    def passes(self, draft: DraftInfo, first: Sequence[str]) -> DraftPasses:
        """The draft's own passes; `first`: what a pass of the target begins with. A draft behind a layer proposes with its
        graphs and the head, and with attention passes its network once more for the row of the last drafted token; one
        without graphs runs on the host."""
        graphs = list(draft.graphs.values())
        if draft.layer is None:
            return DraftPasses()
        return DraftPasses(graphs if self.own_cache is not None else (), [*graphs, "head"])

    def usual_shares(self, manifest: Manifest, head: float) -> DraftShares | None:
        """What the passes cost where nothing was measured; `head`: the share of the target's head. None: as every draft with
        as many graphs."""
        return None
