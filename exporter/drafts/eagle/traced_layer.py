"""Tracing of a draft's layer with keys and values of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .eagle_network import EagleNetwork

if TYPE_CHECKING:
    from ...graphs.traced_module import Template, TraceInput


def traced_layer(
    network: nn.Module,
    drafter: Callable[[Any], EagleNetwork],
    inputs: Sequence[TraceInput],
    enter: Callable[..., torch.Tensor],
) -> Template:
    """The layer `drafter(network)` over what `enter(network, *inputs)` makes of its `inputs`, with its cache."""

    def run(net: Any, *values: Any) -> torch.Tensor:
        *given, positions, mask, kept = values
        own = drafter(net)
        return own.layers[0](
            enter(net, *given),
            attention_mask=mask,
            position_embeddings=own.angles(positions),
            past_key_values=kept,
        )

    config, attention = drafter(network).config, drafter(network).layers[0].self_attn
    shape = config.num_kv_heads, config.head_dim
    return traced_with_cache(network, attention, shape, inputs, run, "features_out", config.axes)


def traced_with_cache(
    network: nn.Module,
    attention: Any,
    cache_shape: tuple[int, int],
    inputs: Sequence[TraceInput],
    function: Callable[..., torch.Tensor],
    output: str,
    axes: int = 1,
) -> Template:
    """`function(network, *inputs, positions, mask, cache)` as a graph with `inputs` and those of every layer with a
    cache, and the outputs `output` and `updated_*`; positions have so many `axes`.

    `attention` is the network's module of transformers that attends, with a cache of `cache_shape` (key/value heads,
    numbers of a head).
    """
    from transformers.models.llama import modeling_llama

    from ...graphs.caches import LayerCache
    from ...graphs.hooks import ATTENTION, export_hooks, replaced
    from ...graphs.traced_module import TraceInput, trace

    heads, size = cache_shape
    cache = ("batch", heads, "cache", size)

    def run(net: Any, *values: Any) -> tuple[torch.Tensor, ...]:
        *given, positions, indices, mask, keys, values_ = values
        kept = LayerCache(keys, values_, indices)
        return function(net, *given, positions, mask, kept), kept.keys, kept.values

    all_inputs = [
        *inputs,
        TraceInput("positions", (*((axes,) if axes > 1 else ()), "batch", "width"), torch.int64),
        TraceInput("write_indices", ("batch",), torch.int64),
        TraceInput("attn_mask", ("batch", 1, "width", "cache"), torch.bool),
        TraceInput("key_cache.0", cache),
        TraceInput("value_cache.0", cache),
    ]
    hooks = export_hooks(rms_norms=(modeling_llama.LlamaRMSNorm,), rotary_modules=(modeling_llama,))
    with hooks, replaced(attention.config, "_attn_implementation", ATTENTION):
        return trace(
            network.eval().requires_grad_(False),
            run,
            all_inputs,
            (output, "updated_key_cache.0", "updated_value_cache.0"),
        )
