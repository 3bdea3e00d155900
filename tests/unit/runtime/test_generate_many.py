"""`Session.generate_many` and `generate_batch`: requests that come, finish and fail one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.common.errors import ImageError, OptionError, PromptError, VlmexportError
from vlmexport.runtime.measure.inspection import kv_bytes_per_sequence
from vlmexport.runtime.session.result import Result
from vlmexport.runtime.session.session import Session

LIMITS = [9, 2, 14, 5, 1, 7, 3]


@pytest.fixture(scope="module", params=["t5", "llama", "vit-gpt2"])
def session(request: pytest.FixtureRequest, tiny_bundle: Callable[[str], Any]) -> Iterator[Session]:
    with Session.load(tiny_bundle(request.param).path, max_batch=3) as opened:
        yield opened


def asked(session: Session, **options: Any) -> list[dict[str, Any]]:
    """One request per limit, with pictures and prompts of different lengths."""
    image, found = session.bundle.manifest.image, []
    for seed, limit in enumerate(LIMITS):
        one = {
            "prompt": "a red cup " * (1 + seed % 3),
            "max_new_tokens": limit,
            "ignore_eos": True,
            **options,
        }
        if image is not None:
            size = (image.height or 8, image.width or 8, 3)
            one["image"] = np.random.default_rng(seed).integers(0, 255, size, np.uint8)
        found.append(one)
    return found


def test_results_come_as_they_finish_and_equal_those_of_single_requests(session: Session):
    requests = asked(session, speculative=False)
    alone = [session.generate(**request) for request in requests]
    taken: list[int] = []

    def coming() -> Iterator[dict[str, Any]]:
        for number, request in enumerate(requests):
            taken.append(number)
            yield request

    order, many = [], session.generate_many(coming())
    for number, result in many:
        assert isinstance(result, Result)
        assert (result.tokens, result.text) == (alone[number].tokens, alone[number].text), number
        assert len(taken) <= len(order) + 3, "a request is taken when there is room for it"
        order.append(number)
    assert sorted(order) == list(range(len(LIMITS))) and order[0] == 1, "the shortest of the first three"
    assert [r.text for r in session.generate_batch(requests)] == [r.text for r in alone]


def test_failing_request_ends_no_other(session: Session, tmp_path):
    requests = asked(session)
    good = [r.tokens for r in session.generate_batch(requests)]
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n")
    if "image" in requests[0]:
        requests[3] = {**requests[3], "image": broken}
    requests[5] = {**requests[5], "prompt": "a red cup " * 3000}
    found = dict(session.generate_many(iter(requests)))
    for number, tokens in enumerate(good):
        outcome = found[number]
        if number == 3 and "image" in requests[0]:
            assert isinstance(outcome, ImageError) and "broken.png" in str(outcome)
        elif number == 5:
            assert isinstance(outcome, PromptError)
        else:
            assert isinstance(outcome, Result) and outcome.tokens == tokens
    with pytest.raises((ImageError, PromptError), match=r"requests\[[35]\]: "):
        session.generate_batch(requests)
    assert session.generate(**requests[1]).tokens == good[1], "the session is free"


def test_close_ends_running_requests(session: Session):
    many = session.generate_many(asked(session))
    next(many)
    with pytest.raises(VlmexportError, match="busy"):
        session.generate(**asked(session)[0])
    many.close()  # type: ignore[attr-defined]
    assert len(session.generate(**asked(session)[0]).tokens) == LIMITS[0]


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_endless_requests_end_by_cancel_and_close(tiny_bundle: Callable[[str], Any], end: str):
    session = Session.load(tiny_bundle("llama").path, max_batch=3)
    taken: list[int] = []

    def endless() -> Iterator[dict[str, Any]]:
        for number in itertools.count():
            taken.append(number)
            yield {"prompt": "a red cup", "max_new_tokens": 3 if number < 2 else 60, "ignore_eos": True}

    found = []
    for number, result in session.generate_many(endless()):
        assert isinstance(result, Result)
        found.append((number, result.finish_reason))
        if len(found) == 2:
            getattr(session, end)()
    assert found[2:] and all(reason == "cancelled" for _, reason in found[2:]), "what was running ends so"
    assert len(found) == len(taken) == 3, "and nothing further is taken"
    if end == "close":
        assert session.decoder is None, "the memory is free"
    else:
        assert session.generate(prompt="a red cup", max_new_tokens=2).tokens
        session.close()


@pytest.mark.parametrize("requests", [None, 3, {"prompt": "a red cup"}])
def test_invalid_request_list_is_refused(session: Session, requests: Any):
    for call in (session.generate_batch, session.generate_many):
        with pytest.raises(OptionError, match="no list or iterator of requests"):
            call(requests)


def test_session_allocates_for_its_own_max_batch(tiny_bundle: Callable[[str], Any]):
    for name in ("t5", "llama"):
        with Session.load(tiny_bundle(name).path) as alone, Session.load(alone.bundle, max_batch=4) as four:
            assert alone.bundle.manifest.limits.max_batch == 16
            assert alone.decoder.arena.nbytes == kv_bytes_per_sequence(alone.bundle.manifest)
            assert four.decoder.arena.nbytes == 4 * alone.decoder.arena.nbytes


def test_an_unknown_option_names_its_request(session: Session):
    requests = [*asked(session)[:1], {"prompt": "a cup", "temprature": 1}]
    with pytest.raises(OptionError, match=r"requests\[1\]: no option temprature"):
        list(session.generate_many(requests))
    with pytest.raises(OptionError, match=r"requests\[1\]: no option temprature"):
        session.generate_batch(requests)
