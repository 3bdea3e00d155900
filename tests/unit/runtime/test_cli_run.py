"""`run` and `bench` on real bundles: what they print, their JSON, and what they refuse."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import vlmexport.runtime
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from vlmexport.runtime import Bundle, Session, cli
from vlmexport.runtime.bundle.stored_costs import pick_costs
from vlmexport.runtime.commands import plot
from vlmexport.runtime.common.errors import ImageError, PromptError
from vlmexport.runtime.hardware import machine
from vlmexport.runtime.hardware.machine import BUSY
from vlmexport.runtime.images.load import load_image
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.measure import benchmark, benchmark_report
from vlmexport.runtime.measure.forced_acceptance import forced_acceptance
from vlmexport.runtime.measure.headline import headline
from vlmexport.runtime.measure.timing import GraphTimer
from vlmexport.runtime.sampling.typical import Typical
from vlmexport.runtime.speedup.cost_model import FREE, DraftCosts

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle

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
    Image.fromarray(synthetic_image(50, 70)).save(path)
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
    stats = expected.stats
    assert stats.alpha is not None
    said = f"; {stats.tau:.1f} tokens per pass, {100 * stats.alpha:.0f} % of drafted accepted; draft {stats.draft}, as many"
    assert said in shown.err


@pytest.mark.parametrize("command", ["run", "bench"])
@pytest.mark.parametrize("columns", [60, 80, 160])
def test_help_says_what_the_figures_of_speculation_are(
    command: str, columns: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(command, "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "tau" in shown and "alpha" in shown and "drafted tokens that were judged" in shown


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


def run_json(capsys: Capture, bundle: Path, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main("run", bundle, "--json", *arguments) == 0
    found = json.loads(capsys.readouterr().out)
    check("run-1", found)
    return found


OPTIONS: list[tuple[list[object], dict[str, Any]]] = [
    (["--temperature", 2, "--seed", 3, "--top-k", 5], {"temperature": 2.0, "seed": 3, "top_k": 5}),
    (["--temperature", 2, "--seed", 3, "--top-p", 0.2], {"temperature": 2.0, "seed": 3, "top_p": 0.2}),
    (["--temperature", 2, "--seed", 3, "--min-p", 0.3], {"temperature": 2.0, "seed": 3, "min_p": 0.3}),
    (
        ["--temperature", 2, "--seed", 3, "--draft-sampling", "drawn", "--draft", "early-exit"],
        {"temperature": 2.0, "seed": 3, "draft_sampling": "drawn", "draft": "early-exit"},
    ),
    (["--repetition-penalty", 1.8], {"repetition_penalty": 1.8}),
    (
        ["--draft", "imitation", "--confidence-threshold", 1],
        {"draft": "imitation", "confidence_threshold": 1.0},
    ),
    (
        ["--draft", "imitation", "--adaptive", "confidence", "--draft-length", 3],
        {"draft": "imitation", "adaptive": "confidence", "draft_length": 3},
    ),
    (["--deadline", 0.000001], {"deadline": 0.000001}),
]


@pytest.mark.parametrize(("arguments", "options"), OPTIONS, ids=lambda value: str(value)[:40])
def test_run_has_the_options_of_generate(
    tiny_bundle: Bundles, capsys: Capture, arguments: list[object], options: dict[str, Any]
) -> None:
    path = tiny_bundle("llama").path
    with Session.load(path) as session:
        want = session.generate(prompt="the cup", max_new_tokens=24, **options)
        plain = session.generate(prompt="the cup", max_new_tokens=24)
    found = run_json(capsys, path, "--prompt", "the cup", "--max-new-tokens", 24, *arguments)
    assert found["finish_reason"] == want.finish_reason
    drafting = bool({"confidence_threshold", "adaptive"} & set(options))
    assert found["stats"]["proposed"] == want.stats.proposed or not drafting
    if "deadline" in options:
        assert found["finish_reason"] == "deadline"
        return
    assert (found["tokens"], found["text"]) == (want.tokens, want.text)
    if not drafting:
        assert want.tokens != plain.tokens, "the option changes something"


def test_run_cuts_the_text_before_stop_strings(tiny_bundle: Bundles, capsys: Capture) -> None:
    path = tiny_bundle("llama").path
    whole = run_json(capsys, path, "--prompt", "the cup", "--max-new-tokens", 40)["text"]
    middle = whole[len(whole) // 2 :][:3]
    found = run_json(
        capsys, path, "--prompt", "the cup", "--max-new-tokens", 40, "--stop", "not there", "--stop", middle
    )
    assert found["finish_reason"] == "stop"
    assert middle and found["text"] == whole[: whole.index(middle)]


def test_run_max_length_sets_the_allocation(tiny_bundle: Bundles, capsys: Capture) -> None:
    path = tiny_bundle("llama").path
    whole = run_json(capsys, path, "--prompt", "the cup", "--max-new-tokens", 40)
    found = run_json(capsys, path, "--prompt", "the cup", "--max-new-tokens", 40, "--max-length", 34)
    assert found["finish_reason"] == "length" and len(found["tokens"]) < len(whole["tokens"])
    assert main("run", path, "--prompt", "a", "--max-length", 10**6) == 2
    assert "max_length (of this bundle): 1000000 is not an integer in 1..160" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", 0], "top_p: 0.0 is not a number > 0 and ≤ 1"),
        (["--top-p", "nan"], "top_p: nan is not a number"),
        (["--deadline", -1], "deadline: -1.0 is not a number > 0"),
        (["--seed", -1], "seed: -1 is not an integer"),
        (["--temperature", "inf"], "temperature: inf is not a number"),
        (["--image", "-", "--prompt", "-"], "standard input holds one of them"),
    ],
)
def test_run_checks_options_before_reading_the_bundle(
    capsys: Capture, arguments: list[object], message: str
) -> None:
    assert main("run", "nowhere", *arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1


def test_run_reads_the_image_from_standard_input(
    tiny_bundle: Bundles, picture: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_bundle("t5").path
    want = run_json(capsys, path, "--image", picture, "--max-new-tokens", 8)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(picture.read_bytes())))
    found = run_json(capsys, path, "--image", "-", "--max-new-tokens", 8)
    assert found["tokens"] == want["tokens"] and found["image"] == "-"
    for data, message in ((b"", "standard input: is empty"), (b"text", "standard input: not an image")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert main("run", path, "--image", "-") == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of three pictures, one of them damaged, and a file that is none."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, side in ((2, 40), (10, 60)):
        Image.fromarray(synthetic_image(side, 50)).save(folder / f"frame{number}.png")
    (folder / "frame3.png").write_bytes(b"no picture")
    (folder / "notes.txt").write_text("no picture")
    return folder


def test_run_answers_every_picture_of_a_folder(tiny_bundle: Bundles, pictures: Path, capsys: Capture) -> None:
    path = tiny_bundle("t5").path
    with Session.load(path) as session:
        want = {
            name: session.generate(pictures / name, "describe", max_new_tokens=8)
            for name in ("frame2.png", "frame10.png")
        }
    capsys.readouterr()
    words = ["--image", pictures, "--prompt", "describe", "--max-new-tokens", 8]
    for as_json in ([], ["--json"]):
        assert main("run", path, *words, *as_json) == 2
        shown = capsys.readouterr()
        lines = shown.out.splitlines()
        if as_json:
            found = [json.loads(line) for line in lines]
            for each in found:
                check("run-1", each)
            assert [(Path(each["image"]).name, each["text"]) for each in found] == [
                (name, result.text) for name, result in want.items()
            ]
        else:
            assert lines == [f"{name}\t{' '.join(result.text.split())}" for name, result in want.items()]
        first, last = shown.err.splitlines()
        assert "frame3.png: not an image" in first
        assert last == "vlmexport: 1 of 3 pictures could not be answered; the others were"
    (pictures / "frame3.png").unlink()
    assert main("run", path, *words) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2 and shown.err == ""


def test_run_names_the_unsuitable_picture(
    tiny_bundle: Bundles, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is refused by the rows that it takes of the prompt, and not as a picture, leaves the others their answers."""
    for number, side in enumerate((40, 400, 40), 1):
        Image.fromarray(synthetic_image(side, side)).save(tmp_path / f"{number}.png")
    generate = Session.generate

    def fitting(self: Session, image: Image.Image, *rest: Any, **options: Any) -> Any:
        if image.width > 100:
            raise PromptError("the prompt has 162 tokens; max_length is 160")
        return generate(self, image, *rest, **options)

    monkeypatch.setattr(Session, "generate", fitting)
    words = ["--image", tmp_path, "--prompt", "describe", "--max-new-tokens", 4]
    assert main("run", tiny_bundle("t5").path, *words) == 2
    shown = capsys.readouterr()
    assert [line.split("\t")[0] for line in shown.out.splitlines()] == ["1.png", "3.png"]
    *_, first, last = shown.err.splitlines()
    assert f"{tmp_path / '2.png'}: the prompt has 162 tokens" in first
    assert last == "vlmexport: 1 of 3 pictures could not be answered; the others were"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--image", "a.png"],
            "a folder is answered picture by picture; give it alone, or each picture by --image FILE",
        ),
        (["--chat"], "give it alone"),
        (["--video", "a.mp4"], "give it alone"),
    ],
)
def test_picture_folder_excludes_other_inputs(
    pictures: Path, capsys: Capture, more: list[str], message: str
) -> None:
    assert main("run", "nowhere", "--image", pictures, *more) == 2
    shown = capsys.readouterr().err
    assert f"--image {pictures}: " in shown and message in shown and shown.count("\n") == 1


def test_folder_without_readable_pictures_is_reported(
    tiny_bundle: Bundles, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_bundle("t5").path
    capsys.readouterr()
    monkeypatch.setattr(Session, "load", lambda *_, **__: pytest.fail("loaded a model for nothing"))
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.txt").touch()
    assert main("run", path, "--image", tmp_path / "none") == 2
    assert capsys.readouterr().err == f"vlmexport: {tmp_path / 'none'}: the folder has no picture files\n"
    (tmp_path / "none" / "a.png").touch()
    assert main("run", path, "--image", tmp_path / "none") == 2
    assert "a.png: the image file is empty" in capsys.readouterr().err


SAMPLING = {"--top-p": 0.9, "--top-k": 5, "--min-p": 0.1, "--seed": 3}


@pytest.mark.parametrize(
    ("command", "given"),
    [
        *(("run", [flag]) for flag in SAMPLING),
        ("run", ["--top-p", "--seed"]),
        ("run", []),
        ("bench", ["--seed"]),
    ],
)
def test_sampling_option_at_temperature_0_warns(capsys: Capture, command: str, given: list[str]) -> None:
    options = [word for flag in given for word in (flag, SAMPLING[flag])]
    assert main(command, "nowhere", *options) == 2
    told = capsys.readouterr().err.splitlines()[:-1]
    flags = ", ".join(f"{flag} {SAMPLING[flag]:g}" for flag in given)
    assert told == (
        [
            f"{flags}: without effect, at temperature 0 the likeliest token is taken; give a --temperature above 0"
        ]
        if given
        else []
    )
    assert main(command, "nowhere", *options, "--temperature", 1) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", [["run"], ["bench"], ["verify", "--model", "tiny-blip2-flant5"]])
def test_a_damaged_tiff_is_one_line(
    tiny_bundle: Bundles, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    path = tiny_bundle("t5").path
    Image.fromarray(synthetic_image(64, 64)).save(tmp_path / "a.tif", compression="tiff_deflate")
    data = bytearray((tmp_path / "a.tif").read_bytes())
    data[40] ^= 255
    (tmp_path / "a.tif").write_bytes(data)
    capfd.readouterr()
    with pytest.raises(ImageError):
        load_image(tmp_path / "a.tif")
    assert "ZIPDecode" in capfd.readouterr().err, "libtiff writes to stderr: the check below can fail"
    code = "import sys\nfrom vlmexport.runtime.cli import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, *words, str(path), "--image", str(tmp_path / "a.tif")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    shown = done.stderr
    assert done.returncode == 2
    assert "a.tif: the image data is truncated or damaged" in shown and shown.count("\n") == 1


def test_pillow_log_messages_are_hidden(tiny_bundle: Bundles, tmp_path: Path) -> None:
    path, picture = tiny_bundle("t5").path, tmp_path / "a.tif"
    Image.fromarray(synthetic_image(64, 64)).save(picture)
    samples = struct.pack("<HHI", 277, 3, 1)  # tag SamplesPerPixel, one number of 16 bits
    before, found, after = picture.read_bytes().partition(samples)
    assert found
    picture.write_bytes(before + found + struct.pack("<H", 67) + after[2:])
    code = "import sys\nfrom vlmexport.runtime.cli import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, "bench", str(path), "--image", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "not an image of a known format" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


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
    assert tokens("-", "größer\r\n".encode("utf-8-sig")) == tokens("größer")
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
        ("llama", ["--prompt", "x", "--draft", "phantom"], "draft: the bundle has no 'phantom'; it has imitation@1, medusa, eagle, eagle3, draft-and-verify, early-exit@1"),
        ("llama", ["--prompt", "x", "--draft-length", "20"], "--draft-length 20: this bundle allows 1 to 19"),
        ("llama", ["--prompt", "x", "--draft-length", "0"], "--draft-length 0: this bundle allows 1 to 19"),
        ("llama", ["--prompt", "x", "--temperature", "nan"], "temperature"),
        ("llama", ["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens: 0 is not an integer ≥ 1"),
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
    one_story(report)
    passes, bound = report["passes"], report["bound"]
    cycles = {int(drafted): count for drafted, count in report["cycles_by_drafted"].items()}
    # Noise must not make a wider pass cheaper: the time of a width is at least that of a smaller one.
    tail = {q: max(s for p, s in passes["tail"].items() if int(p) <= q) for q in map(int, passes["tail"])}
    seconds = sum(
        count * (drafted * (passes["trunk"] + passes["propose"]) + passes["trunk"] + tail[drafted + 1])
        if drafted else count * passes["plain"]["1"]
        for drafted, count in cycles.items()
    )  # fmt: skip
    tokens, number = sum(request["tokens"] - 1 for request in report["requests"]), sum(cycles.values())
    assert bound["cycle_seconds"] == pytest.approx(seconds / number)
    assert bound["tokens_per_cycle"] == pytest.approx(tokens / number)
    assert bound["decode"] == pytest.approx(tokens * passes["plain"]["1"] / seconds)
    assert report["costs"] is None
    assert report["achieved"] == pytest.approx(report["speedup"]["decode"] / bound["decode"])
    shares = [report[arm]["host_share"] for arm in ("plain", "speculative")]
    assert all(0 < share < 1 for share in shares) and report["inside_engine"] > 0


def one_story(report: dict[str, Any]) -> None:
    """Whatever two figures of a report a reader divides, he finds its speed-ups, which are medians over the pairs."""
    plain, speculative, speedup = report["plain"], report["speculative"], report["speedup"]
    quotients = [pair["speculative"] / pair["plain"] for pair in report["pairs"]]
    assert len(quotients) == report["repeats"]
    assert speedup["decode"] == pytest.approx(statistics.median(quotients))
    assert (speedup["decode_min"], speedup["decode_max"]) == pytest.approx((min(quotients), max(quotients)))
    assert plain["tokens_per_second"] == pytest.approx(
        statistics.median(pair["plain"] for pair in report["pairs"])
    )
    for end in ("", "_min", "_max"):
        quotient = speculative[f"tokens_per_second{end}"] / plain["tokens_per_second"]
        assert quotient == pytest.approx(speedup[f"decode{end}"])
    assert plain["seconds"] / speculative["seconds"] == pytest.approx(speedup["end_to_end"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0.1, 10)] * 4), min_size=1, max_size=6))
def test_speed_up_agrees_with_every_pair_of_figures(
    repeats: list[tuple[float, float, float, float]],
) -> None:
    """`repeats`: seconds to the first token and of decoding, plain and speculative."""
    arms = [benchmark_report.Arm(), benchmark_report.Arm()]
    for seconds in repeats:
        for arm, first, decoding in zip(arms, seconds[::2], seconds[1::2], strict=True):
            arm.tokens.append(40)
            arm.first_seconds.append(first)
            arm.decode_seconds.append(decoding)
            arm.engine_seconds.append(0.0)
    one_story({"repeats": len(repeats), **benchmark_report.side_by_side(*arms)})


@pytest.mark.usefixtures("quick")
def test_table_plot_report_and_demo_say_the_same_speed_up(
    tiny_bundle: Bundles, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    draw = plot.draw_benchmark
    monkeypatch.setattr(plot, "draw_benchmark", lambda report: drawn.append(draw(report)) or drawn[0])
    files = ["--plot", tmp_path / "bench.png", "--report", tmp_path / "bench.json"]
    assert main("bench", tiny_bundle("llama").path, *BENCH, *files) == 0
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "bench.json").read_text("utf-8"))
    check("bench-1", report)
    said = headline(report)
    assert f"{report['speedup']['decode']:.2f} times as fast: the median of 2 pairs, " in said
    title = drawn[0].get_suptitle()
    assert said in " ".join(shown.split()) and said in title
    bars, (bound, *_) = drawn[0].axes[0].patches, drawn[0].axes[0].get_lines()[-1:]
    heights = [bar.get_height() for bar in bars]
    assert heights[1] / heights[0] == pytest.approx(report["speedup"]["decode"])
    assert heights[1] / bound.get_ydata()[0] == pytest.approx(report["achieved"])
    assert said in summary_of_demo(report)
    rows = {
        line.split()[0]: line.split() for line in shown.splitlines() if line.startswith(("plain", "specul"))
    }
    printed = [float(rows[arm][1]) for arm in ("plain", "speculative")]
    assert printed[1] / printed[0] == pytest.approx(report["speedup"]["decode"], rel=0.01)


def summary_of_demo(report: dict[str, Any]) -> str:
    """What `make demo` says at its end of a report."""
    place = Path(__file__).parents[3] / "examples" / "demo.py"
    found = importlib.util.spec_from_file_location("demo", place)
    assert found is not None and found.loader is not None
    demo = importlib.util.module_from_spec(found)
    found.loader.exec_module(demo)
    return demo.summary(report, "")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("option", ["--plot", "--report"])
@pytest.mark.parametrize("old", [None, b"of before"])
def test_full_disk_keeps_measured_results(
    tiny_bundle: Bundles,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    old: bytes | None,
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.png"
    if old is not None:
        path.write_bytes(old)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vlmexport.runtime.common.atomic_files.os.fsync", full)
    assert main("bench", tiny_bundle("llama").path, *BENCH, option, path) == 2
    shown = capsys.readouterr()
    assert "Width cost" in shown.out
    assert shown.err.lstrip() == f"vlmexport: {path}: No space left on device\n"
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == (
        [] if old is None else [(path.name, old)]
    )


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_bench_save_stores_this_machines_pass_times(
    tiny_bundle: Bundles, tmp_path: Path, capsys: Capture, family: str
) -> None:
    path = shutil.copytree(tiny_bundle(family).path, tmp_path / "bundle")
    before = Bundle.open(path).manifest
    reports = [bench(capsys, path, "--save") for _ in range(2)]
    after = Bundle.open(path, check="sha256").manifest
    assert len(after.costs) == 1, "the second entry of this machine replaces the first"
    assert after.costs == [reports[1]["costs"]] != [reports[0]["costs"]]
    measured = {"costs": [], "sha256": None}
    assert after.to_dict() | measured == before.to_dict() | measured
    with Session.load(path) as session:
        threads = session.threads or 1
    table = pick_costs(after, machine.processor(), threads)
    report = reports[1]
    assert {str(width): seconds for width, seconds in table.plain.measured.items()} == report["passes"][
        "plain"
    ]
    for draft in ("imitation@1", "early-exit@1"):
        assert table.cycle_seconds(draft, 3) > table.cycle_seconds(draft, 1) > 0
    assert pick_costs(after, "another machine", threads).plain.measured != table.plain.measured


@pytest.mark.usefixtures("quick")
def test_bench_save_refuses_a_read_only_bundle_before_it_measures(
    tiny_bundle: Bundles, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "measure", lambda *_, **__: pytest.fail("measured"))
    # root, whom tests may run as, may write to any folder
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    path = tiny_bundle("t5").path
    capsys.readouterr()
    assert main("bench", path, "--save") == 2
    shown = capsys.readouterr().err
    assert "manifest.json: cannot be written (the folder is read-only)" in shown
    assert shown.count("\n") == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_bench_needs_neither_image_nor_prompt(tiny_bundle: Bundles, capsys: Capture, family: str) -> None:
    report = bench(capsys, tiny_bundle(family).path, "--draft", "early-exit")
    assert report["identical"] is True
    assert report["draft"]["kind"] == "early-exit"


@pytest.mark.usefixtures("quick")
def test_bench_times_a_draft_without_graphs(tiny_bundle: Bundles, capsys: Capture) -> None:
    report = bench(
        capsys, tiny_bundle("llama").path, "--draft", "prompt-lookup", "--prompt", "the cup the cup"
    )
    assert report["identical"] is True
    passes = report["passes"]
    assert passes["tail"] == {} and passes["trunk"] == passes["propose"] == 0
    plain = {q: max(s for p, s in passes["plain"].items() if int(p) <= q) for q in map(int, passes["plain"])}
    cycles = {int(drafted): count for drafted, count in report["cycles_by_drafted"].items()}
    seconds = sum(count * plain[drafted + 1] for drafted, count in cycles.items())
    assert report["bound"]["cycle_seconds"] == pytest.approx(seconds / sum(cycles.values()))


@pytest.mark.usefixtures("quick")
def test_forced_acceptance_says_so(tiny_bundle: Bundles, capsys: Capture) -> None:
    path = tiny_bundle("llama").path
    request = [benchmark.Request("x", prompt="the cup")]
    with Session.load(path) as session:

        def measured(rate: float, **options: Any) -> dict[str, Any]:
            with forced_acceptance(session, rate):
                return benchmark.measure(
                    session, request, options=options, shared={"max_new_tokens": 16}, repeats=1
                )

        report = measured(1.0, draft_length=3)
        assert (report["forced_acceptance"], report["output_is_text"], report["identical"]) == (
            1.0,
            False,
            None,
        )
        assert (report["alpha"], report["unpredicted"]) == (1.0, "acceptance is forced")
        assert measured(0.0)["tau"] == 1.0
        assert not session.generate(prompt="the cup", max_new_tokens=4).stats.forced, "only inside the block"
    assert main("bench", path, "--force-acceptance", 0.5, *BENCH) == 0, "for one release"
    shown = capsys.readouterr()
    assert "not text" in shown.out and "--force-acceptance is deprecated" in shown.err


@pytest.mark.usefixtures("quick")
def test_lossy_results_are_marked_everywhere(tiny_bundle: Bundles, capsys: Capture) -> None:
    path = tiny_bundle("llama").path
    arguments = [
        "--draft", "medusa", "--draft-length", 3, "--temperature", 0.9, "--seed", 2,
        "--lossy", "typical:0,0.3", "--prompt", "the cup",
    ]  # fmt: skip
    found = run_json(capsys, path, *arguments, "--max-new-tokens", 16)
    with Session.load(path) as session:
        asked = {"draft": "medusa", "draft_length": 3, "temperature": 0.9, "seed": 2}
        want = session.generate(prompt="the cup", max_new_tokens=16, lossy=Typical(epsilon=0.0), **asked)
    assert (found["lossy"], found["tokens"]) == ("typical", want.tokens)
    assert main("run", path, *arguments) == 0
    assert "; LOSSY (typical acceptance)" in capsys.readouterr().err
    report = bench(capsys, path, *arguments)
    assert (report["lossy"], report["identical"], report["temperature"]) == ("typical", None, 0.9)
    assert main("bench", path, *arguments, *BENCH) == 0
    shown = capsys.readouterr().out
    assert "typical, LOSSY" in shown and "not distributed as the model's" in shown
    drawn = bench(capsys, path, *arguments[:8], *arguments[-2:], "--draft-sampling", "drawn")
    assert (drawn["lossy"], drawn["identical"]) == (None, None), "another draw from the same distribution"
    assert main("bench", path, *arguments[:8], *arguments[-2:], "--draft-sampling", "auto", *BENCH) == 0
    assert "another draw than plain decoding's" in capsys.readouterr().out
    kept = bench(capsys, path, *arguments[:8], *arguments[-2:])
    assert (kept["lossy"], kept["identical"], kept["temperature"]) == (None, True, 0.9)


@pytest.mark.parametrize("command", ["run", "bench"])
def test_lossy_without_a_temperature_is_refused(tiny_bundle: Bundles, capsys: Capture, command: str) -> None:
    path = tiny_bundle("llama").path
    capsys.readouterr()
    assert main(command, path, "--prompt", "the cup", "--lossy", "typical") == 2
    assert "at temperature 0 it is greedy decoding" in capsys.readouterr().err
    assert main(command, path, "--prompt", "the cup", "--lossy", "nearly", "--temperature", 1) == 2
    assert "lossy: 'nearly' is not one of typical" in capsys.readouterr().err
    assert main(command, path, "--prompt", "the cup", "--typical-delta", 0.5, "--temperature", 1) == 2
    assert "--typical-delta 0.5 is of --lossy typical: give it, too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--draft-length", 3], "--draft-length 3"),
        (["--draft-nodes", 4, "--adaptive", "off"], "--draft-nodes 4 and --adaptive off"),
        (["--confidence-threshold", 0.5], "--confidence-threshold 0.5"),
    ],
)
def test_draft_options_need_a_draft(
    tiny_bundle: Bundles, capsys: Capture, options: list[Any], named: str
) -> None:
    path = tiny_bundle("llama").path
    capsys.readouterr()
    assert main("run", path, "--prompt", "the cup", "--draft", "none", *options) == 2
    assert f"--draft none drafts nothing: leave {named} out, or name a draft" in capsys.readouterr().err


def test_plot_names_machine_and_load() -> None:
    pytest.importorskip("matplotlib")
    arm = {"tokens_per_second": 90.0, "tokens_per_second_min": 80.0, "tokens_per_second_max": 95.0}
    report = {
        "model": "tiny", "speedup": {"decode": 1.5}, "repeats": 1, "draft": {"name": "imitation@3"}, "output_is_text": True, "lossy": "typical",
        "plain": arm, "speculative": arm, "bound": None, "alpha_by_depth": [0.9, 0.8], "tau": 2.0,
        "width_cost": {"1": 1.0, "6": 1.4}, "machine": {"cpu": "A Processor of Some Name", "cores": 2, "load": 5.0},
    }  # fmt: skip
    figure = plot.draw_benchmark(report)
    assert "LOSSY: typical acceptance" in figure.get_suptitle()
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    notes = {text.get_text(): text.get_window_extent(renderer) for text in figure.texts}
    assert "A Processor of Some Name, 2 cores" in notes and BUSY in notes
    for axes in figure.axes:
        for text, box in notes.items():
            assert not box.overlaps(axes.get_tightbbox(renderer)), text
    report["machine"]["load"] = 1.0
    assert BUSY not in {text.get_text() for text in plot.draw_benchmark(report).texts}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_bench_prints_a_table_and_writes_a_plot(
    tiny_bundle: Bundles, tmp_path: Path, capsys: Capture, suffix: str
) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / f"bench{suffix}"
    assert main("bench", tiny_bundle("llama").path, *BENCH, "--plot", drawn) == 0
    shown = capsys.readouterr().out
    for text in ("plain", "speculative", "Decoding", "Bound", "Host", "Width cost", "Machine", "identical"):
        assert text in shown
    start = drawn.read_bytes()[:200]
    assert start.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plot", "bench.txt"], "must end in .png, .svg, .pdf"),
        (["--plot", "nowhere/bench.png"], "--plot nowhere/bench.png: the folder nowhere does not exist"),
        (["--report", "nowhere/b.json"], "--report nowhere/b.json: the folder nowhere does not exist"),
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
            session,
            [benchmark.Request("x", prompt="the cup")],
            options={},
            shared={"max_new_tokens": 8},
            repeats=1,
        )
    assert report["identical"] is False


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_timing_leaves_the_session_as_it_was(tiny_bundle: Bundles, family: str) -> None:
    bundle = tiny_bundle(family).bundle
    image = None if family == "llama" else synthetic_image(32, 32)
    with Session.load(bundle) as session:
        before = session.generate(image=image, prompt="the cup", max_new_tokens=24).tokens
        timer = GraphTimer(bundle, session.decoder.engine, cache=128, source=8)
        costs = timer.costs(bundle.manifest.drafts, [2, 5])
        assert session.generate(image=image, prompt="the cup", max_new_tokens=24).tokens == before
    assert set(costs.plain.measured) == {1, 2, 5}
    assert set(costs.drafts) == {draft.name for draft in bundle.manifest.drafts}
    for draft in bundle.manifest.drafts:
        found = costs.drafts[draft.name]
        options = draft.options
        if options.most_tokens is not None:
            assert found == DraftCosts(once=found.once) and found.once > 0
        elif draft.layer is None and (options.own_cache is not None or draft.kind == "draft-and-verify"):
            assert found == DraftCosts(propose=found.propose) and found.propose > 0
        elif draft.layer is None:
            assert found == FREE
        else:
            assert found.tail is not None and set(found.tail.measured) == {1, 2, 5}
            assert found.trunk > 0 and found.propose > 0
    assert costs.cycle_seconds("imitation@1", 4) > 0


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
