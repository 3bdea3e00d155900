"""The language model of Qwen3-VL: a Qwen3, whose queries and keys are normed head by head, with rotary positions of three
axes that are interleaved, and embeddings of pictures that are added behind its first layers (DeepStack, arXiv 2406.04334)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl import modeling_qwen3_vl

from ....runtime.common.errors import UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.hooks import replaced
from .qwen2_5_vl_text import Qwen2_5_VLLanguage


def interleaved(self: Any, freq: torch.Tensor) -> torch.Tensor:
    # transformers writes strided slices over one another, for which a bundle has no operator.
    place = torch.arange(freq.shape[-1])
    time, down, across = freq.unbind(0)
    for axis, angles in ((1, down), (2, across)):
        time = torch.where((place % 3 == axis) & (place < 3 * self.mrope_section[axis]), angles, time)
    return torch.cat((time, time), -1)


def check_interleaved(architecture: str, sections: Any) -> None:
    """Three numbers: of the angles, every third belongs to an axis as far as its section goes, the rest to time.
    UnsupportedModelError for others; without any transformers has a default."""
    if sections is None:
        return
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int for n in sections):
        raise UnsupportedModelError(f"{architecture}: mrope_section {sections!r:.80} is not three numbers")


class Qwen3VLLanguage(Qwen2_5_VLLanguage):
    """See the module; transformers has no class of it with a head, so it is taken out of the whole model."""

    name: ClassVar[str] = "qwen3_vl_text"
    kind: ClassVar[Any] = Qwen3VLForConditionalGeneration
    modeling: ClassVar[Any] = modeling_qwen3_vl
    norm: ClassVar[Any] = modeling_qwen3_vl.Qwen3VLTextRMSNorm
    angles: ClassVar[Any] = modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str, body: str = "model.") -> None:
        super().__init__(checkpoint, config, prefix, body)
        added = len(checkpoint.config.vision_config.deepstack_visual_indexes)
        if added > config.num_hidden_layers:
            raise UnsupportedModelError(
                f"{self.kind.__name__}: deepstack_visual_indexes names {added} layers' embeddings, the language model has "
                f"{config.num_hidden_layers} layers; correct config.json"
            )
        self.decoder = dataclasses.replace(self.decoder, deepstack_layers=added or None)

    def check_sections(self, sections: Any) -> None:
        """See `check_interleaved`."""
        check_interleaved(self.kind.__name__, sections)

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Llama's, and positions without strided writes."""
        with super().hooks(), replaced(self.angles, "recomposition_frequencies", interleaved):
            yield
