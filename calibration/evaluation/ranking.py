"""Where a target ranks the right one of a record's choices, by the log-probability of each.

All choices follow the same picture and turns, which the target reads once: every choice looks at what is cached of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicLayer, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from ...exporter.families.common.reference import collate, decoder_prefix, padded
from ...exporter.parity.capture import caches, whole_cache
from ..data.reading.records import Record
from ..targets.batches import Batches
from ..targets.target import Target

_REPORTED = 50  # records


@torch.no_grad()
def log_probabilities(
    target: Target, record: Record, texts: Sequence[str], batches: Batches | None = None
) -> list[float]:
    """Σ log p of every token of each text and of the end behind it, given the record's picture and turns; `batches` are of
    texts."""
    answers = [target.answer(replace(record, answer=text, tokens=None)) for text in texts]
    prefix = _Prefix(target, record)
    parts = (batches or Batches(len(answers))).over(answers, prefix.log_probabilities)
    return [value for _, values in parts for value in values]


class _Prefix:
    """What a target has made of a record's picture and turns."""

    def __init__(self, target: Target, record: Record) -> None:
        prompt, family = target.prompt(record), target.family
        inputs = target.moved(collate(family, [prompt], [()]))
        last = target.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, -1:],))
        try:
            output = target.model(**inputs, **whole_cache(family))
        finally:
            last.remove()
        self._target = target
        self._first = output.logits[0, -1].float().log_softmax(-1)
        self._own, self._cross = caches(output, family.decoder.cross_attention)
        spoken: Any = getattr(output, "language_model_outputs", None) or output
        self._states: Any = getattr(spoken, "encoder_last_hidden_state", None)
        self._next = len(decoder_prefix(prompt))
        if prompt.positions is not None:
            self._next = int(prompt.positions.max()) + 1

    def log_probabilities(self, answers: Sequence[tuple[int, ...]]) -> list[float]:
        """Σ log p of the tokens of each of these continuations."""
        target = self._target
        sums = self._first[[answer[0] for answer in answers]].double()
        # What is behind a text's end is seen by none of its tokens.
        ids = padded([answer[:-1] for answer in answers], 0)[0].to(target.device)
        if ids.shape[1]:
            hidden_states = _decoder(target.model)(input_ids=ids, **self._given(*ids.shape)).last_hidden_state
            owners = torch.tensor([b for b, answer in enumerate(answers) for _ in answer[1:]])
            slots = torch.tensor([n for answer in answers for n in range(len(answer) - 1)])
            said = torch.tensor([token for answer in answers for token in answer[1:]])
            owners, slots, said = (each.to(target.device) for each in (owners, slots, said))
            logits = target.logits(hidden_states[owners, slots] * target.logit_scale).float()
            sums.index_add_(0, owners, logits.log_softmax(-1).gather(1, said[:, None])[:, 0].double())
        return sums.tolist()

    def _given(self, count: int, length: int) -> dict[str, Any]:
        """What `count` continuations of `length` tokens are given of the prefix."""
        own = Cache([_read(layer, count) for layer in self._own.layers])
        given: dict[str, Any] = {"past_key_values": own, "use_cache": True}
        if self._cross is not None:
            cross = Cache([_read(layer, count) for layer in self._cross.layers])
            given["past_key_values"] = EncoderDecoderCache(own, cross)
            given["encoder_hidden_states"] = self._states.expand(count, -1, -1)
        axes = {"mrope": (3,), "rotary": ()}.get(self._target.decoder.position)
        if (
            axes is not None
        ):  # behind a picture they are not as many as its embeddings, and they may begin at 1
            places = self._next + torch.arange(length, device=self._target.device)
            given["position_ids"] = places.expand(*axes, count, length)
        return given


class _Read(DynamicLayer):
    """Keys and values [1, heads, T, D] that `count` texts look at; what these add is kept nowhere, so that no more than one
    layer's copies are in memory."""

    def __init__(self, keys: Tensor, values: Tensor, count: int) -> None:
        super().__init__()
        self.keys, self.values = (each.expand(count, -1, -1, -1) for each in (keys, values))
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)


class _ReadStates(LinearAttentionLayer):
    """The same of the rows [1, C, T] that a convolution has seen, and of the state [1, heads, Dk, Dv] of linear attention."""

    def __init__(self, layer: LinearAttentionLayer, count: int) -> None:
        super().__init__()
        rows, state = layer.conv_states[0], layer.recurrent_states.get(0)
        assert rows is not None
        self.conv_states[0] = rows.expand(count, -1, -1)
        self.is_conv_states_initialized[0] = self.has_previous_state[0] = True
        if state is not None:
            self.recurrent_states[0] = state.expand(count, -1, -1, -1)
            self.is_recurrent_states_initialized[0] = True
        self.record_past = True  # else one token alone would be written over the rows that all texts share

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows = self.conv_states[0]
        assert rows is not None
        return torch.cat([rows, conv_states], -1)

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return recurrent_states


def _read(layer: Any, count: int) -> CacheLayerMixin | LinearAttentionLayer:
    if isinstance(layer, LinearAttentionLayer):
        return _ReadStates(layer, count)
    return _Read(layer.keys, layer.values, count)


def _decoder(model: Any) -> Any:
    """The innermost part of a model that reads tokens and gives hidden states behind the final norm."""
    while (inner := model.get_decoder()) is not model:
        model = inner
    return model


def right_rank(values: Sequence[float], choice: int) -> int:
    """Place of `choice` from 1, the highest value first; of equals the earlier one comes first."""
    own = values[choice]
    return 1 + sum(value > own or (value == own and at < choice) for at, value in enumerate(values))


def rank_choices(
    target: Target,
    records: Sequence[Record],
    report: Callable[[str], None] = lambda line: None,
    batch_size: int = 64,
) -> list[int | None]:
    """Per record the rank of its right choice, None where it has no choices or none is right; `batch_size` choices of one
    record are read together."""
    ranks: list[int | None] = []
    batches = Batches(batch_size, report, "choices")
    for number, record in enumerate(records, 1):
        ranked = record.choices and record.choice is not None
        ranks.append(
            right_rank(log_probabilities(target, record, record.choices, batches), record.choice)  # type: ignore[arg-type]
            if ranked else None
        )  # fmt: skip
        if number % _REPORTED == 0 or number == len(records):
            report(f"ranked the choices of {number}/{len(records)} records")
    return ranks
