"""One forward pass of the reference, with everything recorded that a graph takes or gives.

Where modules are and what they read comes from the family (`Family.parts`, `reference_inputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ...runtime.decoder.prompt_chunks import Block
from ...runtime.graphs.values import deepstack_inputs
from ..families.common.base import Family
from ..families.common.cached_rows import cached_rows, recording_cache
from ..families.common.hidden_states import hidden_states_after
from ..families.common.parts import Parts

Array = np.ndarray


@dataclass
class Captured:
    """What the reference computed. `residuals[i]` enters layer i (key L: enters the final norm), [B, N, E]; key 0 is
    what the decoder is given, before any table of positions.

    `caches` [B, heads, T, size] are per layer, by the graphs' names; so are `cross_keys` and `cross_values`. `source_lengths` counts the real
    tokens of each sequence that cross-attention sees; `vision` are the inputs of each run of the vision graph, which give
    `image_embeds` one after the other. `positions` [axes, B, N], of one axis [B, N], is None where they just count from 0.
    """

    name: str
    token_ids: Array
    embedded: Array
    residuals: dict[int, Array]
    caches: list[dict[str, Array]]
    logits: Array
    vision: list[dict[str, Array]] = field(default_factory=list)
    image_embeds: Array | None = None
    source_ids: Array | None = None
    """int64 [B, N]: what a text encoder reads."""
    encoder_hidden: Array | None = None
    encoder_states: Array | None = None
    source_lengths: list[int] = field(default_factory=list)
    cross_keys: list[Array] = field(default_factory=list)
    cross_values: list[Array] = field(default_factory=list)
    final_hidden: Array | None = None
    """[B, N, E] after the final norm and the model's scale of it: what the LM head reads."""
    lm_head: Array | None = None
    """[V, E], where it was asked for."""
    positions: Array | None = None
    blocks: list[list[Block]] = field(default_factory=list)
    """Of each sequence, the parts that see themselves in both directions; empty where all is causal."""
    without: Captured | None = None
    """What the same inputs give in a decoder without the sublayers that a draft leaves out."""
    input_embeds: Array | None = None
    """[B, N, E] what enters layer 0, positions included where the decoder has a table of them."""
    deepstack: dict[str, Array] = field(default_factory=dict)
    """[B, N, E] by the graphs' inputs: what is added behind the first layers where embeddings of pictures are."""
    error: Captured | None = None
    """How far the reference's float32 is from float64 (float32 − float64) where every part of the model is given what it
    was given in float32: of `image_embeds`, `encoder_states`, caches, `residuals`, `final_hidden` and `logits`."""

    def final(self, index: Array) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [R, E] that the LM head reads, by their index int64 [R] among all, and their error."""
        assert (
            self.error is not None and self.final_hidden is not None and self.error.final_hidden is not None
        )
        width = self.final_hidden.shape[-1]
        hidden_states, error = (
            values.reshape(-1, width)[index] for values in (self.final_hidden, self.error.final_hidden)
        )
        return torch.from_numpy(hidden_states), torch.from_numpy(error)


def capture(
    model: Any,
    family: Family,
    kind: str,
    cuts: Sequence[int],
    inputs: Mapping[str, torch.Tensor],
    lm_head: bool = False,
) -> Captured:
    """Runs the reference on `inputs`, called `kind`. `lm_head`: keep a copy of the LM head's table."""
    parts = family.parts(model)
    crossing = family.decoder.cross_attention
    ids = inputs["decoder_input_ids"] if crossing else inputs["input_ids"]
    seen: dict[str, torch.Tensor] = {}
    pictures = _vision_inputs(inputs)
    tables = {"lm_head": parts.lm_head} if lm_head else {}
    with torch.no_grad(), residuals_at(parts.layers, parts.final_norm, cuts) as residuals:
        with (
            recorded_parts(parts, inputs, seen),
            _positions(parts.rotary, seen),
            _recorded(tables, seen, lambda module, _: module.weight.clone()),  # a streamed reference drops it
        ):
            output = model(**inputs, **whole_cache(family))
        embedded = _embed(family, parts.embed, ids, None if crossing else seen.get("image"))
        first_rows, residuals[0] = residuals[0], _array(embedded)
        image_embeds = _array(seen["image"]) if "image" in seen else None
        captured = Captured(
            kind,
            ids.numpy(),
            _array(parts.embed(ids)),
            residuals,
            [],
            _array(output.logits),
            vision=family.vision.runs(pictures) if family.vision is not None and pictures else [],
            image_embeds=image_embeds,
            final_hidden=_array(seen["norm"] * parts.logit_scale),
            lm_head=_array(seen["lm_head"]) if lm_head else None,
            positions=seen["positions"].numpy() if "positions" in seen else None,
            blocks=family.blocks(inputs),
            input_embeds=first_rows,
            deepstack=deepstack_embeds(family, ids.numpy(), image_embeds),
        )
        own, cross = caches(output, crossing)
        if crossing:
            _add_source(captured, family, parts.embed, inputs, seen, cross)
    captured.caches = [
        {name: _array(rows) for name, rows in cached_rows(layer).items()} for layer in own.layers
    ]
    return captured


def whole_cache(family: Family) -> dict[str, Any]:
    """Arguments of a model's forward with which it keeps caches of every position (`recording_cache`)."""
    cache = recording_cache(family.decoder, family.language.config)
    return {"use_cache": True} | ({} if cache is None else {"past_key_values": cache})


def caches(output: Any, crossing: bool) -> tuple[Any, Any]:
    """(the decoder's own cache, that of cross-attention or None) of a model's output."""
    cache = (getattr(output, "language_model_outputs", None) or output).past_key_values
    return (cache.self_attention_cache, cache.cross_attention_cache) if crossing else (cache, None)


def _add_source(
    captured: Captured,
    family: Family,
    embed: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    seen: Mapping[str, torch.Tensor],
    cross: Any,
) -> None:
    """What cross-attention reads: a text encoder's states, or without one the image embeddings."""
    if "encoder" in seen:
        source = inputs["input_ids"]
        captured.source_ids = source.numpy()
        captured.encoder_hidden = _array(_embed(family, embed, source, seen.get("image")))
        states, lengths = seen["encoder"], inputs["attention_mask"].sum(1).tolist()
    else:
        states = seen["image"]
        lengths = [states.shape[1]] * states.shape[0]
    captured.encoder_states, captured.source_lengths = _array(states), lengths
    captured.cross_keys = [_array(layer.keys) for layer in cross.layers]
    captured.cross_values = [_array(layer.values) for layer in cross.layers]


def _embed(
    family: Family, embed: nn.Module, ids: torch.Tensor, image_embeds: torch.Tensor | None
) -> torch.Tensor:
    """Embeddings [B, N, E] of a prompt, the image's in the places of image tokens."""
    embeds = embed(ids)
    if image_embeds is not None and family.image_token_id is not None:
        embeds = embeds.clone()
        entering = image_embeds.reshape(-1, image_embeds.shape[-1])[:, : embeds.shape[-1]]
        embeds[ids == family.image_token_id] = entering
    return embeds


def deepstack_embeds(family: Family, ids: Array, image_embeds: Array | None) -> dict[str, Array]:
    """Float32 [B, N, E] by the graphs' inputs: of `image_embeds` [..., (1 + layers) · E] what is added behind the first
    layers, in the places of image tokens among `ids` int64 [B, N]; zero elsewhere."""
    shape, deepstack = family.decoder, {}
    for number, name in enumerate(deepstack_inputs(shape.deepstack_layers, range(shape.num_layers)), 1):
        deepstack[name] = np.zeros((*ids.shape, shape.hidden_size), np.float32)
        if image_embeds is not None:
            rows = image_embeds.reshape(-1, image_embeds.shape[-1])
            begin = number * shape.hidden_size
            deepstack[name][ids == family.image_token_id] = rows[:, begin : begin + shape.hidden_size]
    return deepstack


def _vision_inputs(inputs: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """What the vision tower reads of a model's arguments."""
    texts = ("input_ids", "attention_mask", "decoder_input_ids", "mm_token_type_ids", "token_type_ids")
    return {name: value.numpy() for name, value in inputs.items() if name not in texts}


@contextmanager
def residuals_at(
    layers: Any, norm: nn.Module, cuts: Sequence[int], given: Captured | None = None
) -> Iterator[dict[int, Any]]:
    """Records what enters the layers at the cuts, and the final norm: arrays, or with `given` tensors, and `given`'s own
    enter in their place."""
    residuals: dict[int, Any] = {}

    def keep(index: int, hidden_states: torch.Tensor) -> torch.Tensor | None:
        if given is None:
            residuals[index] = _array(hidden_states)
            return None
        residuals[index] = hidden_states
        return widened(given.residuals[index] if index else given.input_embeds)

    # Before a hook that loads parameters: a recorded input does not depend on them.
    with hidden_states_after(layers, norm, {*cuts, len(layers)}, keep):
        yield residuals


@contextmanager
def recorded_parts(
    parts: Parts, inputs: Mapping[str, torch.Tensor], seen: dict[str, torch.Tensor]
) -> Iterator[None]:
    """Keeps what the encoder, the final norm and, where there are pictures, the vision tower give."""
    tower = {"image": parts.vision_output} if _vision_inputs(inputs) else {}
    watched = {"encoder": parts.encoder, "norm": parts.final_norm}
    with (
        _recorded(watched, seen, lambda _, output: _first(output)),
        _recorded(tower, seen, lambda _, output: (parts.image_embeds or _first)(output)),
    ):
        yield


@contextmanager
def _recorded(
    modules: Mapping[str, nn.Module | None],
    seen: dict[str, torch.Tensor],
    what: Callable[[Any, Any], torch.Tensor],
) -> Iterator[None]:
    """Keeps `what(module, output)` of named modules when they have run."""

    def recorder(name: str) -> Any:
        def hook(module: Any, _args: Any, output: Any) -> None:
            seen[name] = what(module, output)

        return hook

    hooks = [m.register_forward_hook(recorder(name)) for name, m in modules.items() if m is not None]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _positions(rotary: nn.Module | None, seen: dict[str, torch.Tensor]) -> Iterator[None]:
    """Keeps the positions that a rotary module turns into angles."""

    def hook(_module: Any, args: Any, kwargs: Any) -> None:
        seen["positions"] = kwargs["position_ids"] if "position_ids" in kwargs else args[1]

    handle = None if rotary is None else rotary.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def widened(values: Array | None) -> torch.Tensor:
    """In float64."""
    assert values is not None
    return torch.from_numpy(values).double()


def _first(output: Any) -> torch.Tensor:
    """The first output."""
    return output if isinstance(output, torch.Tensor) else output[0]


def _array(tensor: torch.Tensor) -> Array:
    return tensor.detach().float().contiguous().numpy().copy()
