"""What is kept of torch between two exports is what torch would compute again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._export import utils
from torch.onnx._internal.exporter._registration import ONNXRegistry
from vlmexport.exporter.graphs import torch_constants, traced_module
from vlmexport.exporter.graphs.hooks import export_hooks
from vlmexport.exporter.graphs.traced_module import TraceInput

from tests.support import kept_traces


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """torch as it is without `keep_constants_of_torch`, and put back after the test."""
    registry = ONNXRegistry.__dict__["from_torchlib"].__func__
    materialize = utils._materialize_cpp_cia_ops
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", classmethod(_inner(registry, "original")))
    monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", _inner(materialize, "materialize"))
    yield monkeypatch


def _inner(function: Any, name: str) -> Any:
    """What `function` closes over as `name`, or the function where it was not changed."""
    code, cells = function.__code__, function.__closure__ or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)).get(
        name, function
    )


def test_every_export_gets_a_registry_of_its_own(unchanged: pytest.MonkeyPatch) -> None:
    plain = ONNXRegistry.from_torchlib()
    torch_constants.keep_registry()
    first = ONNXRegistry.from_torchlib()
    assert {name: len(functions) for name, functions in first.functions.items()} == {
        name: len(functions) for name, functions in plain.functions.items()
    }
    assert vars(first).keys() == vars(plain).keys()
    first.register_op(torch.ops.aten.gelu.default, lambda x: x)
    first.functions["new"] = []
    second = ONNXRegistry.from_torchlib()
    assert second.functions.keys() == plain.functions.keys()
    assert len(second.functions["aten::gelu"]) == len(plain.functions["aten::gelu"])
    assert second.functions["aten::gelu"][0] is first.functions["aten::gelu"][1]  # made once


def test_operators_are_looked_up_again_where_there_are_new_ones(unchanged: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = utils._materialize_cpp_cia_ops
    unchanged.setattr(utils, "_materialize_cpp_cia_ops", lambda: (calls.append("all"), original()))
    torch_constants.keep_composite_operators()
    for _ in range(3):
        utils._materialize_cpp_cia_ops()
    assert calls == ["all"]
    library = torch.library.Library("vlmexport_test_constants", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
    utils._materialize_cpp_cia_ops()
    assert calls == ["all", "all"]


def test_graphs_are_those_of_an_unchanged_torch(unchanged: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))

    def graph() -> str:
        with export_hooks(), kept_traces.anew():
            template = traced_module.trace(
                module,
                lambda part, hidden: (part(hidden),),
                [TraceInput("hidden", ("batch", "width", 8))],
                ["out"],
            )
        return f"{list(template.graph)}{template.weights}"

    torch_constants.keep_constants_of_torch()  # done once: the next line's torch is unchanged
    plain = graph()
    torch_constants.keep_registry()
    torch_constants.keep_composite_operators()
    assert [graph(), graph()] == [plain, plain]
