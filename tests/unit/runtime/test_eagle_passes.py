"""Passes of an EAGLE layer are bound once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from vlmexport.runtime import Session
from vlmexport.runtime.drafts.eagle.layer_pass import EaglePass

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle


def test_a_request_like_those_before_binds_no_pass(
    tiny_bundle: Callable[[str], TinyBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, call = [], EaglePass._call

    def counted(self: EaglePass, *given: Any) -> Any:
        bound.append(self)
        return call(self, *given)

    monkeypatch.setattr(EaglePass, "_call", counted)
    with Session.load(tiny_bundle("llama").path) as session:
        ask = lambda: session.generate(prompt="the red cup", max_new_tokens=16, draft="eagle", draft_length=3)  # noqa: E731
        first = ask()
        ask()  # one that begins with the other of the two feature buffers
        passes = len(bound)
        again = ask()
    assert passes > 2 and first.stats.cycles > 1
    assert again.tokens == first.tokens
    assert len(bound) == passes, "every pass was bound before"
