"""What `run`, `bench` and `inspect` say with `-v`: what was opened and compared, chosen, loaded and done, with times."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .output import quantity, size

if TYPE_CHECKING:
    from ..bundle.folder import Bundle, Check
    from ..bundle.manifest import Manifest
    from ..families import Prepared
    from ..session.result import Result
    from ..session.session import Session
    from ..speedup.stats import Stats

log = logging.getLogger(__name__)


def log_bundle(bundle: Bundle, check: Check, seconds: float) -> None:
    """What is in a bundle that was opened, and what of it was compared."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    from ..bundle.folder import SMALL
    from ..bundle.manifest_file import MANIFEST, read_manifest

    manifest = bundle.manifest
    files = manifest.files.values()
    model = manifest.model
    log.debug(
        "bundle %s: %s (%s), %s parameters, weights %s in %s, %d graphs, %d layers cut at %s; opened in %.2f s",
        bundle.path, model.source, model.architecture, quantity(model.parameters), manifest.weights_dtype,
        size(manifest.weights.total), len(manifest.graphs), manifest.decoder.num_layers,
        ", ".join(map(str, manifest.decoder.cuts[1:-1])) or "no layer", seconds,
    )  # fmt: skip
    small = [info.bytes for info in files if info.bytes <= SMALL]
    sums = {
        "sha256": f"the SHA-256 of all {size(sum(info.bytes for info in files))}",
        "once": "the SHA-256 of all files that changed since the last comparison",
        "size": f"the SHA-256 of the {len(small)} files up to {size(SMALL)} ({size(sum(small))})",
    }
    sealed = "the manifest's checksum, " if "sha256" in read_manifest(bundle.path / MANIFEST) else ""
    log.debug("compared: %sthe sizes of %d files, %s", sealed, len(files), sums[check])


def log_request(prepared: Prepared, images: Sequence[Any] = (), seconds: float | None = None) -> None:
    """How large a request is; `images` are the pictures that were read in `seconds`, all together."""
    for image in images:
        took = "" if seconds is None else f", read in {seconds:.2f} s"
        log.debug("picture: %d × %d, mode %s%s", image.width, image.height, image.mode, took)
    slots = prepared.image_positions
    log.debug(
        "prompt: %d tokens, %d of them image rows%s",
        len(prepared.token_ids),
        0 if slots is None else len(slots),
        "" if prepared.decoder_ids is None else f"; {len(prepared.decoder_ids)} before the answer",
    )


def log_draft(manifest: Manifest, generate_kwargs: dict[str, Any]) -> None:
    """Which draft serves a request with the options `generate_kwargs`, and who decides how many tokens it drafts."""
    chosen = manifest.choose_draft(generate_kwargs.get("draft"))
    if chosen is None:
        log.debug("draft: none, plain decoding")
        return
    layer = "" if chosen.layer is None else f", after layer {chosen.layer} of {manifest.decoder.num_layers}"
    length = generate_kwargs.get("draft_length")
    log.debug(
        "draft: %s (%s%s, %s); tokens per cycle: %s; the bundle has %s",
        chosen.name,
        chosen.kind,
        layer,
        "trained" if chosen.trained else "untrained",
        f"{length}, as asked" if length is not None else f"chosen as it pays ({manifest.policy.adaptive})",
        ", ".join(draft.name for draft in manifest.drafts),
    )


def log_session(session: Session, seconds: float) -> None:
    """What a session computes with, and the memory that it took."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    decoder, manifest = session.decoder, session.bundle.manifest
    engine = decoder.engine
    log.debug(
        "engine: %s, %s%s; loaded in %.2f s",
        engine.name,
        "" if engine.threads is None else f"{engine.threads} thread{'s' * (engine.threads != 1)} of ",
        engine.machine,
        seconds,
    )
    log.debug(
        "key/value cache: %s for %d sequence%s of %d positions, in steps of %d",
        size(decoder.arena.nbytes), session.max_batch, "s" * (session.max_batch > 1), session.max_length,
        decoder.arena.cache_len,
    )  # fmt: skip
    here = (engine.machine, session.threads or 1)
    stored = [entry for entry in manifest.costs if (entry.get("machine"), entry.get("threads")) == here]
    log.debug(
        "pass times: %s",
        f"measured on this machine ({stored[-1].get('date')})"
        if stored
        else "assumed from the model's size; `vlmexport bench --save` measures them",
    )


def log_result(result: Result) -> None:
    """Where the time of a request went, and what became of its drafts."""
    stats: Stats = result.stats
    phases = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in stats.seconds.to_dict().items())
    log.debug(
        "time: %.1f ms to the first token, %.1f ms in all: %s",
        1e3 * stats.time_to_first_token, 1e3 * stats.total_seconds, phases,
    )  # fmt: skip
    log.debug(
        "cycles: %d; drafted %d tokens, judged %d, accepted %d; %d were beyond the end",
        stats.cycles, stats.proposed, stats.evaluated, stats.accepted, stats.discarded,
    )  # fmt: skip
    if stats.evaluated:
        depths = " ".join("–" if alpha is None else f"{alpha:.2f}" for alpha in stats.alpha_by_depth)
        shapes = ", ".join(f"{count} × {nodes}" for (nodes, _), count in sorted(stats.shapes.items()))
        log.debug("accepted by depth: %s; cycles by drafted tokens: %s", depths, shapes)
