"""The losses of a batch of packed texts."""

from __future__ import annotations

import numpy as np
import torch

from .captioner import IGNORED
from .emphasis import weighted_loss
from .loop import Part
from .packed_batches import Batch
from .packed_captioner import PackedCaptioner


def part_of(
    captioner: PackedCaptioner,
    batch: Batch,
    known: np.ndarray,
    names: tuple[str, str, str],
    seen: torch.Tensor,
    weight: float,
) -> Part:
    """The losses of a batch, by name: of descriptions, of answers and of roll calls; a name "" where there are none. With weight 0, for the
    log: that of a description's words about the picture.

    known: rows of the tower. seen, on the model's device, and weight: see `weighted_loss`.
    """
    head, batch = captioner.head_of(batch.media), batch.to(captioner.device)
    image_embeds = torch.from_numpy(known[batch.rows][:, batch.media.stored]).float()
    hidden = captioner.hidden(head, image_embeds, batch.packed).last_hidden_state
    losses: Part = {}
    answers = (batch.packed.targets != IGNORED) & ~batch.told & ~batch.called
    for name, where in zip(names, (batch.told, answers, batch.called), strict=True):
        if name:
            logits = captioner.model.lm_head(hidden[where]).float()
            loss, of_seen = weighted_loss(logits, batch.packed.targets[where], seen, weight)
            losses[name] = 1.0, loss
            if where is batch.told:
                losses[f"{name}_seen"] = 0.0, of_seen
    return losses
