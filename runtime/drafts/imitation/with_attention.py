"""The imitation network with attention: over the exit states of a sequence, which pass the network once each (FastVLM,
arXiv 2510.22641, appendix B).

An exit state is the target's own, whatever was drafted: that of an accepted token stays what it was when the token was
drafted, and so do the keys and values that the network made of it. They lie beside the target's in the decoder's arena,
one entry for every slot; what is true of a slot there is true of this layer, too. Nothing runs again after acceptance,
and rejected ones are forgotten with the decoder's length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from typing import ClassVar

import numpy as np

from ...bundle.manifest import DraftInfo
from ...decoder.decoder import Decoder
from ...decoder.device.draft_chain import Sent
from ...decoder.logits import TargetLogits
from ...decoder.masks import CausalMask
from ...engines.base import Call, View
from ...engines.buffers import HostBuffer
from ...speculative.sequence import Sequence
from .self_draft import SelfDraft


def imitation(draft: DraftInfo, decoder: Decoder) -> SelfDraft:
    """The proposer of a draft of this kind: with keys and values, or each exit state by itself."""
    return SelfDraft(draft, decoder) if draft.options.own_cache is None else Attending(draft, decoder)


class Attending(SelfDraft):
    """An imitation network with attention. It runs over every hidden state that leaves the target's layer n: of prompts
    (`on_hidden_states`), of steps on the trunk (`step_logits`, `passed`), and of passes in which it drafted nothing
    (`on_pass`)."""

    needs_prompt_hidden: ClassVar[bool] = True
    needs_passes: ClassVar[bool] = True

    def __init__(self, draft: DraftInfo, decoder: Decoder):
        super().__init__(draft, decoder)
        assert draft.layer is not None
        self._after, self._layer = draft.layer, decoder.draft_layer_index(draft.name)
        engine, capacity, batch = decoder.engine, decoder.arena.capacity, decoder.arena.max_batch
        max_num_tokens = max(decoder.prefill_width, batch * decoder.max_width)
        self._positions = HostBuffer(engine, f"{draft.name}.positions", max_num_tokens, "int64")
        self._indices = HostBuffer(engine, f"{draft.name}.write_indices", batch, "int64")
        self._mask = HostBuffer(engine, f"{draft.name}.attn_mask", max_num_tokens * capacity, "bool")
        self._causal = CausalMask(capacity, 1, np.dtype(np.bool_))
        self._alone: dict[tuple[object, ...], Call] = {}
        """The network for its keys and values only, by the hidden states that it reads and the sequences they are of."""
        self._cache_len = 0
        self._open: list[Sequence] = []
        """Whose exit states all passed."""
        self._drafted = False
        """Whether it ran over the first step of this cycle: over an exit state of every sequence, and all that any
        drafts."""

    @property
    def resumable(self) -> int:
        """All slots that the decoder holds of a request that this draft served have passed the network."""
        return self._arena.lengths[0]

    def step_logits(self, step: int) -> TargetLogits:
        self._drafted = True
        self._place_step(step)
        return super().step_logits(step)

    def passed(self, step: int) -> None:
        self._place_step(step)
        self._run_alone(self._decoder.exit_hidden(self._cut, step), 0)

    def on_hidden_states(self, sequence: Sequence, slot: int, hidden_states: View) -> None:
        """The exit states of a chunk, those that pad it too: theirs are overwritten, as in the target's layers."""
        hidden = self._decoder.hidden_after(self._after)
        self._drafted = False
        if sequence not in self._open:
            self._open.append(sequence)
        self._place([slot], hidden.shape[1], {0})
        self._run_alone(hidden, self._decoder.last_batch_index)

    def end(self, sequence: Sequence) -> None:
        if sequence in self._open:
            self._open.remove(sequence)

    def on_pass(self) -> None:
        """Nothing to do where it drafted. Else the hidden states of all nodes pass: of its own sequences these are the
        roots, which will be accepted; of others, whatever they are, nothing is read."""
        drafted, self._drafted = self._drafted, False
        if not drafted:
            hidden = self._decoder.hidden_after(self._after)
            self._place(self._arena.lengths[: hidden.shape[0]], hidden.shape[1], self._own_places())
            self._run_alone(hidden, 0)

    # --- on a device ---

    def sent_on_device(self, count: int, start: int) -> Sent:
        self._drafted = True
        seen = self._causal.seen(count + 1, self._arena.cache_len)[start]
        return Sent(
            {}, {"slot": start + np.arange(count + 1)[:, None], "attn_mask": seen[0, :, None, None, None]}
        )

    def _corrected_in_cycle(self, hidden: View, number: int, sent: Mapping[str, View]) -> tuple[Call, View]:
        return self._with_hidden(hidden, self._sent(number, sent))

    def last_step(self, hidden: View, number: int, sent: Mapping[str, View]) -> list[Call]:
        return [self._bound(hidden, self._sent(number, sent), 0)]

    def _sent(self, number: int, sent: Mapping[str, View]) -> dict[str, View]:
        slot = sent[f"slot.{number}"]
        return {
            "positions": slot.buffer.view((1, 1), slot.dtype, slot.offset),
            "write_indices": slot,
            "attn_mask": sent[f"attn_mask.{number}"],
        }

    # --- the network ---

    def _place_step(self, step: int) -> None:
        """The slot behind the valid ones and `step` others, of every sequence."""
        arena = self._arena
        starts = [length + step for length in arena.lengths[: arena.batch]]
        self._place(starts, 1, self._own_places())

    def _own_places(self) -> set[int]:
        return {sequence.batch_index for sequence in self._open}

    def _place(self, starts: Items[int], width: int, own: Collection[int]) -> None:
        """The next run is over exit states in slots start.. of sequences; position is slot, and each sees all before
        it. Of sequences that are not at the places `own` no earlier one passed: theirs see themselves."""
        batch, cache_len = len(starts), self._arena.cache_len
        if cache_len != self._cache_len:  # the views of shorter or longer caches are gone
            self._alone.clear()
            self._steps.clear()
            self._cache_len = cache_len
        shape, mask_shape = (batch, width), (batch, 1, width, cache_len)
        positions, mask = self._positions.host(shape), self._mask.host(mask_shape)
        indices = self._indices.host((batch,))
        for batch_index, start in enumerate(starts):
            indices[batch_index] = start
            positions[batch_index] = self._causal.positions[start : start + width]
            if batch_index in own:
                self._causal.chain(mask, batch_index, start, width)
            else:
                mask[batch_index] = False
                mask[batch_index, 0, range(width), range(start, start + width)] = True
        self._positions.push(shape)
        self._mask.push(mask_shape)
        self._indices.push((batch,))

    def _run_alone(self, hidden: View, batch_index: int) -> None:
        """Run the network over placed hidden states [batch, width, E] of sequences batch_index.., for their keys and
        values."""
        key = hidden.address, hidden.shape, batch_index
        call = self._alone.get(key)
        if call is None:
            call = self._alone[key] = self._bound(hidden, self._placed(hidden.shape), batch_index)
        call.run()

    def _corrected(self, hidden: View, batch: int) -> tuple[Call, View]:
        return self._with_hidden(hidden, self._placed(hidden.shape))

    def _with_hidden(self, hidden: View, placed: Mapping[str, View]) -> tuple[Call, View]:
        """The network over placed exit states [batch, 1, E] for the hidden states that the head reads, too."""
        assert self._out is not None
        out = self._out.view(hidden.shape, self._decoder.dtype)
        return self._bound(hidden, placed, 0, out), out

    def _placed(self, shape: tuple[int, ...]) -> dict[str, View]:
        """What the host places."""
        batch, width, _ = shape
        return {
            "positions": self._positions.view((batch, width)),
            "write_indices": self._indices.view((batch,)),
            "attn_mask": self._mask.view((batch, 1, width, self._arena.cache_len)),
        }

    def _bound(
        self, hidden: View, placed: Mapping[str, View], batch_index: int, out: View | None = None
    ) -> Call:
        assert self._graph is not None
        keys, values = self._arena.view(self._layer, batch_index, hidden.shape[0])
        inputs = {"hidden": hidden, **placed, "key_cache.0": keys, "value_cache.0": values}
        outputs = {"updated_key_cache.0": keys, "updated_value_cache.0": values}
        if out is not None:
            outputs["hidden_out"] = out
        return self._decoder.engine.bind(self._graph, inputs, outputs)
