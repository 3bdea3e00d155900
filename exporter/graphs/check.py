"""Rules that every graph of a bundle obeys (docs/contributing/rooms-and-rules.md, rule 5)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx

from ...runtime.bundle.operators import DOMAINS, OPERATORS
from ...runtime.common.errors import ExportError

# TensorRT's parser accepts these and drops their meaning, and ONNX changed it between releases.
FORBIDDEN_ATTRIBUTES = {"is_causal"}
FORBIDDEN_INPUTS = {"Attention": 6}  # nonpad_kv_seqlen


def check_graph(path: Path) -> None:
    """Raises ExportError when a graph is invalid ONNX, ignores an input, leaves ai.onnx or hides visibility."""
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise ExportError(f"{path.name} is not valid ONNX: {str(error).splitlines()[0]}") from error
    model = onnx.load(str(path), load_external_data=False)
    check_model(model, path.name)


def check_operators(operators: Iterable[str], what: str) -> None:
    """Raises ExportError for an operator that the runtime, which reads bundles by the same list, would refuse."""
    unknown = set(operators) - OPERATORS
    if unknown:
        raise ExportError(
            f"{what} uses operators that the runtime does not accept: {', '.join(sorted(unknown))}"
        )


def check_model(model: onnx.ModelProto, name: str) -> None:
    """The rules that need no files."""
    domains = {o.domain for o in model.opset_import} | {n.domain for n in model.graph.node}
    if domains - DOMAINS:
        raise ExportError(f"{name} uses operators outside ai.onnx: {sorted(domains - DOMAINS)}")
    check_operators((n.op_type for n in model.graph.node), name)
    if any(a.HasField("g") or a.graphs for n in model.graph.node for a in n.attribute):
        raise ExportError(f"{name} holds a graph inside a node")
    if model.functions:
        raise ExportError(f"{name} contains local functions: {[f.name for f in model.functions]}")
    used = {i for n in model.graph.node for i in n.input}
    made = {o for n in model.graph.node for o in n.output}
    for value in model.graph.input:
        if value.name not in used:
            raise ExportError(f"{name}: input {value.name!r} is declared but nothing reads it")
    for value in model.graph.output:
        if value.name not in made:
            raise ExportError(f"{name}: output {value.name!r} is not computed")
    for node in model.graph.node:
        bad = FORBIDDEN_ATTRIBUTES & {a.name for a in node.attribute}
        if bad:
            raise ExportError(
                f"{name}: node {node.name!r} ({node.op_type}) carries the forbidden attribute {bad.pop()}"
            )
        limit = FORBIDDEN_INPUTS.get(node.op_type)
        if limit is not None and len(node.input) > limit and node.input[limit]:
            raise ExportError(f"{name}: node {node.name!r} hides visibility in nonpad_kv_seqlen")
