"""Cycles of one sequence that need the host once: drafted tokens, masks and verdicts stay where the graphs run.

`head` writes its best token where the next `embed` reads one, drafts with graphs of their own (`DeviceChain`) do likewise, and
masks come from the graph `mask`, so that between the steps of a cycle nobody waits. The host sends tokens, slots and positions ahead, in one transfer, and reads in one what
was drafted and what the target says of it. The passes are the decoder's own (`Decoder.prepared`); a cycle is a list of
their calls, which an engine may capture and replay (`Engine.program`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..bundle.interfaces import CHANGING
from ..engines.base import DTYPES, Call, Engine, Program, View, dtype_name
from .device.draft_chain import DeviceChain, Sent
from .device.logits_processors import DeviceLogitsProcessors, LogitsChanges
from .device.packed_buffers import FLAG, FLOAT, INT, Fields, HostFields
from .logits import not_finite
from .masks import relations
from .token_tree import TokenTree

if TYPE_CHECKING:
    from .decoder import Decoder, ForwardPass

INT64 = DTYPES["int64"]

LAYOUTS = 4
"""Of caches that grow, so many have their programs kept."""


class DraftsOnDevice(Protocol):
    """A proposer with a `draft_step` (`speculative/proposer.py`)."""

    name: str

    def sent_on_device(self, count: int, start: int) -> Sent: ...
    def draft_step(
        self, hidden: View, outputs: dict[str, View], number: int, sent: Mapping[str, View]
    ) -> list[Call]: ...
    def last_step(self, hidden: View, number: int, sent: Mapping[str, View]) -> list[Call]: ...


def is_supported(engine: Engine) -> bool:
    """Whether an engine can do whole cycles: it is not in host memory, its bundle has the graph `mask`, and its head
    names the best token and whether it is finite."""
    if engine.host_memory or "mask" not in engine.graphs:
        return False
    return {"best", "finite"} <= {value.name for value in engine.interface("head").outputs}


class ArgmaxResult:
    """What the target says after the nodes of a pass: their best tokens, without logits."""

    def __init__(self, best: np.ndarray, finite: np.ndarray):
        self._best, self._finite = best.tolist(), finite

    def best(self, logits_index: int) -> int:
        """The most likely token after `row`. Raises `NumericsError` for logits that are not finite."""
        if not self._finite[logits_index]:
            raise not_finite("head", float("nan"))
        return self._best[logits_index]


@dataclass
class Drafted:
    """Outcome of a cycle: the tree that was verified, the target's answers, and whether the logits that it was drafted
    from are all finite."""

    tree: TokenTree
    answers: ArgmaxResult
    finite: bool = True


def _sent(name: str) -> str:
    """The field of what a draft sends."""
    return f"draft.{name}"


def _sizes(sent: Sent) -> dict[str, int]:
    """Bytes of the fields of what a draft sends."""
    found = {_sent(name): values.nbytes for name, values in sent.once.items()}
    for name, values in sent.each.items():
        found |= {_sent(f"{name}.{step}"): row.nbytes for step, row in enumerate(values)}
    return found


@dataclass
class _Transfers:
    """What goes up and comes down in a cycle, and what its logits pass behind a head (None: nothing)."""

    up: Fields
    down: Fields
    graph: str | None

    def sent(self, names: Mapping[str, int]) -> dict[str, View]:
        """Fields of int64, so many of each."""
        return {name: self.up.view(name, count) for name, count in names.items()}

    def of_draft(self, sent: Sent) -> dict[str, View]:
        """What a draft sends, where the engine has it."""
        numbered = {
            f"{name}.{step}": row for name, rows in sent.each.items() for step, row in enumerate(rows)
        }
        return {
            name: self.up.view(_sent(name), *values.shape, dtype=dtype_name(values))
            for name, values in {**sent.once, **numbered}.items()
        }


class _Cycle:
    """One program, and where its fields lie in what goes up and comes down. `steps`: passes that begin at a slot of their own,
    less one."""

    def __init__(
        self, program: Program, passes: list[ForwardPass], width: int, transfers: _Transfers, steps: int
    ):
        self.program, self.passes, self.width = program, passes, width
        self._up = HostFields(transfers.up, program.upload)
        self._down = HostFields(transfers.down, program.download)
        self._steps = np.arange(steps + 1)
        self._starts, self._firsts = (
            self._up.each(name, self._steps.dtype, self._steps.shape) for name in ("start", "first")
        )

    def send(self, name: str, values: np.ndarray | list[int] | int) -> None:
        """Write a field of the upload: as many int64 as it has, one for all of it, or an array."""
        if isinstance(values, np.ndarray):
            self._up.one(name, values.dtype, values.shape)[...] = values
        else:
            self._up.one(name, INT64)[:] = values

    def begin(self, start: int, first: int) -> None:
        """Write the first slot and the first position of every step."""
        np.add(self._steps, start, out=self._starts)
        np.add(self._steps, first, out=self._firsts)

    def send_draft(self, sent: Sent) -> None:
        """Write what a draft sends."""
        for name, values in sent.once.items():
            self.send(_sent(name), values)
        for name, values in sent.each.items():
            self._up.each(_sent(name), values.dtype, values.shape)[...] = values

    def came(self, name: str, dtype: str = "int64") -> np.ndarray:
        """A field of the download, [n]."""
        return self._down.one(name, DTYPES[dtype])


class OnDevice:
    """The cycles of a decoder whose engine offers them (`offered`); programs are made when first asked for, for
    every layout of the caches."""

    def __init__(self, decoder: Decoder):
        self._decoder, self._engine = decoder, decoder.engine
        self._made: dict[object, dict[tuple[object, ...], _Cycle]] = {}
        """Layout of the decoder's caches → programs."""
        self._slots: View | None = None
        self._bias: View | None = None
        self._chains: dict[int, tuple[View, View]] = {}
        self._lines: dict[int, tuple[View, View]] = {}
        self._processing: DeviceLogitsProcessors | None = None
        self._offered = frozenset(CHANGING) & set(decoder.engine.graphs)

    def offers(self, changes: LogitsChanges) -> bool:
        """Whether the bundle has the graph that a request's logits pass."""
        return changes.graph in self._offered

    def verify(self, tree: TokenTree, start: int, changes: LogitsChanges | None = None) -> Drafted:
        """All segments over a tree that the host knows, whose root takes slot `start`."""
        width, graph = self._decoder.padded(len(tree)), changes and changes.graph
        cycle = self._cycle(
            ("verify", width, tree.is_chain, graph), lambda: self._verifying(width, tree.is_chain, graph)
        )
        cycle.send("tokens", [*tree.tokens, *tree.tokens[-1:] * (width - len(tree))])
        if not tree.is_chain:
            depths, ancestors = relations(tree, width)
            cycle.send("depths", depths)
            cycle.send("ancestors", ancestors)
        self._launch(cycle, start, changes)
        return Drafted(tree, self._answers(cycle))

    def draft(
        self,
        draft: DraftsOnDevice,
        cut: int,
        count: int,
        token: int,
        start: int,
        changes: LogitsChanges | None = None,
    ) -> Drafted:
        """`count` tokens, drafted on the trunk of `cut` segments behind the pending `token`, which takes slot `start`, and
        verified by the tail."""
        graph, sent = changes and changes.graph, draft.sent_on_device(count, start)
        cycle = self._cycle(
            ("draft", draft.name, count, graph),
            lambda: self._drafting(draft, cut, count, graph, sent),
        )
        cycle.send_draft(sent)
        return self._drafted(cycle, token, start, changes)

    def draft_apart(
        self,
        draft: DraftsOnDevice,
        bind: Callable[[], ForwardPass],
        count: int,
        token: int,
        start: int,
        changes: LogitsChanges | None = None,
    ) -> Drafted:
        """`count` tokens, drafted by a pass of its own for each (`Decoder.apart`, which `bind` asks for) behind the pending
        `token`, which takes slot `start`, and verified by all segments, which write the rows of those passes anew."""
        graph = changes and changes.graph
        cycle = self._cycle(
            ("apart", draft.name, count, graph),
            lambda: self._apart(draft, bind(), count, graph),
        )
        return self._drafted(cycle, token, start, changes)

    def verify_drafted(
        self, chain: DeviceChain, token: int, start: int, changes: LogitsChanges | None = None
    ) -> Drafted:
        """A chain that is drafted behind the pending `token` by calls of its own, and verified by all segments; the root
        takes slot `start`."""
        graph = changes and changes.graph
        cycle = self._cycle(("chain", *chain.key, graph), lambda: self._chaining(chain, graph))
        cycle.send("tokens", token)
        cycle.send_draft(chain.sent)
        self._launch(cycle, start, changes)
        tokens = cycle.came("drafted").tolist()
        finite = bool(np.isfinite(cycle.came("scores", "float32")).all())
        return Drafted(TokenTree.chain([token, *tokens]), self._answers(cycle), finite)

    def _drafted(self, cycle: _Cycle, token: int, start: int, changes: LogitsChanges | None) -> Drafted:
        """Outcome of a cycle that begins with the pending token in every place, and drafts its own."""
        cycle.send("tokens", token)
        self._launch(cycle, start, changes)
        chain = [token, *cycle.came("drafted").tolist()]
        finite = bool(cycle.came("drafts_finite", "bool").all())
        return Drafted(TokenTree.chain(chain), self._answers(cycle), finite)

    # --- one launch ---

    def _launch(self, cycle: _Cycle, start: int, changes: LogitsChanges | None) -> None:
        decoder = self._decoder
        if changes is not None:
            for name, values in self._process().begin(changes).items():
                cycle.send(name, values)
        cycle.begin(start, decoder.position_of(start))
        for run in cycle.passes:
            decoder.refresh(run)
        cycle.program.launch()
        cycle.program.wait()
        if changes is not None:
            self._process().done(changes)
        decoder.set_last_pass(cycle.passes[-1])

    def _answers(self, cycle: _Cycle) -> ArgmaxResult:
        return ArgmaxResult(cycle.came("best"), cycle.came("finite", "bool").copy())

    # --- programs ---

    def _cycle(self, key: tuple[object, ...], make: Callable[[], _Cycle]) -> _Cycle:
        """The program `key` over the caches as they lie now; those of the layouts before are kept for the next request, whose
        caches begin small again."""
        layout = self._decoder.layout
        made = self._made.pop(layout, None)
        if made is None:
            made = {}
            if len(self._made) == LAYOUTS:
                del self._made[next(iter(self._made))]
        self._made[layout] = made  # the last one used stands last
        if key not in made:
            made[key] = make()
        return made[key]

    def _transfers(
        self,
        width: int,
        graph: str | None,
        up: Mapping[str, int],
        down: Mapping[str, int] | None = None,
        steps: int = 0,
    ) -> _Transfers:
        """Memory of what every cycle sends and brings, and of fields of its own with so many bytes."""
        sizes = dict(up)
        for name in ("start", "first"):
            sizes |= {f"{name}.{step}": INT for step in range(steps + 1)}
        if graph is not None:
            sizes |= {name: count * INT for name, count in self._process().sent.items()}
        brought = {**(down or {}), "best": width * INT, "finite": width * FLAG}
        return _Transfers(
            Fields(self._engine, "cycle.up", sizes), Fields(self._engine, "cycle.down", brought), graph
        )

    def _done(
        self, calls: list[Call], passes: list[ForwardPass], width: int, transfers: _Transfers, steps: int = 0
    ) -> _Cycle:
        up, down = transfers.up.whole, transfers.down.whole
        return _Cycle(self._engine.program(calls, up, down), passes, width, transfers, steps)

    def _verifying(self, width: int, is_chain: bool, graph: str | None) -> _Cycle:
        decoder = self._decoder
        sizes = {"tokens": width * INT}
        if not is_chain:
            sizes |= {"depths": width * INT, "ancestors": width * width * FLAG}
        transfers = self._transfers(width, graph, sizes)
        up = transfers.up
        related = self._chain(width) if is_chain else (
            up.view("depths", 1, width), up.view("ancestors", 1, width, width, dtype="bool"),
        )  # fmt: skip
        run = decoder.prepared(0, decoder.segments, width, 0)
        calls = [decoder.embedding.bind(up.view("tokens", 1, width))]
        calls += self._pass(run, up, 0, related)
        calls += self._judge(run, width, transfers, up.view("tokens", width), related)
        return self._done(calls, [run], width, transfers)

    def _drafting(self, draft: DraftsOnDevice, cut: int, count: int, graph: str | None, sent: Sent) -> _Cycle:
        decoder, engine = self._decoder, self._engine
        # With a `verify_width` every pass is over all nodes that there will be, from the first slot on; those that are not
        # drafted yet are the pending token.
        fixed, width, wide = decoder.verify_width is not None, decoder.padded(count + 1), decoder.padded(1)
        steps, together = 0 if fixed else count, fixed or graph is not None
        transfers, between = self._of_drafting(wide, width, count, graph, steps, _sizes(sent))
        up, given = transfers.up, transfers.of_draft(sent)
        token, passes, calls = up.view("tokens", 1, wide), [], []
        if together:
            calls.append(engine.copy(between.view("all", 1, wide), token))
        if fixed:
            token = between.view("all", 1, wide)
        for number in range(count + 1):
            run = decoder.prepared(0, cut, wide, number)
            passes.append(run)
            calls.append(decoder.embedding.bind(token))
            calls += self._pass(run, up, min(number, steps), self._chain(wide))
            exits = decoder.exit_hidden(cut, number)
            if number == count:  # the last draft passes the trunk too
                calls += draft.last_step(exits, number, given)
                break
            head = partial(draft.draft_step, exits, number=number, sent=given)
            calls += self._drafts(head, number, transfers, between, together)
            if not fixed:
                token = between.view(f"token.{number}", 1, 1)
        run = decoder.prepared(cut, decoder.segments, width, 0)
        calls += decoder.exit_copies(run, cut, count + 1)
        calls += self._pass(run, up, 0, self._chain(width))
        calls += self._judge(run, width, transfers, between.view("all", width), self._chain(width))
        return self._done(calls, [*passes, run], width, transfers, steps)

    def _apart(self, draft: DraftsOnDevice, drafting: ForwardPass, count: int, graph: str | None) -> _Cycle:
        decoder, engine, width = self._decoder, self._engine, self._decoder.padded(count + 1)
        transfers, between = self._of_drafting(width, width, count, graph, count - 1)
        up = transfers.up
        # The pending token everywhere; what is drafted takes its places from the second on.
        calls = [engine.copy(between.view("all", width), up.view("tokens", width))]
        token = between.view("all", 1, 1)
        for number in range(count):
            calls.append(decoder.embedding.bind(token))
            calls += self._pass(drafting, up, number, self._chain(1))
            head = partial(draft.draft_step, drafting.result, number=number, sent={})
            calls += self._drafts(head, number, transfers, between, True)
            token = between.view(f"token.{number}", 1, 1)
        run = decoder.prepared(0, decoder.segments, width, 0)
        calls.append(decoder.embedding.bind(between.view("all", 1, width)))
        calls += self._pass(run, up, 0, self._chain(width))
        calls += self._judge(run, width, transfers, between.view("all", width), self._chain(width))
        return self._done(calls, [drafting, run], width, transfers, count - 1)

    def _of_drafting(
        self,
        num_positions: int,
        width: int,
        count: int,
        graph: str | None,
        steps: int,
        own: Mapping[str, int] | None = None,
    ) -> tuple[_Transfers, Fields]:
        """Transfers of a cycle that is sent so many places of the pending token, fields of the draft's `own`, and drafts
        `count` tokens; and, on the device, each of these where it can be bound, and all of a pass in a row."""
        sizes = {"all": width * INT}
        for number in range(count):
            sizes |= {f"token.{number}": INT, f"finite.{number}": FLAG}
        brought = {"drafted": count * INT, "drafts_finite": count * FLAG}
        sizes_up = {"tokens": num_positions * INT, **(own or {})}
        transfers = self._transfers(width, graph, sizes_up, brought, steps)
        return transfers, Fields(self._engine, "cycle.tokens", sizes)

    def _drafts(
        self,
        head: Callable[[dict[str, View]], list[Call]],
        number: int,
        transfers: _Transfers,
        between: Fields,
        together: bool,
    ) -> list[Call]:
        """The draft of that number, from 0, by `head` (see `_best`): kept where it can be bound, among all where they are
        wanted `together`, and brought down."""
        engine, down = self._engine, transfers.down
        best = between.view(f"token.{number}", 1)
        finite = between.view(f"finite.{number}", 1, dtype="bool")
        calls = self._best(
            head, best, finite, transfers, between.view("all", number + 1), self._last_of_chain(number + 1)
        )
        if together:
            calls.append(engine.copy(between.view("all", 1, offset=number + 1), best))
        calls.append(engine.copy(down.view("drafted", 1, offset=number), best))
        calls.append(engine.copy(down.view("drafts_finite", 1, dtype="bool", offset=number), finite))
        return calls

    def _chaining(self, chain: DeviceChain, graph: str | None) -> _Cycle:
        decoder, engine, count = self._decoder, self._engine, chain.length
        width = decoder.padded(count + 1)
        sizes = {"tokens": width * INT} | _sizes(chain.sent)
        transfers = self._transfers(width, graph, sizes, {"drafted": count * INT, "scores": count * FLOAT})
        up, down = transfers.up, transfers.down
        between = Fields(engine, "cycle.tokens", {"all": width * INT})

        def keep(number: int, token: View, score: View) -> list[Call]:
            noted = down.view("scores", 1, dtype="float32", offset=number)
            return [engine.copy(between.view("all", 1, offset=number + 1), token), engine.copy(noted, score)]

        sent = transfers.of_draft(chain.sent)
        run = decoder.prepared(0, decoder.segments, width, 0)
        tokens = between.view("all", width)
        # The pending token everywhere; what is drafted takes its places from the second on.
        calls = [engine.copy(tokens, up.view("tokens", width))]
        calls += chain.bind(sent, keep)
        calls.append(engine.copy(down.view("drafted", count), between.view("all", count, offset=1)))
        calls.append(decoder.embedding.bind(between.view("all", 1, width)))
        calls += self._pass(run, up, 0, self._chain(width))
        calls += self._judge(run, width, transfers, tokens, self._chain(width))
        return self._done(calls, [run], width, transfers)

    def _pass(self, run: ForwardPass, up: Fields, number: int, related: tuple[View, View]) -> list[Call]:
        """A pass that begins at `start.number`, with its mask and positions."""
        start = up.view(f"start.{number}", 1)
        mask, positions, indices = self._decoder.position_inputs(run)
        inputs = {
            "start": start,
            "slots": self._numbers(),
            "depths": related[0],
            "ancestors": related[1],
        }
        given = {value.name for value in self._engine.interface("mask").inputs}
        if "first_positions" in given:
            inputs["first_positions"] = up.view(f"first.{number}", 1)
        if "distance_bias" in given:
            inputs |= {"distance_bias": self._biases(), "slot_depths": related[0]}
        outputs = {"attn_mask": mask} | ({} if positions is None else {"positions": positions})
        return [self._engine.bind("mask", inputs, outputs), self._engine.copy(indices, start), *run.calls]

    def _judge(
        self, run: ForwardPass, width: int, transfers: _Transfers, tokens: View, related: tuple[View, View]
    ) -> list[Call]:
        """What the target says of the nodes `tokens` of a pass, and the last calls of a program."""
        best = transfers.down.view("best", width)
        finite = transfers.down.view("finite", width, dtype="bool")
        inputs = {"hidden": run.result, "row_index": self._decoder.row_range(width)}
        head = lambda outputs: [self._engine.bind("head", inputs, outputs)]  # noqa: E731
        calls = self._best(head, best, finite, transfers, tokens, related)
        return calls if transfers.graph is None else [*calls, self._process().keep()]

    def _best(
        self,
        head: Callable[[dict[str, View]], list[Call]],
        best: View,
        finite: View,
        transfers: _Transfers,
        tokens: View,
        related: tuple[View, View],
    ) -> list[Call]:
        """The likeliest tokens by `head`, which takes its outputs: of its logits, or of those that a request changes, row by
        row behind those of the `tokens` that are its ancestors. `related`: `depths` and `ancestors` of the rows."""
        if transfers.graph is None:
            return head({"best": best, "finite": finite})
        process, (rows,), span = self._process(), best.shape, tokens.shape[0]
        (depths, ancestors), whole = related, related if rows == span else self._chain(span)
        flat = lambda view, *shape: view.buffer.view(shape, view.dtype, view.offset)  # noqa: E731
        nodes = {
            "tokens": tokens, "token_depths": flat(whole[0], span),
            "depths": flat(depths, rows), "ancestors": flat(ancestors, rows, span),
        }  # fmt: skip
        found = head({"logits": process.raw(rows), "finite": finite})
        return [*found, process.call(transfers.graph, transfers.sent(process.sent), nodes, best)]

    # --- what does not change ---

    def _chain(self, width: int) -> tuple[View, View]:
        """`depths` and `ancestors` of a chain."""
        if width not in self._chains:
            depths, ancestors = relations(TokenTree.chain([0] * width), width)
            self._chains[width] = (
                self._engine.constant(f"chain.{width}.depths", depths[None]),
                self._engine.constant(f"chain.{width}.ancestors", ancestors[None]),
            )
        return self._chains[width]

    def _last_of_chain(self, span: int) -> tuple[View, View]:
        """`depths` [1] and `ancestors` [1, span] of the last node of a chain."""
        if span not in self._lines:
            self._lines[span] = (
                self._engine.constant(f"path.{span}.depths", np.array([span - 1])),
                self._engine.constant(f"path.{span}.ancestors", np.ones((1, span), np.bool_)),
            )
        return self._lines[span]

    def _process(self) -> DeviceLogitsProcessors:
        """The graphs that change logits, which few requests ask for."""
        if self._processing is None:
            decoder = self._decoder
            vocabulary = decoder.manifest.tensors["embedding_table"].shape[0]
            self._processing = DeviceLogitsProcessors(self._engine, decoder.manifest.limits, vocabulary)
        return self._processing

    def _numbers(self) -> View:
        """int64 [cache]: every slot."""
        arena = self._decoder.arena
        if self._slots is None:
            self._slots = self._engine.constant("slots", np.arange(arena.capacity, dtype=np.int64))
        return self._slots.buffer.view((arena.rows,), "int64")

    def _biases(self) -> View:
        """What the mask graph takes of a relative bias; the same for the life of the engine."""
        if self._bias is None:
            self._bias = self._engine.constant("distance_bias", self._decoder.masks.distance_bias)
        return self._bias
