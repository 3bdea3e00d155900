"""BLIP-2 with a T5 language model: vision tower, Q-Former and projection in one graph, then T5's graphs.

(Li et al., arXiv 2301.12597; Blip2ForConditionalGeneration.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from transformers import Blip2ForConditionalGeneration
from transformers.models.t5 import modeling_t5

from ...runtime.errors import UnsupportedModelError
from ..checkpoint.load import Checkpoint
from ..graphs.compose import Composer
from ..graphs.hollow import hollow_model, signature
from ..graphs.hooks import ATTENTION, export_hooks
from ..graphs.template import Template, TraceInput, trace
from ..graphs.weights import WeightRef, WeightStore
from .base import GraphSpec, check_common
from .images import square_image
from .t5 import T5Language


def _queries(module: Any, image: torch.Tensor) -> tuple[torch.Tensor]:
    queries = module.query_tokens.expand(image.shape[0], -1, -1)
    return (module.qformer.layernorm(queries),)


class _Queries(torch.nn.Module):
    """The learned queries and the norm before the Q-Former's first layer, under their checkpoint names."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.query_tokens = model.query_tokens
        self.qformer = torch.nn.Module()
        self.qformer.layernorm = model.qformer.layernorm


class Blip2Family:
    """Exports Blip2ForConditionalGeneration with T5."""

    name: ClassVar[str] = "blip2"
    decoder_name: ClassVar[str] = "t5"
    architectures: ClassVar[tuple[str, ...]] = ("Blip2ForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("blip-2",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        config = self.config = checkpoint.config
        text = config.text_config
        if text.model_type != "t5":
            raise UnsupportedModelError(
                f"Blip2ForConditionalGeneration with the language model {text.model_type!r} is not supported, only 't5'"
            )
        for part in (config, config.vision_config, config.qformer_config):
            check_common(part, "Blip2ForConditionalGeneration")
        if config.qformer_config.use_qformer_text_input:
            raise UnsupportedModelError(
                "Blip2ForConditionalGeneration: use_qformer_text_input=true is not supported"
            )
        if config.image_token_index is None:
            raise UnsupportedModelError(
                "Blip2ForConditionalGeneration: image_token_index is not set; save the model with a current processor"
            )
        self.language = T5Language(checkpoint, text, "language_model.")
        self.decoder = self.language.decoder
        self.max_positions: int | None = None
        self._side = _pair(config.vision_config.image_size)

    @functools.cached_property
    def _model(self) -> Any:
        config: Any = type(self.config).from_dict(self.config.to_dict())
        # The language model is traced by T5Language; a one-layer stand-in keeps this one small.
        config.text_config.num_layers = config.text_config.num_decoder_layers = 1
        for part in (config, config.vision_config, config.qformer_config, config.text_config):
            part._attn_implementation = ATTENTION
        return hollow_model(lambda: Blip2ForConditionalGeneration(config))

    def graphs(self, cuts: Sequence[int], store: WeightStore) -> Iterator[GraphSpec]:
        """vision, then T5's graphs."""
        with export_hooks(rms_norms=(modeling_t5.T5LayerNorm,)):
            yield self._vision(store)
            yield from self.language.graphs(cuts, store)

    def _vision(self, store: WeightStore) -> GraphSpec:
        model, config = self._model, self.config
        height, width = self._side
        graph = Composer("vision", store)
        pixel_shape = ("batch", 3, height, width)
        pixels = graph.input("pixel_values", "float32", pixel_shape)
        embeddings = trace(
            model.vision_model.embeddings,
            lambda module, pixel_values: (module(pixel_values),),
            [TraceInput("pixel_values", pixel_shape)],
            ("hidden_out",),
        )
        path = "vision_model.embeddings."
        hidden = graph.call(embeddings, "patches", {"pixel_values": pixels}, path.__add__)["hidden_out"]
        patch = _pair(config.vision_config.patch_size)
        rows = (height // patch[0]) * (width // patch[1]) + 1
        image_shape = ("batch", rows, config.vision_config.hidden_size)
        templates: dict[tuple, Template] = {}
        one = lambda module, hidden: (module(hidden),)  # noqa: E731 - traced twice below

        def call(module: torch.nn.Module, path: str, shape: tuple, given: dict, function=one):
            key = signature(module)
            if key not in templates:
                inputs = [TraceInput("hidden", shape)]
                inputs += [TraceInput("image", image_shape)] if "image" in given else []
                templates[key] = trace(module, function, inputs, ("hidden_out",))
            return graph.call(templates[key], path.rstrip("."), given, path.__add__)["hidden_out"]

        for i, layer in enumerate(model.vision_model.encoder.layers):
            hidden = call(layer, f"vision_model.encoder.layers.{i}.", image_shape, {"hidden": hidden})
        image = call(
            model.vision_model.post_layernorm, "vision_model.post_layernorm.", image_shape, {"hidden": hidden}
        )
        count, width = config.num_query_tokens, config.qformer_config.hidden_size
        queries = trace(_Queries(model), _queries, [TraceInput("image", image_shape)], ("hidden_out",))
        hidden = graph.call(queries, "queries", {"image": image}, str)["hidden_out"]
        query_shape = ("batch", count, width)

        def crossing(module: Any, hidden: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor]:
            return (module(hidden, None, image, query_length=count),)

        def plain(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor]:
            return (module(hidden, None, None, query_length=count),)

        for i, layer in enumerate(model.qformer.encoder.layer):
            given = {"hidden": hidden, "image": image} if layer.has_cross_attention else {"hidden": hidden}
            function = crossing if layer.has_cross_attention else plain
            hidden = call(layer, f"qformer.encoder.layer.{i}.", query_shape, given, function)
        rows_out = call(model.language_projection, "language_projection.", query_shape, {"hidden": hidden})
        graph.output("image_rows", rows_out, "float32", ("batch", count, self.decoder.hidden_size))
        return GraphSpec("vision", "vision", graph.model())

    def tensors(self) -> dict[str, WeightRef]:
        """Embedding table and bias tables."""
        return self.language.tensors()

    def encoder(self) -> dict[str, Any]:
        """The encoder's mask."""
        return self.language.encoder_manifest()

    def image(self) -> dict[str, Any]:
        """Preprocessing."""
        return square_image(self.checkpoint.image_settings, self._side, "blip", "BlipImageProcessorPil")

    def text(self) -> dict[str, Any]:
        """Image token, image rows, decoder start."""
        start = self.checkpoint.generation_config.get("decoder_start_token_id")
        if start is None:
            start = getattr(self.config.text_config, "decoder_start_token_id", None)
        return {
            "image_token_id": self.config.image_token_index,
            "image_rows": self.config.num_query_tokens,
            "decoder_start_token_id": 0 if start is None else start,
        }


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
