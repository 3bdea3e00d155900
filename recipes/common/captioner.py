"""A model of a recipe as its training, its checks and its evaluation see it: image embeddings in, token ids out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from typing_extensions import Self

LONGEST = 160  # tokens of a caption; the longest of 30,000 have 149
IGNORED = -100  # fills ids up to a common width; no loss is taken there


class Captioner(ABC):
    """A model and its tokenizer.

    Rows are what is computed once of a picture: float [B, rows, width]. Ids of prompts and of targets are int64 and
    filled up with `IGNORED`. Models that take no prompt ignore it.
    """

    model_class: ClassVar[Any]
    """Its class in transformers."""
    asks: ClassVar[bool]
    """Whether it answers questions, too."""
    prompt: ClassVar[str | None]
    """What asks for a caption; None where nothing does."""
    side: ClassVar[int]
    """Pixels of a picture's edge."""
    shape: ClassVar[tuple[int, int]]
    """Rows of a picture and their width."""
    early_range: ClassVar[tuple[float, float]] = (0.30, 0.65)
    """Least and most that alpha of the early exit after a quarter of the layers may be."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        end = tokenizer.eos_token_id
        assert isinstance(end, int)
        self.end: int = end

    @classmethod
    def open(cls, folder: Path, device: str = "cpu") -> Self:
        """The model of a folder, in float32."""
        model = cls.model_class.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        return cls(model, AutoTokenizer.from_pretrained(folder))

    @property
    def device(self) -> torch.device:
        """Where the model computes. Rows, ids and logits that callers give and get are on the CPU."""
        return next(self.model.parameters()).device

    @property
    @abstractmethod
    def layers(self) -> nn.ModuleList:
        """The decoder's layers; each returns the hidden states [B, t, width] after it, alone or first in a tuple."""

    @abstractmethod
    def pixels(self, pictures: np.ndarray) -> Tensor:
        """What the image side takes of uint8 pictures (B, side, side, 3), float32 [B, …]: what the model's processor gives of
        each."""

    @abstractmethod
    def rows(self, pictures: np.ndarray) -> Tensor:
        """Rows float32 of uint8 pictures (B, side, side, 3)."""

    @abstractmethod
    def logits(self, image_embeds: Tensor, prompts: Tensor, targets: Tensor) -> Tensor:
        """Teacher-forced logits [B, t, V] of targets [B, t]."""

    def loss(self, image_embeds: Tensor, prompts: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the targets, where the model computes."""
        return cross_entropy(self.logits(image_embeds, prompts, targets), targets)

    @abstractmethod
    def generate(self, image_embeds: Tensor, prompts: Tensor, longest: int) -> Tensor:
        """Greedy ids int64 [B, n] without the start token, padded after the end token."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Logits of a layer's hidden states: the final norm and the head."""

    def reading(self, hidden: Tensor, prompts: Tensor, targets: Tensor) -> Tensor:
        """Of a layer's hidden states [B, n, width] those [B, t, width] that say the targets: all, where the layers see nothing else."""
        return hidden

    @property
    def early(self) -> tuple[int, int]:
        """The layers whose early exits are measured: a quarter and a half of the decoder."""
        return len(self.layers) // 4, len(self.layers) // 2

    def further(self, seed: int, indices: Sequence[int]) -> dict[str, Any]:
        """Figures of what the model sees beside single pictures, for an evaluation on these scenes; none unless it sees
        more. Those that `further_musts` names are numbers."""
        return {}

    def further_musts(self) -> dict[str, tuple[float, float]]:
        """Least and most that figures of `further` may be in a bundled model."""
        return {}

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a prompt, special tokens included."""
        return self.tokenizer(text)["input_ids"]

    @classmethod
    def captions_form(cls) -> str:
        """What `--data` calls its requests for captions. A captioner continues its prompt: "describe the scene" would be the
        beginning of a caption."""
        return "scenes-captions" if cls.prompt is None else "scenes"

    @classmethod
    def forms(cls) -> tuple[str, ...]:
        """All that it is asked for, by what `--data` calls it; captions first."""
        return (cls.captions_form(), *(("scenes-questions",) if cls.asks else ()))

    def caption_prompt(self) -> list[int]:
        """Ids of what asks for a caption; none where nothing does."""
        return [] if self.prompt is None else self.prompt_ids(self.prompt)

    def text_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts to be learned, each with the end token."""
        plain = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [[*ids, self.end] for ids in plain]

    @torch.no_grad()
    def speak(self, image_embeds: Tensor, prompts: Tensor, longest: int = LONGEST) -> list[list[int]]:
        """Greedy token ids, ending in the end token unless cut at `longest`."""
        ids = self.generate(image_embeds, prompts, longest).tolist()
        return [row[: row.index(self.end) + 1] if self.end in row else row for row in ids]

    def say(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Texts of ids."""
        return self.tokenizer.batch_decode([list(row) for row in ids], skip_special_tokens=True)

    @torch.no_grad()
    def layer_rows(
        self, image_embeds: Tensor, prompts: Tensor, targets: Tensor, layers: Sequence[int]
    ) -> dict[int, Tensor]:
        """Teacher-forced hidden states [B, t, width] after each of `layers` (1 to L) that say the targets, where the model computes;
        `head` turns them into logits."""
        outputs: dict[int, Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(module: object, inputs: object, output: Any) -> None:
                outputs[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [self.layers[n - 1].register_forward_hook(keep(n)) for n in layers]
        try:
            self.logits(image_embeds, prompts, targets)
        finally:
            for hook in hooks:
                hook.remove()
        return {n: self.reading(outputs[n], prompts, targets) for n in layers}


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens that are not `IGNORED`, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def padded(lists: Sequence[Sequence[int]]) -> Tensor:
    """Rows of ids as one int64 tensor, as wide as the longest and filled with `IGNORED`."""
    width = max(1, *map(len, lists))
    return torch.tensor([[*row, *[IGNORED] * (width - len(row))] for row in lists])


def to_pixels(pictures: np.ndarray | Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (B, side, side, 3) to normalised float [B, 3, side, side], where the pictures lie."""
    x = pictures if isinstance(pictures, Tensor) else torch.from_numpy(np.array(pictures))
    x = x.permute(0, 3, 1, 2).float() / 255
    return (x - _channels(tuple(mean), x.device)) / _channels(tuple(std), x.device)


@cache
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(3, 1, 1)
