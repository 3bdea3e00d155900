"""The decoder of a session, with the widths that its passes need for the same bits with and without drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..bundle.stored_costs import stored_least_width
from ..decoder.decoder import Decoder
from ..decoder.least_width import probe_least_width

if TYPE_CHECKING:
    from ..bundle.folder import Bundle
    from ..bundle.manifest import Manifest
    from ..engines.base import Engine


def kernels_of(engine: Engine) -> str:
    """Whose kernels compute: a least width holds for them alone."""
    return f"{engine.name} {engine.version}".rstrip()


def pads_up(manifest: Manifest) -> bool:
    """Whether a bundle wants a least width: its rows are rounded to 8 bits, and no width of passes is given."""
    return manifest.target_weights is not None and manifest.verify_width is None


def open_decoder(
    bundle: Bundle, engine: Engine, max_length: int | None, max_batch: int
) -> tuple[Bundle, Decoder]:
    """The decoder of a bundle on an engine, and the bundle as it is decoded: where it wants a least width and there is
    none below `max_width`, every pass has `max_width` rows (`verify_width`)."""
    manifest = bundle.manifest
    decoder = Decoder(engine, manifest, bundle.tensor, max_length, max_batch)
    if not pads_up(manifest):
        return bundle, decoder
    stored = stored_least_width(manifest, engine.machine, engine.threads or 1, kernels_of(engine))
    # What was stored is of a single sequence.
    least = probe_least_width(decoder) if stored is None or max_batch > 1 else stored
    if least is not None and least <= manifest.limits.max_width:
        decoder.set_least_width(least)
        return bundle, decoder
    bundle = bundle.with_verify_width(manifest.limits.max_width)
    return bundle, Decoder(engine, bundle.manifest, bundle.tensor, max_length, max_batch)


def note_of(manifest: Manifest, decoder: Decoder) -> str | None:
    """What a user should know of how a bundle is computed; None where that is as the manifest says."""
    notes = [] if decoder.engine.note is None else [decoder.engine.note]
    least, weights = decoder.passes.least_width, manifest.target_weights
    if least > 1:
        notes.append(
            f"passes of fewer than {least} rows are padded to {least}, from which on this machine computes the same bits"
        )
    elif weights is not None and manifest.verify_width is not None:
        notes.append(
            f"every pass has {manifest.verify_width} rows: with {weights.dtype} weights other widths give other bits"
        )
    return "; ".join(notes) or None
