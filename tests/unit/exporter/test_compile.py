"""`vlmexport compile`: plans for a bundle that is there, all of them or none."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import vlmexport.runtime
from vlmexport.exporter.output import folder as output_folder
from vlmexport.exporter.tensorrt import PlanOptions, compile, plans
from vlmexport.exporter.tensorrt.builder import BuiltPlan
from vlmexport.exporter.tensorrt.compile import compile_bundle
from vlmexport.exporter.tensorrt.graph_copy import GraphCopy
from vlmexport.exporter.tensorrt.network import NetworkSummary
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest_changes import store_costs
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import ExportError

pytest.importorskip("tensorrt_rtx_libs")

Content = dict[str, bytes]
LINE = ("--backend", "tensorrt-rtx", "--target", "sm86")


def content(folder: Path) -> Content:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def bundle(tiny_bundle: Callable, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle("llama")[0], tmp_path / "bundle"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """TensorRT builds nothing: a plan holds the name of its graph and a number. Lists what was asked for."""
    asked: list[str] = []

    def build(
        _library: Any, _capability: Any, source: Path, scratch: Path, options: Any, _profiles: Any, _lean: Any
    ) -> BuiltPlan:
        asked.append(source.name)
        scratch.mkdir()
        data = f"{source.name} {options.lowering} {len(asked)}".encode()
        summary = NetworkSummary(Counter(), {}, {"out": ("float32", (1,))}, {}, ())
        copied = GraphCopy(scratch / source.name, {}, 0)
        return BuiltPlan(data, len(data), copied, summary, None, {}, {"out": [1]})

    monkeypatch.setattr(plans, "build_plan", build)
    return asked


def test_json_of_a_compiled_bundle(bundle: Path, capfd: pytest.CaptureFixture) -> None:
    before = content(bundle)
    assert main(["compile", str(bundle), *LINE, "--lowering", "portable", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)  # one object and nothing else
    schemas = Path(vlmexport.runtime.__file__).parent / "schemas"
    jsonschema.validate(report, json.loads((schemas / "compile-1.json").read_text("utf-8")))
    after = content(bundle)
    assert report["bytes"] == sum(map(len, after.values())) and report["replaced"] == 0
    assert {k: v for k, v in after.items() if k in before and k != "manifest.json"} == {
        k: v for k, v in before.items() if k != "manifest.json"
    }
    opened = Bundle.open(bundle, check="sha256")
    assert opened.manifest.plans == report["plans"] and {p["lowering"] for p in report["plans"]} == {
        "portable"
    }
    assert {p["graph"] for p in report["plans"]} == set(opened.manifest.graphs)
    jsonschema.validate(
        opened.manifest.to_dict(), json.loads((schemas / "manifest-2.json").read_text("utf-8"))
    )


def test_plans_of_the_same_backend_and_target_are_replaced(bundle: Path, quick: list[str]) -> None:
    graphs = Bundle.open(bundle).manifest.graphs
    first = compile_bundle(bundle, PlanOptions(target="sm86"))
    other = compile_bundle(bundle, PlanOptions(target="sm89"))
    again = compile_bundle(bundle, PlanOptions(target="sm86", lowering="portable"))
    assert (first.replaced, other.replaced, again.replaced) == (0, 0, len(graphs))
    opened = Bundle.open(bundle, check="sha256")  # nothing is left of the replaced ones
    assert {(p["target"], p["lowering"]) for p in opened.manifest.plans} == {
        ("sm86", "portable"),
        ("sm89", "native"),
    }
    for plan in opened.manifest.plans:
        name, lowering, _ = (bundle / plan["file"]).read_text().split()
        assert (name, lowering) == (f"{plan['graph']}.onnx", plan["lowering"])
    assert len(quick) == 3 * len(graphs)


def test_plans_of_another_place_are_replaced_with_their_files(bundle: Path, quick: list[str]) -> None:
    """As versions before wrote them: without the backend in their path, and without a lowering."""
    compile_bundle(bundle, PlanOptions(target="sm86"))
    document = json.loads((bundle / "manifest.json").read_text("utf-8"))
    (bundle / "plans/tensorrt-rtx/sm86").rename(bundle / "plans/sm86")
    (bundle / "plans/tensorrt-rtx").rmdir()
    text = json.dumps({k: v for k, v in document.items() if k != "sha256"})
    text = text.replace("plans/tensorrt-rtx/sm86", "plans/sm86").replace('"lowering": "native", ', "")
    (bundle / "manifest.json").write_text(text, "utf-8")
    assert compile_bundle(bundle, PlanOptions(target="sm86")).replaced == len(document["plans"])
    assert [p.name for p in (bundle / "plans").iterdir()] == ["tensorrt-rtx"]
    Bundle.open(bundle, check="sha256")


@pytest.mark.parametrize(
    "stop", [KeyboardInterrupt(), ExportError("TensorRT refuses"), OSError(errno.ENOSPC, "full")]
)
@pytest.mark.parametrize("moment", ["a graph", "the manifest"])
def test_a_stop_half_way_leaves_the_bundle(
    bundle: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch, stop: BaseException, moment: str
) -> None:
    compile_bundle(bundle, PlanOptions(target="sm86"))
    before, real, built = content(bundle), plans.build_plan, len(quick)

    def graph(*given: Any) -> Any:
        if len(quick) == built + 3:
            raise stop
        return real(*given)

    def manifest(*_: Any) -> None:
        raise stop

    if moment == "a graph":
        monkeypatch.setattr(plans, "build_plan", graph)
    else:
        monkeypatch.setattr(compile, "write_manifest", manifest)
    wanted = ExportError if isinstance(stop, OSError) else type(stop)
    with pytest.raises(wanted):
        compile_bundle(bundle, PlanOptions(target="sm86", lowering="portable"))
    assert len(quick) > built
    assert content(bundle) == before
    assert [p.name for p in bundle.parent.iterdir()] == ["bundle"]
    Bundle.open(bundle, check="sha256")


def test_plans_are_shown_as_a_table(
    bundle: Path, quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By `compile` and, of each target, by `inspect`; every graph is named while it is built."""
    assert main(["compile", str(bundle), *LINE]) == 0
    compiled, said = capsys.readouterr()
    table = compiled.splitlines()[:-1]
    graphs = sorted(Bundle.open(bundle).manifest.graphs)
    assert table[0].startswith("TensorRT plans for sm86 (tensorrt-rtx") and table[0].endswith(
        "native), not run"
    )
    assert [line.split()[0] for line in table[2:]] == graphs
    assert re.findall(rf"graph (\d+)/{len(graphs)} (\S+), \d+ s", said) == [
        (str(number), name) for number, name in enumerate(graphs, 1)
    ]
    compile_bundle(bundle, PlanOptions(target="sm89", lowering="portable"))
    capsys.readouterr()
    assert main(["inspect", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "\n".join(table) in shown and "TensorRT plans for sm89" in shown
    assert not re.search(r"None|False|True|sha256 |[{}]", shown.partition("TensorRT plans")[2])


def test_what_is_measured_meanwhile_stays(
    bundle: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = plans.build_plan

    def measuring(*given: Any) -> Any:
        if not quick:
            store_costs(bundle, [{"machine": "m", "threads": 1}])
        return real(*given)

    monkeypatch.setattr(plans, "build_plan", measuring)
    compile_bundle(bundle, PlanOptions())
    assert Bundle.open(bundle, check="sha256").manifest.costs == [{"machine": "m", "threads": 1}]


def test_another_bundle_meanwhile_is_not_overwritten(
    bundle: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = plans.build_plan

    def other(*given: Any) -> Any:
        if not quick:
            quick.append("")
            compile_bundle(bundle, PlanOptions(target="sm89"))
        return real(*given)

    monkeypatch.setattr(plans, "build_plan", other)
    with pytest.raises(
        ExportError, match="was changed while its plans were built; it stays so: compile it again"
    ):
        compile_bundle(bundle, PlanOptions(target="sm86"))
    assert {p["target"] for p in Bundle.open(bundle, check="sha256").manifest.plans} == {"sm89"}


def test_files_are_linked_where_that_is_possible(
    bundle: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = (bundle / "weights.bin").stat().st_ino
    compile_bundle(bundle, PlanOptions())
    assert (bundle / "weights.bin").stat().st_ino == inode and (bundle / "weights.bin").stat().st_nlink == 1

    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(compile.os, "link", refuse)
    compile_bundle(bundle, PlanOptions())
    assert (bundle / "weights.bin").stat().st_ino != inode
    Bundle.open(bundle, check="sha256")


def test_invalid_options_are_refused_before_building(
    bundle: Path,
    tmp_path: Path,
    quick: list[str],
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = content(bundle)

    def refused(message: str, *line: str, path: Path = bundle) -> None:
        assert main(["compile", str(path), *(line or LINE)]) == 2
        error = capfd.readouterr().err
        assert message in error and error.count("\n") == 1, error

    (tmp_path / "empty").mkdir()
    refused("holds no manifest.json", path=tmp_path / "empty")
    refused("choose one of sm75, sm80", "--backend", "tensorrt-rtx", "--target", "sm87")
    refused("unknown backend 'cuda'", "--backend", "cuda")
    refused("unknown --plan-precision 'int8'", *LINE, "--plan-precision", "int8")
    refused(
        "has no bfloat16; use fp16",
        "--backend",
        "tensorrt-rtx",
        "--target",
        "sm75",
        "--plan-precision",
        "bf16",
    )
    refused("unknown --lowering 'rows'; choose one of auto", *LINE, "--lowering", "rows")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(output_folder.shutil, "disk_usage", lambda _: usage)
        refused("MB needed, 1.0 kB free")
    with monkeypatch.context() as patch:
        patch.setattr(compile.os, "access", lambda place, mode: place != tmp_path)
        refused(f"cannot write to {tmp_path}: plans are built beside the bundle; compile a copy of it")
    assert not quick and content(bundle) == before


BLOCKED = ("torch", "transformers", "onnxscript", "safetensors", "pydantic", "onnxruntime")
ALONE = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing())
from vlmexport.runtime.cli import main
assert main(sys.argv[1:]) == 0
print(*(m.__file__ for n, m in sys.modules.items() if n.startswith("vlmexport.exporter")), sep="\\n", file=sys.stderr)
"""


def test_a_device_needs_neither_pytorch_nor_onnx_runtime(bundle: Path) -> None:
    """Nor, for JetPack 6, a newer Python than 3.10: what is loaded parses as that."""
    line = [sys.executable, "-c", ALONE, "compile", str(bundle), *LINE, "--lowering", "portable", "--json"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "compiled"
    files = [file for file in done.stderr.splitlines() if file.endswith(".py")]
    assert any(file.endswith("exporter/lowering/rows.py") for file in files)
    for file in files:
        ast.parse(Path(file).read_text("utf-8"), feature_version=(3, 10))


def test_options_of_plans_need_a_backend(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    line = ["build", "--model", "x", "-o", str(tmp_path / "b"), "--lowering", "portable"]
    assert main(line) == 2
    assert "--lowering portable needs --backend tensorrt-rtx|tensorrt" in capfd.readouterr().err
