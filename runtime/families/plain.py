"""What a family reads where texts of messages are text only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..bundle.manifest import Manifest
from ..text.plain import PlainTokenizer
from ..text.tokenizer import Tokenizer
from .base import Source


@dataclass(frozen=True)
class PlainText:
    """A `Source` whose tokenizer finds no special token in what the caller says."""

    source: Source

    @property
    def manifest(self) -> Manifest:
        return self.source.manifest

    @property
    def tokenizer(self) -> Tokenizer:
        return self._plain

    @cached_property
    def _plain(self) -> PlainTokenizer:
        text, image = self.manifest.text, self.manifest.image
        named = [text.bos_token_id, text.pad_token_id, text.decoder_start_token_id, text.image_token_id]
        if image is not None and image.video is not None:
            named.append(image.video.token_id)
        return PlainTokenizer(self.source.tokenizer, [*named, *text.eos_token_ids])
