"""What transformers says: plain forward passes and `generate`, eager attention, float32, no cache, no code of ours but the
rounding of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    Blip2ForConditionalGeneration,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2ForCausalLM,
    T5ForConditionalGeneration,
    VisionEncoderDecoderModel,
)
from transformers.pytorch_utils import Conv1D
from vlmexport.exporter.quantization.blocks import dequantize, quantize

CLASSES: dict[str, Any] = {
    "blip-2": Blip2ForConditionalGeneration,
    "llama": LlamaForCausalLM,
    "llava": LlavaForConditionalGeneration,
    "llava_next": LlavaNextForConditionalGeneration,
    "qwen2": Qwen2ForCausalLM,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "t5": T5ForConditionalGeneration,
    "vision-encoder-decoder": VisionEncoderDecoderModel,
}
"""`model_type` → class. A new family is one line here."""

PARTS = {
    "llama": ("model.layers", "model.norm"),
    "llava": ("model.language_model.layers", "model.language_model.norm"),
    "llava_next": ("model.language_model.layers", "model.language_model.norm"),
    "qwen2": ("model.layers", "model.norm"),
    "qwen2_5_vl": ("model.language_model.layers", "model.language_model.norm"),
    "opt": ("model.decoder.layers", "model.decoder.final_layer_norm"),
    "gpt2": ("transformer.h", "transformer.ln_f"),
    "t5": ("decoder.block", "decoder.final_layer_norm"),
}
"""`model_type` of a model, or of its language model → where its layers and its final norm are."""

NEVER = 10**6
"""An end token that no model has."""


@dataclass(frozen=True)
class Request:
    """`token_ids` with special tokens and image tokens; `pixels` float32 [3, H, W] or None. A picture of any size is
    patches [n, values] and a `grid` of (rows, columns) that the decoder sees, or tiles [n, 3, H, W] and the `size`
    (height, width) that it had.

    Where every row that the decoder sees is an image row (no text encoder), `token_ids` only say how many there are.
    """

    token_ids: tuple[int, ...]
    pixels: np.ndarray | None = None
    grid: tuple[int, int] | None = None
    size: tuple[int, int] | None = None

    def __hash__(self) -> int:
        pixels = None if self.pixels is None else self.pixels.tobytes()
        return hash((self.token_ids, self.grid, self.size, pixels))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and hash(self) == hash(other)


class Oracle:
    """One checkpoint folder in transformers."""

    def __init__(self, folder: Path, weights: str | None = None) -> None:
        """`weights`: the kind of integers that its matrices are rounded to, and read as floats again."""
        kind = AutoConfig.from_pretrained(folder).model_type
        self.model = (
            CLASSES[kind].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        )
        paths = {"blip-2": "language_model", "vision-encoder-decoder": "decoder"}
        self.text = self.model.get_submodule(paths.get(kind, ""))
        layers, norm = PARTS[kind if kind in PARTS else self.text.config.model_type]
        self.layers, self.norm = self.text.get_submodule(layers), self.text.get_submodule(norm)
        self.stack = self.text.get_submodule(layers.rpartition(".")[0])
        """The module that `layers` belong to."""
        self.reads_text = kind != "vision-encoder-decoder"
        self.encoder_decoder = not self.reads_text or bool(self.text.config.is_encoder_decoder)
        if weights is not None:
            self._round(f"{layers}.", weights)

    def _round(self, layers: str, kind: str) -> None:
        """As `vlmexport build --weights` says: linear modules of the layers, a text encoder's too, and an LM head of 8
        bits, which an embedding table shares that is tied to it. In place, for the table's sake."""
        for path, module in self.text.named_modules():
            head = path == "lm_head"
            if not head and not path.startswith((layers, "encoder.block.")):
                continue
            if isinstance(module, torch.nn.Linear | Conv1D):
                by_row = module.weight.data.t() if isinstance(module, Conv1D) else module.weight.data
                by_row.copy_(dequantize(*quantize(by_row.contiguous(), "int8" if head else kind)))

    @property
    def start(self) -> int:
        """The token that an encoder-decoder's decoder starts with."""
        config = self.model.config if not self.reads_text else self.text.config
        return config.decoder_start_token_id

    def _inputs(self, request: Request, tokens: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
        """Arguments of `generate`, or with `tokens` behind the prompt of `forward`."""
        inputs: dict[str, torch.Tensor] = {}
        behind = () if tokens is None or self.encoder_decoder else tokens
        if self.reads_text:
            ids = torch.tensor([[*request.token_ids, *behind]])
            inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if request.grid is not None:
            assert request.pixels is not None
            merge = self.model.config.vision_config.spatial_merge_size
            inputs["pixel_values"] = torch.from_numpy(request.pixels)
            inputs["image_grid_thw"] = torch.tensor([[1, *(merge * side for side in request.grid)]])
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.model.config.image_token_id).long()
        elif request.size is not None:
            inputs["pixel_values"] = torch.from_numpy(request.pixels)
            inputs["image_sizes"] = torch.tensor([request.size])
        elif request.pixels is not None:
            inputs["pixel_values"] = torch.from_numpy(request.pixels)[None]
        if tokens is not None and self.encoder_decoder:
            inputs["decoder_input_ids"] = torch.tensor([[self.start, *tokens]])
        return inputs

    @lru_cache(maxsize=4096)  # noqa: B019 - lives as long as the test session
    def logits(self, request: Request, tokens: tuple[int, ...]) -> np.ndarray:
        """Row j judges the token after `tokens[:j]`; float32 [len(tokens) + 1, V]. One forward over the whole prefix."""
        with torch.inference_mode():
            out = self.model(**self._inputs(request, tokens), use_cache=False).logits[0].numpy()
        return out if self.encoder_decoder else out[len(request.token_ids) - 1 :]

    @lru_cache(maxsize=1024)  # noqa: B019
    def greedy(self, request: Request, count: int, eos: int = NEVER) -> tuple[int, ...]:
        """Tokens of `generate(do_sample=False)`, the end token included when it was reached."""
        with torch.inference_mode():
            out = self.model.generate(
                **self._inputs(request), do_sample=False, max_new_tokens=count, eos_token_id=eos, pad_token_id=0,
            )[0].tolist()  # fmt: skip
        tokens = out[1:] if self.encoder_decoder else out[len(request.token_ids) :]
        return tuple(tokens)

    def token_after(self, request: Request, tokens: Sequence[int]) -> int:
        """The greedy token after `tokens`."""
        return int(self.logits(request, tuple(tokens))[-1].argmax())

    @lru_cache(maxsize=1024)  # noqa: B019
    def hidden(self, request: Request, tokens: tuple[int, ...], layer: int) -> torch.Tensor:
        """The last row [1, E] after decoder layer `layer`, before any final norm."""
        seen: list[Any] = []
        hook = self.layers[layer - 1].register_forward_hook(lambda module, args, out: seen.append(out))
        try:
            with torch.inference_mode():
                self.model(**self._inputs(request, tokens), use_cache=False)
        finally:
            hook.remove()
        out = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
        return out[0, -1:].clone()

    def rows_after(self, request: Request, tokens: Sequence[int], layer: int) -> torch.Tensor:
        """Rows [n, E] after decoder layer `layer` at every position up to the last of `tokens`."""
        seen: list[Any] = []
        hook = self.layers[layer - 1].register_forward_hook(lambda module, args, out: seen.append(out))
        try:
            with torch.inference_mode():
                self.model(**self._inputs(request, tuple(tokens)), use_cache=False)
        finally:
            hook.remove()
        return (seen[0][0] if isinstance(seen[0], tuple) else seen[0])[0].clone()

    def final_row(self, request: Request, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the LM head reads for the token after `tokens`, [1, E], and its table [V, E]."""
        rows, table = self.final_rows(request, tokens)
        return rows[-1:].clone(), table

    def final_rows(self, request: Request, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the LM head reads at every position up to the last of `tokens`, [n, E], and its table [V, E]."""
        seen: list[torch.Tensor] = []
        hook = self.text.lm_head.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
        try:
            with torch.inference_mode():
                self.model(**self._inputs(request, tuple(tokens)), use_cache=False)
        finally:
            hook.remove()
        return seen[0][0].clone(), self.text.lm_head.weight

    def judge(self, rows: torch.Tensor) -> np.ndarray:
        """Rows [n, E] through the final norm and the head; float32 [n, V]."""
        with torch.inference_mode():
            rows = self.norm(rows)
            if getattr(self.text.config, "scale_decoder_outputs", False):
                rows = rows * self.text.model_dim**-0.5
            return self.text.lm_head(rows).numpy()
