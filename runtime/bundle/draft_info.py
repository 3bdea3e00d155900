"""One draft of a manifest."""

# ruff: noqa: RUF009 - `checked` returns a dataclass field

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from ..graphs.registry import draft_kinds
from .draft_options import DraftOptions
from .schema import FLOATS, Part, boolean, checked, integer, mapping_of, optional, string

DRAFT_WEIGHTS = (*FLOATS, "int8", "int4")
"""What a draft's matrices may be stored as; integers have a scale per block (`DequantizeLinear`)."""

NULLABLE = ("cache", "vocabulary", "tree", "heads", "ranks", "queries", "taps", "skipped")
"""Options that every entry of schema 2 has, null where the kind has none."""


@dataclass(kw_only=True)
class DraftInfo(Part):
    """A proposer of the bundle. `layer` is the cut after which it branches off, or null. `graphs` maps the role of
    each of its graphs to the graph's name, `weights_dtype` is what its matrices are stored as, `fingerprint` is that of the
    trained network. `options` are those of its kind, which lie beside these fields in the file; drafts of kinds that this
    version does not know are listed and cannot be chosen."""

    name: str = checked(string(100))
    kind: str = checked(string(40))
    layer: int | None = checked(optional(integer(1, 1024)), default=None)
    graphs: dict[str, str] = checked(mapping_of(string(100), string(40), 16), default_factory=dict)
    trained: bool = checked(boolean, default=False)
    fingerprint: str | None = checked(optional(string(200)), default=None)
    weights_dtype: str | None = checked(optional(string(20, DRAFT_WEIGHTS)), default=None)
    options: DraftOptions = field(default_factory=DraftOptions)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, value: Any, path: str) -> DraftInfo:
        """A draft's entry. Raises `BundleError` as every part, for options of its kind too."""
        draft: DraftInfo = super().parse(value, path)
        kind = draft_kinds().get(draft.kind)
        options = DraftOptions if kind is None else kind.options
        own = {n: v for n, v in draft.extra.items() if v is not None or n not in NULLABLE}
        draft.options, draft.extra = options.parse(own, path), {}
        return draft

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | dict.fromkeys(NULLABLE) | self.options.to_dict()

    def __getattr__(self, name: str) -> Any:
        """Options under the names that were fields of every draft until 0.1; they go with the next release."""
        if name not in NULLABLE:
            raise AttributeError(f"DraftInfo has no {name!r}")
        warnings.warn(f"DraftInfo.{name} is now DraftInfo.options.{name}", DeprecationWarning, stacklevel=2)
        return getattr(self.options, name, None)
