"""From a request to a checked model and the manifest's first half: nothing is traced and nothing is written.

Everything that is cheap to refuse is refused here: options, output, configuration, tokenizer, special tokens, image
settings, TensorRT, disk space. Only then is every weight read once, for the fingerprint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...runtime.bundle.manifest import Manifest
from ...runtime.bundle.schema import ITEM_SIZES
from ...runtime.errors import OptionError
from ..checkpoint import Checkpoint, fingerprint, open_checkpoint
from ..drafts.selection import DraftSelection, select_drafts
from ..families.base import Family
from ..families.registry import family_for
from .describe import describe
from .generation import generation_notices
from .request import BuildRequest
from .write import check_output, check_space

if TYPE_CHECKING:
    from ..tensorrt import PlanOptions


@dataclass
class Prepared:
    """A checked request. `manifest` has everything but graphs, tensors, weights, parity, plans and files."""

    request: BuildRequest
    checkpoint: Checkpoint
    family: Family
    selection: DraftSelection
    manifest: Manifest
    plans: PlanOptions | None

    @property
    def cuts(self) -> list[int]:
        """Where the decoder is cut."""
        return self.manifest.decoder.cuts

    @property
    def notices(self) -> list[str]:
        """Lines for the user."""
        return [*self.selection.notices, *generation_notices(self.manifest.generation.to_dict())]


def prepare(request: BuildRequest, *, identify: bool = True) -> Prepared:
    """Finds the model and the drafts and checks every option; raises the error that the user should read.

    Without `identify` (a dry run) no weight is read, the output is not looked at, the fingerprint stays empty and
    drafts are not matched with it.
    """
    request.check()
    if identify:
        check_output(request.output, request.force)
    checkpoint = open_checkpoint(request.model)
    family = family_for(checkpoint)
    if family.max_positions is not None and request.max_length > family.max_positions:
        raise OptionError(
            f"--max-length {request.max_length} is beyond the model's {family.max_positions} positions"
        )
    shape = family.decoder
    selection = select_drafts(
        request.model, checkpoint.alias, request.drafts, request.draft_layer, shape.num_layers
    )
    plans = _plan_options(request, family)
    manifest = describe(request, checkpoint, family, selection)
    prepared = Prepared(request, checkpoint, family, selection, manifest, plans)
    if identify:
        check_space(request.output, least_bytes(prepared), "at least ")
        manifest.model.fingerprint = fingerprint(checkpoint)
        for draft in selection.drafts:
            draft.check_target(request.model, manifest.model.fingerprint, shape.num_layers, shape.hidden_size)
    return prepared


def least_bytes(prepared: Prepared) -> int:
    """A lower bound of the weights file, from the checkpoint's shapes alone (the graphs say exactly, later).

    Tensors of the embedding table's shape count once: they may be tied. Integer buffers are never stored.
    """
    tensors = prepared.checkpoint.tensors
    table = prepared.family.tensors()["embedding_table"].shape
    shapes = [tensors.shape(name) for name in tensors if "float" in tensors.dtype(name)]
    count = sum(math.prod(shape) for shape in shapes if shape != table)
    count += math.prod(table) if table in shapes else 0
    # A tenth off: a checkpoint may hold a little that no graph reads.
    return int(0.9 * count * ITEM_SIZES[prepared.manifest.weights_dtype])


def _plan_options(request: BuildRequest, family: Family) -> PlanOptions | None:
    """The TensorRT plans that were asked for; raises when they cannot be built here."""
    if request.backend is None:
        return None
    from ..tensorrt.plans import PlanOptions, check_plan_options

    options = PlanOptions(request.backend, request.target, request.plan_precision)
    check_plan_options(options, family.decoder_name, request.precision)
    return options
