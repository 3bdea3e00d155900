"""What transformers says: plain forward passes and `generate`, eager attention, float32, no cache, no code of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, Blip2ForConditionalGeneration, LlamaForCausalLM

CLASSES: dict[str, Any] = {"blip-2": Blip2ForConditionalGeneration, "llama": LlamaForCausalLM}
"""`model_type` → class. A new family is one line here."""

NEVER = 10**6
"""An end token that no model has."""


@dataclass(frozen=True)
class Request:
    """`token_ids` with special tokens and image tokens; `pixel_values` float32 [3, H, W] or None."""

    token_ids: tuple[int, ...]
    pixels: np.ndarray | None = None

    def __hash__(self) -> int:
        return hash((self.token_ids, None if self.pixels is None else self.pixels.tobytes()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and hash(self) == hash(other)


class Oracle:
    """One checkpoint folder in transformers."""

    def __init__(self, folder: Path) -> None:
        kind = AutoConfig.from_pretrained(folder).model_type
        self.model = (
            CLASSES[kind].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        )
        self.encoder_decoder = kind == "blip-2"

    def _inputs(self, request: Request) -> dict[str, torch.Tensor]:
        ids = torch.tensor([request.token_ids])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if request.pixels is not None:
            inputs["pixel_values"] = torch.from_numpy(request.pixels)[None]
        return inputs

    @lru_cache(maxsize=4096)  # noqa: B019 - lives as long as the test session
    def logits(self, request: Request, tokens: tuple[int, ...]) -> np.ndarray:
        """Row j judges the token after `tokens[:j]`; float32 [len(tokens) + 1, V]. One forward over the whole prefix."""
        inputs = self._inputs(request)
        with torch.inference_mode():
            if self.encoder_decoder:
                start = self.model.config.text_config.decoder_start_token_id
                inputs["decoder_input_ids"] = torch.tensor([[start, *tokens]])
                return self.model(**inputs).logits[0].numpy()
            ids = torch.tensor([[*request.token_ids, *tokens]])
            out = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        return out[len(request.token_ids) - 1 :].numpy()

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
        inputs = self._inputs(request)
        with torch.inference_mode():
            if self.encoder_decoder:
                start = self.model.config.text_config.decoder_start_token_id
                inputs["decoder_input_ids"] = torch.tensor([[start, *tokens]])
                block = self.model.language_model.decoder.block[layer - 1]
            else:
                ids = torch.tensor([[*request.token_ids, *tokens]])
                inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                block = self.model.model.layers[layer - 1]
            seen: list[Any] = []
            hook = block.register_forward_hook(lambda module, args, out: seen.append(out))
            try:
                self.model(**inputs)
            finally:
                hook.remove()
        out = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
        return out[0, -1:].clone()

    def judge(self, rows: torch.Tensor) -> np.ndarray:
        """Rows [n, E] through the final norm and the head; float32 [n, V]."""
        with torch.inference_mode():
            if not self.encoder_decoder:
                return self.model.lm_head(self.model.model.norm(rows)).numpy()
            text = self.model.language_model
            rows = text.decoder.final_layer_norm(rows)
            if text.config.scale_decoder_outputs:
                rows = rows * text.model_dim**-0.5
            return text.lm_head(rows).numpy()
