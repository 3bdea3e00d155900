"""The two forms of a graph in a bundle of float16 or bfloat16, over the same weights.

Graphs are composed in float32. The source form is retyped to the bundle's precision, for engines that compute in it;
the wide form casts every stored weight where it is read, so that an engine which folds constants when it loads a graph
(ONNX Runtime does) computes with float32 weights from then on, as the float32 model with rounded weights would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from ...runtime.graphs.role import Values
from .dtypes import ONNX
from .retype import NARROW, retype


@dataclass(frozen=True)
class Precision:
    """Types of a bundle as in its manifest; `mask` is that of masks which are not boolean."""

    weights: str
    compute: str
    cache: str

    @property
    def mask(self) -> str:
        """Masks enter attention, which computes in the type of its cache."""
        return self.cache

    @property
    def narrow(self) -> bool:
        """Whether graphs have two forms."""
        return self.weights != "float32"

    @classmethod
    def named(cls, name: str, *, wide_residual: bool) -> Precision:
        """`wide_residual`: the residual stream overflows float16 and stays float32 there (`Language.wide_residual`)."""
        return cls(name, "float32" if name == "float16" and wide_residual else name, name)


def source_form(
    model: ir.Model, precision: Precision, inputs: Values, outputs: Values, *, wide_residual: bool
) -> ir.Model:
    """The composed graph retyped to `precision`; `inputs` and `outputs` are what its role implies there (empty: usual)."""
    proto = ir.to_proto(model)
    stored = _external(proto)
    bound = {name: ONNX[dtype].value for name, (dtype, _) in {**inputs, **outputs}.items()}
    kinds = retype(
        proto, precision.weights, wide_residual=wide_residual, bound=bound or None, stored=stored.keys()
    )
    for tensor in proto.graph.initializer:
        if tensor.name in stored:
            tensor.data_type = NARROW[precision.weights]
        elif tensor.data_type == TensorProto.FLOAT and kinds[tensor.name] != TensorProto.FLOAT:
            kind = helper.tensor_dtype_to_np_dtype(kinds[tensor.name])
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(kind), tensor.name))
    return ir.from_proto(proto)


def wide_form(model: ir.Model, precision: Precision) -> ir.Model:
    """The composed graph with a cast behind every stored weight; each is part of the layer that reads it first."""
    proto = ir.to_proto(model)
    stored = _external(proto)
    for tensor in stored.values():
        tensor.data_type = NARROW[precision.weights]
    nodes: list[onnx.NodeProto] = []
    cast: dict[str, str] = {}
    for node in proto.graph.node:
        for position, name in enumerate(node.input):
            if name not in stored:
                continue
            if name not in cast:
                cast[name] = f"{name}/float32"
                prefix = f"{node.name.partition('/')[0]}/" if "/" in node.name else ""
                nodes.append(
                    helper.make_node(
                        "Cast", [name], [cast[name]], name=f"{prefix}cast {name}", to=TensorProto.FLOAT
                    )
                )
            node.input[position] = cast[name]
        nodes.append(node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    del proto.graph.value_info[:]
    return ir.from_proto(proto)


def _external(proto: onnx.ModelProto) -> Mapping[str, onnx.TensorProto]:
    """Weights of the bundle's file, by name; they are composed as float32 whatever the file holds."""
    return {
        tensor.name: tensor
        for tensor in proto.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL and tensor.data_type == TensorProto.FLOAT
    }
