"""Graphs of a bundle hold listed operators only; the list is what the exporter writes, no more."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vlmexport.runtime.bundle.operators import ACTIVATIONS, STRUCTURE, refuse
from vlmexport.runtime.bundle.seal import manifest_text
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import BundleError

onnx = pytest.importorskip("onnx", reason="making graphs needs [export]")
helper = onnx.helper
FLOAT = onnx.TensorProto.FLOAT

COVERING = (
    "t5",
    "llama",
    "llama-tied",
    "blip2-opt",
    "vit-gpt2",
    "llama-float16",
    "llama-int4",
    "paligemma2",
    "qwen3.5",
)
"""Bundles that need the whole list between them."""


def operators(graph: Any) -> Iterator[str]:
    return (node.op_type for node in graph.node)


@pytest.fixture(scope="module")
def bundles(tiny_bundle: Callable) -> list[Path]:
    return [tiny_bundle(name).path for name in COVERING]


def test_allowlist_is_what_bundles_need(bundles: list[Path]) -> None:
    found: set[str] = set()
    for path in [path for bundle in bundles for path in bundle.glob("*.onnx")]:
        refuse(path)
        found |= set(operators(onnx.load(str(path), load_external_data=False).graph))
    assert found == STRUCTURE


def test_rest_of_allowlist_is_what_activations_need() -> None:
    torch = pytest.importorskip("torch")
    from transformers.activations import ACT2FN
    from vlmexport.exporter.graphs.hooks import OPSET

    for operator, activation in ACTIVATIONS.items():
        program = torch.onnx.export(
            torch.nn.Sequential(ACT2FN[activation]).eval(),
            (torch.randn(2, 4),),
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
        )
        assert operator in {node.op_type for node in program.model.graph}, (operator, activation)
    assert not STRUCTURE & set(ACTIVATIONS)


def model(*nodes: Any, domain: str = "", **more: Any) -> Any:
    values = [[helper.make_tensor_value_info(name, FLOAT, [1])] for name in "xy"]
    graph = helper.make_graph(list(nodes), "g", *values)
    imports = [helper.make_opsetid("", 24), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=imports, **more)


def node(operator: str = "Relu", **attributes: Any) -> Any:
    return helper.make_node(operator, ["x"], ["y"], **attributes)


BODY = helper.make_graph([], "body", [], [])
FUNCTION = helper.make_function(
    "here", "F", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], [helper.make_opsetid("", 24)]
)
REFUSED = {
    "loop": (model(node("Loop", body=BODY)), "the operator 'Loop'"),
    "branch": (model(node("If", then_branch=BODY, else_branch=BODY)), "the operator 'If'"),
    "scan": (model(node("Scan", body=BODY, num_scan_inputs=1)), "the operator 'Scan'"),
    "not ours": (model(node("RandomNormalLike")), "the operator 'RandomNormalLike'"),
    "graph in another node": (model(node("Relu", body=BODY)), "holds a graph of its own"),
    "graphs in another node": (model(node("Relu", bodies=[BODY])), "holds a graph of its own"),
    "other domain": (model(node("Relu", domain="com.microsoft")), r"operators of 'com\.microsoft'"),
    "imported domain": (model(node("Relu"), domain="evil"), "operators of 'evil'"),
    "function": (model(node("Relu"), functions=[FUNCTION]), "local functions"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unlisted_operators_are_refused(tmp_path: Path, kind: str) -> None:
    made, message = REFUSED[kind]
    (tmp_path / "g.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(BundleError, match=rf"g\.onnx: .*{message}.*build the bundle again") as caught:
        refuse(tmp_path / "g.onnx")
    assert "\n" not in str(caught.value)


def test_loop_operator_in_duplicate_field_is_found(tmp_path: Path) -> None:
    """Protobuf takes the last of several values of a field, and merges several graphs into one."""
    path, loop = tmp_path / "g.onnx", node("Loop")
    for first, second in ((loop, node()), (node(), loop)):
        path.write_bytes(model(first).SerializeToString() + model(second).SerializeToString())
        with pytest.raises(BundleError, match="'Loop'"):
            refuse(path)
        twice = first.SerializeToString() + second.SerializeToString()
        whole = onnx.GraphProto.DESCRIPTOR.fields_by_name["node"].number << 3 | 2
        graph = bytes([whole, len(twice)]) + twice
        key = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number << 3 | 2
        path.write_bytes(bytes([key, len(graph)]) + graph)
        with pytest.raises(BundleError, match="'Loop'"):
            refuse(path)


def test_non_utf8_operator_names_are_refused(tmp_path: Path) -> None:
    for where in ("xname", "yname", "nname", "iname", "dname"):
        made = model(node(name="nname"))
        made.graph.input[0].name, made.graph.output[0].name = "xname", "yname"
        made.graph.output[0].type.tensor_type.shape.dim.add().dim_param = "dname"
        made.graph.initializer.append(helper.make_tensor("iname", FLOAT, [1], [0.0]))
        data = made.SerializeToString()
        (tmp_path / "good.onnx").write_bytes(data)
        refuse(tmp_path / "good.onnx")
        (tmp_path / "g.onnx").write_bytes(data.replace(where.encode(), b"\xff" + where.encode()[1:]))
        with pytest.raises(BundleError, match=r"g\.onnx: holds a name that is not UTF-8"):
            refuse(tmp_path / "g.onnx")


def test_damaged_files_end_in_one_line_and_soon(bundles: list[Path], tmp_path: Path) -> None:
    rng, path = random.Random(0), tmp_path / "g.onnx"
    whole = (bundles[0] / "segment.0.onnx").read_bytes()
    refused, begin = 0, time.perf_counter()
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        try:
            refuse(path)
        except BundleError as error:
            refused += "\n" not in str(error)
    assert refused > 70
    assert (time.perf_counter() - begin) / 150 < 2.0
    for data in (
        b"",
        b"\x00",
        b"\xff" * 4096,
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x3a\x05abc",
    ):
        path.write_bytes(data)
        with pytest.raises(BundleError, match="not a readable ONNX file"):
            refuse(path)


def test_field_numbers_are_those_of_onnx() -> None:
    numbers = {
        onnx.ModelProto: {"graph": 7, "opset_import": 8, "training_info": 20, "functions": 25},
        onnx.GraphProto: {"node": 1, "initializer": 5, "input": 11, "output": 12, "value_info": 13},
        onnx.NodeProto: {"input": 1, "output": 2, "name": 3, "op_type": 4, "attribute": 5, "domain": 7},
        onnx.AttributeProto: {"name": 1, "g": 6, "graphs": 11},
        onnx.OperatorSetIdProto: {"domain": 1},
        onnx.ValueInfoProto: {"name": 1},
        onnx.TensorProto: {"name": 8},
    }
    for message, fields in numbers.items():
        found = {field.name: field.number for field in message.DESCRIPTOR.fields}
        assert fields.items() <= found.items()
    # Nothing else may hold a graph or a node.
    holders = {
        (message.name, field.name)
        for message in onnx.ModelProto.DESCRIPTOR.file.message_types_by_name.values()
        for field in message.fields
        if field.message_type is not None
        and field.message_type.name in ("GraphProto", "NodeProto", "FunctionProto", "TrainingInfoProto")
    }
    assert holders == {
        ("AttributeProto", "g"), ("AttributeProto", "graphs"), ("GraphProto", "node"), ("FunctionProto", "node"),
        ("ModelProto", "graph"), ("ModelProto", "training_info"), ("ModelProto", "functions"),
        ("TrainingInfoProto", "initialization"), ("TrainingInfoProto", "algorithm"),
    }  # fmt: skip


def test_a_session_refuses_the_graph_before_it_is_loaded(
    tiny_bundle: Callable, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(tiny_bundle("llama").path, tmp_path / "bundle"))
    loop = onnx.load(str(folder / "head.onnx"), load_external_data=False)
    loop.graph.node[0].op_type = "Loop"
    cut = (folder / "head.onnx").read_bytes()
    for data, message in (
        (loop.SerializeToString(), "head.onnx: holds the operator 'Loop'"),
        (cut.replace(b"RMSNormalization", b"Relu____________"), "head.onnx: holds the operator 'Relu____"),
        (cut.replace(b"Gather", b"Concat"), "ONNX Runtime cannot load head.onnx"),
    ):
        assert data != cut
        (folder / "head.onnx").write_bytes(data)
        document = json.loads((folder / "manifest.json").read_text("utf-8"))
        document["files"]["head.onnx"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (folder / "manifest.json").write_text(manifest_text(document), "utf-8")
        capfd.readouterr()
        assert main(["run", str(folder), "--prompt", "a"]) == 2
        shown = capfd.readouterr().err
        assert message in shown and shown.count("\n") == 1, shown
