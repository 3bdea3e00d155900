"""`run` and `bench` on real bundles: what they print, their JSON, and what they refuse."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
import vlmexport.runtime
from PIL import Image
from vlmexport.runtime import Session, cli
from vlmexport.runtime.measure import benchmark
from vlmexport.runtime.measure.timing import GraphTimer

if TYPE_CHECKING:
    from tiny_bundles import TinyBundle

pytest.importorskip("torch", reason="building the bundles needs [export]")

Capture = pytest.CaptureFixture[str]
Bundles = Callable[[str], "TinyBundle"]


def check(name: str, value: Any) -> None:
    """Raise where `value` breaks the published schema."""
    path = Path(vlmexport.runtime.__file__).parent / "schemas" / f"{name}.json"
    jsonschema.Draft202012Validator(json.loads(path.read_text(encoding="utf-8"))).validate(value)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "scene.png"
    Image.fromarray(benchmark.synthetic_image(50, 70)).save(path)
    return path


def main(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_run_prints_the_text_and_one_line(tiny_bundle: Bundles, picture: Path, capsys: Capture) -> None:
    bundle = tiny_bundle("t5")
    capsys.readouterr()  # what building it printed
    assert main("run", bundle.path, "--image", picture, "--prompt", "describe", "--max-new-tokens", 12) == 0
    shown = capsys.readouterr()
    with Session.load(bundle.path) as session:
        expected = session.generate(image=picture, prompt="describe", max_new_tokens=12)
    assert shown.out == expected.text + "\n"
    assert shown.err.count("\n") == 1
    assert shown.err.startswith(f"{len(expected.tokens)} tokens, ")
    assert "plain decoding" not in shown.err
    assert f"draft {expected.stats.draft}" in shown.err


def test_run_json_is_valid_and_the_draft_changes_nothing(
    tiny_bundle: Bundles, picture: Path, capsys: Capture
) -> None:
    outputs = {}
    tiny_bundle("t5")
    capsys.readouterr()
    for draft in ("none", "imitation", "early-exit", "imitation@1"):
        options = [
            "--image",
            picture,
            "--prompt",
            "describe",
            "--max-new-tokens",
            20,
            "--draft",
            draft,
            "--json",
        ]
        assert main("run", tiny_bundle("t5").path, *options) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        outputs[draft] = json.loads(shown.out)
        check("run-1", outputs[draft])
    assert len({tuple(output["tokens"]) for output in outputs.values()}) == 1
    assert outputs["none"]["stats"]["proposed"] == 0
    assert outputs["imitation"]["stats"]["draft"] == "imitation@1"
    assert outputs["early-exit"]["stats"]["draft"] == "early-exit@1"
    assert outputs["none"]["image"] == str(picture)


def test_run_sampling_repeats_with_its_seed(tiny_bundle: Bundles, capsys: Capture) -> None:
    texts = []
    for seed in (3, 3, 4):
        options = [
            "--prompt",
            "the cup",
            "--temperature",
            2,
            "--seed",
            seed,
            "--json",
            "--max-new-tokens",
            16,
        ]
        assert main("run", tiny_bundle("llama").path, *options) == 0
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1] != texts[2]


def test_run_reads_the_prompt_from_standard_input(
    tiny_bundle: Bundles, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(prompt: str, data: bytes = b"") -> list[int]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert (
            main("run", tiny_bundle("llama").path, "--prompt", prompt, "--json", "--max-new-tokens", 8) == 0
        )
        return json.loads(capsys.readouterr().out)["tokens"]

    assert tokens("-", "größer".encode()) == tokens("größer") != tokens("the cup")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert main("run", tiny_bundle("llama").path, "--prompt", "-") == 2
    assert "not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("t5", [], "--image FILE"),
        ("t5", ["--image", "no.png"], "no.png: no such image file"),
        ("llama", [], "needs a prompt"),
        ("llama", ["--prompt", ""], "prompt is empty"),
        ("llama", ["--prompt", "x" * 500], "the prompt has 5"),
        ("llama", ["--prompt", "x", "--draft", "medusa"], "--draft medusa: this bundle has imitation@1, early-exit@1, prompt-lookup, none"),
        ("llama", ["--prompt", "x", "--draft-length", "20"], "--draft-length 20: this bundle allows 1 to 19"),
        ("llama", ["--prompt", "x", "--draft-length", "0"], "--draft-length 0: this bundle allows 1 to 19"),
        ("llama", ["--prompt", "x", "--temperature", "nan"], "temperature"),
        ("llama", ["--prompt", "x", "--max-new-tokens", "0"], "max-new-tokens"),
    ],
)  # fmt: skip
def test_run_refuses(
    tiny_bundle: Bundles,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    options: list[str],
    message: str,
) -> None:
    tiny_bundle(family)
    capsys.readouterr()
    if not any("temperature" in option for option in options):  # the session checks sampling
        monkeypatch.setattr(Session, "load", lambda *_, **__: pytest.fail("loaded a model for nothing"))
    assert main("run", tiny_bundle(family).path, *options) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err


BENCH = ["--max-new-tokens", 16, "--repeats", 2]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmexport.runtime.measure.timing.BUDGET", 0.0)


def bench(capsys: Capture, *arguments: object) -> dict[str, Any]:
    assert main("bench", *arguments, *BENCH, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    check("bench-1", report)
    return report


@pytest.mark.usefixtures("quick")
def test_bench_reports_consistent_figures(tiny_bundle: Bundles, picture: Path, capsys: Capture) -> None:
    report = bench(
        capsys, tiny_bundle("t5").path, "--image", picture, "--prompt", "the cup", "--prompt", "describe",
        "--draft-length", 4,
    )  # fmt: skip
    assert report["identical"] is True
    assert [request["name"] for request in report["requests"]] == [
        "scene.png, the cup",
        "scene.png, describe",
    ]
    assert report["draft"]["name"] == "imitation@1"
    assert len(report["alpha_by_depth"]) <= report["draft_length"] == 4
    assert report["tau"] >= 1
    assert report["width_cost"]["1"] == 1
    assert "5" in report["width_cost"], "the verifier's width d + 1 is timed"
    for arm in ("plain", "speculative"):
        figures = report[arm]
        low, middle, high = (figures[f"tokens_per_second{end}"] for end in ("_min", "", "_max"))
        assert low <= middle <= high
        assert figures["seconds_to_first_token"] < figures["seconds"]
    passes, bound = report["passes"], report["bound"]
    cycle = 4 * (passes["trunk"] + passes["propose"]) + passes["trunk"] + passes["tail"]["5"]
    assert bound["cycle_seconds"] == pytest.approx(cycle)
    survival = np.cumprod([*report["alpha_by_depth"], *[report["alpha_by_depth"][-1]] * 4][:4])
    assert bound["tokens_per_cycle"] == pytest.approx(1 + survival.sum())
    assert bound["decode"] == pytest.approx(bound["tokens_per_cycle"] * passes["plain"]["1"] / cycle)
    assert report["achieved"] == pytest.approx(report["speedup"]["decode"] / bound["decode"])


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_bench_needs_neither_image_nor_prompt(tiny_bundle: Bundles, capsys: Capture, family: str) -> None:
    report = bench(capsys, tiny_bundle(family).path, "--draft", "early-exit")
    assert report["identical"] is True
    assert report["draft"]["kind"] == "early-exit"


@pytest.mark.usefixtures("quick")
def test_bench_forced_acceptance_says_so(tiny_bundle: Bundles, capsys: Capture) -> None:
    path = tiny_bundle("llama").path
    report = bench(capsys, path, "--force-acceptance", 1.0, "--draft-length", 3)
    assert (report["forced_acceptance"], report["output_is_text"], report["identical"]) == (1.0, False, None)
    assert report["alpha"] == 1.0
    assert bench(capsys, path, "--force-acceptance", 0.0)["tau"] == 1.0
    assert main("bench", path, "--force-acceptance", 0.5, *BENCH) == 0
    assert "not text" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_bench_prints_a_table_and_writes_a_plot(
    tiny_bundle: Bundles, tmp_path: Path, capsys: Capture, suffix: str
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / f"bench{suffix}"
    assert main("bench", tiny_bundle("llama").path, *BENCH, "--plot", plot) == 0
    shown = capsys.readouterr().out
    for text in ("plain", "speculative", "Speed-up", "Bound", "Width cost", "Machine", "identical"):
        assert text in shown
    start = plot.read_bytes()[:200]
    assert start.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plot", "bench.txt"], "must end in .png, .svg, .pdf"),
        (["--plot", "nowhere/bench.png"], "the folder nowhere does not exist"),
        (["--draft", "none"], "name a draft"),
        (["--image", "no.png"], "no such image file"),
        (["--force-acceptance", "1.5"], "force-acceptance"),
    ],
)
def test_bench_refuses_before_it_measures(
    tiny_bundle: Bundles, capsys: Capture, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setattr(benchmark, "measure", lambda *_, **__: pytest.fail("measured"))
    assert main("bench", tiny_bundle("t5").path, *options) == 2
    assert message in capsys.readouterr().err


def test_a_changed_output_is_reported(tiny_bundle: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmexport.runtime.measure.timing.BUDGET", 0.0)
    with Session.load(tiny_bundle("llama").path) as session:
        generate = session.generate

        def wrong(*args: Any, **options: Any) -> Any:
            result = generate(*args, **options)
            if options["speculative"]:
                result.tokens[-1] ^= 1
            return result

        monkeypatch.setattr(session, "generate", wrong)
        report = benchmark.measure(
            session, [benchmark.Request("x", prompt="the cup")], options={}, max_new_tokens=8, repeats=1
        )
    assert report["identical"] is False


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_timing_leaves_the_session_as_it_was(tiny_bundle: Bundles, family: str) -> None:
    bundle = tiny_bundle(family).bundle
    image = None if family == "llama" else benchmark.synthetic_image(32, 32)
    with Session.load(bundle) as session:
        before = session.generate(image=image, prompt="the cup", max_new_tokens=24).tokens
        timer = GraphTimer(bundle, session.decoder.engine, cache=128, source=8)
        costs = timer.costs(1, "imitation.1", [1, 2, 5])
        assert session.generate(image=image, prompt="the cup", max_new_tokens=24).tokens == before
    assert set(costs.plain) == set(costs.tail) == {1, 2, 5}
    assert all(
        value > 0 for value in [*costs.plain.values(), *costs.tail.values(), costs.trunk, costs.propose]
    )


def test_a_small_bundle_loads_in_a_process_that_already_has_a_thread_pool(tiny_bundle: Bundles) -> None:
    code = (
        "import sys\nfrom vlmexport.runtime import Session\nfrom vlmexport.runtime.engines import onnxruntime as engine\n"
        "early = Session.load(sys.argv[1])\n"
        "engine.use_global_pool(2)\n"
        "late = Session.load(sys.argv[1])\n"
        "tokens = [session.generate(prompt='the cup', max_new_tokens=8, draft='imitation').tokens "
        "for session in (early, late)]\n"
        "assert tokens[0] == tokens[1]\n"
    )
    command = [sys.executable, "-c", code, str(tiny_bundle("llama").path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
