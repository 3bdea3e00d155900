"""What the build needs to know of a model family, and helpers that families share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import onnx_ir as ir
import torch

from ...runtime.errors import UnsupportedModelError
from ..checkpoint.load import Checkpoint
from ..checkpoint.tensors import TensorFiles
from ..graphs.compose import Composer
from ..graphs.template import Template
from ..graphs.weights import WeightRef, WeightStore


@dataclass(frozen=True)
class GraphSpec:
    """One graph of a bundle. `layers` is set for segments: [first, last)."""

    name: str
    role: str
    model: ir.Model
    layers: tuple[int, int] | None = None


@dataclass(frozen=True)
class DecoderShape:
    """What the runtime needs to know of the decoder; fields as in the manifest's `decoder`."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    position: str
    mask_dtype: str
    mask_heads: int
    cross_attention: bool
    relative_bias: dict[str, Any] | None = None


class Family(Protocol):
    """A model family over one checkpoint. Constructing it checks every option of the configuration and raises
    UnsupportedModelError for what cannot be exported correctly."""

    name: ClassVar[str]
    decoder_name: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    model_types: ClassVar[tuple[str, ...]]
    decoder: DecoderShape
    max_positions: int | None
    """Most positions the model was made for; None when positions have no end."""

    def __init__(self, checkpoint: Checkpoint) -> None: ...

    def graphs(self, cuts: Sequence[int], store: WeightStore) -> Iterator[GraphSpec]:
        """All graphs except `commit` and drafts, in the order in which a request uses them."""
        ...

    def tensors(self) -> dict[str, WeightRef]:
        """Tensors that the runtime reads itself: the embedding table, relative-bias tables."""
        ...

    def encoder(self) -> dict[str, Any] | None:
        """The manifest's `encoder`."""
        ...

    def image(self) -> dict[str, Any] | None:
        """The manifest's `image`."""
        ...

    def text(self) -> dict[str, Any]:
        """The family's part of the manifest's `text` (image token and rows, decoder start)."""
        ...


LAYER_COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers")
MOST_LAYERS = 1024  # as in a manifest


def check_common(config: Any, architecture: str) -> None:
    """Refuses options that no family supports."""
    for name in LAYER_COUNTS:
        count = getattr(config, name, None)
        if count is not None and (type(count) is not int or not 1 <= count <= MOST_LAYERS):
            raise UnsupportedModelError(f"{architecture}: {name}={count!r} is not in 1..{MOST_LAYERS}")
    if getattr(config, "quantization_config", None):
        method = config.quantization_config
        method = (
            method.get("quant_method")
            if isinstance(method, dict)
            else getattr(method, "quant_method", method)
        )
        raise UnsupportedModelError(
            f"{architecture}: quantized checkpoints ({method}) are not supported; give the original"
        )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise UnsupportedModelError(
            f"{architecture}: sliding_window={config.sliding_window} is not supported"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModelError(
            f"{architecture}: layer_types {sorted(kinds)} are not supported, only full_attention"
        )


def shared_tensor(tensors: TensorFiles, names: Sequence[str]) -> str:
    """The one tensor behind several names that must be the same table; refuses tables that differ."""
    present = [n for n in names if n in tensors]
    if not present:
        return names[0]
    for other in present[1:]:
        if not _same(tensors, present[0], other):
            raise UnsupportedModelError(
                f"{present[0]} and {other} are different tables; one shared table is supported"
            )
    return present[0]


def head_tensor(tensors: TensorFiles, embedding: str, head: str, tied: bool) -> str:
    """The LM head's tensor, as transformers 5 decides it: a head of its own when the checkpoint holds one that
    differs from the embedding table, else the table itself when the configuration ties them."""
    if head in tensors:
        return embedding if embedding in tensors and _same(tensors, embedding, head) else head
    return embedding if tied else head


def _same(tensors: TensorFiles, one: str, other: str) -> bool:
    if tensors.shape(one) != tensors.shape(other) or tensors.dtype(one) != tensors.dtype(other):
        return False
    return torch.equal(tensors.read(one), tensors.read(other))


def build_embed(store: WeightStore, table: WeightRef) -> GraphSpec:
    """The `embed` graph; the table is an input, bound from the weights file."""
    graph = Composer("embed", store)
    ids = graph.input("token_ids", "int64", ("batch", "width"))
    rows = graph.input("embedding_table", "float32", table.shape)
    hidden = graph.node("Gather", [rows, ids], "gather", axis=0)
    graph.output("hidden", hidden, "float32", ("batch", "width", table.shape[1]))
    return GraphSpec("embed", "embed", graph.model())


def build_head(
    store: WeightStore,
    norm: Template,
    norm_name: Callable[[str], str],
    table: WeightRef,
    scale: float = 1.0,
) -> GraphSpec:
    """The `head` graph: rows are selected, normalised, perhaps scaled, and multiplied by the table [V, E]."""
    vocabulary, width = table.shape
    graph = Composer("head", store)
    hidden = graph.input("hidden", "float32", ("batch", "width", width))
    index = graph.input("row_index", "int64", ("rows",))
    flat = graph.node("Reshape", [hidden, graph.constant(np.array([-1, width], np.int64))], "flat")
    rows = graph.node("Gather", [flat, index], "rows", axis=0)
    normed = graph.call(norm, "norm", {"hidden": rows}, norm_name)["hidden_out"]
    if scale != 1.0:
        normed = graph.node("Mul", [normed, graph.constant(np.array(scale, np.float32))], "scale")
    logits = graph.node("Gemm", [normed, graph.weight(table)], "logits_gemm", transB=1)
    graph.output("logits", logits, "float32", ("rows", vocabulary))
    return GraphSpec("head", "head", graph.model())
