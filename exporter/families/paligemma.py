"""PaliGemma and PaliGemma 2: SigLIP's rows in front of the prompt of a Gemma, which sees all of itself (arXiv 2407.07726,
2412.03555).

A prompt is a prefix whose positions see each other in both directions, whatever the window of a layer; what is generated
behind it is causal. Positions count from 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...runtime.common.errors import InputError, UnsupportedModelError
from ...runtime.decoder.prompt_chunks import Block
from ...runtime.families.base import image_list
from ...runtime.families.paligemma import FIRST_POSITION
from ..checkpoint.checkpoint import Checkpoint
from .common.base import Family
from .common.config_checks import check_language_model
from .common.parts import Parts, ReferencePrompt
from .languages.gemma import GemmaLanguage
from .languages.gemma2 import Gemma2Language
from .vision.paligemma import PaliGemmaVision

LANGUAGES: dict[str, type[GemmaLanguage]] = {each.name: each for each in (GemmaLanguage, Gemma2Language)}
MARKS = ["<image>", *(f"<loc{i:04}>" for i in range(1024)), *(f"<seg{i:03}>" for i in range(128))]
"""Tokens that `PaliGemmaProcessor` adds to a tokenizer without them."""


class PaliGemmaFamily(Family):
    """Exports PaliGemmaForConditionalGeneration of SigLIP and Gemma or Gemma 2."""

    name: ClassVar[str] = "paligemma"
    architectures: ClassVar[tuple[str, ...]] = ("PaliGemmaForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("paligemma",)
    needs_picture: ClassVar[bool] = True
    whole_prompt: ClassVar[bool] = True
    first_position: ClassVar[int] = FIRST_POSITION

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config = self.config.text_config
        check_language_model(config, checkpoint.architecture, LANGUAGES)
        self.language = LANGUAGES[config.model_type](checkpoint, config, "", "model.language_model.")
        self.language.decoder = replace(self.language.decoder, whole_blocks=True)
        self.vision: PaliGemmaVision = PaliGemmaVision(checkpoint, self.language.decoder.hidden_size)

    @property
    def image_token_id(self) -> int:
        """`<image>`."""
        return self.config.image_token_id

    @property
    def chat_template(self) -> None:
        """There is none: see `text`."""
        return None

    def text(self) -> dict[str, Any]:
        """See `Family`. Raises UnsupportedModelError for a processor that writes a picture as other tokens or more of them, for
        a tokenizer without the tokens that the processor would add, and for a chat template."""
        tokenizer, settings = self.checkpoint.tokenizer, self.checkpoint.image_settings
        if super().chat_template is not None:
            raise UnsupportedModelError(f"{self.checkpoint.architecture}: a chat template is not supported")
        added = tokenizer.get_added_vocab()
        lacking = [mark for mark in MARKS if mark not in added]
        if lacking or added["<image>"] != self.image_token_id:
            raise UnsupportedModelError(
                f"the tokenizer has no added token {lacking[0]!r}; save the model's processor into its folder"
                if lacking
                else f"config.json: image_token_id={self.image_token_id} is not the tokenizer's '<image>'"
            )
        if (mark := getattr(tokenizer, "image_token", None) or "<image>") != "<image>":
            raise UnsupportedModelError(
                f"the tokenizer's image_token={mark!r:.80} is not supported, only '<image>'"
            )
        if tokenizer.bos_token is None:
            raise UnsupportedModelError("the tokenizer has no bos_token, which begins the text of a prompt")
        count = settings.get("image_seq_length", self.vision.num_embeds)
        if count != self.vision.num_embeds:
            raise UnsupportedModelError(
                f"image processor: image_seq_length={count!r:.40} differs from the {self.vision.num_embeds} rows of a picture"
            )
        return super().text()

    def parts(self, model: Any) -> Parts:
        """See `Family`; positions do not count from 0."""
        return replace(super().parts(model), rotary=model.model.language_model.rotary_emb)

    def blocks(self, inputs: Mapping[str, torch.Tensor]) -> list[list[Block]]:
        """The whole prompt; without `token_type_ids` everything is one."""
        kinds = inputs.get("token_type_ids")
        rows = torch.zeros_like(inputs["input_ids"]) if kinds is None else kinds
        return [[(0, int((row == 0).sum()))] for row in rows]

    def forward_arguments(
        self, input_ids: torch.Tensor, prompts: Sequence[slice] = ()
    ) -> dict[str, torch.Tensor]:
        """`token_type_ids`: 0 for a prompt, 1 for what is behind it."""
        kinds = torch.ones_like(input_ids)
        for row, prompt in zip(kinds, prompts, strict=True):
            row[prompt] = 0
        return {"token_type_ids": kinds}

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """`PaliGemmaProcessor`: pictures, the begin token, text and a line end. Raises InputError without a picture."""
        images = image_list(image)
        if not images:
            raise InputError("this model reads no text without a picture: give one")
        if isinstance(prompt, list):
            raise InputError("this model has no chat template: give the prompt as text")
        text = prompt or ""
        if MARKS[0] not in text:  # as the processor does, which then warns of it
            text = MARKS[0] * len(images) + text
        made = self.checkpoint.processor(images=[images], text=[text], return_tensors="pt")
        ids = tuple(made["input_ids"][0].tolist())
        positions = torch.arange(FIRST_POSITION, FIRST_POSITION + len(ids))[None]
        return ReferencePrompt(ids, self.vision.tensors(made), positions=positions)
