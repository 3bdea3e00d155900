"""Requests of a scheduler give what `Session.generate` gives for them, whoever comes, leaves or is cancelled meanwhile.

The schedules are drawn, and one thread steps through them: what a real thread does in an order that nobody chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from vlmexport.runtime.common.errors import CapacityError
from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.decoder.kv_cache import KVArena
from vlmexport.runtime.measure.pass_costs import runnable
from vlmexport.runtime.serving.prefill_budget import PrefillBudget
from vlmexport.runtime.serving.scheduler import Scheduler
from vlmexport.runtime.serving.ticket import Ticket
from vlmexport.runtime.session.continuous_batch import ContinuousBatch
from vlmexport.runtime.session.result import Result
from vlmexport.runtime.session.session import Session

from tests.support.pairs import whole_product
from tests.support.rig import Rig

FAMILIES = ("llama", "t5", "qwen2.5-vl", "gemma3", "lfm2", "qwen3.5")
"""Positions, cross-attention, M-RoPE, windows and blocks, rows of convolutions, states: all that a place holds."""

Served = tuple[Session, list[dict[str, Any]], list[Result]]
MAX_BATCH = 3
REQUESTS = 10
EXAMPLES = 350 if whole_product else 30
"""Schedules of each family."""


class OnePart(PrefillBudget):
    """One part between two cycles, so that drawn schedules do not depend on times: the most interleavings."""

    def begin(self, beginning: int, running: int) -> None:
        self._left = 1

    def allows(self, part: str) -> bool:
        return self._left > 0


class Stepped(Scheduler):
    """A scheduler without threads: `step` does what is between two cycles, and a cycle."""

    def _start(self, work: Iterator[None]) -> Any:
        self.work, self.reads, self.sequences = work, [], {}
        self._readers.shutdown()
        self._readers = self  # type: ignore[assignment]
        self._budget = OnePart(1)
        return None

    def close(self, drain: float | None = None) -> None:
        """There is no thread to wait for."""

    def submit(self, request: Any, *rest: Any, **options: Any) -> Any:
        """A request; or work for the readers, which do it when `read` says so."""
        if callable(request):
            self.reads.append((request, rest))
            return None
        return super().submit(request, *rest, **options)

    def read(self, number: int = 0) -> None:
        """The readers do some of their work."""
        if self.reads:
            work, arguments = self.reads.pop(number % len(self.reads))
            work(*arguments)

    def _begin(self, batch: ContinuousBatch, ticket: Ticket) -> None:
        super()._begin(batch, ticket)
        self.sequences[ticket] = self.session._unended[-1].sequence

    def expire(self, ticket: Ticket) -> None:
        """The deadline of a request passes now."""
        ticket.expires = 0.0
        if ticket in self.sequences:
            self.sequences[ticket].limits.deadline = 0.0

    def _wait(self) -> bool:
        return not self._closed

    def step(self) -> bool:
        """Whether there will be anything more to do."""
        return next(self.work, self) is None

    def end(self) -> None:
        """Let all requests end, and give the session back."""
        while self.reads:
            self.read()
        while self._tickets:
            assert self.step()
        self._closed = True
        assert not self.step()


def requests(session: Session, drafts: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Short and long prompts, with and without pictures, greedy and drawn, with every draft, or these."""
    info, found = session.bundle.manifest, []
    drafts = ["none", *([draft.name for draft in info.drafts] if drafts is None else drafts)]
    for seed in range(REQUESTS):
        one: dict[str, Any] = {
            "prompt": "a red cup " * (1 + seed % 4),
            "max_new_tokens": (9, 2, 14, 5, 1, 7)[seed % 6],
            "draft": drafts[seed % len(drafts)],
            "temperature": 0.9 * (seed % 3 == 2),
            "seed": seed,
        }
        if one["draft"] != "none":
            one["draft_length"] = 1 + seed % 4
        if info.image is not None and (seed % 4 or info.decoder.cross_attention):
            size = (info.image.height or 40, info.image.width or 56, 3)
            one["image"] = np.random.default_rng(seed).integers(0, 255, size, np.uint8)
        found.append(one)
    return found


def narrow(session: Session) -> None:
    """Prompts go in short chunks, and caches grow every few slots."""
    decoder = session.decoder
    decoder.prefill_width = max(20, session.bundle.manifest.decoder.max_block or 0)
    decoder.arena._bucket = decoder.arena.aligned(4)


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tiny_bundle: Callable[[str], Any]) -> Iterator[Served]:
    """A `narrow` session, requests, and what they give by themselves, before that."""
    with Session.load(tiny_bundle(request.param).path, max_batch=MAX_BATCH) as session:
        asked = requests(session)
        alone = [session.generate(**each) for each in asked]
        narrow(session)
        yield session, asked, alone


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, REQUESTS - 1)),
        st.tuples(st.just("submit"), st.integers(0, REQUESTS - 1)),
        st.tuples(st.just("read"), st.integers(0, 5)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 11)),
        st.tuples(st.just("expire"), st.integers(0, 11)),
    ),
    min_size=2,
    max_size=40,
)


def test_any_schedule_gives_what_a_request_gives_by_itself(served: Served) -> None:
    check_schedules(served, EXAMPLES)


@pytest.mark.parametrize(
    ("family", "engine"), [("llama", "device"), ("t5", "growing-device"), ("qwen2.5-vl", "tensorrt")]
)
def test_schedules_on_a_device(rigs: Callable[[str, str], Rig], family: str, engine: str) -> None:
    """Its caches grow and move by calls of the device, which are bound once."""
    host, device = rigs(family, "onnxruntime"), rigs(family, engine)
    drafts = runnable(device.manifest.drafts, device.engine.graphs)
    session = Session(host.tiny.bundle, host.decoder, None)
    asked = requests(session, [draft.name for draft in drafts])
    alone = [session.generate(**each) for each in asked]
    session = Session(device.tiny.bundle, device.decoder, None)
    session.max_batch = MAX_BATCH  # places are reused sooner
    narrow(session)
    check_schedules((session, asked, alone), 60 if whole_product else 15)
    device.settle()


def check_schedules(served: Served, count: int) -> None:
    """So many drawn schedules."""

    @given(actions=ACTIONS, parts=st.integers(1, 3), inline=st.booleans())
    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
    )
    def check(actions: Any, parts: int, inline: bool) -> None:
        check_schedule(served, actions, parts, inline)

    check()


def check_schedule(served: Served, actions: Any, parts: int, inline: bool) -> None:
    """What comes of one is what requests give by themselves."""
    session, asked, alone = served
    scheduler = Stepped(session, prefills_per_cycle=parts)
    try:
        tickets, ended = followed(scheduler, asked, actions, inline)
    finally:
        scheduler.work.close()  # type: ignore[attr-defined]
    for place, (number, ticket) in enumerate(tickets):
        result, want = ticket.result(0), alone[number]
        assert "".join(ticket) == result.text
        if place in ended and result.finish_reason in ("cancelled", "deadline"):
            assert result.tokens == want.tokens[: len(result.tokens)]
            continue
        assert (result.tokens, result.text) == (want.tokens, want.text), asked[number]
        assert result.finish_reason == want.finish_reason


def followed(
    scheduler: Stepped, asked: list[dict[str, Any]], actions: Any, inline: bool
) -> tuple[list[tuple[int, Ticket]], set[int]]:
    """What came of a schedule: (number of the request, its ticket), and which of these were told to end early."""
    tickets: list[tuple[int, Ticket]] = []
    ended: set[int] = set()
    for action, value in actions:
        if action == "submit":
            tickets.append((value, scheduler.submit(asked[value])))
            if inline:
                scheduler.read()
        elif action == "read":
            scheduler.read(value)
        elif action == "step":
            for _ in range(value):
                assert scheduler.step()
        elif value < len(tickets):
            ended.add(value)
            ticket = tickets[value][1]
            ticket.cancel() if action == "cancel" else scheduler.expire(ticket)
    scheduler.end()
    return tickets, ended


def test_others_decode_between_the_chunks_of_a_prompt(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with a long prompt comes while two decode; the first of them leaves while its prompt is not through."""
    session, asked, alone = served
    longest = max(range(REQUESTS), key=lambda n: ("image" in asked[n], len(asked[n]["prompt"])))
    short = asked[0] | {"max_new_tokens": 60, "ignore_eos": True}
    want = session.generate(**short).tokens
    beside: list[int] = []
    stage = Decoder.stage

    def counted(self: Decoder) -> None:
        stage(self)
        beside.append(self.batch)

    monkeypatch.setattr(Decoder, "stage", counted)
    scheduler = Stepped(session)
    tickets = []
    for each in (short, short, asked[longest]):
        tickets.append(scheduler.submit(each))
        scheduler.read()
        for _ in range(12):
            if each is short or 2 not in beside:
                assert scheduler.step()
    assert 2 in beside, "the prompt was through before the others ended"
    tickets[0].cancel()
    assert scheduler.step() and scheduler.running == 2
    scheduler.end()
    assert tickets[1].result(0).tokens == want
    assert tickets[2].result(0).tokens == alone[longest].tokens
    assert 0 < len(tickets[0].result(0).tokens) < len(want)


def staged_rows_left_by_growth(patch: pytest.MonkeyPatch) -> None:
    """The caches grow for the batch, and not for who stands aside."""
    patch.setattr(
        KVArena,
        "_grow",
        lambda self, cache_len: (
            self._growth.run(self.batch, self.length, self.cache_len, cache_len),
            setattr(self, "cache_len", cache_len),
        ),
    )


def staged_sequence_left_behind(patch: pytest.MonkeyPatch) -> None:
    """A sequence leaves, and who stands aside stays where it was."""
    moves = KVArena.moves
    patch.setattr(KVArena, "moves", lambda self, index: (m for m in moves(self, index) if m[1] != self.batch))


def staged_sequence_decodes(patch: pytest.MonkeyPatch) -> None:
    """Who stands aside has advanced by a token when its prompt goes on."""
    unstage = KVArena.unstage

    def wrong(self: KVArena) -> int:
        place = unstage(self)
        self.lengths[place] += bool(self.lengths[place])
        return place

    patch.setattr(KVArena, "unstage", wrong)


@pytest.mark.parametrize(
    "plant", [staged_rows_left_by_growth, staged_sequence_left_behind, staged_sequence_decodes]
)
def test_planted_errors_are_found(
    tiny_bundle: Callable[[str], Any],
    plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Session.load(tiny_bundle("llama").path, max_batch=MAX_BATCH) as session:
        asked = requests(session)
        alone = [session.generate(**each) for each in asked]
        narrow(session)
        served = session, asked, alone
        plant(monkeypatch)
        with pytest.raises((AssertionError, CapacityError, ValueError)):  # the last: slots beyond the cache
            check_schedules(served, 60)
