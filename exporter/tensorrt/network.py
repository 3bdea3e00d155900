"""Parsing an ONNX file into a TensorRT network, and saying what is in it."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime.common.errors import ExportError
from ...runtime.engines.tensorrt_library import DTYPES, first_error
from .api import TensorRT, load_tensorrt
from .graph_copy import CopyOptions, copy_graph


@dataclass(frozen=True)
class NetworkSummary:
    """What NVIDIA's parser made of a graph.

    `layers` counts layer types by name (`KV_CACHE_UPDATE`, `ATTENTION_INPUT`, `MATRIX_MULTIPLY`, ...); `aliases` maps
    an output that shares its input's memory to that input; `unused_inputs` names inputs that no layer reads.
    """

    layers: Counter[str]
    inputs: dict[str, tuple[str, tuple[int, ...]]]
    outputs: dict[str, tuple[str, tuple[int, ...]]]
    aliases: dict[str, str]
    unused_inputs: tuple[str, ...]

    @property
    def attentions(self) -> int:
        """Fused attention layers."""
        return self.layers["ATTENTION_INPUT"]


@dataclass
class ParsedNetwork:
    """A network with what must outlive it."""

    library: TensorRT
    logger: Any
    builder: Any
    network: Any
    parser: Any
    summary: NetworkSummary


def parse(library: TensorRT, path: Path) -> ParsedNetwork:
    """Parses an ONNX file, weights beside it.

    Raises ExportError naming the operator when the parser refuses it, and when a declared input is read by no layer
    (TensorRT drops what it does not understand silently: then the plan would compute something else).
    """
    trt = library.module
    logger = library.logger()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        reasons = [_parser_error(parser.get_error(i)) for i in range(parser.num_errors)]
        raise ExportError(
            f"{library.backend} {library.version} cannot parse {path.name}: {first_error(reasons or logger.errors)}"
        )
    summary = summarize(network)
    if summary.unused_inputs:
        raise ExportError(
            f"{library.backend} {library.version} drops the input {summary.unused_inputs[0]!r} of {path.name}; "
            "a plan without it would compute something else"
        )
    return ParsedNetwork(library, logger, builder, network, parser, summary)


def _parser_error(error: Any) -> str:
    operator = error.node_operator() if callable(getattr(error, "node_operator", None)) else ""
    node = error.node_name() if callable(getattr(error, "node_name", None)) else ""
    text = next(
        (line for line in error.desc().splitlines() if "Error Code" in line and "cudaError" not in line),
        error.desc(),
    )
    return f"operator {operator} ({node}): {text}" if operator else text


def summarize(network: Any) -> NetworkSummary:
    """Counts layers, follows aliases and finds unread inputs of a parsed network."""
    layers: Counter[str] = Counter()
    read: set[str] = set()
    aliases: dict[str, str] = {}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        kind = str(layer.type).rpartition(".")[2]
        layers[kind] += 1
        names = [layer.get_input(i).name for i in range(layer.num_inputs) if layer.get_input(i) is not None]
        read.update(names)
        if kind == "KV_CACHE_UPDATE":
            aliases[layer.get_output(0).name] = names[0]
    inputs = {t.name: _describe(t) for t in (network.get_input(i) for i in range(network.num_inputs))}
    outputs = {t.name: _describe(t) for t in (network.get_output(i) for i in range(network.num_outputs))}
    return NetworkSummary(
        layers, inputs, outputs,
        {o: i for o, i in aliases.items() if o in outputs and i in inputs},
        tuple(name for name in inputs if name not in read),
    )  # fmt: skip


def _describe(tensor: Any) -> tuple[str, tuple[int, ...]]:
    return DTYPES.get(str(tensor.dtype).rpartition(".")[2], str(tensor.dtype)), tuple(tensor.shape)


def inspect_network(
    onnx_path: Path,
    *,
    capacity: int = 128,
    precision: str = "float16",
    decomposable: bool = False,
    wide_residual: bool = False,
    backend: str = "tensorrt-rtx",
) -> NetworkSummary:
    """Makes the TensorRT copy of a bundle's graph, parses it and returns what is in the network; builds nothing.

    `capacity` is the number of slots of the static cache. Raises ExportError as `parse` does.
    """
    library = load_tensorrt(backend)
    with tempfile.TemporaryDirectory(prefix="vlmexport-trt-") as folder:
        options = CopyOptions(precision, capacity, decomposable=decomposable, wide_residual=wide_residual)
        copied = copy_graph(Path(onnx_path), Path(folder), options)
        return parse(library, copied.path).summary
