"""What a target computes over given texts (teacher forcing), which drafts learn from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

from torch import Tensor, nn

from ...exporter.families.common.hidden_states import hidden_states_after


@dataclass
class Rows:
    """Rows of a target at the positions where a draft may propose.

    Row r saw the text up to its own input token; `tokens[r]` is what follows in the text. The first
    answer token is not among them, unless it was asked for: prefill emits it.
    """

    trunk: Tensor  # [N, E] after layer n
    residuals: Tensor  # [N, K, E] after the last K layers, before the final norm
    tokens: Tensor  # int64 [N]
    records: Tensor  # int64 [N], index into the batch of records
    positions: Tensor  # int64 [N], index of the token in its answer, from 1 (0 is the one that prefill emits)

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, kept: Tensor) -> Rows:
        """The rows of a bool [N]."""
        return Rows(*(getattr(self, one.name)[kept] for one in fields(self)))


@dataclass
class Texts:
    """Whole texts of B records, prompts included: for drafts that look back at what they read.

    Place t of a record is the target's row at position t with the token that follows it there; places behind its end are
    zero. A draft may learn from place t where the token after that one is the target's to say and not the first of an
    answer, which prefill emits.
    """

    hidden: Tensor  # [B, T, E] after the last layer, before the final norm
    embedded: Tensor  # [B, T, E] the embedding of the token that follows
    tokens: Tensor  # int64 [B, T] that token
    learned: Tensor  # bool [B, T] places whose next row, and the token that it says, are known and part of an answer
    pictures: list[
        list[tuple[int, Tensor]]
    ]  # of each record: position of a picture's or video's first embedding, and its embeddings [time steps, n, E]
    taps: Mapping[int, Tensor] = field(default_factory=dict)  # number of layers → [B, T, E] after them
    lengths: Sequence[int] = ()  # places of each text
    positions: Tensor | None = None  # int64 [3, B, T] of the places, where the target's have three axes

    def __len__(self) -> int:
        return int(self.learned.sum())


@contextmanager
def hidden_states_kept(
    layers: nn.ModuleList, final_norm: nn.Module, numbers: Iterable[int], lm_head: nn.Module
) -> Iterator[dict[int, Tensor]]:
    """Number of layers, from 1 → hidden states [B, T, E] after them, of what the model runs meanwhile.

    `lm_head` reads the first token of each text alone: logits of all would take more memory than all else, and nobody
    reads them.
    """
    outputs: dict[int, Tensor] = {}
    short = lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, :1],))
    try:
        # `update` gives None: what is read stays as it is.
        with hidden_states_after(
            layers, final_norm, numbers, lambda number, hidden: outputs.update({number: hidden})
        ):
            yield outputs
    finally:
        short.remove()
