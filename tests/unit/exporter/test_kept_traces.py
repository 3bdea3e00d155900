"""A trace that tests keep is used again only where nothing that decides it differs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama
from vlmexport.exporter.graphs.hooks import export_hooks
from vlmexport.exporter.graphs.traced_module import Template, TraceInput

from tests.support import kept_traces, stored_traces
from tests.support.programs import ROOT, environment

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
        patch.delenv(kept_traces.FOLDER, raising=False)
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


def test_a_trace_from_another_process_is_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(kept_traces.FOLDER, str(tmp_path))
    name = stored_traces.name_of(kept_key())
    monkeypatch.setattr(kept_traces, "_kept", {})
    first = made()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    monkeypatch.setattr(kept_traces, "_kept", {})  # as another process
    monkeypatch.setattr(kept_traces, "_trace", None)
    second = made()
    assert second is not first and second == dataclasses.replace(first, graph=second.graph)
    assert stored_traces.onnx_file(second) == stored_traces.onnx_file(first)


def test_a_key_has_the_same_name_in_every_process() -> None:
    code = "from tests.unit.exporter.test_kept_traces import name_of_a_layer; print(name_of_a_layer())"
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=environment(), cwd=ROOT)
    assert done.stdout.split()[-1] == name_of_a_layer() != "None"


def name_of_a_layer() -> str:
    """Of a decoder layer with its attention and rotary angles. (pytest rewrites the functions of this file.)"""
    config = LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2)
    layer = modeling_llama.LlamaDecoderLayer(config, 0)
    return str(
        stored_traces.name_of(
            kept_traces.key_of(layer, modeling_llama.rotate_half, ROWS, ("hidden_out",), {})
        )
    )


def test_code_counts_by_content() -> None:
    def one(x: int) -> int:
        return x + 1

    def two(x: int) -> int:
        return x + 2

    names = {stored_traces.name_of(kept_traces._value(function)) for function in (one, two)}
    assert len(names) == 2 and None not in names
    assert stored_traces.name_of((object(),)) is None
