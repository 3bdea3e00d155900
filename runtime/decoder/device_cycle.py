"""Cycles of one sequence that need the host once: drafted tokens, masks and verdicts stay where the graphs run.

`head` writes its best token where the next `embed` reads one, drafts with graphs of their own (`DeviceChain`) do
likewise, and masks come from the graph `mask`, so that between the steps of a cycle nobody waits. The host sends
tokens, slots and positions ahead, in one transfer, and reads in one what was drafted and what the target says of it.
The passes are the decoder's own (`ForwardPasses.prepare`); a cycle is a list of their calls, which an engine may
capture and replay (`Engine.program`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..bundle.manifest import Limits
from ..engines.base import Engine
from ..graphs.on_device import CHANGING
from .cycle_program import CycleProgram
from .device.draft_chain import DeviceChain, DraftsOnDevice
from .device.logits_processors import LogitsChanges
from .device_programs import DevicePrograms
from .exit_states import ExitStates
from .forward_pass import ForwardPass
from .forward_passes import ForwardPasses
from .head import HeadOutputs
from .logits import ArgmaxResult
from .masks import relations
from .token_tree import TokenTree

LAYOUTS = 4
"""Of caches that grow, so many have their programs kept."""


def is_supported(engine: Engine) -> bool:
    """Whether an engine can do whole cycles: it is not in host memory, its bundle has the graph `mask`, and its head
    names the best token and whether it is finite."""
    if engine.host_memory or "mask" not in engine.graphs:
        return False
    return {"best", "finite"} <= {value.name for value in engine.interface("head").outputs}


@dataclass
class CycleOutcome:
    """The tree that a cycle verified, the target's answers, and whether the logits that it was drafted from are all
    finite."""

    tree: TokenTree
    answers: ArgmaxResult
    finite: bool = True


class OnDevice:
    """The cycles of a decoder whose engine offers them (`is_supported`); programs are made when first asked for, for
    every layout of the caches."""

    def __init__(self, passes: ForwardPasses, exits: ExitStates, heads: HeadOutputs, limits: Limits):
        self._passes = passes
        self._make = DevicePrograms(passes, exits, heads, limits)
        self._programs: dict[object, dict[tuple[object, ...], CycleProgram]] = {}
        """Layout of the decoder's caches → programs."""
        self._graphs = frozenset(CHANGING) & set(passes.engine.graphs)

    def offers(self, changes: LogitsChanges) -> bool:
        """Whether the bundle has the graph that a request's logits pass."""
        return changes.graph in self._graphs

    def verify(self, tree: TokenTree, start: int, changes: LogitsChanges | None = None) -> CycleOutcome:
        """All segments over a tree that the host knows, whose root takes slot `start`."""
        width, graph = self._passes.padded(len(tree)), changes and changes.graph
        program = self._program(
            ("verify", width, tree.is_chain, graph), lambda: self._make.verify(width, tree.is_chain, graph)
        )
        program.send("tokens", [*tree.tokens, *tree.tokens[-1:] * (width - len(tree))])
        if not tree.is_chain:
            depths, ancestors = relations(tree, width)
            program.send("depths", depths)
            program.send("ancestors", ancestors)
        self._launch(program, start, changes)
        return CycleOutcome(tree, _answers(program))

    def draft(
        self,
        draft: DraftsOnDevice,
        cut: int,
        count: int,
        token: int,
        start: int,
        changes: LogitsChanges | None = None,
    ) -> CycleOutcome:
        """`count` tokens, drafted on the trunk of `cut` segments behind the pending `token`, which takes slot `start`,
        and verified by the tail."""
        graph, sent = changes and changes.graph, draft.sent_on_device(count, start)
        program = self._program(
            ("draft", draft.name, count, graph),
            lambda: self._make.draft_on_trunk(draft, cut, count, graph, sent),
        )
        program.send_draft(sent)
        return self._run_draft(program, token, start, changes)

    def draft_apart(
        self,
        draft: DraftsOnDevice,
        bind: Callable[[], ForwardPass],
        count: int,
        token: int,
        start: int,
        changes: LogitsChanges | None = None,
    ) -> CycleOutcome:
        """`count` tokens, drafted by a pass of its own for each (`ForwardPasses.prepare_partial`, which `bind` asks
        for) behind the pending `token`, which takes slot `start`, and verified by all segments, which write the slots
        of those passes anew."""
        graph = changes and changes.graph
        program = self._program(
            ("apart", draft.name, count, graph),
            lambda: self._make.draft_apart(draft, bind(), count, graph),
        )
        return self._run_draft(program, token, start, changes)

    def verify_drafted(
        self, chain: DeviceChain, token: int, start: int, changes: LogitsChanges | None = None
    ) -> CycleOutcome:
        """A chain that is drafted behind the pending `token` by calls of its own, and verified by all segments; the root
        takes slot `start`."""
        graph = changes and changes.graph
        program = self._program(("chain", *chain.key, graph), lambda: self._make.verify_chain(chain, graph))
        program.send("tokens", token)
        program.send_draft(chain.sent)
        self._launch(program, start, changes)
        tokens = program.read("drafted").tolist()
        finite = bool(np.isfinite(program.read("scores", "float32")).all())
        return CycleOutcome(TokenTree.chain([token, *tokens]), _answers(program), finite)

    def _run_draft(
        self, program: CycleProgram, token: int, start: int, changes: LogitsChanges | None
    ) -> CycleOutcome:
        """Outcome of a cycle that begins with the pending token in every place, and drafts its own."""
        program.send("tokens", token)
        self._launch(program, start, changes)
        tokens = [token, *program.read("drafted").tolist()]
        finite = bool(program.read("drafts_finite", "bool").all())
        return CycleOutcome(TokenTree.chain(tokens), _answers(program), finite)

    def _launch(self, program: CycleProgram, start: int, changes: LogitsChanges | None) -> None:
        passes = self._passes
        if changes is not None:
            for name, values in self._make.processors.begin(changes).items():
                program.send(name, values)
        program.send_starts(start, passes.positions.of_slot(start))
        for forward_pass in program.passes:
            passes.refresh(forward_pass)
        program.program.launch()
        program.program.wait()
        if changes is not None:
            self._make.processors.done(changes)
        passes.set_last(program.passes[-1])

    def _program(self, key: tuple[object, ...], make: Callable[[], CycleProgram]) -> CycleProgram:
        """The program `key` over the caches as they lie now; those of the layouts before are kept for the next request,
        whose caches begin small again."""
        layout = self._passes.layout
        programs = self._programs.pop(layout, None)
        if programs is None:
            programs = {}
            if len(self._programs) == LAYOUTS:
                del self._programs[next(iter(self._programs))]
        self._programs[layout] = programs  # the last one used stands last
        if key not in programs:
            programs[key] = make()
        return programs[key]


def _answers(program: CycleProgram) -> ArgmaxResult:
    return ArgmaxResult(program.read("best"), program.read("finite", "bool").copy())
