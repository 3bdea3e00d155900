"""The programs of cycles on a device: verify a tree, draft on the trunk or by passes apart, run a chain of a draft's
own.

Each is a list of calls between one transfer up and one down; passes are those that step-by-step decoding runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ..bundle.manifest import Limits
from ..engines.base import Call, View
from .cycle_program import CycleProgram, Transfers, draft_sizes
from .device.draft_chain import DeviceChain, DraftsOnDevice, Sent
from .device.logits_processors import DeviceLogitsProcessors
from .device.packed_buffers import FLAG, FLOAT, INT, Fields
from .device_argmax import BindHead, DeviceArgmax
from .device_passes import DevicePasses
from .exit_states import ExitStates
from .forward_pass import ForwardPass
from .forward_passes import ForwardPasses
from .head import HeadOutputs


class DevicePrograms:
    """Makes programs of the decoder's passes, exit states and heads. `graph`: what changes the logits of a request."""

    def __init__(self, passes: ForwardPasses, exits: ExitStates, heads: HeadOutputs, limits: Limits):
        self._engine, self._passes, self._exits = passes.engine, passes, exits
        self._device_passes = DevicePasses(passes)
        self._argmax = DeviceArgmax(
            passes.engine, heads, self._device_passes, limits, passes.embedding.vocabulary
        )
        self._end = len(passes.segments)

    @property
    def processors(self) -> DeviceLogitsProcessors:
        """The graphs that change logits."""
        return self._argmax.processors

    def verify(self, width: int, is_chain: bool, graph: str | None) -> CycleProgram:
        """All segments over a tree of `width` nodes that the host sends."""
        sizes = {"tokens": width * INT}
        if not is_chain:
            sizes |= {"depths": width * INT, "ancestors": width * width * FLAG}
        transfers = self._transfers(width, graph, sizes)
        up = transfers.up
        nodes = self._device_passes.chain(width) if is_chain else (
            up.view("depths", 1, width), up.view("ancestors", 1, width, width, dtype="bool"),
        )  # fmt: skip
        forward_pass = self._passes.prepare(0, self._end, width)
        calls = [self._passes.embedding.bind(up.view("tokens", 1, width))]
        calls += self._device_passes.bind(forward_pass, up, 0, nodes)
        calls += self._argmax.judge(forward_pass, width, transfers, up.view("tokens", width), nodes)
        return self._program(calls, [forward_pass], transfers)

    def draft_on_trunk(
        self, draft: DraftsOnDevice, cut: int, count: int, graph: str | None, sent: Sent
    ) -> CycleProgram:
        """`count` tokens drafted behind the exit states after `cut` segments, and the tail over all of them."""
        passes, engine, chain = self._passes, self._engine, self._device_passes.chain
        # With a `verify_width` every pass is over all nodes that there will be, from the first slot on; those that are not
        # drafted yet are the pending token. With a least width it stands behind the one token of a step.
        fixed, width, wide = passes.verify_width is not None, passes.padded(count + 1), passes.padded(1)
        steps, together = 0 if fixed else count, fixed or graph is not None
        each = 1 if fixed else wide
        transfers, kept = self._draft_transfers(wide, width, count, graph, steps, draft_sizes(sent), each)
        up, inputs = transfers.up, transfers.draft_inputs(sent)
        token, trunks, calls = up.view("tokens", 1, wide), [], []
        if together:
            calls.append(engine.copy(kept.view("all", 1, wide), token))
        if fixed:
            token = kept.view("all", 1, wide)
        elif wide > 1:
            calls += [engine.copy(kept.view(f"token.{number}", 1, wide), token) for number in range(count)]
        for number in range(count + 1):
            trunk = passes.prepare(0, cut, wide, number)
            trunks.append(trunk)
            calls.append(passes.embedding.bind(token))
            calls += self._device_passes.bind(trunk, up, min(number, steps), chain(wide))
            hidden = self._exits.view(cut, passes.arena.batch, 1, number)
            if number == count:  # the last draft passes the trunk too
                calls += draft.last_step(hidden, number, inputs)
                break
            head = partial(draft.draft_step, hidden, number=number, sent=inputs)
            calls += self._draft(head, number, transfers, kept, together)
            if not fixed:
                token = kept.view(f"token.{number}", 1, wide)
        tail = passes.prepare(cut, self._end, width)
        calls += self._exits.copies(tail, cut, count + 1)
        calls += self._device_passes.bind(tail, up, 0, chain(width))
        calls += self._argmax.judge(tail, width, transfers, kept.view("all", width), chain(width))
        return self._program(calls, [*trunks, tail], transfers, steps)

    def draft_apart(
        self, draft: DraftsOnDevice, drafting: ForwardPass, count: int, graph: str | None
    ) -> CycleProgram:
        """`count` tokens, each by the pass `drafting`, and all segments over them."""
        engine, passes, chain = self._engine, self._passes, self._device_passes.chain
        width = passes.padded(count + 1)
        transfers, kept = self._draft_transfers(width, width, count, graph, count - 1)
        up = transfers.up
        # The pending token everywhere; what is drafted takes its places from the second on.
        calls = [engine.copy(kept.view("all", width), up.view("tokens", width))]
        token = kept.view("all", 1, 1)
        for number in range(count):
            calls.append(passes.embedding.bind(token))
            calls += self._device_passes.bind(drafting, up, number, chain(1))
            head = partial(draft.draft_step, drafting.result, number=number, sent={})
            calls += self._draft(head, number, transfers, kept, True)
            token = kept.view(f"token.{number}", 1, 1)
        full = passes.prepare(0, self._end, width)
        calls.append(passes.embedding.bind(kept.view("all", 1, width)))
        calls += self._device_passes.bind(full, up, 0, chain(width))
        calls += self._argmax.judge(full, width, transfers, kept.view("all", width), chain(width))
        return self._program(calls, [drafting, full], transfers, count - 1)

    def verify_chain(self, chain: DeviceChain, graph: str | None) -> CycleProgram:
        """A chain that its own calls draft, and all segments over it."""
        engine, passes, count = self._engine, self._passes, chain.length
        width = passes.padded(count + 1)
        sizes = {"tokens": width * INT} | draft_sizes(chain.sent)
        transfers = self._transfers(width, graph, sizes, {"drafted": count * INT, "scores": count * FLOAT})
        up, down = transfers.up, transfers.down
        kept = Fields(engine, "cycle.tokens", {"all": width * INT})

        def keep(number: int, token: View, score: View) -> list[Call]:
            scores = down.view("scores", 1, dtype="float32", offset=number)
            return [engine.copy(kept.view("all", 1, offset=number + 1), token), engine.copy(scores, score)]

        full = passes.prepare(0, self._end, width)
        tokens = kept.view("all", width)
        # The pending token everywhere; what is drafted takes its places from the second on.
        calls = [engine.copy(tokens, up.view("tokens", width))]
        calls += chain.bind(transfers.draft_inputs(chain.sent), keep)
        calls.append(engine.copy(down.view("drafted", count), kept.view("all", count, offset=1)))
        calls.append(passes.embedding.bind(kept.view("all", 1, width)))
        nodes = self._device_passes.chain(width)
        calls += self._device_passes.bind(full, up, 0, nodes)
        calls += self._argmax.judge(full, width, transfers, tokens, nodes)
        return self._program(calls, [full], transfers)

    def _transfers(
        self,
        width: int,
        graph: str | None,
        up: Mapping[str, int],
        down: Mapping[str, int] | None = None,
        steps: int = 0,
    ) -> Transfers:
        """Memory of what every cycle sends and brings, and of fields of its own with so many bytes."""
        sizes = dict(up)
        for name in ("start", "first"):
            sizes |= {f"{name}.{step}": INT for step in range(steps + 1)}
        if graph is not None:
            sizes |= {name: count * INT for name, count in self._argmax.processors.sent.items()}
        results = {**(down or {}), "best": width * INT, "finite": width * FLAG}
        return Transfers(
            Fields(self._engine, "cycle.up", sizes), Fields(self._engine, "cycle.down", results), graph
        )

    def _draft_transfers(
        self,
        num_positions: int,
        width: int,
        count: int,
        graph: str | None,
        steps: int,
        own: Mapping[str, int] | None = None,
        each: int = 1,
    ) -> tuple[Transfers, Fields]:
        """Transfers of a cycle that is sent so many places of the pending token, fields of the draft's `own`, and drafts
        `count` tokens; and, on the device, each of these where it can be bound as the first of `each`, and all of a pass
        in a row."""
        sizes = {"all": width * INT}
        for number in range(count):
            sizes |= {f"token.{number}": each * INT, f"finite.{number}": FLAG}
        results = {"drafted": count * INT, "drafts_finite": count * FLAG}
        sizes_up = {"tokens": num_positions * INT, **(own or {})}
        transfers = self._transfers(width, graph, sizes_up, results, steps)
        return transfers, Fields(self._engine, "cycle.tokens", sizes)

    def _draft(
        self, head: BindHead, number: int, transfers: Transfers, kept: Fields, together: bool
    ) -> list[Call]:
        """The draft of that number, from 0, by `head`: kept where it can be bound, among all where they are wanted
        `together`, and brought down."""
        engine, down = self._engine, transfers.down
        best = kept.view(f"token.{number}", 1)
        finite = kept.view(f"finite.{number}", 1, dtype="bool")
        node = self._device_passes.last_of_chain(number + 1)
        calls = self._argmax.best(head, best, finite, transfers, kept.view("all", number + 1), node)
        if together:
            calls.append(engine.copy(kept.view("all", 1, offset=number + 1), best))
        calls.append(engine.copy(down.view("drafted", 1, offset=number), best))
        calls.append(engine.copy(down.view("drafts_finite", 1, dtype="bool", offset=number), finite))
        return calls

    def _program(
        self, calls: list[Call], passes: list[ForwardPass], transfers: Transfers, steps: int = 0
    ) -> CycleProgram:
        program = self._engine.program(calls, transfers.up.whole, transfers.down.whole)
        return CycleProgram(program, passes, transfers, steps)
