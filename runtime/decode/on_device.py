"""Cycles of one sequence that need the host once: drafted tokens, masks and verdicts stay where the graphs run.

`head` writes its best token where the next `embed` reads one, drafts with graphs of their own (`DeviceChain`) do likewise, and
masks come from the graph `mask`, so that between the steps of a cycle nobody waits. The host sends tokens, slots and positions ahead, in one transfer, and reads in one what
was drafted and what the target says of it. The passes are the decoder's own (`Decoder.prepared`); a cycle is a list of
their calls, which an engine may capture and replay (`Engine.program`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..engines.base import DTYPES, Call, Engine, Program, View, dtype_name
from .device_chain import DeviceChain
from .masks import relations
from .processing import GRAPH, Changes, Processing
from .target_rows import not_finite
from .tree import TokenTree

if TYPE_CHECKING:
    from .passes import Decoder, Pass

DraftStep = Callable[[View, "dict[str, View]"], "list[Call]"]

LAYOUTS = 4
"""Of caches that grow, so many have their programs kept."""

_INT, _FLOAT = 8, 4
"""Bytes of an int64, of a float32."""


class DraftsOnDevice(Protocol):
    """A proposer with a `draft_step` (`speculate/proposer.py`)."""

    name: str

    def draft_step(self, hidden: View, outputs: dict[str, View]) -> list[Call]: ...


def offered(engine: Engine) -> bool:
    """Whether an engine can do whole cycles: it is not in host memory, its bundle has the graph `mask`, and its head
    names the best token and whether it is finite."""
    if engine.host_memory or "mask" not in engine.graphs:
        return False
    return {"best", "finite"} <= {value.name for value in engine.interface("head").outputs}


class Answers:
    """What the target says after the nodes of a pass: their best tokens, without logits."""

    def __init__(self, best: np.ndarray, finite: np.ndarray):
        self._best, self._finite = best.tolist(), finite

    def best(self, row: int) -> int:
        """The most likely token after `row`. Raises `NumericsError` for logits that are not finite."""
        if not self._finite[row]:
            raise not_finite("head", float("nan"))
        return self._best[row]


@dataclass
class Drafted:
    """Outcome of a cycle: the tree that was verified, the target's answers, and whether the logits that it was drafted
    from are all finite."""

    tree: TokenTree
    answers: Answers
    finite: bool = True


def _sent(name: str) -> str:
    """The field of what a `DeviceChain` sends."""
    return f"draft.{name}"


class _Block:
    """A transfer, laid out field after field at the engine's alignment."""

    def __init__(self, engine: Engine, name: str):
        self._engine, self._name, self._unit = engine, name, max(engine.alignment, _INT)
        self._end = 0

    def place(self, nbytes: int) -> int:
        """Where a field of so many bytes begins."""
        start, self._end = self._end, self._end + -(-nbytes // self._unit) * self._unit
        return start

    def allocate(self) -> View:
        """The whole, uint8 [n]."""
        return self._engine.allocate(self._name, self._end).view((self._end,), "uint8")


def _at(block: View, start: int, shape: tuple[int, ...], dtype: str = "int64") -> View:
    return block.buffer.view(shape, dtype, start // DTYPES[dtype].itemsize)


class _Cycle:
    """One program, and where its fields lie in what goes up and comes down."""

    def __init__(
        self, program: Program, passes: list[Pass], width: int, fields: dict[str, int], drafted: int
    ):
        self.program, self.passes, self.width, self.drafted = program, passes, width, drafted
        self._fields = fields

    def send(self, name: str, values: np.ndarray | list[int] | int) -> None:
        """Write a field of the upload."""
        data = values if isinstance(values, np.ndarray) else np.asarray(values, np.int64)
        start = self._fields[name]
        self.program.upload[start : start + data.nbytes] = (
            np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        )

    def came(self, name: str, count: int, dtype: str = "int64") -> np.ndarray:
        """A field of the download, [count]."""
        start, item = self._fields[name], DTYPES[dtype]
        return self.program.download[start : start + count * item.itemsize].view(item)


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
        self._lines: dict[int, View] = {}
        self._processing: Processing | None = None
        self.processes = GRAPH in decoder.engine.graphs
        """Whether a request may change logits (`Changes`)."""

    def verify(self, tree: TokenTree, start: int, changes: Changes | None = None) -> Drafted:
        """All segments over a tree that the host knows, whose root takes slot `start`."""
        width, changed = self._decoder.padded(len(tree)), changes is not None
        cycle = self._cycle(
            ("verify", width, tree.is_chain, changed), lambda: self._verifying(width, tree.is_chain, changed)
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
        changes: Changes | None = None,
    ) -> Drafted:
        """`count` tokens, drafted on the trunk of `cut` segments behind the pending `token`, which takes slot `start`, and
        verified by the tail."""
        changed = changes is not None
        cycle = self._cycle(
            ("draft", draft.name, count, changed),
            lambda: self._drafting(draft.draft_step, cut, count, changed),
        )
        cycle.send("tokens", [token] * self._decoder.padded(1))
        self._launch(cycle, start, changes)
        tokens = cycle.came("drafted", count).tolist()
        finite = bool(cycle.came("drafts_finite", count, "bool").all())
        return Drafted(TokenTree.chain([token, *tokens]), self._answers(cycle), finite)

    def draft_apart(
        self,
        draft: DraftsOnDevice,
        bind: Callable[[], Pass],
        count: int,
        token: int,
        start: int,
        changes: Changes | None = None,
    ) -> Drafted:
        """`count` tokens, drafted by a pass of its own for each (`Decoder.apart`, which `bind` asks for) behind the pending
        `token`, which takes slot `start`, and verified by all segments, which write the rows of those passes anew."""
        changed = changes is not None
        cycle = self._cycle(
            ("apart", draft.name, count, changed),
            lambda: self._apart(draft.draft_step, bind(), count, changed),
        )
        cycle.send("tokens", [token] * cycle.width)
        self._launch(cycle, start, changes)
        tokens = cycle.came("drafted", count).tolist()
        finite = bool(cycle.came("drafts_finite", count, "bool").all())
        return Drafted(TokenTree.chain([token, *tokens]), self._answers(cycle), finite)

    def verify_drafted(
        self, chain: DeviceChain, token: int, start: int, changes: Changes | None = None
    ) -> Drafted:
        """A chain that is drafted behind the pending `token` by calls of its own, and verified by all segments; the root
        takes slot `start`."""
        changed = changes is not None
        cycle = self._cycle(("chain", *chain.key, changed), lambda: self._chaining(chain, changed))
        cycle.send("tokens", [token] * cycle.width)
        for name, values in chain.sent.items():
            cycle.send(_sent(name), values)
        self._launch(cycle, start, changes)
        tokens = cycle.came("drafted", chain.length).tolist()
        finite = bool(np.isfinite(cycle.came("scores", chain.length, "float32")).all())
        return Drafted(TokenTree.chain([token, *tokens]), self._answers(cycle), finite)

    # --- one launch ---

    def _launch(self, cycle: _Cycle, start: int, changes: Changes | None) -> None:
        decoder = self._decoder
        if changes is not None:
            cycle.send("recent", self._process().begin(changes))
        first = decoder.position_of(start)
        for step in range(cycle.drafted + 1):
            cycle.send(f"start.{step}", start + step)
            cycle.send(f"first.{step}", first + step)
        for run in cycle.passes:
            decoder.refresh(run)
        cycle.program.launch()
        cycle.program.wait()
        if changes is not None:
            self._process().done(changes)
        decoder.passed(cycle.passes[-1])

    def _answers(self, cycle: _Cycle) -> Answers:
        return Answers(cycle.came("best", cycle.width), cycle.came("finite", cycle.width, "bool").copy())

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

    def _verifying(self, width: int, is_chain: bool, changed: bool) -> _Cycle:
        decoder, engine = self._decoder, self._engine
        up, down, fields = _Block(engine, "cycle.up"), _Block(engine, "cycle.down"), {}
        fields["tokens"] = up.place(width * _INT)
        if not is_chain:
            fields["depths"], fields["ancestors"] = up.place(width * _INT), up.place(width * width)
        fields |= {"start.0": up.place(_INT), "first.0": up.place(_INT)}
        fields |= {"best": down.place(width * _INT), "finite": down.place(width)}
        if changed:
            fields["recent"] = up.place(self._process().recent * _INT)
        upload, download = up.allocate(), down.allocate()
        related = self._chain(width) if is_chain else (
            _at(upload, fields["depths"], (1, width)), _at(upload, fields["ancestors"], (1, width, width), "bool"),
        )  # fmt: skip
        run = decoder.prepared(0, decoder.segments, width, 0)
        calls = [decoder.embedding.bind(_at(upload, fields["tokens"], (1, width)))]
        calls += self._pass(run, upload, fields, 0, related)
        tokens = _at(upload, fields["tokens"], (width,)) if changed else None
        calls += self._judge(run, width, upload, download, fields, tokens, related[1])
        return _Cycle(engine.program(calls, upload, download), [run], width, fields, 0)

    def _drafting(self, step: DraftStep, cut: int, count: int, changed: bool) -> _Cycle:
        decoder, engine = self._decoder, self._engine
        # With a `verify_width` every pass is over all nodes that there will be, from the first slot on; those that are not
        # drafted yet are the pending token.
        fixed, width, wide = decoder.verify_width is not None, decoder.padded(count + 1), decoder.padded(1)
        steps = 0 if fixed else count
        up, down, inner = (_Block(engine, f"cycle.{name}") for name in ("up", "down", "tokens"))
        fields = {"tokens": up.place(wide * _INT)}
        for number in range(steps + 1):
            fields |= {f"start.{number}": up.place(_INT), f"first.{number}": up.place(_INT)}
        fields |= {"drafted": down.place(count * _INT), "drafts_finite": down.place(count)}
        fields |= {"best": down.place(width * _INT), "finite": down.place(width)}
        if changed:
            fields["recent"] = up.place(self._process().recent * _INT)
        places = [(inner.place(_INT), inner.place(1)) for _ in range(count)]
        whole = inner.place(width * _INT)
        upload, download, between = up.allocate(), down.allocate(), inner.allocate()
        token, passes, calls = _at(upload, fields["tokens"], (1, wide)), [], []
        if changed or fixed:
            calls.append(engine.copy(_at(between, whole, (1, wide)), token))
        if fixed:
            token = _at(between, whole, (1, wide))
        for number in range(count + 1):
            run = decoder.prepared(0, cut, wide, number)
            passes.append(run)
            calls.append(decoder.embedding.bind(token))
            calls += self._pass(run, upload, fields, min(number, steps), self._chain(wide))
            if number == count:
                break  # the last draft passes the trunk too
            at, flag = places[number]
            best, finite = _at(between, at, (1,)), _at(between, flag, (1,), "bool")
            calls += self._best(
                partial(step, decoder.exit_rows(cut, number)), best, finite, upload, fields,
                _at(between, whole, (number + 1,)) if changed else None, self._all_related(number + 1),
            )  # fmt: skip
            if changed or fixed:
                calls.append(engine.copy(_at(between, whole + (number + 1) * _INT, (1,)), best))
            kept = _at(download, fields["drafted"] + number * _INT, (1,))
            calls += [engine.copy(kept, best)]
            calls += [engine.copy(_at(download, fields["drafts_finite"] + number, (1,), "bool"), finite)]
            if not fixed:
                token = _at(between, at, (1, 1))
        run = decoder.prepared(cut, decoder.segments, width, 0)
        calls += decoder.exit_copies(run, cut, count + 1)
        calls += self._pass(run, upload, fields, 0, self._chain(width))
        tokens = _at(between, whole, (width,)) if changed else None
        calls += self._judge(run, width, upload, download, fields, tokens, self._chain(width)[1])
        return _Cycle(engine.program(calls, upload, download), [*passes, run], width, fields, steps)

    def _apart(self, step: DraftStep, drafting: Pass, count: int, changed: bool) -> _Cycle:
        decoder, engine, width = self._decoder, self._engine, self._decoder.padded(count + 1)
        up, down, inner = (_Block(engine, f"cycle.{name}") for name in ("up", "down", "tokens"))
        fields = {"tokens": up.place(width * _INT)}
        for number in range(count):
            fields |= {f"start.{number}": up.place(_INT), f"first.{number}": up.place(_INT)}
        fields |= {"drafted": down.place(count * _INT), "drafts_finite": down.place(count)}
        fields |= {"best": down.place(width * _INT), "finite": down.place(width)}
        if changed:
            fields["recent"] = up.place(self._process().recent * _INT)
        places = [(inner.place(_INT), inner.place(1)) for _ in range(count)]
        whole = inner.place(width * _INT)
        upload, download, between = up.allocate(), down.allocate(), inner.allocate()
        # The pending token everywhere; what is drafted takes its places from the second on.
        calls = [engine.copy(_at(between, whole, (width,)), _at(upload, fields["tokens"], (width,)))]
        token = _at(between, whole, (1, 1))
        for number, (at, flag) in enumerate(places):
            best, finite = _at(between, at, (1,)), _at(between, flag, (1,), "bool")
            calls.append(decoder.embedding.bind(token))
            calls += self._pass(drafting, upload, fields, number, self._chain(1))
            calls += self._best(
                partial(step, drafting.result), best, finite, upload, fields,
                _at(between, whole, (number + 1,)) if changed else None, self._all_related(number + 1),
            )  # fmt: skip
            kept = _at(download, fields["drafted"] + number * _INT, (1,))
            calls += [
                engine.copy(_at(between, whole + (number + 1) * _INT, (1,)), best),
                engine.copy(kept, best),
                engine.copy(_at(download, fields["drafts_finite"] + number, (1,), "bool"), finite),
            ]
            token = _at(between, at, (1, 1))
        run = decoder.prepared(0, decoder.segments, width, 0)
        calls.append(decoder.embedding.bind(_at(between, whole, (1, width))))
        calls += self._pass(run, upload, fields, 0, self._chain(width))
        tokens = _at(between, whole, (width,)) if changed else None
        calls += self._judge(run, width, upload, download, fields, tokens, self._chain(width)[1])
        program = engine.program(calls, upload, download)
        return _Cycle(program, [drafting, run], width, fields, count - 1)

    def _chaining(self, chain: DeviceChain, changed: bool) -> _Cycle:
        decoder, engine, count = self._decoder, self._engine, chain.length
        width = decoder.padded(count + 1)
        up, down, inner = (_Block(engine, f"cycle.{name}") for name in ("up", "down", "tokens"))
        fields = {"tokens": up.place(width * _INT), "start.0": up.place(_INT), "first.0": up.place(_INT)}
        fields |= {_sent(name): up.place(values.nbytes) for name, values in chain.sent.items()}
        fields |= {"drafted": down.place(count * _INT), "scores": down.place(count * _FLOAT)}
        fields |= {"best": down.place(width * _INT), "finite": down.place(width)}
        if changed:
            fields["recent"] = up.place(self._process().recent * _INT)
        whole = inner.place(width * _INT)
        upload, download, between = up.allocate(), down.allocate(), inner.allocate()

        def keep(number: int, token: View, score: View) -> list[Call]:
            noted = _at(download, fields["scores"] + number * _FLOAT, (1,), "float32")
            return [
                engine.copy(_at(between, whole + (number + 1) * _INT, (1,)), token),
                engine.copy(noted, score),
            ]

        sent = {
            name: _at(upload, fields[_sent(name)], values.shape, dtype_name(values))
            for name, values in chain.sent.items()
        }
        run = decoder.prepared(0, decoder.segments, width, 0)
        tokens = _at(between, whole, (width,))
        # The pending token everywhere; what is drafted takes its places from the second on.
        calls = [engine.copy(tokens, _at(upload, fields["tokens"], (width,)))]
        calls += chain.bind(sent, keep)
        calls.append(
            engine.copy(_at(download, fields["drafted"], (count,)), _at(between, whole + _INT, (count,)))
        )
        calls.append(decoder.embedding.bind(_at(between, whole, (1, width))))
        calls += self._pass(run, upload, fields, 0, self._chain(width))
        calls += self._judge(
            run, width, upload, download, fields, tokens if changed else None, self._chain(width)[1]
        )
        return _Cycle(engine.program(calls, upload, download), [run], width, fields, 0)

    def _pass(
        self, run: Pass, upload: View, fields: dict[str, int], number: int, related: tuple[View, View]
    ) -> list[Call]:
        """A pass that begins at `start.number`, with its mask and positions."""
        start = _at(upload, fields[f"start.{number}"], (1,))
        mask, positions, indices = self._decoder.places(run)
        inputs = {
            "start": start,
            "slots": self._numbers(),
            "depths": related[0],
            "ancestors": related[1],
        }
        given = {value.name for value in self._engine.interface("mask").inputs}
        if "first_positions" in given:
            inputs["first_positions"] = _at(upload, fields[f"first.{number}"], (1,))
        if "distance_bias" in given:
            inputs |= {"distance_bias": self._biases(), "slot_depths": related[0]}
        outputs = {"attn_mask": mask} | ({} if positions is None else {"positions": positions})
        return [self._engine.bind("mask", inputs, outputs), self._engine.copy(indices, start), *run.calls]

    def _judge(
        self,
        run: Pass,
        width: int,
        upload: View,
        download: View,
        fields: dict[str, int],
        tokens: View | None,
        ancestors: View,
    ) -> list[Call]:
        """What the target says of the nodes `tokens` of a pass (None: of logits that nothing changes), and the last calls of
        a program."""
        best = _at(download, fields["best"], (width,))
        finite = _at(download, fields["finite"], (width,), "bool")
        inputs = {"hidden": run.result, "row_index": self._decoder.rows_in_order(width)}
        head = lambda outputs: [self._engine.bind("head", inputs, outputs)]  # noqa: E731
        calls = self._best(head, best, finite, upload, fields, tokens, ancestors)
        return calls if tokens is None else [*calls, self._process().keep()]

    def _best(
        self,
        head: Callable[[dict[str, View]], list[Call]],
        best: View,
        finite: View,
        upload: View,
        fields: dict[str, int],
        tokens: View | None,
        ancestors: View,
    ) -> list[Call]:
        """The likeliest tokens by `head`, which takes its outputs: of its logits, or of those that a request changes, row by
        row behind the `tokens` that are its `ancestors`."""
        if tokens is None:
            return head({"best": best, "finite": finite})
        process, (rows,), span = self._process(), best.shape, tokens.shape[0]
        recent = _at(upload, fields["recent"], (process.recent,))
        related = ancestors.buffer.view((rows, span), "bool", ancestors.offset)
        found = head({"logits": process.raw(rows), "finite": finite})
        return [*found, process.call(recent, tokens, related, best)]

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

    def _all_related(self, span: int) -> View:
        """`ancestors` [1, span] of the last node of a chain."""
        if span not in self._lines:
            self._lines[span] = self._engine.constant(f"path.{span}.ancestors", np.ones((1, span), np.bool_))
        return self._lines[span]

    def _process(self) -> Processing:
        """The graph that changes logits, which few requests ask for."""
        if self._processing is None:
            decoder = self._decoder
            vocabulary = decoder.manifest.tensors["embedding_table"].shape[0]
            self._processing = Processing(self._engine, vocabulary, decoder.max_width)
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
