"""The frozen target: what it says, and the rows that a draft learns from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from torch import Tensor, nn

from ...exporter.checkpoint import Checkpoint, fingerprint, open_checkpoint
from ...runtime.errors import InputError, OptionError, UnsupportedModelError
from ..data.records import Record

FUSED = 4  # how many last residuals FastVLM fuses


@dataclass
class Rows:
    """Rows of a frozen target at the positions where a draft may propose.

    Row r saw the text up to its own input token; `tokens[r]` is what follows in the text. The first
    answer token is not among them: prefill emits it.
    """

    trunk: Tensor  # [N, E] after layer n
    residuals: Tensor  # [N, K, E] after the last K layers, before the final norm
    tokens: Tensor  # int64 [N]
    records: Tensor  # int64 [N], index into the batch of records
    positions: Tensor  # int64 [N], index of the token in its answer, from 1

    def __len__(self) -> int:
        return len(self.tokens)


class Target:
    """A trained model of a supported family, never changed.

    `generate` and `rows` take records; `head` maps rows before the final norm to logits.
    """

    def __init__(self, checkpoint: Checkpoint, model: nn.Module, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.model: Any = model.eval().requires_grad_(False).to(device)
        self.device = device
        self.name = checkpoint.alias.name if checkpoint.alias else Path(checkpoint.source).name
        self.tokenizer = checkpoint.tokenizer
        self.layers: nn.ModuleList
        self.final_norm: nn.Module
        self.lm_head: nn.Module
        self.logit_scale = 1.0

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

    def check_layer(self, layer: int) -> None:
        """OptionError unless 1 <= layer < L."""
        if not 1 <= layer < self.num_layers:
            raise OptionError(
                f"--draft-layer {layer} is outside 1..{self.num_layers - 1}: {self.name} has {self.num_layers} layers"
            )

    def head(self, rows: Tensor) -> Tensor:
        """The target's own final norm and LM head, [..., E] to logits [..., V]."""
        normed = self.final_norm(rows)
        return self.lm_head(normed if self.logit_scale == 1.0 else normed * self.logit_scale)

    def answer(self, record: Record) -> tuple[int, ...]:
        """The record's token ids, ending in the end token where the text ends.

        Raises InputError when the record has neither tokens nor an answer.
        """
        if record.tokens is not None:
            return record.tokens
        if record.answer is None:
            raise InputError(
                f"record {record.key} has no text; write some first with vlmexport generate-data"
            )
        ids = self.tokenizer(record.answer, add_special_tokens=False)["input_ids"]
        return (*ids, self.eos_token_ids[0])

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end an answer."""
        ids = self.model.generation_config.eos_token_id
        ids = self.tokenizer.eos_token_id if ids is None else ids
        return list(ids) if isinstance(ids, list | tuple) else [ids]

    @torch.no_grad()
    def generate(
        self, records: Sequence[Record], max_new_tokens: int = 96, processors: Any = None
    ) -> list[tuple[int, ...]]:
        """Greedy answers, ending in the end token unless cut by the limit. `processors` are transformers' own
        (`LogitsProcessorList`); what they leave is chosen from greedily."""
        inputs, first = self._generation_inputs(records)
        output = self.model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            min_new_tokens=0,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            pad_token_id=self.pad_token_id,
            logits_processor=processors,
        )
        return [self._cut(row) for row in output[:, first:].tolist()]

    @property
    def pad_token_id(self) -> int:
        """What fills short rows."""
        pad = self.tokenizer.pad_token_id
        return self.eos_token_ids[0] if pad is None else pad

    def _cut(self, row: list[int]) -> tuple[int, ...]:
        ends = [row.index(e) for e in self.eos_token_ids if e in row]
        return tuple(row[: min(ends) + 1] if ends else row)

    @torch.no_grad()
    def rows(self, records: Sequence[Record], layers: Sequence[int]) -> tuple[Rows, dict[int, Tensor]]:
        """Teacher-forced rows of the records' texts.

        Returns:
            rows with the trunk of `layers[0]`, and the trunk rows [N, E] of every asked layer.
        """
        answers = [self.answer(r) for r in records]
        kept: dict[int, Tensor] = {}
        wanted = {*layers, *range(max(1, self.num_layers - FUSED + 1), self.num_layers + 1)}
        handles = [self.layers[i - 1].register_forward_hook(_keep(kept, i)) for i in wanted]
        try:
            starts = self._forward(records, answers)
        finally:
            for handle in handles:
                handle.remove()
        batch, slots, tokens, positions = [], [], [], []
        for b, answer in enumerate(answers):
            count = max(0, len(answer) - 1)
            batch += [b] * count
            slots += range(starts[b] + 1, starts[b] + 1 + count)
            tokens += answer[1:]
            positions += range(1, count + 1)
        index = (
            torch.tensor(batch, dtype=torch.long, device=self.device),
            torch.tensor(slots, dtype=torch.long, device=self.device),
        )
        residuals = [kept[i][index] for i in sorted(wanted) if i > self.num_layers - FUSED]
        trunks = {n: kept[n][index] for n in layers}
        rows = Rows(
            trunks[layers[0]],
            torch.stack(residuals, 1),
            torch.tensor(tokens, dtype=torch.long, device=self.device),
            index[0],
            torch.tensor(positions, dtype=torch.long, device=self.device),
        )
        return rows, trunks

    def _forward(self, records: Sequence[Record], answers: Sequence[tuple[int, ...]]) -> list[int]:
        """Runs the decoder over the texts; returns the slot of the row that predicts answer[0] per record."""
        raise NotImplementedError

    def _generation_inputs(self, records: Sequence[Record]) -> tuple[dict[str, Tensor], int]:
        """(arguments of `generate`, number of leading ids in its output that are no answer)."""
        raise NotImplementedError

    def _padded(self, rows: Sequence[Sequence[int]], left: bool = False) -> tuple[Tensor, Tensor]:
        """(ids, mask), both int64 [B, longest]."""
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.pad_token_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for b, row in enumerate(rows):
            place = slice(width - len(row), width) if left else slice(0, len(row))
            ids[b, place] = torch.tensor(row, dtype=torch.long)
            mask[b, place] = 1
        return ids.to(self.device), mask.to(self.device)


class Blip2T5Target(Target):
    """BLIP-2 with a T5 language model: the picture's rows and the prompt go to the encoder."""

    def __init__(self, checkpoint: Checkpoint, model: nn.Module, device: torch.device) -> None:
        super().__init__(checkpoint, model, device)
        language = self.model.language_model
        self.layers = language.decoder.block
        self.final_norm = language.decoder.final_layer_norm
        self.lm_head = language.lm_head
        self.start = self.model.config.text_config.decoder_start_token_id or 0
        if getattr(language.config, "scale_decoder_outputs", False):
            self.logit_scale = language.model_dim**-0.5
        processor = transformers.AutoProcessor.from_pretrained(
            checkpoint.folder, local_files_only=True, trust_remote_code=False
        )
        self.processor = processor.image_processor

    @property
    def eos_token_ids(self) -> list[int]:
        ids = self.model.generation_config.eos_token_id
        ids = self.model.config.text_config.eos_token_id if ids is None else ids
        return list(ids) if isinstance(ids, list | tuple) else [ids]

    def _inputs(self, records: Sequence[Record]) -> dict[str, Tensor]:
        missing = next((r.key for r in records if r.image is None), None)
        if missing is not None:
            raise InputError(f"record {missing} has no image, which {self.name} needs")
        images = [r.image.load() for r in records if r.image is not None]
        pixels = self.processor(images=images, return_tensors="pt")["pixel_values"]
        count = self.model.query_tokens.shape[1]
        image = [self.model.config.image_token_id] * count
        ids, mask = self._padded([image + self.tokenizer(r.prompt)["input_ids"] for r in records])
        return {"pixel_values": pixels.to(self.device), "input_ids": ids, "attention_mask": mask}

    def _generation_inputs(self, records: Sequence[Record]) -> tuple[dict[str, Tensor], int]:
        return self._inputs(records), 1

    def _forward(self, records: Sequence[Record], answers: Sequence[tuple[int, ...]]) -> list[int]:
        ids, _ = self._padded([(self.start, *a[:-1]) for a in answers])
        # Padding follows the text, so causal attention never sees it from a real row.
        self.model(**self._inputs(records), decoder_input_ids=ids, use_cache=False)
        return [0] * len(answers)


class LlamaTarget(Target):
    """A decoder-only language model of the Llama architecture; text only."""

    def __init__(self, checkpoint: Checkpoint, model: nn.Module, device: torch.device) -> None:
        super().__init__(checkpoint, model, device)
        self.layers = self.model.model.layers
        self.final_norm = self.model.model.norm
        self.lm_head = self.model.lm_head

    def _prompt(self, record: Record) -> list[int]:
        if record.image is not None:
            raise InputError(f"record {record.key} has an image, but {self.name} reads text only")
        if getattr(self.tokenizer, "chat_template", None):
            turn = [{"role": "user", "content": record.prompt}]
            text = self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = self.tokenizer(record.prompt)["input_ids"]
        if not ids:
            raise InputError(f"record {record.key} has an empty prompt")
        return ids

    def _generation_inputs(self, records: Sequence[Record]) -> tuple[dict[str, Tensor], int]:
        ids, mask = self._padded([self._prompt(r) for r in records], left=True)
        return {"input_ids": ids, "attention_mask": mask}, ids.shape[1]

    def _forward(self, records: Sequence[Record], answers: Sequence[tuple[int, ...]]) -> list[int]:
        prompts = [self._prompt(r) for r in records]
        ids, mask = self._padded([[*p, *a[:-1]] for p, a in zip(prompts, answers, strict=True)])
        self.model.model(input_ids=ids, attention_mask=mask, use_cache=False)
        return [len(p) - 1 for p in prompts]


def load_target(model: str | Path, device: str | torch.device = "cpu") -> Target:
    """Opens an alias, folder or hub id in float32, frozen.

    `device` may be `auto`: this process's GPU where there is one, else the CPU.

    Raises:
        UnsupportedModelError: no draft can be trained for this architecture.
    """
    checkpoint = open_checkpoint(model)
    config: Any = checkpoint.config
    if config.model_type == "llama":
        kind, adapter = transformers.LlamaForCausalLM, LlamaTarget
    elif config.model_type == "blip-2" and config.text_config.model_type == "t5":
        kind, adapter = transformers.Blip2ForConditionalGeneration, Blip2T5Target
    else:
        inner = getattr(getattr(config, "text_config", None), "model_type", None)
        raise UnsupportedModelError(
            f"no imitation draft can be trained for model type {config.model_type!r}"
            f"{f' with language model {inner!r}' if inner else ''}; supported are llama, and blip-2 with t5"
        )
    place = PartialState().device if device == "auto" else device
    loaded = kind.from_pretrained(
        checkpoint.folder, config=config, dtype=torch.float32, local_files_only=True
    )
    return adapter(checkpoint, loaded, torch.device(place or "cpu"))


def _keep(store: dict[int, Tensor], layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: object, output: Any) -> None:
        store[layer] = output[0] if isinstance(output, tuple) else output

    return hook
