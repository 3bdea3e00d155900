"""The target: what it says, and the hidden states that a draft learns from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...exporter.checkpoint import Checkpoint, fingerprint, open_checkpoint
from ...exporter.checkpoint.origin import Origin
from ...exporter.checkpoint.whole import load_whole
from ...exporter.families.common.base import Family
from ...exporter.families.common.parts import DecoderShape, ReferencePrompt
from ...exporter.families.common.reference import collate, decoder_prefix, pad_id
from ...exporter.families.registry import family_for
from ...exporter.pipeline.text import end_tokens
from ...runtime.common.errors import InputError, OptionError
from ...runtime.images.video import Video
from ..data.layout import prompt_of
from ..data.reading.records import Record
from .changing import ChangingDecoder
from .devices import find_device
from .generation_groups import generated_together
from .image_places import pictures_of, placeholder_tokens
from .teacher_forcing import Rows, Texts, hidden_states_kept
from .text_positions import positions_of

FUSED = 4  # how many last residuals FastVLM fuses

log = logging.getLogger(__name__)


class Target:
    """A trained model of any supported family; frozen, unless a training asks for `changing`.

    `generate` and `rows` take records; `head` maps hidden states before the final norm to logits. Where the model's
    modules are and how a request is laid out comes from its family.
    """

    def __init__(self, family: Family, model: nn.Module, device: torch.device) -> None:
        self.family, self.checkpoint = family, family.checkpoint
        self.model: Any = model.eval().requires_grad_(False).to(device)
        self.device = device
        checkpoint: Checkpoint = family.checkpoint
        self.name = checkpoint.alias.name if checkpoint.alias else Path(checkpoint.source).name
        self.tokenizer = checkpoint.tokenizer
        parts = family.parts(self.model)
        self.layers, self.final_norm, self.lm_head = parts.layers, parts.final_norm, parts.lm_head
        self.logit_scale, self.embed, self.capped = parts.logit_scale, parts.embed, parts.capped
        self._vision_output, self._image_embeds = parts.vision_output, parts.image_embeds

    @property
    def fingerprint(self) -> str:
        """Identity of the weights."""
        return fingerprint(self.checkpoint)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """E."""
        return self.lm_head.in_features  # type: ignore[return-value]

    @property
    def decoder(self) -> DecoderShape:
        """Sizes of its decoder."""
        return self.family.decoder

    def check_layer(self, layer: int, given: str | None = None) -> None:
        """OptionError unless 1 <= layer < L; `given` is the option as it was written, by default --draft-layer."""
        if not 1 <= layer < self.num_layers:
            raise OptionError(
                f"{given or f'--draft-layer {layer}'} is outside 1..{self.num_layers - 1}: {self.name} has "
                f"{self.num_layers} layers"
            )

    def head(self, hidden_states: Tensor) -> Tensor:
        """The target's own final norm and LM head, [..., E] to logits [..., V]."""
        return self.logits(self.features(hidden_states))

    def logits(self, features: Tensor) -> Tensor:
        """Logits [..., V] of what the LM head reads [..., E], bounded where the model does that."""
        return self.capped(self.lm_head(features))

    def features(self, hidden_states: Tensor) -> Tensor:
        """What the LM head reads: hidden states [..., E] through the final norm, scaled where the model does that."""
        normed = self.final_norm(hidden_states)
        return normed if self.logit_scale == 1.0 else normed * self.logit_scale

    def answer(self, record: Record) -> tuple[int, ...]:
        """The record's token ids, ending in the end token where the text ends.

        Raises InputError when the record has neither tokens nor an answer, or tokens that the target has not.
        """
        if record.tokens is not None:
            if max(record.tokens, default=0) >= self.vocabulary:
                raise InputError(
                    f"record {record.key} has the token {max(record.tokens)}; {self.name} knows {self.vocabulary}"
                )
            return record.tokens
        if record.answer is None:
            raise InputError(
                f"record {record.key} has no text; write some first with vlmexport generate-data"
            )
        ids = self.tokenizer(record.answer, add_special_tokens=False)["input_ids"]
        self._check_ids(record, "text", ids)
        return (*ids, self.eos_token_ids[0])

    def check_prompt(self, record: Record) -> None:
        """InputError for a prompt that writes the token which stands for a row of a picture or of a video; nothing else is
        looked at."""
        if placeholder_tokens(self.family):
            for text in (record.prompt or "", *(words for _, words in record.history)):
                self._check_ids(record, "prompt", self.tokenizer(text)["input_ids"])

    def _check_ids(self, record: Record, what: str, ids: Sequence[int]) -> None:
        for token in placeholder_tokens(self.family):
            if token in ids:
                written = self.tokenizer.convert_ids_to_tokens(token)
                kind = "an image" if token == self.family.image_token_id else "a video"
                raise InputError(
                    f"record {record.key}: the {what} contains {written!r}, which stands for {kind} row: leave it out"
                )

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.lm_head.out_features  # type: ignore[return-value]

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end an answer, as in a bundle of this target."""
        return end_tokens(self.checkpoint)

    @torch.no_grad()
    def generate(
        self,
        records: Sequence[Record],
        max_new_tokens: int = 96,
        processors: Callable[[Sequence[int]], Any] | None = None,
    ) -> list[tuple[int, ...]]:
        """Greedy answers, ending in the end token unless cut by the limit: those of the model's own `generate`, with
        what its generation configuration asks for. `processors` gives further ones (transformers'
        `LogitsProcessorList`) for the records of these indices; what they leave is chosen from greedily."""
        prompts = [self.prompt(r) for r in records]
        answers: dict[int, tuple[int, ...]] = {}
        for group in generated_together(self.checkpoint, prompts):
            inputs = self.moved(collate(self.family, [prompts[i] for i in group], left=True))
            output = self.model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                pad_token_id=self.pad_token_id,
                logits_processor=None if processors is None else processors(group),
            )
            first = max(len(decoder_prefix(prompts[i])) for i in group)
            answers |= {
                i: self._cut(tokens) for i, tokens in zip(group, output[:, first:].tolist(), strict=True)
            }
        return [answers[i] for i in range(len(records))]

    @property
    def pad_token_id(self) -> int:
        """What fills short texts."""
        return pad_id(self.family)

    def _cut(self, tokens: list[int]) -> tuple[int, ...]:
        ends = [tokens.index(e) for e in self.eos_token_ids if e in tokens]
        return tuple(tokens[: min(ends) + 1] if ends else tokens)

    def changing(self) -> ChangingDecoder:
        """The part of this model that a joint training changes, in place."""
        origin = Origin(self.name, self.fingerprint, self.checkpoint.default_prompt)
        return ChangingDecoder(self.checkpoint, self.model, self.family.parts(self.model), origin)

    def rows(
        self, records: Sequence[Record], layers: Sequence[int], first: bool = False
    ) -> tuple[Rows, dict[int, Tensor]]:
        """Teacher-forced rows of the records' texts; with their graph where the decoder learns.

        Args:
            layers: whose outputs are wanted. first: also the row that says the first token of an answer.

        Returns:
            rows with the trunk of `layers[0]`, and the hidden states [N, E] after every asked layer.
        """
        prompts, answers = [self.prompt(r) for r in records], [self.answer(r) for r in records]
        numbers = {*layers, *range(max(1, self.num_layers - FUSED + 1), self.num_layers + 1)}
        with hidden_states_kept(self.layers, self.final_norm, numbers, self.lm_head) as outputs:
            starts = self._forward(prompts, answers)
        batch_indices, slots, tokens, positions = [], [], [], []
        for b, answer in enumerate(answers):
            begin = 0 if first else 1
            count = max(0, len(answer) - begin)
            batch_indices += [b] * count
            slots += range(starts[b] + begin, starts[b] + begin + count)
            tokens += answer[begin:]
            positions += range(begin, begin + count)
        index = tuple(
            torch.tensor(each, dtype=torch.long, device=self.device) for each in (batch_indices, slots)
        )
        residuals = [outputs[i][index] for i in sorted(numbers) if i > self.num_layers - FUSED]
        trunks = {n: outputs[n][index] for n in layers}
        batch = Rows(
            trunks[layers[0]],
            torch.stack(residuals, 1),
            torch.tensor(tokens, dtype=torch.long, device=self.device),
            index[0],
            torch.tensor(positions, dtype=torch.long, device=self.device),
        )
        return batch, trunks

    def texts(self, records: Sequence[Record], taps: Sequence[int] = ()) -> Texts:
        """The records' texts behind their prompts, teacher-forced; also the hidden states after `taps` layers."""
        prompts, answers = [self.prompt(r) for r in records], [self.answer(r) for r in records]
        image_embeds: list[Tensor] = []
        with ExitStack() as stack:
            kept = stack.enter_context(
                hidden_states_kept(self.layers, self.final_norm, {*taps, self.num_layers}, self.lm_head)
            )
            if self._vision_output is not None and self._image_embeds is not None:
                read, tower = self._image_embeds, self._vision_output
                hook = tower.register_forward_hook(lambda *seen: image_embeds.append(read(seen[-1])))
                stack.callback(hook.remove)
            with torch.no_grad():
                starts = self._forward(prompts, answers)
        hidden = kept[self.num_layers].clone()
        tapped = {tap: kept[tap].clone() for tap in set(taps)}
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
        learned = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=self.device)
        lengths: list[int] = []
        for b, (prompt, answer, start) in enumerate(zip(prompts, answers, starts, strict=True)):
            ids = (*decoder_prefix(prompt), *answer)[1:]
            lengths.append(len(ids))
            tokens[b, : len(ids)] = torch.tensor(ids, device=self.device)
            for hidden_states in (hidden, *tapped.values()):
                hidden_states[b, len(ids) :] = 0
            learned[b, start : len(ids) - 1] = True
        pictures = pictures_of(self.family, prompts, image_embeds)
        positions = positions_of(self.family, prompts, lengths, self.device)
        return Texts(hidden, self.embed(tokens), tokens, learned, pictures, tapped, lengths, positions)

    def _forward(self, prompts: Sequence[ReferencePrompt], answers: Sequence[tuple[int, ...]]) -> list[int]:
        """Runs the decoder over the texts; returns the slot of the row that predicts answer[0] per prompt."""
        inputs = collate(self.family, prompts, [a[:-1] for a in answers])
        self.model(**self.moved(inputs), use_cache=False)
        return [len(decoder_prefix(p)) - 1 for p in prompts]

    def prompt(self, record: Record) -> ReferencePrompt:
        """The record as the model's own processor lays it out; InputError names the record that it cannot."""
        if self.family.vision is None and record.image is not None:
            raise InputError(f"record {record.key} has an image, but {self.name} reads text only")
        if self.family.needs_picture and record.image is None:
            raise InputError(f"record {record.key} has no image, which {self.name} needs")
        self.check_prompt(record)
        image = None if record.image is None else record.image.load()
        if isinstance(image, Video) and self.family.video_token_id is None:
            raise InputError(
                f"record {record.key} is a video, which {self.name} does not read; give its data frames=N"
            )
        template, vision = bool(self.family.chat_template), self.family.vision is not None
        try:
            return self.family.reference_prompt(image, prompt_of(record, image, template, vision))
        except InputError as error:
            raise InputError(f"record {record.key}: {error}") from error

    def moved(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inputs of the model, where it is."""
        return {name: value.to(self.device) for name, value in inputs.items()}


def load_target(model: str | Path, device: str | torch.device = "cpu") -> Target:
    """Opens an alias, folder or hub id in float32, frozen.

    `device` may be `auto`: this process's GPU where there is one, else the CPU.

    Raises:
        OptionError: there is no such device.
        UnsupportedModelError: no draft can be trained for this architecture.
    """
    place = find_device(device)
    family = family_for(open_checkpoint(model))
    for notice in family.checkpoint.notices:
        log.info("%s", notice)
    return Target(family, load_whole(family.checkpoint), place)
