"""A trained draft as a checkpoint in somebody else's format."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.common.errors import ExportError, OptionError
from ..checkpoint import Checkpoint, fingerprint, open_checkpoint
from ..drafts.common.trained import TrainedDraft
from ..drafts.common.verifier import Verifier
from ..drafts.folders import open_draft
from ..drafts.medusa.vllm_format import MEDUSA
from ..early_checks import check_export
from ..families.common.base import Family
from ..families.registry import family_for
from ..output import replaced_folder

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Exported:
    """What was written. `verifier` is the target's name there; `notices` are for the user."""

    output: str
    format: str
    kind: str
    parameters: int
    verifier: str | None
    architectures: list[str]
    notices: list[str]

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"schema_version": 1, **asdict(self)}


def export_draft(folder: Path, output: Path, form: str, model: str | None = None) -> Exported:
    """Writes the draft in `folder` to the new folder `output`, in the format `form`.

    Its target is `model`, or the one that it names; of a hub's only the description is fetched. Raises OptionError for
    options, and ExportError where the draft does not fit its target, or the format.
    """
    check_export(folder, output, form, model)
    draft = open_draft(folder)
    if not isinstance(draft, TrainedDraft):
        raise ExportError(f"{folder}: {draft.name} is not a trained draft")
    name = model or str(draft.target.get("name") or "")
    if not name:
        raise OptionError(f"{folder} does not say which model it is for; give it with --model")
    try:
        checkpoint = open_checkpoint(name, weights=False)
    except OptionError as error:
        if model is not None:
            raise
        raise OptionError(
            f"the model of {folder}, {name!r:.80}, is not here; give it with --model"
        ) from error
    family = family_for(checkpoint)
    _check(draft, form, checkpoint, family)
    verifier = Verifier(
        checkpoint.hub_id or str(checkpoint.folder.absolute()),
        (checkpoint.architecture,),
        getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None),
        (lambda: _lm_head(checkpoint, family)) if checkpoint.tensors.readable else None,
    )
    document, tensors = draft.checkpoint(form, verifier)
    from safetensors.torch import save

    stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with replaced_folder(output, False) as work:
        (work / "config.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        (work / "model.safetensors").write_bytes(save(stored, {"format": "pt"}))
    return Exported(
        str(output),
        form,
        draft.kind,
        sum(value.numel() for value in stored.values() if value.is_floating_point()),
        verifier.name,
        list(verifier.architectures),
        draft.export_notices(form, family),
    )


def _lm_head(checkpoint: Checkpoint, family: Family) -> Tensor:
    """The target's LM head [V, E] in float32."""
    import torch

    head = family.language.head
    table = torch.cat([checkpoint.tensors.read(name) for name in head.names]).float()
    return table.t().contiguous() if head.transpose else table


def _check(draft: TrainedDraft, form: str, checkpoint: Checkpoint, family: Family) -> None:
    """ExportError unless the draft fits: by the weights where they are here, else by sizes; and unless those who read the
    format have such targets."""
    shape = family.decoder
    known = draft.target.get("fingerprint")
    identity = fingerprint(checkpoint) if checkpoint.tensors.readable else str(known)
    draft.check_family(family)
    draft.check_target(checkpoint.source, identity, shape.num_layers, shape.hidden_size)
    target = f"{checkpoint.source} ({checkpoint.architecture})"
    if form == MEDUSA and shape.cross_attention:
        raise ExportError(f"{target} is an encoder-decoder; vLLM drafts with Medusa for decoders alone")
    if form != MEDUSA and shape.position not in ("rotary", "mrope"):
        raise ExportError(
            f"{target} has no rotary positions; drafts of the format {form} are for models that have them"
        )
