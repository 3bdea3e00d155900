"""What vision towers share."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from ...checkpoint.checkpoint import Checkpoint
from ...graphs.composer import Composer
from ...graphs.hooks import ATTENTION
from ...graphs.meta_model import hollow_model, signature
from ...graphs.traced_module import Template, TraceInput, trace
from ...graphs.weights import WeightStore
from ..common.config_checks import single_layer
from ..common.parts import GraphSpec


class Vision:
    """One vision tower with its connector, over the whole model's checkpoint.

    `width` is the E of its embeddings. A tower of one size has `side`, (height, width) of `pixel_values`, and `num_embeds`, how many
    embeddings a picture becomes; one of many sizes has neither, says the most of a picture (`max_embeds`), and composes a
    graph with inputs of its own (`graph`, `runs`, `random`).
    """

    side: tuple[int, int]
    num_embeds: int | None = None
    max_embeds: int | None = None
    scales: ClassVar[bool] = False
    """Whether a picture may have any size up to `Checkpoint.max_pixels`."""
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
            part.dtype = torch.float32  # graphs are traced so, whatever type a part was published in
        return hollow_model(lambda: self.checkpoint.model_class(config))

    @property
    def needed_embeds(self) -> int:
        """Rows that a prompt must have room for, or else pictures of ordinary sizes would be refused."""
        return self.num_embeds or 1

    def graph(self, store: WeightStore) -> GraphSpec:
        """`pixel_values` [batch, 3, H, W] → `image_rows` [batch, rows, width]. Call it inside the hooks."""
        assert self.num_embeds is not None, "a tower of many sizes composes its own graph"
        graph = Composer("vision", store)
        shape = ("batch", 3, *self.side)
        pixels = graph.input("pixel_values", "float32", shape)
        image_embeds = self.compose(Calls(graph, self.checkpoint), pixels)
        graph.output("image_rows", image_embeds, "float32", ("batch", self.num_embeds, self.width))
        return GraphSpec("vision", "vision", graph.model())

    def compose(self, calls: Calls, pixels: ir.Value) -> ir.Value:
        """Adds the tower's nodes to the graph."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """The manifest's `image`."""
        raise NotImplementedError

    def hooks(self) -> AbstractContextManager[None]:
        """What the tower's graph needs beside the language model's hooks."""
        return contextlib.nullcontext()

    def random(self, generator: torch.Generator, variant: int = 0) -> tuple[dict[str, torch.Tensor], int]:
        """One random picture as the model's own processor would give it, and its embeddings; `variant` chooses among a few
        sizes of a tower of many."""
        assert self.num_embeds is not None
        return {"pixel_values": torch.randn(1, 3, *self.side, generator=generator)}, self.num_embeds

    def runs(self, tensors: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """The inputs of the graph for each picture, of the tensors [pictures, ...] of the model's own processor."""
        pictures = len(next(iter(tensors.values())))
        return [{name: value[i : i + 1] for name, value in tensors.items()} for i in range(pictures)]

    def output(self, model: Any) -> nn.Module:
        """The module of a real model whose output `read_embeds` reads the image embeddings from."""
        raise NotImplementedError

    def read_embeds(self, output: Any) -> torch.Tensor:
        """Image embeddings [..., E] in what `output` gives."""
        return output if isinstance(output, torch.Tensor) else output[0]


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
        return self.several(module, path, given, function, ("hidden_out",))["hidden_out"]

    def several(
        self,
        module: nn.Module,
        path: str,
        given: Mapping[str, tuple[ir.Value, Sequence[str | int]]],
        function: Callable[..., Any],
        outputs: Sequence[str],
    ) -> dict[str, ir.Value]:
        """As `__call__`, for a function that gives as many values as there are names in `outputs`."""
        inputs = [
            TraceInput(name, tuple(shape), _OTHER.get(value.dtype or ir.DataType.FLOAT, torch.float32))
            for name, (value, shape) in given.items()
        ]
        key = (signature(module), tuple((i.name, i.shape) for i in inputs), function.__code__)
        if key not in self._templates:
            self._templates[key] = trace(module, function, inputs, outputs)
        values = {name: value for name, (value, _) in given.items()}
        named = lambda name: self._checkpoint.stored(f"{path}{name}")  # noqa: E731
        prefix = path.rstrip(".") or type(module).__name__.strip("_").lower()
        return self.graph.call(self._templates[key], prefix, values, named)


_OTHER = {ir.DataType.INT64: torch.int64, ir.DataType.BOOL: torch.bool}
"""Types of values that are no hidden states; those are float32, which a value in the middle of a graph need not say."""


def pair(value: Any) -> tuple[int, int]:
    """(height, width) of a size that is one number or two."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
