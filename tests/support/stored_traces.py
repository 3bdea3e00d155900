"""Traces in a folder, which the workers of a run share.

A trace is stored under a digest of its key (`kept_traces.key_of`) that is equal in every process: code counts by its content,
classes by their names. A key that holds something else has no name, and its trace stays in its process.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import onnx
import onnx_ir as ir
import torch
from vlmexport.exporter.graphs.hooks import OPSET
from vlmexport.exporter.graphs.traced_module import Template, TraceInput


class NoName(Exception):
    """A value that another process cannot compare."""


def name_of(key: Any) -> str | None:
    """The file name of a trace; None for a key that only this process understands."""
    try:
        return hashlib.sha256("\n".join(_parts(key, ())).encode()).hexdigest()
    except NoName:
        return None


def save(path: Path, template: Template) -> None:
    """Write a trace whole: a reader sees all of it or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = onnx_file(template), template.inputs, template.outputs, dict(template.weights)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(pickle.dumps(content))
    part.replace(path)


def onnx_file(template: Template) -> bytes:
    """The graph of a template as a file holds it."""
    return ir.serde.serialize_model(ir.Model(template.graph, ir_version=10)).SerializeToString(
        deterministic=True
    )


def load(path: Path) -> Template | None:
    """A trace, or None where there is none. The files are those of this run's workers."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    model, inputs, outputs, weights = pickle.loads(content)
    graph = ir.serde.deserialize_model(onnx.ModelProto.FromString(model)).graph
    assert graph.opset_imports[""] == OPSET
    return Template(graph, inputs, outputs, weights)


def _parts(value: Any, within: tuple[int, ...]) -> Iterator[str]:
    """Texts that are equal exactly for equal values. `within`: functions that are being described."""
    if value is None or isinstance(
        value, bool | int | float | str | bytes | complex | torch.dtype | TraceInput
    ):
        yield f"{type(value).__name__} {value!r}"
    elif value is Ellipsis:
        yield "..."
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} {len(value)}"
        for item in value:
            yield from _parts(item, within)
    elif isinstance(value, frozenset | set):
        yield f"set {len(value)}"
        yield from sorted("\t".join(_parts(item, within)) for item in value)
    elif isinstance(value, dict):
        yield from _parts(tuple(value.items()), within)
    elif isinstance(value, type):
        yield f"class {value.__module__}.{value.__qualname__}"
    elif isinstance(value, CodeType):
        yield f"code {value.co_name} {hashlib.sha256(value.co_code).hexdigest()}"
        yield from _parts((value.co_consts, value.co_names, value.co_varnames, value.co_freevars), within)
    elif isinstance(value, FunctionType):
        yield f"function {value.__module__}.{value.__qualname__}"
        if id(value) not in within:
            cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
            yield from _parts((value.__code__, cells, value.__defaults__), (*within, id(value)))
    elif isinstance(value, torch.no_grad):  # of a decorated forward
        yield "no_grad"
    elif isinstance(value, MethodType):
        yield from _parts((value.__self__, value.__func__), within)
    else:
        raise NoName(type(value))
