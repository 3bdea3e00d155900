"""Names of the types that bundles store weights in. No PyTorch is needed here."""

from __future__ import annotations

from ...runtime.bundle.target_weights import INTEGERS
from ...runtime.common.errors import OptionError

PRECISIONS = ("float32", "float16", "bfloat16")
SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def precision_name(value: str) -> str:
    """float32, float16 or bfloat16 from what a user typed. Raises OptionError for anything else."""
    name = SHORT.get(value, value)
    if name in INTEGERS:
        raise OptionError(
            f"--precision {value}: the precision is that of hidden states and caches; store the model's matrices so with "
            f"--weights {value}, or drafts with --draft-precision {value}"
        )
    if name not in PRECISIONS:
        raise OptionError(
            f"--precision {value!r:.40} is unknown; choose {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}"
        )
    return name
