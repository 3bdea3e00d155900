"""The portable lowering: a bundle's graph in standard operators of opset 17, for engines without the operators that the
graphs are composed with: TensorRT before 10.15 has neither an in-place cache update nor (before 10.14) attention.

Pure functions over `onnx_ir`; `lower` is the door. What a lowered graph computes is what the graph computes; what it hands
over is different where it updates a cache (`rows`).
"""

from __future__ import annotations

import onnx_ir as ir

from .attention import Attentions
from .opset import IR_VERSION, OPSET, TENSORRT_10_3, check_operators, widen_refused_types
from .rewriter import Rewriter, number_of, typed
from .rows import new_name, output_rows
from .single import RULES

__all__ = ["OPSET", "TENSORRT_10_3", "lower", "lower_capped", "new_name"]


def lower_capped(model: ir.Model) -> ir.Model:
    """A copy of a graph in which attentions with a soft cap, which TensorRT's attention has not, are products, sums and one
    softmax each; all else stays, caches that are updated in place too."""
    lowered = typed(model)
    attentions = Attentions(Rewriter(lowered.graph, "capped"))
    for node in list(lowered.graph):
        if node.op_type == "Attention" and number_of(node, "softcap", 0.0):
            attentions.lower(node)
    return lowered


def lower(model: ir.Model) -> ir.Model:
    """A lowered copy of a graph of a bundle, in the types that it has; weights stay references to their file.

    Inputs and outputs are the graph's, but where it updates caches: `write_indices` is gone unless a convolution needs it,
    `new_key.i` and `new_value.i` are in place of `updated_key_cache.i` and `updated_value_cache.i`, and `new_mask` stands behind `attn_mask`, `new_sliding_mask` behind
    `sliding_mask` (`rows`).
    Raises ExportError for an operator, or a use of one, that has no lowering.
    """
    lowered = typed(model)
    graph = lowered.graph
    write = Rewriter(graph)
    attentions = Attentions(write)
    output_rows(graph, write, attentions)
    for node in list(graph):
        write.before(node)
        if node.op_type == "Attention":
            attentions.lower(node)
        elif node.op_type in RULES:
            RULES[node.op_type](write, node)
    lowered.graph.opset_imports[""] = OPSET
    lowered.ir_version = IR_VERSION
    check_operators(graph)
    lowered = typed(lowered)
    widen_refused_types(lowered.graph, Rewriter(lowered.graph, "types"))
    return lowered
