"""AutoRound's own export: GPTQ's or AWQ's tensors under another method, told by `packing_format`.

Read in auto_round/inference/convert_model.py and auto_round_extension/torch/ (0.16): "auto_gptq" stores zero points less one,
without "gptq", and as "gptqmodel", as they are.
"""

from __future__ import annotations

from .awq import AwqLayout
from .gptq import FLOAT_BITS, allowed, gptq_layout
from .layout import Layout
from .settings import Settings

LESS_ONE = ("auto_round:auto_gptq", "auto_round:gptq", "auto")
AS_THEY_ARE = ("auto_round", "auto_round:gptqmodel")
AWQ = ("auto_round:auto_awq", "auto_round:awq")


def read_auto_round(settings: Settings) -> Layout:
    """Raises UnsupportedModelError for types of numbers, activations and packings that are not read."""
    overrides = settings.parts("extra_config")
    for each in (settings, *overrides):
        kind = each.text("data_type", "int")
        if kind not in ("int", "int_sym", "int_asym") and (each.whole("bits") or 0) < FLOAT_BITS:
            raise settings.refuse(f"data_type={kind!r:.80} is not read, only int")
        if (each.whole("act_bits", FLOAT_BITS) or FLOAT_BITS) < FLOAT_BITS:
            raise settings.refuse(f"activations of {each.whole('act_bits')} bits are not read")
    if settings.told("rotation_config"):
        raise settings.refuse("rotated weights (rotation_config) are not read")
    packing = settings.text("packing_format", LESS_ONE[0])
    bits, groups = allowed(settings, overrides)
    if packing in AWQ:
        if bits != (4,):
            raise settings.refuse(f"{packing} is read with 4 bits only")
        return AwqLayout(identity="awq", groups=groups)
    if packing not in (*LESS_ONE, *AS_THEY_ARE):
        raise settings.refuse(
            f"packing_format={packing!r:.80} is not read, only {', '.join((*LESS_ONE[:1], *AS_THEY_ARE, *AWQ[:1]))}"
        )
    symmetric = settings.flag("sym", True) and all(each.flag("sym", True) for each in overrides)
    return gptq_layout(packing in LESS_ONE, bits, groups, symmetric)
