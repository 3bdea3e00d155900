"""LLaVA-1.5: image embeddings anywhere in the prompt of a Llama (Liu et al., arXiv 2310.03744)."""

from __future__ import annotations

from typing import Any, ClassVar

from ...runtime.common.errors import InputError
from ...runtime.families.base import image_list
from ...runtime.families.llava import pictures
from ..checkpoint.checkpoint import Checkpoint
from .common.base import Family
from .common.config_checks import check_language_model
from .common.parts import ReferencePrompt
from .common.prompt_text import marked_text
from .languages.llama import LlamaLanguage
from .vision.clip import ClipVision


class LlavaFamily(Family):
    """Exports LlavaForConditionalGeneration of CLIP and Llama (Vicuna)."""

    name: ClassVar[str] = "llava"
    architectures: ClassVar[tuple[str, ...]] = ("LlavaForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("llava",)
    tower: ClassVar[Any] = ClipVision

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config = self.config.text_config
        check_language_model(config, checkpoint.architecture, ["llama"])
        self.language = LlamaLanguage(checkpoint, config, "", "model.language_model.")
        self.vision: ClipVision = self.tower(checkpoint, self.language.decoder.hidden_size)

    @property
    def image_token_id(self) -> int:
        """The processor's `<image>`."""
        return self.config.image_token_id

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """`LlavaProcessor`: the chat template where there is one, `<image>` repeated for every embedding of a picture."""
        processor, images = self.checkpoint.processor, image_list(image)
        if processor.patch_size is None:  # folders of older releases leave these to the configuration
            processor.patch_size = self.config.vision_config.patch_size
        if "num_additional_image_tokens" not in self.checkpoint.processor_settings:
            processor.num_additional_image_tokens = 1  # the tower's class token
        if processor.vision_feature_select_strategy is None:
            processor.vision_feature_select_strategy = self.config.vision_feature_select_strategy
        kinds = ["image"] * len(images)
        text, surrounded = marked_text(self, prompt, kinds, pictures(processor.image_token))
        made = processor(images=images or None, text=text, return_tensors="pt", add_special_tokens=surrounded)
        ids = tuple(made["input_ids"][0].tolist())
        if not ids:
            raise InputError("the prompt has no tokens; write some text")
        return ReferencePrompt(ids, self.vision.tensors(made) if images else None)
