"""Gemma 3: SigLIP's rows anywhere in the prompt of a Gemma, those of a picture seeing each other (arXiv 2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...runtime.common.errors import UnsupportedModelError
from ...runtime.decoder.prompt_chunks import Block
from ...runtime.families.base import image_list
from ...runtime.families.gemma3 import BEGIN, END, pictures
from ..checkpoint.checkpoint import Checkpoint
from .common.base import Family
from .common.config_checks import check_language_model
from .common.parts import ReferencePrompt
from .common.prompt_text import marked_text, token_runs
from .languages.gemma3_text import Gemma3Language
from .vision.gemma3 import Gemma3Vision


class Gemma3Family(Family):
    """Exports Gemma3ForConditionalGeneration."""

    name: ClassVar[str] = "gemma3"
    architectures: ClassVar[tuple[str, ...]] = ("Gemma3ForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("gemma3",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config = self.config.text_config
        check_language_model(config, checkpoint.architecture, [Gemma3Language.name])
        self.language = Gemma3Language(checkpoint, config, "", "model.language_model.")
        self.vision: Gemma3Vision = Gemma3Vision(checkpoint, self.language.decoder.hidden_size)
        self.language.decoder = replace(self.language.decoder, max_block=self.vision.num_embeds)

    @property
    def image_token_id(self) -> int:
        """`<image_soft_token>`."""
        return self.config.image_token_id

    def text(self) -> dict[str, Any]:
        """See `Family`. Raises UnsupportedModelError for a processor that writes other tokens around a picture, or more of
        them."""
        tokenizer = self.checkpoint.tokenizer
        for name, known in (("boi_token", BEGIN), ("eoi_token", END)):
            if (token := getattr(tokenizer, name, None)) != known:
                raise UnsupportedModelError(
                    f"the tokenizer's {name}={token!r:.80} is not supported, only {known!r}"
                )
        count = self.checkpoint.processor_settings.get("image_seq_length", self.vision.num_embeds)
        if count != self.vision.num_embeds:
            raise UnsupportedModelError(
                f"processor_config.json: image_seq_length={count!r:.40} differs from mm_tokens_per_image="
                f"{self.vision.num_embeds}"
            )
        return super().text()

    def blocks(self, inputs: Mapping[str, torch.Tensor]) -> list[list[Block]]:
        """The rows of each picture; between two pictures stands text."""
        token, ids = self.image_token_id, inputs["input_ids"].tolist()
        return [[(first, end) for _, first, end in token_runs(row, [token])] for row in ids]

    def forward_arguments(
        self, input_ids: torch.Tensor, prompts: Sequence[slice] = ()
    ) -> dict[str, torch.Tensor]:
        """`token_type_ids`: which tokens are a picture's."""
        return {"token_type_ids": (input_ids == self.image_token_id).long()}

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """`Gemma3Processor`: the chat template where there is one, each picture between the tokens around it."""
        processor, images = self.checkpoint.processor, image_list(image)
        text, surrounded = marked_text(self, prompt, ["image"] * len(images), pictures(""))
        made = processor(
            images=[images] if images else None,
            text=[text],
            return_tensors="pt",
            add_special_tokens=surrounded,
        )
        ids = tuple(made["input_ids"][0].tolist())
        return ReferencePrompt(ids, self.vision.tensors(made) if images else None)
