"""What transformers says: plain forward passes and `generate`, eager attention, float32, no cache, no code of ours but the
rounding of matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D
from vlmexport.exporter.quantization.blocks import dequantize, quantize

NORMS = ("norm", "ln_f", "final_layer_norm", "embedding_norm")
"""What decoders call their final norm."""

NEVER = 10**6
"""An end token that no model has."""


@dataclass(frozen=True, eq=False)
class Request:
    """`token_ids` with special tokens and image tokens; `vision`, what the model's own forward takes of a picture, or None.

    Where every row that the decoder sees is an image row (no text encoder), `token_ids` only say how many there are. Of a model
    whose prompts begin with a part that sees itself in both directions, `prefix` says how long that is.
    """

    token_ids: tuple[int, ...]
    vision: Mapping[str, np.ndarray] | None = None
    prefix: int | None = None

    @cached_property
    def _key(self) -> tuple[object, ...]:
        seen = sorted((self.vision or {}).items())
        return (
            self.token_ids,
            self.prefix,
            tuple((name, values.shape, values.tobytes()) for name, values in seen),
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and self._key == other._key


class Oracle:
    """One checkpoint folder in transformers."""

    def __init__(self, folder: Path, weights: str | None = None) -> None:
        """`weights`: the kind of integers that its matrices are rounded to, and read as floats again."""
        config = AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, (config.architectures or [""])[0])
        self.model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        paths = {"blip-2": "language_model", "vision-encoder-decoder": "decoder"}
        self.text = self.model.get_submodule(paths.get(config.model_type, ""))
        self.stack = self.text.get_decoder()
        """The module that `layers` belong to."""
        named = dict(self.stack.named_children())
        self.layers: Any = next(child for child in named.values() if isinstance(child, torch.nn.ModuleList))
        self.norm = next(named[name] for name in NORMS if name in named)
        self.reads_text = config.model_type != "vision-encoder-decoder"
        self.encoder_decoder = not self.reads_text or bool(self.text.config.is_encoder_decoder)
        if weights is not None:
            layers = next(name for name, module in self.text.named_modules() if module is self.layers)
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

    def inputs(self, request: Request, tokens: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
        """Arguments of `generate`, or with `tokens` behind the prompt of `forward`."""
        inputs: dict[str, torch.Tensor] = {}
        behind = () if tokens is None or self.encoder_decoder else tokens
        if self.reads_text:
            ids = torch.tensor([[*request.token_ids, *behind]])
            inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name, values in (request.vision or {}).items():
            inputs[name] = torch.from_numpy(values)
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in signature(self.model.forward).parameters:
                ids = inputs["input_ids"]
                inputs[name] = (
                    (ids == self.model.config.image_token_id).long()
                    if request.prefix is None
                    else (torch.arange(ids.shape[1])[None] >= request.prefix).long()
                )
        if tokens is not None and self.encoder_decoder:
            inputs["decoder_input_ids"] = torch.tensor([[self.start, *tokens]])
        return inputs

    @lru_cache(maxsize=4096)  # noqa: B019 - lives as long as the test session
    def logits(self, request: Request, tokens: tuple[int, ...]) -> np.ndarray:
        """Row j judges the token after `tokens[:j]`; float32 [len(tokens) + 1, V]. One forward over the whole prefix."""
        with torch.inference_mode():
            out = self.model(**self.inputs(request, tokens), use_cache=False).logits[0].numpy()
        return out if self.encoder_decoder else out[len(request.token_ids) - 1 :]

    @lru_cache(maxsize=1024)  # noqa: B019
    def greedy(self, request: Request, count: int, eos: int = NEVER) -> tuple[int, ...]:
        """Tokens of `generate(do_sample=False)`, the end token included when it was reached."""
        with torch.inference_mode():
            out = self.model.generate(
                **self.inputs(request), do_sample=False, max_new_tokens=count, eos_token_id=eos, pad_token_id=0,
            )[0].tolist()  # fmt: skip
        tokens = out[1:] if self.encoder_decoder else out[len(request.token_ids) :]
        return tuple(tokens)

    def token_after(self, request: Request, tokens: Sequence[int]) -> int:
        """The greedy token after `tokens`."""
        return int(self.logits(request, tuple(tokens))[-1].argmax())

    @lru_cache(maxsize=1024)  # noqa: B019
    def hidden(self, request: Request, tokens: tuple[int, ...], layer: int) -> torch.Tensor:
        """The last row [1, E] after decoder layer `layer`, before any final norm."""
        return self.rows_after(request, tokens, layer)[-1:]

    def positions(self, request: Request, tokens: Sequence[int]) -> torch.Tensor:
        """Positions with axes int64 [axes, 1, n] of the prompt and `tokens`, as its rotary module is given them."""
        seen: list[torch.Tensor] = []
        hook = self.stack.rotary_emb.register_forward_pre_hook(
            lambda _module, given, named: seen.append(
                named["position_ids"] if "position_ids" in named else given[1]
            ),
            with_kwargs=True,
        )
        try:
            with torch.inference_mode():
                self.model(**self.inputs(request, tuple(tokens)), use_cache=False)
        finally:
            hook.remove()
        return seen[0].clone()

    def rows_after(self, request: Request, tokens: Sequence[int], layer: int) -> torch.Tensor:
        """Rows [n, E] after decoder layer `layer` at every position up to the last of `tokens`: what the next layer reads,
        or the final norm."""
        seen: list[torch.Tensor] = []
        reader = self.layers[layer] if layer < len(self.layers) else self.norm
        hook = reader.register_forward_pre_hook(
            lambda _module, given, named: seen.append(given[0] if given else named["hidden_states"]),
            with_kwargs=True,
        )
        try:
            with torch.inference_mode():
                self.model(**self.inputs(request, tuple(tokens)), use_cache=False)
        finally:
            hook.remove()
        return seen[0][0].clone()

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
                self.model(**self.inputs(request, tuple(tokens)), use_cache=False)
        finally:
            hook.remove()
        return seen[0][0].clone(), self.text.lm_head.weight

    def judge(self, rows: torch.Tensor) -> np.ndarray:
        """Rows [n, E] through the final norm and the head; float32 [n, V]."""
        with torch.inference_mode():
            rows = self.norm(rows)
            if getattr(self.text.config, "scale_decoder_outputs", False):
                rows = rows * self.text.model_dim**-0.5
            logits = self.text.lm_head(rows)
            cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
            return (logits if cap is None else (logits / cap).tanh() * cap).numpy()
