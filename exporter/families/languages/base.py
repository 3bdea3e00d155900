"""What language models share: their graphs follow from where their modules are and how one layer is called."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from ....runtime.graphs.values import FULL
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.hooks import ATTENTION, export_hooks
from ...graphs.meta_model import hollow_model, signature
from ...graphs.retype import WIDE_RESIDUAL
from ...graphs.traced_module import Template, TraceInput, trace
from ...graphs.weights import WeightRef, WeightStore
from ..common.config_checks import check_common
from ..common.decoder_graphs import (
    FinalNorm,
    Named,
    Prologue,
    build_embed,
    build_head,
    build_segment,
    build_skipped,
    layer_inputs,
    layer_outputs,
)
from ..common.embedding_names import embedding_tensor, head_tensor
from ..common.layer_skip import Sublayers, left_out
from ..common.parts import DecoderShape, GraphSpec, Parts


def learned_positions(config: Any, *, cross_attention: bool) -> DecoderShape:
    """The decoder of a model that adds a learned table of positions to its embeddings; every head has its own keys."""
    heads = config.num_attention_heads
    return DecoderShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=config.hidden_size // heads,
        position="learned",
        mask_dtype="bool",
        mask_heads=1,
        cross_attention=cross_attention,
        max_positions=config.max_position_embeddings,
    )


class Language:
    """One language model. `prefix` is its module path in the whole model (`language_model.` in BLIP-2, else "").

    A subclass names its modules by their paths in its own class, sets `decoder`, and calls one layer (`run_layer`).
    Where the whole model holds the language model without its head, `body` is where the head's own model would have it:
    `model.language_model.` in Llava, whose LM head stands beside it.
    """

    name: ClassVar[str]
    kind: ClassVar[Any]
    """The transformers class with the head."""
    layers_path: ClassVar[str]
    norm_path: ClassVar[str]
    embed_path: ClassVar[str]
    attention_paths: ClassVar[tuple[str, ...]] = ("self_attn",)
    """In a decoder layer, what attends: itself, and over the source where there is one."""
    attention_values: ClassVar[int] = 2
    """How many values each of those gives, its hidden states first."""
    convolution_path: ClassVar[str | None] = None
    """In a decoder layer, the convolution that some layers have in place of attention; it gives hidden states alone."""
    source_paths: ClassVar[tuple[str, ...]] = ()
    """Of what attends over a source, what makes its keys and values, once in a request."""
    encoder_path: ClassVar[str | None] = None
    """The layers of a text encoder."""
    mlp_path: ClassVar[str] = "mlp"
    """In a decoder layer, what gives the MLP's part of the hidden states."""
    attention_norm_path: ClassVar[str | None] = None
    mlp_norm_path: ClassVar[str | None] = None
    """In a decoder layer, what norms attention's part and the MLP's before they are added, where something does."""
    windows: ClassVar[bool] = False
    """Whether some of its layers may have sliding attention."""
    further_kinds: ClassVar[tuple[str, ...]] = ()
    """Kinds of its layers that are no attention, beside at least one that is."""
    reads_image_embeds: ClassVar[bool] = False
    """Whether the embeddings of a picture may stand in its prompt (BLIP-2)."""
    decoder: DecoderShape
    max_positions: int | None = None
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """What bounds logits (`Parts`)."""

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str, body: str = "model.") -> None:
        self.checkpoint, self.config, self.prefix, self.body = checkpoint, config, prefix, body
        check_common(config, self.kind.__name__, windows=self.windows, further=self.further_kinds)

    @property
    def wide_residual(self) -> bool:
        """Whether its residual stream overflows float16, so that it stays float32 there (transformers' `_keep_in_fp32`)."""
        return self.name in WIDE_RESIDUAL

    @functools.cached_property
    def embedding(self) -> WeightRef:
        """The embedding table [V, E]."""
        name = embedding_tensor(self.checkpoint, *self._tables)
        return WeightRef((name,), False, self._table_shape)

    @functools.cached_property
    def head(self) -> WeightRef:
        """The LM head's table [V, E]."""
        name = head_tensor(self.checkpoint, self.embedding.names[0], *self._tables)
        return WeightRef((name,), False, self._table_shape)

    @property
    def _tables(self) -> tuple[str, str]:
        """Parameters of the embedding table and of the LM head."""
        return f"{self.within(self.embed_path)}.weight", f"{self.within('lm_head')}.weight"

    @property
    def _table_shape(self) -> tuple[int, int]:
        return self.config.vocab_size, self.decoder.hidden_size

    # --- what a subclass may change ---

    def hooks(self) -> AbstractContextManager[None]:
        """The hooks inside which graphs must be built."""
        return export_hooks()

    def run_layer(self, module: nn.Module, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """One decoder layer on what `layer_inputs` names; gives hidden states, then its updated caches (`layer_outputs`)."""
        raise NotImplementedError

    def prologue(self) -> Prologue | None:
        """What a segment computes from `positions`."""
        return None

    def prologues(self) -> dict[str, Prologue]:
        """The same by kind of layer (a key of `MASKS`), where those differ; else that of all."""
        prologue = self.prologue()
        return {} if prologue is None else {FULL: prologue}

    @property
    def ropes(self) -> dict[str, Mapping[str, Any]]:
        """What rotary angles follow from, by kind of layer; one of a kind is for all."""
        rope = getattr(self.config, "rope_parameters", None)
        return {FULL: rope} if rope else {}

    @property
    def rotary_base(self) -> float | None:
        """The base of its rotary positions, whatever scales them, in layers that see everything; None where it has none."""
        return self.ropes.get(FULL, {}).get("rope_theta")

    @property
    def angles_per_head(self) -> int:
        """By which rotary positions turn a head."""
        return self.decoder.head_dim // 2

    def source_graphs(self, store: WeightStore) -> Iterator[GraphSpec]:
        """Graphs in front of the decoder: `encoder` and `cross_kv` of models with cross-attention."""
        yield from ()

    def encoder(self) -> dict[str, Any] | None:
        """The manifest's `encoder`."""
        return None

    def tensors(self) -> dict[str, WeightRef]:
        """Tensors that the runtime reads itself."""
        return {"embedding_table": self.embedding}

    def encoder_module(self, language: Any) -> nn.Module | None:
        """The text encoder of a real model."""
        return None

    # --- what follows ---

    @property
    def stacks(self) -> tuple[str, ...]:
        """Paths of its layers: a text encoder's before the decoder's."""
        return (self.layers_path,) if self.encoder_path is None else (self.encoder_path, self.layers_path)

    def within(self, path: str) -> str:
        """The path in the whole model of a module of the language model's own class."""
        own = path.startswith("model.")
        return f"{self.prefix}{self.body}{path.removeprefix('model.')}" if own else f"{self.prefix}{path}"

    def named(self, path: str) -> Named:
        """Names of the checkpoint's tensors for parameters of the module at `path` ("model.norm." with its dot)."""
        return lambda name: self.checkpoint.stored(f"{self.within(path)}{name}")

    @functools.cached_property
    def model(self) -> Any:
        """The hollow language model."""
        config = copy.deepcopy(self.config)
        config._attn_implementation = ATTENTION
        return hollow_model(lambda: self.kind(config))

    def parts(self, model: Any) -> Parts:
        """The modules of a whole, real model."""
        return Parts(
            layers=model.get_submodule(self.within(self.layers_path)),
            final_norm=model.get_submodule(self.within(self.norm_path)),
            lm_head=model.get_submodule(self.within("lm_head")),
            embed=model.get_submodule(self.within(self.embed_path)),
            logit_scale=self.logit_scale,
            logit_cap=self.logit_cap,
            encoder=self.encoder_module(model.get_submodule(self.prefix.rstrip("."))),
        )

    def graphs(self, cuts: Sequence[int], store: WeightStore) -> Iterator[GraphSpec]:
        """Source graphs, embed, segments, head."""
        yield from self.source_graphs(store)
        yield build_embed(store, self.decoder.embedding_scale)
        layer = per_layer(self._layer, self._trace_layer)
        prologues = self.prologues()
        for index, (first, last) in enumerate(itertools.pairwise(cuts)):
            yield build_segment(store, index, first, last, self.decoder, layer, prologues)
        yield build_head(store, self.final_norm, self.head, self.logit_cap)

    def skipped(self, store: WeightStore, skip: Sublayers) -> GraphSpec:
        """The graph `skipped`: all layers without the sublayers `skip`. Ask for it inside `hooks`."""
        traced: dict[tuple[bool, bool], Callable[[int], tuple[Template, Named]]] = {}

        def layer(i: int) -> tuple[Template, Named] | None:
            without = {"attention": i in skip.attention, "mlp": i in skip.mlp}
            if all(without.values()):
                return None
            make = self._trace_mlp if without["attention"] else self._trace_layer
            kept = traced.setdefault(tuple(without.values()), per_layer(self._layer, make))  # type: ignore[arg-type]
            with left_out(self, self._layer(i)[0], **without):
                return kept(i)

        attention = skip.kept_attention(self.decoder.num_layers)
        return build_skipped(store, self.decoder, layer, attention, self.prologues())

    def _layer(self, i: int) -> tuple[nn.Module, Named]:
        """Decoder layer i of the hollow model, and what the checkpoint calls its parameters."""
        layers = self.model.get_submodule(self.layers_path)
        return layers[i], self.named(f"{self.layers_path}.{i}.")

    def _trace_layer(self, module: nn.Module, index: int) -> Template:
        inputs = layer_inputs(self.decoder, index, self.angles_per_head)
        names = [item.name for item in inputs]

        def run(module: nn.Module, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.run_layer(module, dict(zip(names, tensors, strict=True)))

        return trace(module, run, inputs, layer_outputs(self.decoder, index))

    def _trace_mlp(self, module: nn.Module, index: int) -> Template:
        """A decoder layer whose attention is left out: it sees each position alone."""

        def run(module: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (self.run_layer(module, collections.defaultdict(lambda: None, hidden=hidden))[0],)  # type: ignore[arg-type]

        inputs, outputs = layer_inputs(self.decoder, index), layer_outputs(self.decoder, index)
        return trace(module, run, inputs[:1], outputs[:1])

    @functools.cached_property
    def final_norm(self) -> FinalNorm:
        """What the LM head, and a draft's own heads, read hidden states through; ask for it inside `hooks`."""
        template = self.trace_hidden(self.model.get_submodule(self.norm_path), ("rows",))
        names = self.named(f"{self.norm_path}.")
        return FinalNorm(template, names, self.decoder.hidden_size, self.logit_scale)

    def trace_hidden(self, module: nn.Module, dims: tuple[str, ...]) -> Template:
        """A module that maps hidden states [*dims, E] to hidden states."""
        inputs = [TraceInput("hidden", (*dims, self.decoder.hidden_size))]
        return trace(module, lambda m, hidden: (m(hidden),), inputs, ("hidden_out",))


def per_layer(
    find: Callable[[int], tuple[nn.Module, Named]], make: Callable[[nn.Module, int], Template]
) -> Callable[[int], tuple[Template, Named]]:
    """Templates by layer, each distinct layer traced once: `make(module, number)`."""
    templates: dict[tuple, Template] = {}

    def layer(i: int) -> tuple[Template, Named]:
        module, names = find(i)
        key = signature(module)
        if key not in templates:
            templates[key] = make(module, i)
        return templates[key], names

    return layer
