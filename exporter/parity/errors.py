"""The reference once more in float64, every part of it given what it was given in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..common.float64 import float64_arithmetic
from ..families.common.base import Family
from ..families.common.cached_rows import cached_rows
from ..families.common.parts import Parts
from .capture import Array, Captured, caches, recorded_parts, residuals_at, whole_cache, widened


def float32_errors(
    model: Any, family: Family, cuts: Sequence[int], inputs: Mapping[str, torch.Tensor], given: Captured
) -> Captured:
    """`Captured.error` of `given`; `model` is of `load_exact`.

    One thing is not as it was given: keys and values of cross-attention are float64's own, so that what float32 made of
    them counts as an error of the layers as well, PyTorch's and the graph's alike.
    """
    parts, crossing = family.parts(model), family.decoder.cross_attention
    seen: dict[str, torch.Tensor] = {}
    with torch.no_grad(), float64_arithmetic():
        wide = {
            name: value.double() if value.is_floating_point() else value for name, value in inputs.items()
        }
        with (
            residuals_at(parts.layers, parts.final_norm, cuts, given) as residuals,
            recorded_parts(parts, inputs, seen),
            _as_given(parts, given),
        ):
            output = model(**wide, **whole_cache(family))
        own, cross = caches(output, crossing)

        def error(expected: Array | None, exact: torch.Tensor) -> Array:
            assert expected is not None
            return (expected - exact.reshape(expected.shape).numpy()).astype(np.float32)

        def errors(expected: Sequence[Array], layers: Any, name: str) -> list[Array]:
            return [error(e, getattr(layer, name)) for e, layer in zip(expected, layers, strict=True)]

        empty = np.zeros(0, np.float32)
        return Captured(
            given.name,
            empty,
            empty,
            {
                index: error(given.residuals[index], hidden_states)
                for index, hidden_states in residuals.items()
                if index
            },
            [
                {name: error(e[name], rows) for name, rows in cached_rows(layer).items()}
                for e, layer in zip(given.caches, own.layers, strict=True)
            ],
            error(given.logits, output.logits),
            image_embeds=error(given.image_embeds, seen["image"]) if "image" in seen else None,
            encoder_states=error(given.encoder_states, seen["encoder"]) if "encoder" in seen else None,
            cross_keys=errors(given.cross_keys, cross.layers, "keys") if crossing else [],
            cross_values=errors(given.cross_values, cross.layers, "values") if crossing else [],
            final_hidden=error(given.final_hidden, seen["norm"] * parts.logit_scale),
        )


@contextmanager
def _as_given(parts: Parts, given: Captured) -> Iterator[None]:
    """Lets what follows the encoder, image embeddings that cross-attention reads or that are added behind layers, have
    float32's values of them, and the encoder those of what it reads."""
    hooks: list[Any] = []

    def length(_module: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("inputs_embeds") is None:  # token ids: an embedding is exact
            return None
        return args, kwargs | {"inputs_embeds": widened(given.encoder_hidden)}

    def states(_module: Any, _args: Any, output: Any) -> Any:
        replaced = widened(given.encoder_states)
        if isinstance(output, torch.Tensor):
            return replaced.reshape(output.shape)
        output.last_hidden_state = replaced
        return output

    if parts.encoder is not None:
        hooks.append(parts.encoder.register_forward_pre_hook(length, with_kwargs=True))
    source = parts.encoder or (parts.vision_output if given.encoder_states is not None else None)
    if source is not None:
        hooks.append(source.register_forward_hook(states))
    if parts.vision_output is not None and parts.put_deepstack is not None and given.image_embeds is not None:
        put, embeds = parts.put_deepstack, widened(given.image_embeds)
        hooks.append(parts.vision_output.register_forward_hook(lambda _m, _a, output: put(output, embeds)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
