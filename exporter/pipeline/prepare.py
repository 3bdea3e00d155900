"""From a request to a checked model and the manifest's first half: no graph is traced and nothing is written.

Everything that is cheap to refuse is refused here: options, output, configuration, tokenizer, special tokens, image
settings, shapes, sample requests, activations, TensorRT, disk space. `identify` then reads every weight once, for the fingerprint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...runtime.common.errors import OptionError
from ..checkpoint import Checkpoint, fingerprint, open_checkpoint
from ..common.lengths import check_length
from ..drafts.selection import select_drafts, set_precisions
from ..families.common.base import Family
from ..families.common.matrices import round_weights
from ..families.registry import family_for
from ..output import check_output, check_space
from ..quantization.choice import check_no_states
from .checks import check_early, estimated_bytes
from .describe import describe
from .links import check_links
from .prepared import Prepared
from .request import ROUND, TEXT, BuildRequest

if TYPE_CHECKING:
    from ...runtime.bundle.manifest import Manifest
    from ..drafts.selection import DraftSelection
    from ..tensorrt import PlanOptions


def prepare(request: BuildRequest, *, write: bool = True) -> Prepared:
    """Finds the model and the drafts and checks all that is cheap; raises the error that the user should read.

    Without `write` (a dry run) the output and its disk are not looked at. Of a hub model only its description is
    fetched: configuration, tokenizer, headers of the weights.
    """
    request.check()
    if write:
        check_output(request.output, request.force)
    checkpoint = open_checkpoint(request.model, weights=False, adapter=request.adapter)
    checkpoint.max_pixels = request.max_pixels
    family = family_for(checkpoint)
    if request.max_pixels is not None and (family.vision is None or not family.vision.scales):
        raise OptionError(
            f"--max-pixels {request.max_pixels}: this model reads no pictures of any size; leave it out"
        )
    if request.max_length is None:
        request = replace(request, max_length=_length(request, family))
    linear = family.decoder.linear_attention
    if linear is not None and request.max_width > linear.window // 2:
        raise OptionError(
            f"--max-width {request.max_width}: with linear attention it is at most {linear.window // 2}"
        )
    check_length(request.length, family.max_positions, family.needed_embeds)
    selection = select_drafts(
        request.model,
        checkpoint.alias,
        request.drafts,
        request.draft_layer,
        family.decoder.num_layers,
        request.skip,
    )
    set_precisions(selection, request.draft_precision)
    _round_weights(request, checkpoint, family)
    manifest = describe(request, checkpoint, family, selection)
    if manifest.target_weights is not None:
        check_no_states(linear, manifest.target_weights.dtype)
    plans = _plan_options(request, manifest, selection)
    prepared = Prepared(request, checkpoint, family, selection, manifest, plans)
    check_early(prepared)
    if request.link_weights:
        check_links(checkpoint.tensors, manifest.weights_dtype, request.output)
    if write:
        check_space(request.output, estimated_bytes(prepared), "about ")
    return prepared


def _length(request: BuildRequest, family: Family) -> int:
    """What `BuildRequest.max_length` says of None."""
    embeds = family.needed_embeds
    if request.max_pixels is not None and family.vision is not None:
        embeds = family.vision.max_embeds or embeds
    length = TEXT if embeds <= ROUND else -(-(TEXT + embeds) // ROUND) * ROUND
    return length if family.max_positions is None else min(length, family.max_positions)


def identify(prepared: Prepared) -> None:
    """Fetches the weights where they are not here yet, and reads them for the manifest's fingerprint, which every
    trained draft must know."""
    if prepared.checkpoint.fetch():
        prepared.family = family_for(prepared.checkpoint)
        _round_weights(prepared.request, prepared.checkpoint, prepared.family)
    identity = prepared.manifest.model.fingerprint = fingerprint(prepared.checkpoint)
    shape, origin = prepared.family.decoder, prepared.checkpoint.quantized_from
    for draft in prepared.selection.drafts:
        draft.check_family(prepared.family)
        target = (getattr(draft, "target", None) or {}).get("fingerprint")
        # What was trained on the float model drafts for its integers, too.
        fits = origin.fingerprint if origin is not None and target == origin.fingerprint else identity
        draft.check_target(prepared.request.model, fits, shape.num_layers, shape.hidden_size)


def _round_weights(request: BuildRequest, checkpoint: Checkpoint, family: Family) -> None:
    round_weights(
        checkpoint, family, request.weights, request.weights_block, request.output.absolute().parent
    )


def _plan_options(request: BuildRequest, manifest: Manifest, selection: DraftSelection) -> PlanOptions | None:
    """The TensorRT plans that were asked for; raises when they cannot be built here."""
    if request.backend is None:
        return None
    from ..tensorrt.options import PlanOptions, check_attention, check_integers, resolve

    check_attention(manifest.decoder)
    options = PlanOptions(request.backend, request.plan_target, request.plan_precision, request.lowering)
    wanted = resolve(options, manifest.model.decoder, request.precision)
    check_integers(wanted, selection.precisions, manifest.target_weights)
    return options
