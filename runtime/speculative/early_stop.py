"""When a draft that says one token after the other stops before its budget is used up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..decoder.logits import TargetLogits
    from .sequence import Sequence


def ending(sequence: Sequence) -> Callable[[TargetLogits, int, int], bool]:
    """`ends(logits, logits_index, token)`: whether drafting stops after `token`, which was chosen there: an end token,
    or one that is less likely than the policy asks for."""
    eos, policy = sequence.limits.eos_token_ids, sequence.policy
    if policy is None or not policy.needs_confidence:
        return lambda logits, logits_index, token: token in eos
    keep_drafting = policy.keep_drafting
    return lambda logits, logits_index, token: (
        token in eos or not keep_drafting(confidence(logits.logits(logits_index), token))
    )


@np.errstate(all="ignore")
def confidence(logits: np.ndarray, token: int) -> float:
    """Probability of `token` under a softmax of logits [V], in float32."""
    return float(1.0 / np.exp(logits - logits[token]).sum())
