"""What a family is: a vision tower (or none), a language model, and how a prompt is laid out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ....runtime.decoder.prompt_chunks import Block
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.precision import Precision
from ...graphs.weights import WeightRef, WeightStore
from .parts import DecoderShape, GraphSpec, Parts, ReferencePrompt

if TYPE_CHECKING:
    from ..languages.base import Language
    from ..vision.base import Vision


def processor_surrounds(tokenizer: Any, rendered: str) -> bool:
    """Whether transformers' processors put the tokenizer's special tokens around what a chat template has written: unless
    that begins with the first (`ProcessorMixin.apply_chat_template`). Tokenizers alone never do."""
    return not (tokenizer.bos_token and rendered.startswith(tokenizer.bos_token))


class Family:
    """A model family over one checkpoint: `language`, perhaps `vision`, and the layout of a prompt.

    Constructing it checks every option of the configuration and raises UnsupportedModelError for what cannot be
    exported correctly.
    """

    name: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    model_types: ClassVar[tuple[str, ...]]
    needs_picture: ClassVar[bool] = False
    """Whether the model reads no text without a picture."""
    whole_prompt: ClassVar[bool] = False
    """Whether all positions of a prompt see each other (a prefix-LM); what is generated behind it is causal."""
    first_position: ClassVar[int] = 0
    """Of a prompt whose positions just count."""
    language: Language
    vision: Vision | None = None

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config: Any = checkpoint.config

    # --- export ---

    def precision(self, name: str) -> Precision:
        """The types of a bundle of precision `name` (float32, float16, bfloat16)."""
        return Precision.named(name, wide_residual=self.language.wide_residual)

    @property
    def decoder_name(self) -> str:
        """The manifest's `model.decoder`."""
        return self.language.name

    @property
    def decoder(self) -> DecoderShape:
        """The language model's decoder."""
        return self.language.decoder

    @property
    def rotary_base(self) -> float | None:
        """The base of the language model's rotary positions, whatever scales them; None where it has none."""
        return self.language.rotary_base

    @property
    def max_positions(self) -> int | None:
        """Most positions the model was made for; None when positions have no end."""
        return self.language.max_positions

    def graphs(self, cuts: Sequence[int], store: WeightStore) -> Iterator[GraphSpec]:
        """All graphs except `commit` and drafts, in the order in which a request uses them."""
        with self.language.hooks():
            if self.vision is not None:
                with self.vision.hooks():
                    yield self.vision.graph(store)
            yield from self.language.graphs(cuts, store)

    def tensors(self) -> dict[str, WeightRef]:
        """Tensors that the runtime reads itself: the embedding table, relative-bias tables."""
        return self.language.tensors()

    def encoder(self) -> dict[str, Any] | None:
        """The manifest's `encoder`: of a text encoder, not of the vision tower."""
        return self.language.encoder()

    @property
    def needed_embeds(self) -> int:
        """Positions of a prompt that a picture of an ordinary size takes; 0 where it stands in no prompt."""
        return 0 if self.vision is None or self.decoder.cross_attention else self.vision.needed_embeds

    def image(self) -> dict[str, Any] | None:
        """The manifest's `image`."""
        return None if self.vision is None else self.vision.settings()

    def max_source(self, asked: int) -> int | None:
        """The manifest's `limits.max_source`: hidden states that cross-attention may see, `asked` where that is free.

        Without a text encoder it sees one picture, whose embeddings are what they are.
        """
        if not self.decoder.cross_attention:
            return None
        return asked if self.vision is None or self.encoder() is not None else self.vision.num_embeds

    def text(self) -> dict[str, Any]:
        """The family's part of the manifest's `text` (image token and number of embeddings, decoder start)."""
        return {
            "image_token_id": self.image_token_id,
            "image_rows": None if self.vision is None else self.vision.num_embeds,
            "decoder_start_token_id": self.decoder_start,
        }

    @property
    def image_token_id(self) -> int | None:
        """The id that holds the place of an image embedding in a prompt."""
        return None

    @property
    def video_token_id(self) -> int | None:
        """The id that holds the place of a video's embedding in a prompt; None for a model that reads no videos."""
        return None

    @property
    def chat_template(self) -> str | None:
        """Jinja source, of several the default, or None: the processor's where the model sees pictures and its processor
        has one, else the tokenizer's."""
        own = None if self.vision is None else self.checkpoint.processor_template
        template = own or self.checkpoint.tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @functools.cached_property
    def decoder_start(self) -> int | None:
        """The token that a decoder with cross-attention starts with, as transformers finds it."""
        if not self.decoder.cross_attention:
            return None
        config = self.config.get_text_config(decoder=True)
        token = self.checkpoint.generation_config.get("decoder_start_token_id")
        for part in (self.config, config):
            if token is None:
                token = getattr(part, "decoder_start_token_id", None)
        return 0 if token is None else token

    # --- the reference in transformers ---

    def parts(self, model: Any) -> Parts:
        """Where the modules of `model`, of this checkpoint's class, are."""
        parts = self.language.parts(model)
        if self.vision is None:
            return parts
        return replace(parts, vision_output=self.vision.output(model), image_embeds=self.vision.read_embeds)

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """A picture (PIL, RGB, or None), of models that read several a list of them, of those with a `video_token_id` also a
        `Video`, and a prompt as the model's own processor lays them out."""
        raise NotImplementedError

    def max_block(self, max_length: int) -> int | None:
        """The manifest's `decoder.max_block` of a bundle for so many positions: a prompt that sees all of itself goes through
        one pass."""
        return max(1, max_length - 1) if self.whole_prompt else self.decoder.max_block

    def blocks(self, inputs: Mapping[str, torch.Tensor]) -> list[list[Block]]:
        """Of each of the sequences that are arguments of the model's own forward, the parts whose positions see each other in
        both directions; empty where prompts are causal."""
        return []

    def forward_arguments(
        self, input_ids: torch.Tensor, prompts: Sequence[slice] = ()
    ) -> dict[str, torch.Tensor]:
        """What the model's own forward takes beside the ids [B, n] of padded sequences, their mask and pictures; `prompts`
        are where the prompt of each stands."""
        return {}
