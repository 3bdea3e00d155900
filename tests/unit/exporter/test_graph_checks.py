"""The rules of a bundle's graphs catch what they are for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from vlmexport.exporter.graphs.check import check_model
from vlmexport.runtime.common.errors import ExportError

Bundles = Callable[..., tuple[Path, Path]]


@pytest.fixture
def segment(tiny_bundle: Bundles) -> onnx.ModelProto:
    return onnx.load(tiny_bundle("t5")[0] / "segment.1.onnx", load_external_data=False)


def attention(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.op_type == "Attention")


def test_untouched_graph_passes(segment: onnx.ModelProto) -> None:
    check_model(segment, "segment.1.onnx")


def test_is_causal(segment: onnx.ModelProto) -> None:
    attention(segment).attribute.append(onnx.helper.make_attribute("is_causal", 1))
    with pytest.raises(ExportError, match="is_causal"):
        check_model(segment, "g")


def test_nonpad_kv_seqlen(segment: onnx.ModelProto) -> None:
    node = attention(segment)
    node.input.extend([""] * (6 - len(node.input)) + ["write_indices"])
    with pytest.raises(ExportError, match="nonpad_kv_seqlen"):
        check_model(segment, "g")


def test_unread_input_fails(segment: onnx.ModelProto) -> None:
    for node in segment.graph.node:
        for i, name in enumerate(node.input):
            if name == "cross_mask":
                node.input[i] = ""
    with pytest.raises(ExportError, match="'cross_mask' is declared but nothing reads it"):
        check_model(segment, "g")


def test_other_domains(segment: onnx.ModelProto) -> None:
    attention(segment).domain = "com.microsoft"
    with pytest.raises(ExportError, match=r"outside ai.onnx"):
        check_model(segment, "g")


def test_operators_that_the_runtime_would_refuse(segment: onnx.ModelProto) -> None:
    node = next(n for n in segment.graph.node if n.op_type == "Relu" or n.op_type == "Mul")
    node.op_type = "Softplus"
    with pytest.raises(ExportError, match=r"operators that the runtime does not accept: Softplus"):
        check_model(segment, "g")
    node.op_type = "Relu"
    node.attribute.append(onnx.helper.make_attribute("body", onnx.helper.make_graph([], "body", [], [])))
    with pytest.raises(ExportError, match="holds a graph inside a node"):
        check_model(segment, "g")
