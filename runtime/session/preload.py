"""Graphs that are loaded with a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..bundle.folder import Bundle
    from ..engines.base import Engine


def load_graphs(bundle: Bundle, engine: Engine) -> None:
    """Load what the default request needs: the first one is then not slower than the others, and a folder that is
    replaced behind the session's back changes nothing of it."""
    manifest = bundle.manifest
    _ = bundle.tokenizer
    names = [
        *manifest.segments,
        "head",
        *(n for n in ("vision", "encoder", "cross_kv") if n in manifest.graphs),
    ]
    draft = manifest.draft(manifest.policy.draft) if manifest.policy.draft else None
    if draft is not None and manifest.policy.speculative:
        names.extend(draft.graphs.values())
    engine.load(*names)
