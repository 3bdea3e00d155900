"""One forward pass of the reference, with everything recorded that a graph takes or gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...runtime.errors import ExportError
from ..checkpoint import Checkpoint

Array = np.ndarray


@dataclass
class Captured:
    """What the reference computed. `residuals[i]` enters layer i (key L: enters the final norm), [B, N, E].

    `keys`/`values` and `cross_keys`/`cross_values` are per layer, [B, heads, rows, D]; masks are as the graphs take them.
    """

    name: str
    token_ids: Array
    embedded: Array
    residuals: dict[int, Array]
    keys: list[Array]
    values: list[Array]
    logits: Array
    pixel_values: Array | None = None
    image_rows: Array | None = None
    encoder_rows: Array | None = None
    encoder_mask: Array | None = None
    encoder_states: Array | None = None
    source_visible: Array | None = None
    cross_keys: list[Array] = field(default_factory=list)
    cross_values: list[Array] = field(default_factory=list)
    bias: Array | None = None
    """T5's decoder bias [1, heads, N + spare, N + spare]."""


SPARE = 3  # cache rows beyond the sequence, filled with noise that the mask must hide


def capture(
    model: Any,
    checkpoint: Checkpoint,
    manifest: dict[str, Any],
    name: str,
    cuts: Sequence[int],
    rows: int,
    seed: int = 11,
) -> Captured:
    """Runs the reference on the `random` (batch 2, padded source) or `realistic` (batch 1) input."""
    with torch.no_grad():
        if manifest["decoder"]["cross_attention"]:
            return _encoder_decoder(model, checkpoint, manifest, name, cuts, rows, seed)
        ids = _token_ids(checkpoint, manifest, name, rows, seed)
        layers, norm = model.model.layers, model.model.norm
        with _Recorder(layers, norm, cuts) as recorder:
            output = model(input_ids=ids, use_cache=True)
        cache = output.past_key_values
        return Captured(
            name,
            ids.numpy(),
            model.get_input_embeddings()(ids).numpy(),
            recorder.residuals,
            [_array(layer.keys) for layer in cache.layers],
            [_array(layer.values) for layer in cache.layers],
            _array(output.logits),
        )


def _encoder_decoder(
    model: Any,
    checkpoint: Checkpoint,
    manifest: dict[str, Any],
    name: str,
    cuts: Sequence[int],
    rows: int,
    seed: int,
) -> Captured:
    language = getattr(model, "language_model", model)
    text = manifest["text"]
    ids = _token_ids(checkpoint, manifest, name, rows, seed)
    start = torch.full((ids.shape[0], 1), text["decoder_start_token_id"])
    decoder_ids = torch.cat([start, _token_ids(checkpoint, manifest, name, rows, seed + 1)[:, : rows - 1]], 1)
    mask = torch.ones_like(ids)
    if ids.shape[0] > 1:
        mask[1, -3:] = 0
    arguments: dict[str, Any] = {}
    pixels = None
    if text.get("image_rows"):
        pixels = _pixels(manifest["image"], name, ids.shape[0], seed)
        slots = torch.full((ids.shape[0], text["image_rows"]), text["image_token_id"])
        ids, mask = torch.cat([slots, ids], 1), torch.cat([torch.ones_like(slots), mask], 1)
        arguments["pixel_values"] = pixels
    seen: dict[str, Any] = {}
    hooks = [
        language.encoder.register_forward_pre_hook(
            lambda m, a, k: seen.update(rows=k["inputs_embeds"]), with_kwargs=True
        ),
        language.encoder.register_forward_hook(lambda m, a, o: seen.update(states=o[0])),
    ]
    if pixels is not None:
        hooks.append(model.language_projection.register_forward_hook(lambda m, a, o: seen.update(image=o)))
    if "inputs_embeds" not in arguments and pixels is None:
        arguments["inputs_embeds"] = language.get_input_embeddings()(ids)
    else:
        arguments["input_ids"] = ids
    try:
        with _Recorder(language.decoder.block, language.decoder.final_layer_norm, cuts) as recorder:
            output = model(attention_mask=mask, decoder_input_ids=decoder_ids, use_cache=True, **arguments)
    finally:
        for hook in hooks:
            hook.remove()
    output = getattr(output, "language_model_outputs", None) or output
    own, cross = output.past_key_values.self_attention_cache, output.past_key_values.cross_attention_cache
    source = ids.shape[1]
    hidden = torch.where(mask[:, None, None, :] > 0, 0.0, torch.finfo(torch.float32).min)
    encoder_bias = language.encoder.block[0].layer[0].SelfAttention.compute_bias(source, source, device="cpu")
    count = decoder_ids.shape[1] + SPARE
    bias = language.decoder.block[0].layer[0].SelfAttention.compute_bias(count, count, device="cpu")
    return Captured(
        name,
        decoder_ids.numpy(),
        language.get_input_embeddings()(decoder_ids).numpy(),
        recorder.residuals,
        [_array(layer.keys) for layer in own.layers],
        [_array(layer.values) for layer in own.layers],
        _array(output.logits),
        pixel_values=None if pixels is None else pixels.numpy(),
        image_rows=_array(seen["image"]) if pixels is not None else None,
        encoder_rows=_array(seen["rows"]),
        encoder_mask=_array(torch.clamp(encoder_bias + hidden, min=torch.finfo(torch.float32).min)),
        encoder_states=_array(seen["states"]),
        source_visible=mask.numpy() > 0,
        cross_keys=[_array(layer.keys) for layer in cross.layers],
        cross_values=[_array(layer.values) for layer in cross.layers],
        bias=_array(bias),
    )


class _Recorder:
    """Records what enters the layers at the cuts, and the final norm."""

    def __init__(self, layers: Any, norm: Any, cuts: Sequence[int]) -> None:
        self.residuals: dict[int, Array] = {}
        self._modules = [(i, layers[i]) for i in cuts if i < len(layers)] + [(len(layers), norm)]
        self._hooks: list[Any] = []

    def __enter__(self) -> _Recorder:
        for index, module in self._modules:

            def hook(_module: Any, args: Any, kwargs: Any, index: int = index) -> None:
                value = args[0] if args else kwargs["hidden_states"]
                self.residuals[index] = _array(value)

            # Before a hook that loads parameters: a recorded input does not depend on them.
            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()


def _array(tensor: torch.Tensor) -> Array:
    return tensor.detach().float().contiguous().numpy().copy()


SENTENCE = (
    "a small robot puts the red cube on the table next to the blue cup , then it looks at the green ball . "
)


def _token_ids(
    checkpoint: Checkpoint, manifest: dict[str, Any], name: str, rows: int, seed: int
) -> torch.Tensor:
    """[batch, rows] token ids: random ones (batch 2), or of a sentence (batch 1)."""
    text = manifest["text"]
    barred = {text.get("image_token_id"), text.get("pad_token_id"), *text["eos_token_ids"]}
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.tensor([i for i in range(text["vocab_size"]) if i not in barred])
    if name == "random":
        return allowed[torch.randint(len(allowed), (2, rows), generator=generator)]
    prompt = f"{text.get('default_prompt') or ''} {SENTENCE * (1 + rows // 8)}"
    ids = [i for i in checkpoint.tokenizer(prompt, add_special_tokens=False)["input_ids"] if i not in barred]
    if len(ids) < rows:
        raise ExportError(
            f"the tokenizer of {checkpoint.folder} turns a sentence into {len(ids)} tokens; is it the model's own?"
        )
    offset = seed % max(1, min(5, len(ids) - rows))
    return torch.tensor([ids[offset : offset + rows]])


def sample_picture(height: int, width: int) -> Array:
    """A uint8 [height, width, 3] picture of coloured boxes on a shaded ground."""
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([90 + 100 * y / height, 80 + 100 * x / width, np.full((height, width), 120.0)], -1)
    for k, color in enumerate([(200, 30, 30), (30, 60, 200), (40, 160, 60)]):
        top, left = height * (1 + k) // 5, width * (1 + 2 * k) // 8
        picture[top : top + height // 5, left : left + width // 5] = color
    return picture.astype(np.uint8)


def _pixels(image: dict[str, Any], name: str, batch: int, seed: int) -> torch.Tensor:
    height, width = image["height"], image["width"]
    if name == "random":
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, 3, height, width, generator=generator)
    values = sample_picture(height, width) * image["rescale_factor"]
    values = (values - np.array(image["mean"])) / np.array(image["std"])
    return torch.tensor(values.transpose(2, 0, 1)[None], dtype=torch.float32)
