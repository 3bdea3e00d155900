"""`Scheduler` with its threads: who is accepted, how a request ends, what goes on beside."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.common.errors import (
    BusyError,
    ClosedError,
    ImageError,
    OptionError,
    QueueFullError,
    VlmexportError,
)
from vlmexport.runtime.serving.scheduler import Scheduler
from vlmexport.runtime.serving.ticket import Ticket
from vlmexport.runtime.session.session import Session
from vlmexport.runtime.speculative.cycle import Cycle

from tests.support.gated_cycles import WAIT, Gate

LONG: dict[str, Any] = {"prompt": "a red cup", "max_new_tokens": 90, "ignore_eos": True, "speculative": False}


@pytest.fixture(scope="module")
def session(tiny_bundle: Callable[[str], Any]) -> Iterator[Session]:
    with Session.load(tiny_bundle("llama").path, max_batch=2) as opened:
        yield opened


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def pictured(session: Session, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (40, 56, 3), np.uint8)


def test_requests_of_many_threads_give_their_own_answers(session: Session) -> None:
    requests = [
        {
            "prompt": "a red cup " * (1 + seed % 5),
            "max_new_tokens": 3 + seed % 7,
            "temperature": 0.8 * (seed % 2),
            "seed": seed,
        }
        for seed in range(24)
    ]
    alone = [session.generate(**request) for request in requests]
    found: dict[int, tuple[str, Any]] = {}
    with Scheduler(session) as scheduler:

        def ask(seed: int) -> None:
            ticket = scheduler.submit(requests[seed])
            found[seed] = "".join(ticket), ticket.result(WAIT)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
    for seed, want in enumerate(alone):
        text, result = found[seed]
        assert (result.tokens, result.text, text) == (want.tokens, want.text, want.text)
        assert result.finish_reason == want.finish_reason
        assert 0 < result.stats.time_to_first_token <= result.stats.total_seconds


def test_the_session_is_its_own_until_it_closes(session: Session) -> None:
    scheduler = Scheduler(session)
    with pytest.raises(BusyError):
        session.generate(prompt="a cup")
    with pytest.raises(BusyError):
        Scheduler(session)
    ticket = scheduler.submit({"prompt": "a cup", "max_new_tokens": 2})
    scheduler.close()
    scheduler.close()
    assert len(ticket.result(0).tokens) <= 2, "what was accepted ends"
    with pytest.raises(ClosedError, match="closed"):
        scheduler.submit({"prompt": "a cup"})
    with pytest.raises(ClosedError, match="closed"):
        scheduler.encode(pictured(session, 0))
    assert session.generate(prompt="a cup", max_new_tokens=2).tokens == ticket.result(0).tokens


def test_as_many_wait_as_may_and_the_others_are_refused_at_once(session: Session, gate: Gate) -> None:
    with Scheduler(session, max_waiting=3) as scheduler:
        tickets: list[Ticket] = []
        refused = 0
        for _ in range(9):
            try:
                tickets.append(scheduler.submit(LONG))
            except QueueFullError as error:
                assert "3 requests wait already" in str(error)
                refused += 1
        assert (len(tickets), refused) == (session.max_batch + 3, 4)
        gate.wait()
        tickets[-1].cancel()
        gate.cycle()
        assert tickets[-1].result(WAIT).finish_reason == "cancelled" and not tickets[-1].result(0).tokens
        tickets.append(scheduler.submit(LONG))
        gate.open()
        whole = [len(ticket.result(WAIT).tokens) for ticket in tickets]
        assert whole == [90, 90, 90, 90, 0, 90]
        assert (scheduler.running, scheduler.waiting) == (0, 0)


def test_a_request_that_is_cancelled_frees_its_place_within_a_cycle(session: Session, gate: Gate) -> None:
    with Scheduler(session) as scheduler:
        first, second, third = (scheduler.submit(LONG) for _ in range(3))
        gate.wait()
        for _ in range(6):
            gate.cycle()
        assert (scheduler.running, scheduler.waiting) == (2, 1)
        first.cancel()
        gate.cycle()
        assert first.done and first.result(0).finish_reason == "cancelled"
        assert 1 <= len(first.result(0).tokens) <= 8
        assert (scheduler.running, scheduler.waiting) == (2, 0), "the next one has the place"
        gate.open()
        assert second.result(WAIT).tokens == third.result(WAIT).tokens
        assert first.result(0).tokens == second.result(0).tokens[: len(first.result(0).tokens)]
        first.cancel()
        assert first.result(0).finish_reason == "cancelled"


def test_a_deadline_counts_from_arrival(session: Session, gate: Gate) -> None:
    with Scheduler(session) as scheduler:
        running = [scheduler.submit(LONG) for _ in range(2)]
        late = scheduler.submit(LONG, deadline=0.001)
        gate.wait()
        threading.Event().wait(0.01)
        gate.cycle()
        result = late.result(WAIT)
        assert (result.finish_reason, result.tokens) == ("deadline", [])
        gate.open()
        assert all(len(ticket.result(WAIT).tokens) == 90 for ticket in running)
        with pytest.raises(OptionError, match="deadline is given twice"):
            scheduler.submit({**LONG, "deadline": 3}, deadline=3)
        with pytest.raises(OptionError, match="deadline: -1"):
            scheduler.submit(LONG, deadline=-1)


def test_a_request_that_cannot_be_served_ends_nobody_else(tiny_bundle: Callable[[str], Any]) -> None:
    with Session.load(tiny_bundle("t5").path, max_batch=2) as session, Scheduler(session) as scheduler:
        good = scheduler.submit({"image": pictured(session, 1), "prompt": "a cup", "max_new_tokens": 5})
        bad = scheduler.submit({"image": b"no picture", "prompt": "a cup"})
        with pytest.raises(ImageError):
            bad.result(WAIT)
        with pytest.raises(ImageError):
            list(bad)
        assert good.result(WAIT).tokens
        with pytest.raises(OptionError, match="max_new_tokens"):
            scheduler.submit({"prompt": "a cup", "max_new_tokens": 0})
        with pytest.raises(OptionError, match="not a mapping"):
            scheduler.submit("a cup")  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="on_text"):
            scheduler.submit({"prompt": "a cup"}, on_text=3)  # type: ignore[arg-type]


def test_an_exception_of_on_text_ends_its_own_request(session: Session) -> None:
    seen: list[str] = []

    def fail(text: str) -> None:
        seen.append(text)
        raise ValueError("the client is gone")

    with Scheduler(session) as scheduler:
        ticket = scheduler.submit(LONG, on_text=fail)
        other = scheduler.submit(LONG)
        with pytest.raises(ValueError, match="the client is gone"):
            ticket.result(WAIT)
        with pytest.raises(OptionError, match="on_text"):
            list(ticket)
        assert len(seen) == 1 and len(other.result(WAIT).tokens) == 90


def test_a_program_may_end_without_closing(tiny_bundle: Callable[[str], Any]) -> None:
    code = f"""
from vlmexport.runtime import Scheduler, Session
scheduler = Scheduler(Session.load({str(tiny_bundle("llama").path)!r}, max_batch=2))
tickets = [scheduler.submit({LONG!r}) for _ in range(4)]
next(iter(tickets[0]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT)
    assert (done.returncode, done.stderr) == (0, "")


def test_callbacks_hear_of_the_end_once(session: Session) -> None:
    heard: list[Ticket] = []
    with Scheduler(session) as scheduler:
        ticket = scheduler.submit({"prompt": "a cup", "max_new_tokens": 2})
        ticket.add_done_callback(heard.append)
        ticket.result(WAIT)
    ticket.add_done_callback(heard.append)
    assert heard == [ticket, ticket] and list(ticket) and not list(ticket)


def test_pictures_are_encoded_while_others_decode(tiny_bundle: Callable[[str], Any], gate: Gate) -> None:
    with Session.load(tiny_bundle("t5").path, max_batch=2, picture_cache=0) as session:
        picture = pictured(session, 4)
        gate.open()
        want = session.generate(picture, "a cup", max_new_tokens=6).tokens
        gate.shut()
        with Scheduler(session) as scheduler:
            running = scheduler.submit({**LONG, "image": picture, "max_new_tokens": 60})
            found: list[Any] = []
            thread = threading.Thread(target=lambda: found.append(scheduler.encode(picture)))
            thread.start()
            gate.wait()
            for _ in range(20):
                if not found:
                    gate.cycle()
            thread.join(WAIT)
            assert not running.done
            asked = scheduler.submit({"image": found[0], "prompt": "a cup", "max_new_tokens": 6})
            gate.open()
            assert asked.result(WAIT).tokens == want
            assert asked.result(0).stats.reused_pictures == 1
            with pytest.raises(ImageError):
                scheduler.encode(b"no picture")


def test_draining_ends_what_was_accepted_and_later_cancels_it(session: Session, gate: Gate) -> None:
    scheduler = Scheduler(session)
    tickets = [scheduler.submit(LONG) for _ in range(4)]
    gate.wait()
    closing = threading.Thread(target=scheduler.close, args=(0.2,))
    closing.start()
    threading.Event().wait(0.5)
    gate.open()
    closing.join(WAIT)
    assert [ticket.result(0).finish_reason for ticket in tickets] == ["cancelled"] * 4
    with pytest.raises(RuntimeError, match="in the block"), Scheduler(session) as scheduler:
        ticket = scheduler.submit(LONG)
        raise RuntimeError("in the block")
    assert ticket.done


def test_an_error_of_the_engine_ends_all_and_is_named(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(cycle: Cycle) -> Any:
        raise RuntimeError("the device is lost")

    with Scheduler(session) as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(Cycle, "run", lost)
            ticket = scheduler.submit(LONG)
            with pytest.raises(VlmexportError, match="the device is lost"):
                ticket.result(WAIT)
        with pytest.raises(VlmexportError, match="the device is lost"):
            scheduler.submit(LONG)
    assert len(session.generate(**LONG).tokens) == 90, "the session serves again"


def test_what_is_read_while_the_session_closes_is_cancelled(tiny_bundle: Callable[[str], Any]) -> None:
    session = Session.load(tiny_bundle("llama").path, max_batch=2)
    scheduler = Scheduler(session)
    tickets = [scheduler.submit(LONG) for _ in range(5)]
    session.close()
    assert {ticket.result(WAIT).finish_reason for ticket in tickets} <= {"cancelled", "length"}
    with pytest.raises(ClosedError):
        scheduler.submit(LONG)
    scheduler.close()
    assert session.decoder is None
