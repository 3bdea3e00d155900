"""Log-probabilities of emitted tokens are those of transformers, whatever drafts and whichever engine decodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.measure.pass_costs import runnable
from vlmexport.runtime.sampling.logprobs import Logprobs
from vlmexport.runtime.session.result import Result
from vlmexport.runtime.session.session import Session
from vlmexport.runtime.speculative.sequence import Sequence

from tests.support.oracle import Request
from tests.support.rig import Rig

TOP = 3
COUNT = 9


def wanted(rig: Rig, request: Request, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [len(tokens), V] in transformers."""
    logits = rig.oracle.logits(request, tuple(tokens[:-1])).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check(rig: Rig, request: Request, result: Result) -> None:
    entries = result.logprobs
    assert entries is not None and [entry.token for entry in entries] == result.tokens
    if not result.stats.discarded:
        assert sum(entry.drafted for entry in entries) == result.stats.accepted
    want = wanted(rig, request, result.tokens)
    for row, entry in zip(want, entries, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token], abs=2e-4)
        assert len(entry.top) == TOP
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(np.sort(row)[::-1][:TOP], abs=2e-4)
        assert [row[token] for token, _ in entry.top] == pytest.approx(values, abs=2e-4)


def remembered(session: Session, request: Request, stop: int) -> Result:
    """A greedy answer whose drafts are right: they are those of the same answer before. It stops where that has its token
    number `stop`."""
    options: dict[str, Any] = {"max_new_tokens": 2 * COUNT, "ignore_eos": True, "memory": "answers"}
    before = session.generate_tokens(request.token_ids, **options)
    text = session.bundle.tokenizer.decode(before.tokens[stop : stop + 1])
    result = session.generate_tokens(request.token_ids, **options, stop=[text] if text else [], logprobs=TOP)
    session.forget("answers")
    return result


@pytest.mark.parametrize("engine", ["onnxruntime", "device", "tensorrt"])
@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_they_are_those_of_transformers(rigs: Callable[[str, str], Rig], family: str, engine: str) -> None:
    """On a device, too, whose cycles otherwise keep the logits to themselves."""
    rig = rigs(family, engine)
    session = Session(rig.tiny.bundle, rig.decoder, None)
    request = rig.request(3)
    drafts = [draft.name for draft in runnable(rig.manifest.drafts, rig.engine.graphs)]
    options: dict[str, Any] = {"max_new_tokens": COUNT, "ignore_eos": True}
    for draft in ("none", *drafts):
        for sampling in ({}, {"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.3}):
            asked = options | sampling | {"draft": draft}
            result = session.generate_tokens(request.token_ids, **asked, logprobs=TOP)
            check(rig, request, result)
            assert result.tokens == session.generate_tokens(request.token_ids, **asked).tokens
    discarded = 0
    for stop in range(COUNT):
        result = remembered(session, request, stop)
        check(rig, request, result)
        discarded += result.stats.discarded
    assert discarded, "no cycle chose more than it emitted"
    rig.settle()


def test_planted_errors_are_found(rigs: Callable[[str, str], Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs("llama", "device")
    session = Session(rig.tiny.bundle, rig.decoder, None)
    request = rig.request(3)
    with monkeypatch.context() as patch, pytest.raises(AssertionError):  # tokens are cut, entries not
        patch.setattr(Logprobs, "cut", lambda self, length: None)
        for stop in range(COUNT):
            check(rig, request, remembered(session, request, stop))
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="keeps the logits"):
        patch.setattr(Sequence, "takes_the_best", property(lambda self: True))
        session.generate_tokens(request.token_ids, max_new_tokens=COUNT, ignore_eos=True, logprobs=TOP)
    rig.settle()


def test_they_are_not_noted_unless_asked_for(rigs: Callable[[str, str], Rig]) -> None:
    rig = rigs("llama", "onnxruntime")
    session = Session(rig.tiny.bundle, rig.decoder, None)
    ids = rig.request(3).token_ids
    assert session.generate_tokens(ids, max_new_tokens=3).logprobs is None
    none = session.generate_tokens(ids, max_new_tokens=3, logprobs=0)
    assert none.logprobs is not None and [entry.top for entry in none.logprobs] == [[], [], []]
    assert none.to_dict()["logprobs"][0].keys() == {"token", "logprob", "top", "drafted"}
    for wrong in (21, -1, "all", True):
        with pytest.raises(OptionError, match="logprobs"):
            session.generate_tokens(ids, logprobs=wrong)
    own = Logprobs(1)
    assert session.generate_tokens(ids, max_new_tokens=3, logprobs=own).logprobs is own.entries
    with pytest.raises(OptionError, match="3 tokens of another request"):
        session.generate_tokens(ids, logprobs=own)


def test_the_lowest_id_comes_first_among_equals() -> None:
    logprobs = Logprobs(3)
    logprobs.add(1, np.array([0.0, 2.0, 1.0, 2.0, 1.0], np.float32))
    assert [token for token, _ in logprobs.entries[0].top] == [1, 3, 2]
