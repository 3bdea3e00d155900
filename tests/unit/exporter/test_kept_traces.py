"""A trace that tests keep is used again only where nothing that decides it differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama
from vlmexport.exporter.graphs.hooks import export_hooks
from vlmexport.exporter.graphs.traced_module import Template, TraceInput

from tests.support import kept_traces

ROWS = [TraceInput("hidden", ("batch", 8))]


def made(change: Callable[[Any], None] = lambda mlp: None, factor: Any = 2.0, **config: Any) -> Template:
    """The template of a small layer of transformers, with rows multiplied by what the function closes over."""
    mlp = modeling_llama.LlamaMLP(
        LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2, **config)
    )
    change(mlp)
    with export_hooks():
        return kept_traces.trace(mlp, lambda module, rows: (module(rows * factor),), ROWS, ("rows",))


def test_equal_modules_are_traced_once() -> None:
    assert made() is made()
    with kept_traces.anew():
        assert made() is not made()


def test_path_and_token_ids_do_not_change_the_trace() -> None:
    assert kept_key() == kept_key(name_or_path="/elsewhere", eos_token_id=7, vocab_size=50, dtype="float16")


@pytest.mark.parametrize(
    "options",
    [
        {"factor": 3.0}, {"hidden_act": "relu"}, {"rms_norm_eps": 0.5},
        {"change": lambda mlp: setattr(mlp, "setting", 1)}, {"change": lambda mlp: mlp.double()},
    ],
    ids=["closure", "activation", "configuration", "attribute", "type"],
)  # fmt: skip
def test_different_modules_do_not_share_a_trace(options: dict[str, Any]) -> None:
    assert kept_key() == kept_key() != kept_key(**options)


def kept_key(**options: Any) -> Any:
    """What `made` with the same options is kept under."""
    kept: dict[Any, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_traces, "_trace", lambda *given, **named: None)
        patch.setattr(kept_traces, "_kept", kept)
        made(**options)
    (key,) = kept
    return key


def test_planted_error_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    right = made()
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x) + 1)
    assert len(made().graph) == len(right.graph) + 1


def test_hooks_around_a_module_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept_key()
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x)
    assert kept_key() != before


def test_incomparable_modules_are_traced_again() -> None:
    assert made(factor=torch.tensor(2.0)) is not made(factor=torch.tensor(2.0))
