"""The language model of Qwen2.5-VL: a Qwen2 whose rotary positions have three axes (M-RoPE; Bai et al., arXiv
2502.13923)."""

from __future__ import annotations

import copy
import functools
from typing import Any, ClassVar

import torch
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from ....runtime.common.errors import UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.hooks import ATTENTION
from ...graphs.meta_model import hollow_model
from .llama import LlamaLanguage


class Qwen2_5_VLLanguage(LlamaLanguage):
    """See the module; transformers has no class of it with a head, so it is taken out of the whole model."""

    name: ClassVar[str] = "qwen2_5_vl_text"
    kind: ClassVar[Any] = Qwen2_5_VLForConditionalGeneration
    layers_path: ClassVar[str] = "model.language_model.layers"
    norm_path: ClassVar[str] = "model.language_model.norm"
    embed_path: ClassVar[str] = "model.language_model.embed_tokens"
    position: ClassVar[str] = "mrope"
    modeling: ClassVar[Any] = modeling_qwen2_5_vl
    norm: ClassVar[Any] = modeling_qwen2_5_vl.Qwen2_5_VLRMSNorm
    angles: ClassVar[Any] = modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str, body: str = "model.") -> None:
        super().__init__(checkpoint, config, prefix, body)
        self.check_sections((config.rope_parameters or {}).get("mrope_section"))

    def check_sections(self, sections: Any) -> None:
        """Raises UnsupportedModelError for sizes of the axes' sections that are none."""
        half = self.decoder.head_dim // 2
        if not isinstance(sections, list) or len(sections) != 3 or sum(sections) != half:
            raise UnsupportedModelError(
                f"{self.kind.__name__}: mrope_section {sections!r:.80} is not three numbers whose sum is {half}, half a head"
            )

    @functools.cached_property
    def model(self) -> Any:
        """The whole model, hollow, with one vision block."""
        config = copy.deepcopy(self.checkpoint.config)
        config.vision_config.depth = 1
        for part in (config, config.text_config, config.vision_config):
            part._attn_implementation = ATTENTION
            part.dtype = torch.float32  # graphs are traced so, whatever type a part was published in
        return hollow_model(lambda: self.kind(config))
