"""The TensorRT copy of a bundle's graph: frozen cache, narrow types, the best token beside the logits, perhaps lowered."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from ...runtime.common.errors import ExportError
from ...runtime.common.foreign_errors import raise_if_foreign
from ..graphs.retype import retype
from ..lowering import lower, lower_capped
from .zero_points import move_zero_points

PRECISIONS = ("float32", "float16", "bfloat16")
CHUNK = 1 << 24  # elements converted at a time
_ITEM: dict[int, np.dtype] = {TensorProto.FLOAT: np.dtype(np.float32), TensorProto.FLOAT16: np.dtype(np.float16),
         TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16)}  # fmt: skip


@dataclass(frozen=True)
class CopyOptions:
    """How a copy differs from the bundle's graph.

    `precision`: types of the copy; `source`: those of the bundle's graphs, which are retyped only where they are float32.
    `capacity`: slots of the static cache (max_length + max_width). `decomposable`: let TensorRT split Attention where
    it has no fused kernel. `shared_inputs`: (file, byte offset) → input name; a weight at that place
    becomes a network input (the embedding table of a tied head), so that no plan holds it. `lowering`: `native`, or
    `portable` for a TensorRT without cache updates and attention (`exporter/lowering`).
    """

    precision: str
    capacity: int
    decomposable: bool = False
    wide_residual: bool = False
    shared_inputs: Mapping[tuple[str, int], str] = field(default_factory=dict)
    source: str = "float32"
    lowering: str = "native"


@dataclass(frozen=True)
class GraphCopy:
    """A written copy. `weights` maps each remaining initializer to (bytes in the copy, where it came from); `attentions`
    counts those of the bundle's graph, `decomposed` those among them that the copy has not: TensorRT's own takes no soft
    cap."""

    path: Path
    weights: dict[str, tuple[int, tuple[str, int] | None]]
    attentions: int
    decomposed: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all initializers in the copy's types."""
        return sum(size for size, _ in self.weights.values())


def copy_graph(source: Path, folder: Path, options: CopyOptions) -> GraphCopy:
    """Writes `source`'s TensorRT copy and its weights into `folder` (new files), streaming tensor by tensor.

    Raises ExportError when a weight does not fit the type, or the disk is full.
    """
    model = onnx.load(str(source), load_external_data=False)
    constants_to_initializers(model)
    freeze(model, {"cache": options.capacity, "distances": options.capacity + 1})
    offer_shared(model, options.shared_inputs)
    retyped = (
        options.precision if options.source == "float32" else "float32"
    )  # what is narrow already is left as it is
    kinds = retype(model, retyped, wide_residual=options.wide_residual)
    kinds |= add_answers(model)
    attentions = [node for node in model.graph.node if node.op_type == "Attention"]
    capped = [node for node in attentions if any(a.name == "softcap" and a.f for a in node.attribute)]
    if options.decomposable:
        for node in (node for node in attentions if node not in capped):
            node.attribute.append(helper.make_attribute("TRT_decomposable", 1))
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / source.name
    try:
        moved = folder / f"{source.stem}.moved"
        kinds |= move_zero_points(model, source.parent, moved, kinds)
        weights = _write_weights(model, source.parent, folder / f"{source.stem}.data", kinds)
        moved.unlink(missing_ok=True)
        if options.lowering == "portable":  # last: it follows the types that the copy has by now
            model = ir.to_proto(lower(ir.from_proto(model)))
        elif capped:
            model = ir.to_proto(lower_capped(ir.from_proto(model)))
        target.write_bytes(model.SerializeToString())
    except OSError as error:
        raise_if_foreign(error)
        raise ExportError(
            f"the TensorRT copy of {source.name} cannot be written to {folder}: {error.strerror}"
        ) from error
    return GraphCopy(target, weights, len(attentions), len(capped))


def constants_to_initializers(model: onnx.ModelProto) -> None:
    """Turns Constant nodes into initializers, which can be retyped in one place."""
    kept = []
    for node in model.graph.node:
        values = {a.name: a for a in node.attribute}
        if node.op_type == "Constant" and "value" in values:
            tensor = values["value"].t
            tensor.name = node.output[0]
            model.graph.initializer.append(tensor)
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)


def freeze(model: onnx.ModelProto, sizes: Mapping[str, int]) -> None:
    """Replaces symbolic dimensions by numbers in every input and output; inferred shapes are dropped."""
    for value in (*model.graph.input, *model.graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in sizes:
                dimension.dim_value = sizes[dimension.dim_param]
    del model.graph.value_info[:]


def offer_shared(model: onnx.ModelProto, shared: Mapping[tuple[str, int], str]) -> None:
    """Turns initializers that lie at a shared place into inputs; a graph that takes one already reads that."""
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    for tensor in list(model.graph.initializer):
        place = external_place(tensor)
        name = shared.get(place) if place is not None else None
        if name is None or types.get(name, tensor.data_type) != tensor.data_type:
            continue
        for node in model.graph.node:
            for position, value in enumerate(node.input):
                if value == tensor.name:
                    node.input[position] = name
        if name not in types:
            model.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
        model.graph.initializer.remove(tensor)


def add_answers(model: onnx.ModelProto) -> dict[str, int]:
    """Adds `best` int64 [rows] and `finite` bool [rows] beside an output `logits` float32 [rows, V]: the first of the
    highest logits, and whether that one is a number. A device then need not hand over whole rows of logits.

    What is not a number counts as infinity, wherever it stands: of rows with one the order is anybody's guess. Returns
    the element types of the initializers that it adds.
    """
    graph = model.graph
    logits = next((value for value in graph.output if value.name == "logits"), None)
    if logits is None:
        return {}
    constants = {
        "infinity": np.array(np.inf, np.float32),
        "largest": np.array(np.finfo(np.float32).max, np.float32),
        "one": np.array([1], np.int64),
        "last": np.array([-1], np.int64),
    }
    made = [numpy_helper.from_array(array, f"answers/{name}") for name, array in constants.items()]
    graph.initializer.extend(made)
    for kind, inputs, outputs in (
        ("Equal", "logits logits", "answers/numbers"),  # NaN equals nothing
        ("Where", "answers/numbers logits answers/infinity", "answers/seen"),
        ("TopK", "answers/seen answers/one", "answers/values answers/indices"),
        ("Squeeze", "answers/indices answers/last", "best"),
        ("Squeeze", "answers/values answers/last", "answers/value"),
        ("Abs", "answers/value", "answers/size"),
        ("LessOrEqual", "answers/size answers/largest", "finite"),
    ):
        graph.node.append(helper.make_node(kind, inputs.split(), outputs.split(), name=f"{outputs}/{kind}"))
    dimension = logits.type.tensor_type.shape.dim[0]
    for name, kind in (("best", TensorProto.INT64), ("finite", TensorProto.BOOL)):
        graph.output.append(
            helper.make_tensor_value_info(name, kind, [dimension.dim_param or dimension.dim_value])
        )
    return {tensor.name: tensor.data_type for tensor in made}


def external_place(tensor: onnx.TensorProto) -> tuple[str, int] | None:
    """(file, byte offset) of an external initializer, or None."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    entries = {e.key: e.value for e in tensor.external_data}
    return entries["location"], int(entries.get("offset", 0))


def _write_weights(
    model: onnx.ModelProto, origin: Path, target: Path, kinds: Mapping[str, int]
) -> dict[str, tuple[int, tuple[str, int] | None]]:
    used = {name for node in model.graph.node for name in node.input} | {o.name for o in model.graph.output}
    sizes: dict[str, tuple[int, tuple[str, int] | None]] = {}
    position = 0
    with target.open("wb") as file:
        for tensor in list(model.graph.initializer):
            if tensor.name not in used:
                model.graph.initializer.remove(tensor)
                continue
            place = external_place(tensor)
            kind = kinds[tensor.name]
            if place is None:
                if tensor.data_type == TensorProto.FLOAT and kind != tensor.data_type:
                    array = _narrow(numpy_helper.to_array(tensor), kind, tensor.name)
                    name = tensor.name
                    tensor.CopyFrom(numpy_helper.from_array(array, name))
                sizes[tensor.name] = (len(tensor.raw_data) or tensor.ByteSize(), None)
                continue
            packed = tensor.data_type == TensorProto.INT4  # two numbers in a byte
            source = np.memmap(
                origin / place[0], mode="r", offset=place[1],
                dtype=np.uint8 if packed else helper.tensor_dtype_to_np_dtype(tensor.data_type),
                shape=(-(-math.prod(tensor.dims) // 2) if packed else math.prod(tensor.dims),),
            )  # fmt: skip
            position = -(-position // 64) * 64
            file.seek(position)
            size = 0
            for start in range(0, len(source), CHUNK):
                part = np.asarray(source[start : start + CHUNK])
                if kind != tensor.data_type:
                    part = _narrow(part, kind, tensor.name)
                file.write(part.tobytes())
                size += part.nbytes
            tensor.data_type = kind
            del tensor.external_data[:]
            for key, value in (("location", target.name), ("offset", position), ("length", size)):
                tensor.external_data.add(key=key, value=str(value))
            sizes[tensor.name] = (size, place)
            position += size
        file.flush()
        os.fsync(file.fileno())
    return sizes


def _narrow(array: np.ndarray, kind: int, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        result = array.astype(_ITEM[kind])
    if kind == TensorProto.FLOAT16 and np.isinf(result).any() and np.isfinite(array).all():
        peak = float(np.abs(array).max())
        raise ExportError(f"weight {name} reaches {peak:.3g}, beyond float16; use --plan-precision bfloat16")
    return result


def symbolic_shapes(path: Path) -> tuple[dict[str, Sequence[int | str]], dict[str, Sequence[int | str]]]:
    """Input and output shapes of an ONNX file by name; symbolic dimensions as strings."""
    model = onnx.load(str(path), load_external_data=False)

    def shapes(values: Sequence[onnx.ValueInfoProto]) -> dict[str, Sequence[int | str]]:
        return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}

    return shapes(model.graph.input), shapes(model.graph.output)
