"""The folded form of a graph whose heads of queries share key/value heads, for ONNX Runtime's CUDA provider.

With a mask that provider has no fused kernel for groups in float32, and the one that it has for narrow types first
repeats keys and values over the whole bound cache. In the folded form there are no groups (`lowering/groups.py`).
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from ..lowering.groups import Groups
from ..lowering.rewriter import Rewriter, given, number_of, typed


def folded_form(model: ir.Model) -> ir.Model | None:
    """A copy of a graph, over the same weights, that computes the same without groups; None where it has none.

    Attentions of other forms than the exporter makes stay as they are.
    """
    if all(node.op_type != "Attention" for node in model.graph):
        return None
    folded = typed(model)
    write = Rewriter(folded.graph, "folded")
    groups = Groups(write)
    count = sum(_fold(write, groups, node) for node in list(folded.graph) if node.op_type == "Attention")
    if not count:
        return None
    proto = ir.to_proto(folded)
    del proto.graph.value_info[:]
    return ir.from_proto(proto)


def _fold(write: Rewriter, groups: Groups, node: ir.Node) -> bool:
    """Whether the queries of an Attention came in groups; they are folded then."""
    query, keys, values = (given(node, place) for place in range(3))
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    more = any(value is not None for value in node.inputs[4:]) or len(node.outputs) > 1
    if (
        more
        or set(node.attributes) - {"scale", "softcap"}
        or (mask is not None and len(mask.shape or ()) != 4)
    ):
        return False
    (heads, size), (kv_heads, _), (_, made) = (_heads(value) for value in (query, keys, values))
    if not (heads and kv_heads and made) or heads == kv_heads:
        return False
    write.before(node)
    inputs = [groups.queries(query, kv_heads, size), keys, values]
    if mask is not None:
        inputs.append(groups.mask(mask, kv_heads, heads // kv_heads))
    attributes: dict[str, Any] = {"scale": number_of(node, "scale", 1.0 / math.sqrt(size))}
    if "softcap" in node.attributes:
        attributes["softcap"] = number_of(node, "softcap", 0.0)
    output = write.add("Attention", *inputs, **attributes)
    write.replace(node, groups.result(output, heads, made))
    return True


def _heads(value: ir.Value) -> tuple[int, int]:
    """Heads and numbers of a head in [batch, heads, length, head_dim]; 0 where that is not known."""
    if value.shape is None or len(value.shape) != 4:
        return 0, 0
    _, heads, _, size = value.shape
    return (heads, size) if isinstance(heads, int) and isinstance(size, int) else (0, 0)
