"""A template is one traced module as a clean ONNX graph whose weights are still inputs.

Layers of equal shape share one template (`hollow.signature`), so exporting 40 layers costs about as much as one.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
import torch
from torch import nn

from ...runtime.common.errors import ExportError, UnsupportedModelError
from ...runtime.common.foreign_errors import raise_if_foreign
from .check import check_operators
from .hooks import OPSET, translation_table
from .onnx_cleanup import WeightSource, clean
from .torch_constants import keep_constants_of_torch

log = logging.getLogger(__name__)

# Sizes used for tracing. All differ, and none is 0 or 1, which torch.export would specialise.
EXAMPLE_SIZES = {
    "batch": 2, "width": 3, "cache": 17, "source": 13, "rows": 5, "units": 7, "windows": 9, "tiles": 11, "recent": 15,
}  # fmt: skip


LEAST_SIZES = {"recent": 8}
"""Of dimensions that a trace must not take for shorter ones: a convolution reads so many rows at most."""


@dataclass(frozen=True)
class TraceInput:
    """One data input of a template: symbolic dimensions by name, dtype as torch knows it."""

    name: str
    shape: tuple[str | int, ...]
    dtype: torch.dtype = torch.float32

    def example(self) -> torch.Tensor:
        """A zero tensor of the tracing sizes."""
        return torch.zeros([EXAMPLE_SIZES.get(d, d) for d in self.shape], dtype=self.dtype)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Template:
    """A cleaned graph. `weights` maps an input of the graph to (parameters it is made of, transform)."""

    graph: ir.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, WeightSource] = field(default_factory=dict)


class _Positional(nn.Module):
    """Gives a function over a module the flat positional signature that torch.export names inputs by."""

    def __init__(self, module: nn.Module, function: Callable[..., Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self.m = module
        self.function = function

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.function(self.m, *arguments))


def trace(
    module: nn.Module,
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[TraceInput],
    outputs: Sequence[str],
    *,
    merge_linears: bool = True,
) -> Template:
    """Exports `function(module, *inputs)` and cleans the graph. Call it inside `export_hooks()`.

    Parameters of `module` become weight inputs named by their path in the module; buffers become constants.
    Raises ExportError when an input is not used, when torch cannot export the module, or when it needs an operator that
    the runtime refuses, and UnsupportedModelError when it asks attention for what ours cannot do.
    """
    begin = time.perf_counter()
    keep_constants_of_torch()
    dims: dict[str, object] = {}
    for item in inputs:
        for d in item.shape:
            if isinstance(d, str):
                dims.setdefault(d, torch.export.Dim(d, min=LEAST_SIZES.get(d)))
    shapes = tuple({i: dims[d] for i, d in enumerate(item.shape) if isinstance(d, str)} for item in inputs)
    wrapped = _Positional(module, function).eval()
    names = [item.name for item in inputs]
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(
                wrapped, tuple(i.example() for i in inputs), dynamic_shapes=(shapes,), strict=False
            )
            exported = torch.onnx.export(
                program,
                opset_version=OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
                custom_translation_table=translation_table(),
                input_names=names,
                output_names=list(outputs),
            )
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise_if_foreign(error)
        raise ExportError(f"torch cannot export {type(module).__name__}: {_reason(error)}") from error
    assert exported is not None
    parameters = {f"m.{name}" for name, _ in module.named_parameters()}
    graph, weights = clean(exported.model, parameters, names, merge_linears=merge_linears)
    sources = {
        name: WeightSource(tuple(p.removeprefix("m.") for p in w.parameters), w.transpose, w.shape, w.dtype)
        for name, w in weights.items()
    }
    used = {v.name for node in graph for v in node.inputs if v is not None}
    for name in names:
        if name not in used:
            raise ExportError(f"input {name!r} of {type(module).__name__} is not used by the exported graph")
    check_operators((node.op_type for node in graph), type(module).__name__)
    log.debug(
        "traced %s in %.1f s: %d nodes, %d weights; inputs %s",
        type(module).__name__, time.perf_counter() - begin, len(graph), len(sources), ", ".join(names),
    )  # fmt: skip
    return Template(graph, tuple(names), tuple(outputs), sources)


def _reason(error: BaseException) -> str:
    """The innermost cause in one line; torch wraps errors in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@contextlib.contextmanager
def _quiet():
    """torch.onnx narrates to stdout and warns about packages it does not find: neither is for our user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
