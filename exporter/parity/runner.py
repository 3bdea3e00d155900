"""Runs a bundle's graphs in ONNX Runtime: whole, or layer by layer so that one layer's weights are in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from ...runtime.common.errors import ExportError
from ...runtime.common.foreign_errors import raise_if_foreign
from ...runtime.engines.onnxruntime import fold_integers, use_global_pool
from ..common.memory import GraphMemory, graph_memory, node_prefix

Feeds = Mapping[str, np.ndarray]


class GraphRunner:
    """Runs the graph files of a folder. `piecewise`: one group of nodes (a layer) at a time."""

    def __init__(self, folder: Path, *, piecewise: bool) -> None:
        self.folder = folder
        self.piecewise = piecewise
        use_global_pool()  # one pool per process, the runtime's: ONNX Runtime refuses sessions with their own beside it
        self._options = ort.SessionOptions()
        self._options.use_per_session_threads = False
        self._options.log_severity_level = 4
        fold_integers(self._options)
        self._open: tuple[str, ort.InferenceSession] | None = None

    def run(self, file: str, feeds: Feeds) -> dict[str, np.ndarray]:
        """All outputs of a graph by name."""
        return self.run_chain(file, [feeds], {})[0]

    def run_chain(
        self, file: str, runs: Sequence[Feeds], carried: Mapping[str, str]
    ) -> list[dict[str, np.ndarray]]:
        """The outputs of every run; `carried` outputs, by name, are inputs of the next run under the name they map to,
        and are handed out of the last one only."""
        if self.piecewise:
            return self._run_pieces(file, runs, carried)
        if self._open is None or self._open[0] != file:
            self._open = None  # its weights go before the next graph's come
            self._open = (file, self._session(self.folder / file))
        results: list[dict[str, np.ndarray]] = []
        for feeds in runs:
            before = results[-1] if results else {}
            given = {name: before.pop(output) for output, name in carried.items() if output in before}
            results.append(self._outputs(self._open[1], {**feeds, **given}, file))
        return results

    def _session(self, path: Path) -> ort.InferenceSession:
        try:
            return ort.InferenceSession(
                str(path), self._options, providers=["CPUExecutionProvider"], enable_fallback=0
            )
        except Exception as error:  # onnxruntime raises plain classes of its own
            raise_if_foreign(error)
            raise ExportError(
                f"ONNX Runtime cannot load {path.name}: {str(error).splitlines()[0]}"
            ) from error

    @staticmethod
    def _outputs(session: ort.InferenceSession, feeds: Feeds, file: str) -> dict[str, np.ndarray]:
        names = [o.name for o in session.get_outputs()]
        try:
            fed = {name: _value(array) for name, array in feeds.items()}
            values: list[Any] = [v.numpy() for v in session.run_with_ort_values(names, fed)]
        except Exception as error:
            raise_if_foreign(error)
            raise ExportError(f"ONNX Runtime cannot run {file}: {str(error).splitlines()[0]}") from error
        return dict(zip(names, values, strict=True))

    def _run_pieces(
        self, file: str, runs: Sequence[Feeds], carried: Mapping[str, str]
    ) -> list[dict[str, np.ndarray]]:
        model = onnx.load(str(self.folder / file), load_external_data=False)
        graph = model.graph
        types = _element_types(model)
        weights = {t.name: t for t in graph.initializer}
        values: list[dict[str, np.ndarray]] = [dict(feeds) for feeds in runs]
        wanted = {o.name for o in graph.output}
        pieces = node_groups(list(graph.node))
        readers: dict[str, int] = {}
        for number, nodes in enumerate(pieces):
            for node in nodes:
                readers.update(dict.fromkeys(node.input, number))
        piece_file = self.folder / ".parity-piece.onnx"
        try:
            for number, nodes in enumerate(pieces):
                made = {o for n in nodes for o in n.output if o}
                read = {i for n in nodes for i in n.input if i} - made
                inputs = sorted(read - set(weights))
                outputs = sorted(o for o in made if o in wanted or readers.get(o, -1) > number)
                piece = helper.make_graph(
                    nodes, "piece",
                    [helper.make_tensor_value_info(i, types[i], None) for i in inputs],
                    [helper.make_tensor_value_info(o, types[o], None) for o in outputs],
                    [weights[w] for w in sorted(read & set(weights))],
                )  # fmt: skip
                made_model = helper.make_model(
                    piece, opset_imports=list(model.opset_import), ir_version=model.ir_version
                )
                piece_file.write_bytes(made_model.SerializeToString())
                session = self._session(piece_file)
                for at, known in enumerate(values):
                    results = self._outputs(session, {i: known[i] for i in inputs}, file)
                    # Copied: they are views into the session's arena, all of which would stay with them.
                    known.update({name: array.copy() for name, array in results.items()})
                    for name in [n for n in known if n not in wanted and readers.get(n, -1) <= number]:
                        del known[name]
                    for output in outputs:
                        if output in carried and at + 1 < len(values):
                            values[at + 1][carried[output]] = known.pop(output)
                del session
        finally:
            piece_file.unlink(missing_ok=True)
        return [{name: known[name] for name in wanted if name in known} for known in values]


def _value(array: np.ndarray) -> ort.OrtValue:
    """For ONNX Runtime; uint16 holds bfloat16 bits."""
    array = np.ascontiguousarray(array)
    if array.dtype == np.uint16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def node_groups(nodes: list[onnx.NodeProto]) -> list[list[onnx.NodeProto]]:
    """Runs of nodes whose names share what stands before the slash (`layer.3/…`): one layer each."""
    groups: list[list[onnx.NodeProto]] = []
    last = None
    for node in nodes:
        prefix = node_prefix(node.name)
        if not groups or prefix != last:
            groups.append([])
            last = prefix
        groups[-1].append(node)
    return groups


def _element_types(model: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model)
    values = (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output)
    return {v.name: v.type.tensor_type.elem_type for v in values}


def stored_graph_memory(path: Path) -> GraphMemory:
    """What running a graph file takes."""
    graph = onnx.load(str(path), load_external_data=False).graph
    weights = {t.name: 4 * math.prod(t.dims) for t in graph.initializer if t.external_data}
    return graph_memory(((n.name, n.input) for n in graph.node), weights)
