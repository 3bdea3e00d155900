"""`vlmexport profile`: trtexec's commands and files, the engine at hand, and what the report makes of the times."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

pytest.importorskip("torch", reason="building the bundles needs [export]")

import vlmexport.runtime
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import LOWERINGS, Manifest, ValueInfo
from vlmexport.runtime.bundle.stored_acceptance import StoredAcceptance
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import InputError, OptionError
from vlmexport.runtime.engines.base import DTYPES
from vlmexport.runtime.graphs.registry import graph_role, reads_prompts
from vlmexport.runtime.measure.profile import commands, points, results
from vlmexport.runtime.measure.profile import page as page_of
from vlmexport.runtime.measure.profile.host import Cycles
from vlmexport.runtime.measure.profile.page import page
from vlmexport.runtime.measure.profile.report import build_report, table_of
from vlmexport.runtime.measure.profile.results import Layer, Timing
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.speedup.cost_model import CostTable, Curve, DraftCosts
from vlmexport.runtime.speedup.predict import AcceptanceCounts, best_length

from tests.support.browser import FLAGS, need_browser
from tests.support.fake_trtexec import fake_trtexec
from tests.support.tiny_bundles import TinyBundle

Bundles = Callable[[str], TinyBundle]
FAMILIES = ("t5", "llama", "vit-gpt2", "qwen2.5-vl", "llava-next", "internvl")
RUN = {"startEnqMs": 0.0, "endEnqMs": 0.05, "h2dMs": 0.0, "d2hMs": 0.0, "computeMs": 0.5, "latencyMs": 0.5}


def with_plans(
    bundle: Bundle,
    folder: Path,
    backend: str = "tensorrt",
    version: str = "10.16.1",
    lowering: str = "native",
) -> Bundle:
    """A copy that says it has plans, as `vlmexport build --backend` describes them; the files hold nothing."""
    trt = pytest.importorskip("vlmexport.exporter.tensorrt.profiles")
    copy = Path(shutil.copytree(bundle.path, folder / "bundle"))
    manifest = Bundle.open(copy).manifest
    sizes = trt.Sizes.of_manifest(manifest)
    capacity = manifest.limits.max_length + manifest.limits.max_width
    for name, graph in manifest.graphs.items():
        bindings = [
            {
                "name": value.name,
                "mode": "input",
                "dtype": value.dtype,
                "shape": [capacity if d == "cache" else d for d in value.shape],
            }
            for value in (graph.inputs if lowering == "native" else lowered_inputs(bundle.path / graph.file))
        ]
        used = {d for each in bindings for d in each["shape"] if isinstance(d, str)}
        profiles = [
            {"name": p.name, "dimensions": {d: list(r) for d, r in p.ranges.items() if d in used}}
            for p in trt.profiles_for(graph.role, sizes, reads_prompts(graph))
        ]
        manifest.plans.append(
            {
                "graph": name, "file": f"plans/native/{name}.plan", "target": "native", "backend": backend,
                "version": version, "precision": "float32", "profiles": profiles, "bindings": bindings,
                "lowering": lowering,
            }
        )  # fmt: skip
        path = copy / f"plans/native/{name}.plan"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return Bundle(copy, manifest)


def lowered_inputs(file: Path) -> list[ValueInfo]:
    """Inputs of the portable lowering of a graph."""
    import onnx
    import onnx_ir as ir
    from vlmexport.exporter.lowering import lower

    model = lower(ir.from_proto(onnx.load(str(file), load_external_data=False)))
    names = {1: "float32", 7: "int64", 9: "bool", 10: "float16", 16: "bfloat16"}
    return [
        ValueInfo(
            name=value.name, dtype=names[int(value.dtype)], shape=[d if isinstance(d, int) else str(d) for d in value.shape]
        )
        for value in model.graph.inputs
    ]  # fmt: skip


def all_runs(bundle: Bundle) -> list[commands.Run]:
    found = points.list_points(bundle, points.verify_widths(bundle))
    return commands.list_runs(bundle.manifest, bundle.manifest.plans, found)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_graph_is_run_at_shapes_that_its_plan_takes(
    tiny_bundle: Bundles, tmp_path: Path, family: str, lowering: str
) -> None:
    bundle = with_plans(tiny_bundle(family).bundle, tmp_path, lowering=lowering)
    found = all_runs(bundle)
    assert {run.point.graph for run in found} == set(bundle.manifest.graphs)
    widths = {run.point.width for run in found if run.point.graph == "head"}
    assert {1, 2, bundle.manifest.policy.draft_length + 1} <= widths
    for run in found:
        (profile,) = (p for p in run.plan["profiles"] if p["name"] == run.point.profile)
        for binding in run.plan["bindings"]:
            shape = run.shapes[binding["name"]]
            assert len(shape) == len(binding["shape"])
            for size, dimension in zip(shape, binding["shape"], strict=True):
                low, _, high = profile["dimensions"].get(dimension, (size, size, size))
                assert low <= size <= high and (isinstance(dimension, str) or size == dimension)
            loaded = run.inputs.get(binding["name"])
            if binding["dtype"] in ("int64", "int32", "bool") or binding["name"].endswith("mask"):
                assert loaded is not None, f"random numbers in {binding['name']}"
                assert loaded.shape == shape and loaded.dtype == DTYPES[binding["dtype"]]
        flags = run.flags("B", "I", "O")
        index = [p["name"] for p in run.plan["profiles"]].index(run.point.profile)
        assert f"--useProfile={index}" in flags
        if run.point.graph.startswith("segment"):
            own = {"write_indices"} if lowering == "native" else {"new_mask"}
            assert own <= run.inputs.keys() and not {"write_indices", "new_mask"} - own & run.shapes.keys()
        assert all(f"{name}:I/{run.point.name}.{name}.bin" in " ".join(flags) for name in run.inputs)


@pytest.mark.parametrize("table", [None, 30])
def test_profile_inputs_stay_within_buffers(
    tiny_bundle: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: int | None
) -> None:
    """A table of positions may be shorter than the cache, which has room for a pass beyond the last one."""
    bundle = with_plans(tiny_bundle("llama").bundle, tmp_path)
    monkeypatch.setattr(bundle.manifest.decoder, "max_positions", table)
    limits = bundle.manifest.limits
    for run in all_runs(bundle):
        for name, bound in (
            ("write_indices", limits.max_length + limits.max_width - run.point.width),
            ("positions", (table or limits.max_length + limits.max_width) - 1),
            ("row_index", run.point.width - 1),
            ("token_ids", bundle.manifest.text.vocab_size - 1),
        ):
            if name in run.inputs:
                assert 0 <= run.inputs[name].min() <= run.inputs[name].max() <= bound
        if "attn_mask" in run.inputs:
            assert run.inputs["attn_mask"].all(), "everything is visible"


@pytest.mark.parametrize(
    ("backend", "version", "has", "lacks"),
    [
        ("tensorrt", "10.3.0", {"--useCudaGraph", "--noDataTransfers", "--useSpinWait", "--separateProfileRun"}, set()),
        ("tensorrt", "11.4.1", set(), {"--useCudaGraph", "--noDataTransfers", "--useSpinWait", "--separateProfileRun"}),
        ("tensorrt-rtx", "1.7.1", {"--rtxCudaGraphStrategy=wholeGraph", "--noDataTransfers"}, {"--useCudaGraph"}),
    ],
)  # fmt: skip
def test_trtexec_options_follow_the_version(backend: str, version: str, has: set, lacks: set) -> None:
    flags = set(commands.version_flags(backend, version))
    assert has <= flags and not lacks & flags


def test_trtexec_script_results_are_read_back(
    tiny_bundle: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script, its inputs and the bundle are carried elsewhere; the folder of results comes back."""
    bundle = with_plans(tiny_bundle("t5").bundle, tmp_path)
    monkeypatch.setattr(Bundle, "open", classmethod(lambda *_: bundle))
    here, there = tmp_path / "with space", tmp_path / "device $HOME"
    here.mkdir()
    found = all_runs(bundle)
    assert main(["profile", str(bundle.path), "--save-commands", str(here / "p.sh")]) == 0
    assert f"{len(found)} runs" in " ".join(capsys.readouterr().out.split())
    shutil.copytree(here, there)
    (there / "bin").mkdir()
    fake_trtexec(there / "bin")
    bundle.path.rename(there / "bundle")
    done = subprocess.run(
        ["bash", str(there / "p.sh"), str(there / "bundle"), str(there / "out")],
        env={"PATH": f"{there / 'bin'}:/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert main(["profile", str(there / "bundle"), "--import", str(there / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, schema())
    assert {row["graph"] for row in report["graphs"]} == {run.point.graph for run in found}
    timings = commands.read_results(there / "out")
    assert {(t.graph, t.profile, t.width) for t in timings} == {
        (r.point.graph, r.point.profile, r.point.width) for r in found
    }
    assert len(timings[0].milliseconds) == commands.ITERATIONS and timings[0].layer_count == 3
    assert [(layer.name, layer.kind) for layer in timings[0].layers] == [("mm <1>", "gemm"), ("norm", None)]


def test_trtexec_is_run_and_reported(
    tiny_bundle: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = with_plans(tiny_bundle("llama").bundle, tmp_path)
    portable = with_plans(tiny_bundle("llama").bundle, tmp_path / "portable", lowering="portable")
    monkeypatch.setattr(Bundle, "open", classmethod(lambda *_: bundle))
    tool = fake_trtexec(tmp_path)
    line = [
        "profile",
        str(bundle.path),
        "--trtexec",
        str(tool),
        "--iterations",
        "10",
        "--widths",
        "1,4,5",
        "--json",
    ]
    assert main(line) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, schema())
    assert report["timed_with"] == "tensorrt 10.16.1 plans for native, float32"
    # embed, mask, two segments and the head, 0.1 ms and 0.01 ms by position each
    assert report["passes"] == pytest.approx({"1": 0.55, "4": 0.7, "5": 0.75})
    assert report["tokens_per_second"] == pytest.approx(1e3 / 0.55)
    assert not any("portable plans" in note for note in report["notes"])
    monkeypatch.setattr(Bundle, "open", classmethod(lambda *_: portable))
    assert main(line) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith("portable plans: appending the new rows")
    monkeypatch.setattr(sys, "argv", ["vlmexport"])
    assert main(["profile", str(bundle.path), "--trtexec", str(fake_trtexec(tmp_path, "broken"))]) == 2
    assert "[E] the plan is of another GPU" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_profile_of_the_local_engine(
    tiny_bundle: Bundles, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    bundle = tiny_bundle(family).bundle
    assert main(["profile", str(bundle.path), "--widths", "1,3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, schema())
    assert report["timed_with"] == "the engine onnxruntime-cpu" and set(report["passes"]) == {"1", "3"}
    assert set(report["drafts"]) == {draft.name for draft in bundle.manifest.drafts}
    timed = {row["graph"] for row in report["graphs"]}
    assert timed == set(bundle.manifest.graphs) - {"embed", "mask", "penalties", "repeats"}, (
        "they are the host's own work there"
    )
    for row in report["graphs"]:
        ms = row["ms"]
        assert 0 < ms["min"] <= ms["p50"] <= ms["p90"] <= ms["p95"] <= ms["p99"] <= ms["max"]
    assert (report["request"]["ms"]["vision"] > 0) == ("vision" in timed)
    assert report["request"]["ms"]["host"] > 0
    assert report["width_cost"] == pytest.approx(
        {width: ms / report["passes"]["1"] for width, ms in report["passes"].items()}
    )
    assert all(row["speedup"] >= 1 for row in report["predictions"]), "drafting nothing costs nothing"
    for row in report["predictions"]:
        rates = row["by_length"]
        assert [*rates] == [str(d) for d in range(1, len(rates) + 1)]
        assert row["tokens_per_second"] == pytest.approx(max(report["tokens_per_second"], *rates.values()))
        if row["draft_length"]:
            assert row["tokens_per_second"] == pytest.approx(rates[str(row["draft_length"])])


def test_predictions_are_those_of_the_speed_model() -> None:
    table = CostTable(
        Curve({1: 1.0, 5: 1.4}), {"x": DraftCosts(propose=0.05), "slow": DraftCosts(propose=1.0)}
    )
    length, speedup = best_length(table, "x", 0.8, 4)
    every = {d: sum(0.8**k for k in range(d + 1)) / (d * 0.05 + table.plain(d + 1)) for d in range(1, 5)}
    assert length == max(every, key=lambda d: every[d]) and speedup == pytest.approx(every[length])
    assert best_length(table, "slow", 0.5, 4) == (0, 1.0)


def synthetic(manifest: Manifest, name: str = "head") -> list[Timing]:
    layers = [Layer("<script>alert(1)</script>", 0.5, 0.9, "gemm")]
    found = []
    for graph, info in manifest.graphs.items():
        profile = "request" if graph_role(info.role).per_request else "token"
        found.append(Timing(graph, profile, 1, [1.0, 2.0, 9.0], 1.9 if graph == name else 0.1, layers))
        if profile == "token":
            found.append(Timing(graph, "verify", 4, [2.0, 3.0, 9.0]))
    return found


def test_host_share_is_the_rest_of_a_cycle(tiny_bundle: Bundles) -> None:
    """Of calls that return when they are done their own seconds count, else those of the graphs."""
    manifest = tiny_bundle("llama").bundle.manifest
    asked: list[Any] = []

    def report(cycles: Cycles | None) -> dict[str, Any]:
        def timed(draft: str | None, length: int) -> Cycles | None:
            asked.append((draft, length))
            return cycles

        return build_report(manifest, synthetic(manifest), {}, embed=True, tokens=8, alpha=0.0, cycles=timed)[
            "request"
        ]

    unknown = report(None)
    assert unknown["ms"]["host"] is None and asked == [(unknown["draft"], unknown["draft_length"])]
    assert (unknown["draft"], unknown["draft_length"]) == (None, 0), "nothing is ever accepted"
    graphs = unknown["ms"]["verify"] / 8
    assert report(Cycles(1.0, 0.75))["ms"]["host"] == pytest.approx(8 * 250)
    assert report(Cycles(1.0, None))["ms"]["host"] == pytest.approx(8 * (1000 - graphs))
    assert report(Cycles(1e-9, None))["ms"]["host"] == 0.0


def test_request_reports_prompt_length(tiny_bundle: Bundles) -> None:
    """As many rows as were timed: a session of few places holds no 128."""
    manifest = tiny_bundle("llama").bundle.manifest
    timings = synthetic(manifest)
    for added, rows in (([], 0), ([Timing("head", "prefill", 48, [5.0])], 48)):
        report = build_report(manifest, [*timings, *added], {}, embed=True, tokens=8, alpha=0.5)
        assert report["request"]["prompt_rows"] == rows
        assert report["request"]["ms"]["prefill"] == (5.0 if rows else 0.0)


def test_report_page_escapes_names_and_loads_nothing(tiny_bundle: Bundles) -> None:
    manifest = tiny_bundle("t5").bundle.manifest
    about = {"model": "a <b> & c", "timed_with": "x", "device": "<i>", "cache_rows": 1, "notes": []}
    report = build_report(manifest, synthetic(manifest), about, embed=True, tokens=8, alpha=0.5)
    jsonschema.validate(report, schema())
    text = page(report)
    assert "<script" not in text and "<b>" not in text and "<i>" not in text and "&lt;script&gt;" in text
    assert "<td>gemm</td>" in text
    assert "takes about as long as the pass itself: head (1)" in text

    class Links(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "iframe", "img", "object")
            for name, value in attrs:
                if name in ("href", "src", "xlink:href"):
                    assert value is not None and value.startswith("#"), value

    Links().feed(text)


def shown_page() -> tuple[dict[str, Any], str]:
    """A report with a measured acceptance, of made-up times, and its page."""
    pytest.importorskip("matplotlib")

    def graph(name: str, profile: str, width: int, ms: float) -> dict[str, Any]:
        return Timing(name, profile, width, [ms]).report()

    report: dict[str, Any] = {
        "model": "tiny", "timed_with": "x", "device": "y", "cache_rows": 1, "notes": [], "tokens_per_second": 100.0,
        "graphs": [
            graph("segment.0", "token", 1, 3.0), graph("head", "token", 1, 1.0), graph("segment.0", "verify", 9, 6.0),
            graph("head", "verify", 9, 2.0), graph("vision", "request", 4, 5.0), graph("encoder", "request", 8, 15.0),
        ],
        "passes": {"1": 4.0, "9": 8.0}, "drafts": {"medusa": {}, "eagle": {}},
        "predictions": [
            {
                "draft": name, "acceptance": alpha, "draft_length": 3, "speedup": 2.0, "tokens_per_second": 200.0,
                "by_length": {"3": 200.0},
            }
            for name in ("medusa", "eagle") for alpha in (0.5, 0.9)
        ],
        "measured": {
            "eagle": {
                "acceptance": 0.77, "draft_length": 3, "speedup": 1.9, "tokens_per_second": 190.0, "data": "mine.jsonl",
            },
        },
        "request": {
            "tokens": 8, "acceptance": 0.8, "draft": None, "draft_length": 0,
            "ms": {"vision": 5.0, "verify": 32.0, "host": None},
        },
    }  # fmt: skip
    return report, page(report)


def test_report_page_follows_color_scheme_and_width() -> None:
    _, text = shown_page()
    style, body = text.split("</style>", 1)
    assert "@media (prefers-color-scheme: dark)" in style and "@media (max-width" in style
    assert "background: var(--paper)" in style and "color: var(--ink)" in style
    for colour in re.findall(r"#[0-9a-fA-F]{3,6}", style.partition("body {")[2]):
        pytest.fail(f"{colour} does not follow: colours are variables")
    drawn = "".join(re.findall(r"<svg.*?</svg>", body, re.S))
    assert drawn.count("<svg") == 3, "a plot each: they stand below each other where there is no room"
    assert "currentColor" in drawn and not re.search(r"#000000|#ffffff|: ?(black|white)", drawn)
    assert "positions in one pass" in drawn, "text that is text keeps its colour and can be read aloud"
    assert body.count('<div class="scroll"><table') == body.count("<table")


def test_graphs_that_run_together_are_summed_and_shared() -> None:
    _, text = shown_page()
    rows = re.findall(r"<tr(?: class=\"sum\")?><td>([^<]*)</td><td>([\d.]+)</td>(.*?)</tr>", text, re.S)
    found = [(name, float(ms), re.findall(r"width: ([\d.]+)%", rest)) for name, ms, rest in rows]
    assert found == [
        ("token, 1 wide", 4.0, []), ("segment.0", 3.0, ["75.0"]), ("head", 1.0, ["25.0"]),
        ("verify, 9 wide", 8.0, []), ("segment.0", 6.0, ["75.0"]), ("head", 2.0, ["25.0"]),
        ("request, all", 20.0, []), ("vision", 5.0, ["25.0"]), ("encoder", 15.0, ["75.0"]),
    ]  # fmt: skip


def test_plots_mark_measured_points_to_scale() -> None:
    report, text = shown_page()
    assert "Measured acceptance: eagle 0.77 (1.90 × at 3; mine.jsonl)" in text and "measured here" in text
    figure = pytest.importorskip("matplotlib.figure").Figure()
    passes, drafts = figure.subplots(1, 2)
    page_of._passes(passes, report)
    assert sorted({bar.get_x() + bar.get_width() / 2 for bar in passes.patches}) == pytest.approx([1, 9])
    page_of._drafts(drafts, report)
    marks = {
        (line.get_color(), float(line.get_xdata()[0]), float(line.get_ydata()[0]))
        for line in drafts.lines
        if line.get_marker() == "D" and len(line.get_xdata())
    }
    colours = {line.get_label(): line.get_color() for line in drafts.lines}
    assert marks == {(colours["eagle"], 0.77, 190.0)}
    report["measured"] = {}
    nothing = page(report)
    assert "measured here" not in nothing and "No acceptance was measured" in nothing


def test_the_report_predicts_for_the_acceptance_that_calibrate_saw(tiny_bundle: Bundles) -> None:
    manifest = tiny_bundle("t5").bundle.manifest
    chain = StoredAcceptance.of(
        AcceptanceCounts("imitation@1", Budget.chain(2), {(2, 2): 10}, [8, 6]),
        3,
        "mine.jsonl",
        "2026-01-01T00:00:00Z",
    )
    known = replace(manifest, acceptance=[chain.to_dict()])
    about = {"model": "m", "timed_with": "x", "device": "y", "cache_rows": 1, "notes": []}
    found, without = (
        build_report(each, synthetic(each), about, embed=True, tokens=8, alpha=0.5)
        for each in (known, manifest)
    )
    jsonschema.validate(found, schema())
    row = found["measured"]["imitation@1"]
    assert (
        without["measured"] == {}
        and row["acceptance"] == pytest.approx(14 / 18)
        and row["data"] == "mine.jsonl"
    )
    near = [each for each in found["predictions"] if each["draft"] == "imitation@1"]
    below, above = (next(each for each in near if each["acceptance"] == alpha) for alpha in (0.7, 0.8))
    assert below["speedup"] <= row["speedup"] <= above["speedup"]


def test_profile_says_that_it_times(
    tiny_bundle: Bundles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vlmexport.runtime.measure.profile.local.time_here.__defaults__", (0.0, lambda done, total: None)
    )
    path = str(tiny_bundle("t5").path)
    capsys.readouterr()
    assert main(["profile", path, "--widths", "1"]) == 0
    shown = capsys.readouterr()
    assert re.match(r"timing graphs on the engine onnxruntime-cpu: \d+ sizes, taking turns\n", shown.err)
    assert main(["profile", path, "--widths", "1", "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_report_page_in_a_browser(tiny_bundle: Bundles, tmp_path: Path) -> None:
    """Drawn by a real browser: three plots with their legends, and nothing that scrolls sideways."""
    browser = need_browser()
    bundle = tiny_bundle("t5").bundle
    assert main(["profile", str(bundle.path), "--widths", "1,3", "--html", str(tmp_path / "p.html")]) == 0
    flags = ["--headless", *FLAGS, f"--user-data-dir={tmp_path / 'user'}"]
    seen = subprocess.run(
        [browser, *flags, "--window-size=1200,1400", f"--screenshot={tmp_path / 'p.png'}", f"file://{tmp_path / 'p.html'}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert seen.returncode == 0, seen.stderr
    from PIL import Image

    colours = np.asarray(Image.open(tmp_path / "p.png").convert("RGB")).reshape(-1, 3)
    for colour in ((31, 119, 180), (255, 127, 14), (44, 160, 44)):  # the first three of matplotlib's
        assert (np.abs(colours.astype(int) - colour).max(1) < 8).sum() > 500, f"no plot in {colour}"
    assert (colours > 250).all(1).mean() > 0.5, "a page with white around its plots"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "not a list of runs"),
        ("[]", "not a list of runs"),
        ("[1]", "not a list of runs"),
        ("[{}]", "computeMs is None"),
        (json.dumps([RUN | {"computeMs": "1"}]), "computeMs is '1'"),
        (json.dumps([RUN | {"computeMs": 0}]), "a run of no time"),
        (json.dumps([RUN | {"h2dMs": 0.2}]), "0.200 ms of a run are transfers"),
        ("[", "cannot be read"),
        ("NaN", "not a list of runs"),
    ],
)
def test_invalid_results_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "head.token.1.times.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        commands.read_results(tmp_path)


def test_folders_without_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no results"):
        commands.read_results(tmp_path)
    (tmp_path / "mine.times.json").write_text(json.dumps([RUN]))
    with pytest.raises(InputError, match="not a name that --save-commands gives"):
        commands.read_results(tmp_path)
    with pytest.raises(InputError, match="not a list of layers"):
        (tmp_path / "l.json").write_text("3")
        results.read_layers(tmp_path / "l.json")
    for content, message in (
        ("[]", "has no list of Layers"),
        ('{"Layers": 1}', "has no list of Layers"),
        ('{"Layers": [3]}', "a layer is 3"),
        ('{"Layers": [{"Name": "a", "LayerType": 1}]}', "a layer is {"),
    ):
        (tmp_path / "l.json").write_text(content)
        with pytest.raises(InputError, match=message):
            results.read_layer_info(tmp_path / "l.json")
    (tmp_path / "l.json").write_text('{"Layers": ["a"], "Bindings": []}')
    assert results.read_layer_info(tmp_path / "l.json") == {"a": None}


def test_times_of_too_few_graphs_are_refused(tiny_bundle: Bundles) -> None:
    manifest = tiny_bundle("t5").bundle.manifest
    few = [each for each in synthetic(manifest) if each.graph != "segment.1"]
    with pytest.raises(InputError, match="no pass of one token was timed"):
        table_of(manifest, few, embed=True)
    without = [each for each in synthetic(manifest) if not each.graph.startswith("imitation")]
    assert not any(name.startswith("imitation") for name in table_of(manifest, without, embed=True).drafts)


def test_conflicting_options_are_refused(
    tiny_bundle: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_bundle("t5").bundle.path)
    for options, message in (
        (["--widths", "0"], "numbers from 1 to"),
        (["--widths", "1,x"], "numbers from 1 to"),
        (["--save-commands", str(tmp_path / "x.sh")], "has no TensorRT plans"),
        (["--import", str(tmp_path)], "has no TensorRT plans"),
        (["--target", "sm86"], "the bundle has plans for none"),
        (["--html", str(tmp_path / "x.txt")], "must end in .html"),
        (["--html", str(tmp_path / "no/x.html")], "does not exist"),
        (["--save-commands", "a", "--import", "b"], "two steps"),
        (["--device", "tensorrt", "--import", "b"], "--device tensorrt times that engine: leave"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (
            ["--engine", "--trtexec", "nope"],
            "--trtexec nope is for trtexec's plans, --engine times an engine",
        ),
        (["--engine", "--target", "sm86"], "--target sm86 is for trtexec's plans, --engine"),
        (
            ["--device", "cuda", "--backend", "tensorrt"],
            "--backend tensorrt is for trtexec's plans, --device cuda",
        ),
    ):
        assert main(["profile", folder, *options]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") <= 2, error


def test_several_plan_targets_need_a_choice(tiny_bundle: Bundles, tmp_path: Path) -> None:
    bundle = with_plans(tiny_bundle("t5").bundle, tmp_path)
    more = [{**plan, "target": "sm86"} for plan in bundle.manifest.plans]
    manifest = replace(bundle.manifest, plans=[*bundle.manifest.plans, *more])
    with pytest.raises(OptionError, match="native, sm86; choose one with --target"):
        commands.choose_plans(manifest, None)
    assert commands.choose_plans(manifest, "sm86") == more
    other = [{**plan, "backend": "tensorrt-rtx"} for plan in more]
    manifest = replace(manifest, plans=[*manifest.plans, *other])
    with pytest.raises(OptionError, match="tensorrt, tensorrt-rtx; choose one with --backend"):
        commands.choose_plans(manifest, "sm86")
    assert commands.choose_plans(manifest, "sm86", "tensorrt-rtx") == other
    with pytest.raises(OptionError, match="--backend cuda: the bundle has plans for tensorrt, tensorrt-rtx"):
        commands.choose_plans(manifest, "sm86", "cuda")


def schema() -> dict[str, Any]:
    path = Path(vlmexport.runtime.__file__).parent / "schemas" / "profile-1.json"
    return json.loads(path.read_text("utf-8"))
