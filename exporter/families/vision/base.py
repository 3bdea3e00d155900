"""What vision towers share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from ...checkpoint.load import Checkpoint
from ...graphs.compose import Composer
from ...graphs.hollow import hollow_model, signature
from ...graphs.hooks import ATTENTION
from ...graphs.template import Template, TraceInput, trace
from ...graphs.weights import WeightStore
from ..base import GraphSpec, single_layer


class Vision:
    """One vision tower with its connector, over the whole model's checkpoint.

    `side` is (height, width) of `pixel_values`, `rows` how many rows a picture becomes, `width` the E of these rows.
    """

    side: tuple[int, int]
    rows: int
    width: int

    def __init__(self, checkpoint: Checkpoint, language: str) -> None:
        """`language` is the name of the language model's configuration, which is no part of the tower."""
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self._language = language

    @functools.cached_property
    def model(self) -> Any:
        """The whole model, hollow, with a language model of one layer."""
        config: Any = copy.deepcopy(self.config)
        setattr(config, self._language, single_layer(getattr(config, self._language)))
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            part._attn_implementation = ATTENTION
        return hollow_model(lambda: self.checkpoint.model_class(config))

    def graph(self, store: WeightStore) -> GraphSpec:
        """`pixel_values` [batch, 3, H, W] → `image_rows` [batch, rows, width]. Call it inside `export_hooks`."""
        graph = Composer("vision", store)
        shape = ("batch", 3, *self.side)
        pixels = graph.input("pixel_values", "float32", shape)
        rows = self.compose(Calls(graph, self.checkpoint), pixels)
        graph.output("image_rows", rows, "float32", ("batch", self.rows, self.width))
        return GraphSpec("vision", "vision", graph.model())

    def compose(self, calls: Calls, pixels: ir.Value) -> ir.Value:
        """Adds the tower's nodes to the graph."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """The manifest's `image`."""
        raise NotImplementedError

    def random(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Random inputs [1, ...] of the tower."""
        return {"pixel_values": torch.randn(1, 3, *self.side, generator=generator)}

    def output(self, model: Any) -> nn.Module:
        """The module of a real model whose output are the image rows."""
        raise NotImplementedError


class Calls:
    """Appends modules of a model to a graph, tracing equal ones once."""

    def __init__(self, graph: Composer, checkpoint: Checkpoint) -> None:
        self.graph = graph
        self._checkpoint = checkpoint
        self._templates: dict[tuple, Template] = {}

    def __call__(
        self,
        module: nn.Module,
        path: str,
        given: Mapping[str, tuple[ir.Value, Sequence[str | int]]],
        function: Callable[..., Any] = lambda module, hidden: (module(hidden),),
    ) -> ir.Value:
        """The value of `function(module, *given)`; `given` maps a name to (value, shape), `path` ends with a dot."""
        shapes = {name: tuple(shape) for name, (_, shape) in given.items()}
        key = (signature(module), tuple(shapes.items()), function.__code__)
        if key not in self._templates:
            inputs = [TraceInput(name, shape) for name, shape in shapes.items()]
            self._templates[key] = trace(module, function, inputs, ("hidden_out",))
        values = {name: value for name, (value, _) in given.items()}
        named = lambda name: self._checkpoint.stored(f"{path}{name}")  # noqa: E731
        prefix = path.rstrip(".") or type(module).__name__.strip("_").lower()
        return self.graph.call(self._templates[key], prefix, values, named)["hidden_out"]


def pair(value: Any) -> tuple[int, int]:
    """(height, width) of a size that is one number or two."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
