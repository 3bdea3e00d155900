"""What a graph of a bundle may compute: standard operators without loops, branches or local functions.

A graph comes with the bundle and is data, not code: with the operators below, the work of a pass is bounded by the sizes
of its inputs. `Loop`, `Scan` and `If` hold graphs of their own, custom domains load code; the exporter writes neither
(`exporter/graphs/check.py` refuses by this same list). `refuse` reads the protobuf itself, the package onnx is not
needed: it walks ModelProto → graph → node once, in time linear in the file, and skips everything else by its length.
Field numbers: `onnx/onnx.proto` of ONNX 1.23.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..common.errors import BundleError
from ..common.foreign_errors import raise_if_foreign

STRUCTURE = frozenset((
    "Add", "And", "Attention", "Cast", "Clip", "Concat", "Conv", "Cos", "DequantizeLinear", "Div", "Equal", "Exp", "Expand", "Gather",
    "GatherElements", "Gelu", "Gemm", "Identity", "LayerNormalization", "Less", "MatMul", "Max", "Min", "Mul", "Or",
    "RMSNormalization", "Range", "ReduceLogSumExp", "Relu", "Reshape", "RotaryEmbedding", "ScatterElements", "Shape", "Sigmoid",
    "Sin", "Slice", "Split", "Squeeze", "Sub", "Tanh", "TensorScatter", "TopK", "Transpose", "Unsqueeze", "Where",
))  # fmt: skip
"""What the graphs of the supported families are made of."""

ACTIVATIONS = {
    "Erf": "gelu_python", "HardSwish": "hardswish",
    "LeakyRelu": "leaky_relu", "Mish": "mish", "Pow": "relu2",
}  # fmt: skip
"""What other activations in a model's configuration add → one activation (transformers' name) that needs it."""

OPERATORS = STRUCTURE | frozenset(ACTIVATIONS)
"""Operators of `ai.onnx` that a graph of a bundle may hold."""

DOMAINS = frozenset(("", "ai.onnx"))

LIMIT = 64 << 20
"""Bytes. Weights lie in a file of their own; a graph of a hundred layers takes a few megabytes."""

DIMENSION = (2, 1, 2, 1, 2)
"""Where the name of a dimension lies in a ValueInfoProto: type, tensor_type, shape, dim, dim_param."""

_REBUILD = "build the bundle again with `vlmexport build`"
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_Field = tuple[int, int, int]
"""Field number, and where its bytes begin and end."""


def refuse(path: Path) -> None:
    """Raise `BundleError` unless the ONNX file holds nothing but `OPERATORS`, and names that are UTF-8."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > LIMIT:
            raise BundleError(f"{path.name}: is not a graph of at most {LIMIT >> 20} MiB; {_REBUILD}")
        data = path.read_bytes()
    except OSError as error:
        raise_if_foreign(error)
        raise BundleError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        _check_model(memoryview(data), path.name)
    except UnicodeDecodeError as error:
        raise BundleError(
            f"{path.name}: holds a name that is not UTF-8 ({error.reason}); {_REBUILD}"
        ) from error
    except (IndexError, ValueError) as error:
        raise_if_foreign(error)
        raise BundleError(f"{path.name}: is not a readable ONNX file ({error}); {_REBUILD}") from error


def _check_model(data: memoryview, file: str) -> None:
    graphs = 0
    for number, start, end in _fields(data, 0, len(data)):
        if number == 7:  # graph; protobuf would merge several into one
            graphs += 1
            _check_graph(data, start, end, file)
        elif number == 8:  # opset_import
            for inner, first, last in _fields(data, start, end):
                if inner == 1:
                    _check_domain(_text(data, first, last), file)
        elif number in (20, 25):  # training_info, functions
            what = "local functions" if number == 25 else "training steps"
            raise BundleError(f"{file}: holds {what}, which no graph of vlmexport does; {_REBUILD}")
    if not graphs:
        raise ValueError("there is no graph in it")


def _check_graph(data: memoryview, start: int, end: int, file: str) -> None:
    for number, first, last in _fields(data, start, end):
        if number == 1:  # node
            _check_node(data, first, last, file)
        elif number in (11, 12, 13):  # input, output, value_info
            _check_names(data, first, last, (1,))
            _check_at(data, first, last, DIMENSION)
        elif number == 5:  # initializer
            _check_names(data, first, last, (8,))


def _check_node(data: memoryview, start: int, end: int, file: str) -> None:
    operator = ""
    for number, first, last in _fields(data, start, end):
        if number == 4:  # op_type
            operator = _text(data, first, last)
            if operator not in OPERATORS:
                raise BundleError(
                    f"{file}: holds the operator {operator!r:.80}, which no graph of vlmexport does; {_REBUILD}"
                )
        elif number == 7:  # domain
            _check_domain(_text(data, first, last), file)
        elif number in (1, 2, 3):  # input, output, name
            _text(data, first, last)
        elif number == 5:  # attribute
            for inner, begin, stop in _fields(data, first, last):
                if inner in (6, 11):  # g, graphs
                    raise BundleError(
                        f"{file}: a node holds a graph of its own (a loop or a branch), which no graph of vlmexport does; "
                        f"{_REBUILD}"
                    )
                if inner == 1:
                    _text(data, begin, stop)
    if not operator:
        raise ValueError("a node without an operator")


def _check_domain(domain: str, file: str) -> None:
    if domain not in DOMAINS:
        raise BundleError(
            f"{file}: uses operators of {domain!r:.80}; graphs of vlmexport use plain ai.onnx only; {_REBUILD}"
        )


def _check_names(data: memoryview, start: int, end: int, numbers: tuple[int, ...]) -> None:
    for number, first, last in _fields(data, start, end):
        if number in numbers:
            _text(data, first, last)


def _check_at(data: memoryview, start: int, end: int, path: Sequence[int]) -> None:
    """Texts at a path of field numbers."""
    for number, first, last in _fields(data, start, end):
        if number == path[0]:
            if len(path) > 1:
                _check_at(data, first, last, path[1:])
            else:
                _text(data, first, last)


def _text(data: memoryview, start: int, end: int) -> str:
    return bytes(data[start:end]).decode("utf-8")


def _fields(data: memoryview, start: int, end: int) -> Iterator[_Field]:
    """The length-delimited fields of a protobuf message; numbers are skipped. Raises `ValueError`, `IndexError`."""
    while start < end:
        key, start = _varint(data, start)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            _, start = _varint(data, start)
        elif kind == _BYTES:
            length, start = _varint(data, start)
            if length > end - start:
                raise ValueError("a field is longer than what holds it")
            yield number, start, start + length
            start += length
        elif kind in (_EIGHT, _FOUR):
            start += 8 if kind == _EIGHT else 4
        else:
            raise ValueError(f"a field of kind {kind}")
    if start != end:
        raise ValueError("a field is longer than what holds it")


def _varint(data: memoryview, start: int) -> tuple[int, int]:
    value = 0
    for at in range(10):
        byte = data[start + at]
        value |= (byte & 127) << 7 * at
        if byte < 128:
            return value, start + at + 1
    raise ValueError("a number of more than 10 bytes")
