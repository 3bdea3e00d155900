"""`build`, `models` and `verify` as a user types them: output, exit status, and one clear line for every mistake."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from vlmexport.exporter.cli.tables import parity_line
from vlmexport.exporter.common.sizes import parse_size
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import OptionError

from tests.support import kept_traces


def _run(capfd: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    capfd.readouterr()  # what making the checkpoint printed (a fixture's, transformers' progress) is not the command's
    status = main([str(a) for a in arguments])
    out, err = capfd.readouterr()
    return status, out, err


def test_models(capfd: pytest.CaptureFixture) -> None:
    status, out, _ = _run(capfd, "models", "--json")
    document = json.loads(out)
    assert status == 0
    assert {"tiny-blip2-flant5", "tiny-vit-gpt2", "blip2-flant5"} <= {m["alias"] for m in document["models"]}
    assert document["architectures"]["LlamaForCausalLM"] == "llama"
    status, out, _ = _run(capfd, "models")
    assert status == 0 and "early-exit" in out
    assert all(name in out for name in document["architectures"])
    header, *lines = out.splitlines()  # not a terminal: a line per model, whole words
    assert header.split()[:3] == ["alias", "family", "source"]
    for model, line in zip(document["models"], lines, strict=False):
        assert line.split()[:3] == [model["alias"], model["family"], model["source"]]
        assert line.endswith(model["description"])


def test_build_then_verify(tiny_checkpoint: Callable, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    model, out = tiny_checkpoint("llama"), tmp_path / "bundle"
    options = ("--draft-layer", 1, "--max-length", 96, "--max-width", 8)
    status, text, err = _run(capfd, "build", "--model", model, "-o", out, *options)
    assert status == 0, err
    line = r"^\d+ graphs compared with PyTorch: largest difference \S+ % of its limit \(\S+\); 24 generated tokens equal$"
    assert re.search(line, text, re.MULTILINE) and "segment.1" not in text  # the table is for -v
    assert f"vlmexport run {out}" in text
    assert re.search(r"^Time: checks .* s, .*graphs .* s, .*parity .* s, checksums .* s$", text, re.MULTILINE)
    assert "vlmexport train --model" in text  # no trained draft: says how to get one
    assert "Comparing with PyTorch" in err
    status, text, err = _run(
        capfd, "verify", out, "--model", model, "--prompts", 2, "--max-new-tokens", 12, "--json"
    )
    report = json.loads(text)
    assert status == 0 and report["ok"] and err == ""
    drafts = ["early-exit@1", "prompt-lookup", "always-wrong (early-exit@1)"]
    assert [row["draft"] for row in report["lossless"]] == drafts
    assert all(row["different"] == 0 and row["tokens"] > 0 for row in report["lossless"])
    assert report["lossless"][2]["alpha"] < 0.2
    assert report["files_checked"] == len(list(out.iterdir())) - 1
    assert "generation" in {row["graph"] for row in report["parity"]}


def test_parity_in_one_line_is_that_of_the_graph_nearest_to_its_limit() -> None:
    rows = [
        {"graph": "vision", "relative_difference": 3e-7, "limit": 1e-6, "values": 9},
        {"graph": "head", "relative_difference": 4e-7, "limit": 5e-6, "values": 9},
        {"graph": "embed", "relative_difference": 0.0, "limit": 0.0, "values": 9},
    ]
    found = "3 graphs compared with PyTorch: largest difference 30 % of its limit (vision)"
    assert parity_line(rows) == found
    others = [
        {"graph": "preparation", "relative_difference": 0.9, "limit": 1.0, "values": 9},
        {"graph": "generation", "relative_difference": 0.0, "limit": 0.0, "values": 24},
    ]
    assert parity_line([*rows, *others]) == f"{found}; 24 generated tokens equal"
    assert parity_line([*rows[2:], others[1]]).startswith("1 graph compared with PyTorch: no difference;")


def test_a_build_says_more_or_nothing(
    tiny_checkpoint: Callable, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    options = ("build", "--model", tiny_checkpoint("llama"), "--draft-layer", 1, "--max-length", 96)
    status, text, err = _run(capfd, *options, "-o", tmp_path / "quiet", "-q")
    assert (status, err) == (0, "") and "Next: vlmexport run" in text
    with kept_traces.anew():  # a trace that was kept has nothing to say
        status, text, err = _run(capfd, *options, "-o", tmp_path / "told", "-v", "--json")
    assert status == 0 and json.loads(text)["status"] == "built"  # one object and nothing else
    for what in (
        r"model .*, drafts: the model's own, precision float32, up to 96 tokens", r"machine: .* cores, load .*; PyTorch ",
        r"traced LlamaDecoderLayer in .* s: \d+ nodes", r"Tracing graphs: \d+ done", r"Writing weights: .* done",
        r"segment\.1: [\d]+ values, largest difference ", r"loaded segment\.1\.onnx in ",
        r"graph segment\.0 \(segment\): \d+ nodes", r"stages: checks .* s, .*graphs .* s, .*parity .* s",
    ):  # fmt: skip
        assert re.search(rf"^ *\d+\.\d\d s  {what}", err, re.MULTILINE), (what, err)


def test_build_json_with_plans(
    tiny_checkpoint: Callable, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    pytest.importorskip("tensorrt_rtx_libs")
    out = tmp_path / "bundle"
    plans = ("--backend", "tensorrt-rtx", "--target", "sm89", "--plan-precision", "bf16")
    status, text, err = _run(
        capfd, "build", "--model", tiny_checkpoint("llama"), "--draft-layer", 1, "-o", out, *plans, "--json"
    )
    assert status == 0, err
    report = json.loads(text)  # one object and nothing else
    assert report["status"] == "built" and report["cuts"] == [0, 1, 2]
    assert {p["precision"] for p in report["plans"]} == {"bfloat16"}
    assert (out / "plans/tensorrt-rtx/sm89/segment.0.plan").is_file()
    assert report["bytes"] == sum(p.stat().st_size for p in out.rglob("*") if p.is_file())


def test_verify_finds_other_weights(
    tiny_bundle: Callable, tiny_checkpoint: Callable, capfd: pytest.CaptureFixture
) -> None:
    other = tiny_checkpoint("llama", seed=99)
    status, out, _ = _run(capfd, "verify", tiny_bundle("llama")[0], "--model", other, "--json")
    assert status == 1
    assert "built from other weights" in json.loads(out)["failures"][0]


def test_verify_refuses_lossy_acceptance(capfd: pytest.CaptureFixture) -> None:
    status, _, err = _run(capfd, "verify", "bundle", "--model", "model", "--lossy", "typical")
    assert status == 2
    assert "--lossy typical: verify checks that the output is the model's" in err


def test_verify_finds_a_changed_file(
    tiny_bundle: Callable, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    source, model = tiny_bundle("llama")
    bundle = Path(shutil.copytree(source, tmp_path / "bundle"))
    weights = bundle / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    status, _, err = _run(capfd, "verify", bundle, "--model", model)
    assert status == 2 and "weights.bin" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "tiny-blip2-flant"],
            "unknown model 'tiny-blip2-flant': no alias, folder or hub id; did you mean tiny-blip2-flant5",
        ),
        (
            ["--model", "LLAMA", "--draft-layer", "2"],
            "--draft-layer 2 is out of range: this decoder has 2 layers, choose 1..1",
        ),
        (["--model", "LLAMA", "--draft-layer", "0"], "--draft-layer 0 is out of range"),
        (
            ["--model", "LLAMA", "--draft", "medusa9"],
            "--draft 'medusa9' is neither a kind (imitation, medusa, eagle, eagle3, vispec, mtp, draft-and-verify, early-exit, prompt-lookup, none) nor a folder",
        ),
        (["--model", "LLAMA", "--draft", "imitation"], "vlmexport train --model"),
        (["--model", "LLAMA", "--max-length", "1"], "--max-length 1 is out of range"),
        (["--model", "LLAMA", "--max-width", "1"], "--max-width 1 is out of range"),
        (["--model", "LLAMA", "--precision", "int3"], "--precision 'int3' is unknown"),
        (["--model", "LLAMA", "--parity-memory", "lots"], "--parity-memory 'lots' is not a size"),
        (["--model", "LLAMA", "--target", "sm86"], "--target sm86 needs --backend"),
        (["--model", "LLAMA", "--plan-precision", "fp16"], "--plan-precision fp16 needs --backend"),
        (
            ["--model", "LLAMA", "--backend", "cuda"],
            "unknown backend 'cuda'; choose one of tensorrt-rtx, tensorrt",
        ),
        (
            ["--model", "LLAMA", "--backend", "tensorrt-rtx", "--target", "sm90"],
            "unknown target 'sm90' for tensorrt-rtx; choose one of sm75",
        ),
        (
            ["--model", "LLAMA", "--backend", "tensorrt-rtx", "--plan-precision", "x"],
            "unknown --plan-precision 'x'",
        ),
    ],
)
def test_a_mistake_gets_one_line(
    tiny_checkpoint: Callable,
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
    arguments: list[str],
    message: str,
) -> None:
    named = [str(tiny_checkpoint("llama")) if a == "LLAMA" else a for a in arguments]
    capfd.readouterr()  # what making the checkpoint printed
    status, out, err = _run(capfd, "build", *named, "-o", tmp_path / "bundle")
    assert status == 2 and out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_unsupported_model_type_is_named(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64)).save_pretrained(
        tmp_path / "gpt2"
    )
    capfd.readouterr()
    status, _, err = _run(capfd, "build", "--model", tmp_path / "gpt2", "-o", tmp_path / "bundle")
    assert status == 2 and "GPT2LMHeadModel (model_type 'gpt2') is not supported" in err
    assert not (tmp_path / "bundle").exists()


def test_an_existing_folder_needs_force(
    tiny_checkpoint: Callable, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    kept = tmp_path / "holiday"
    kept.mkdir()
    (kept / "photo.jpg").write_bytes(b"x")
    for force, message in (((), "replace it with --force"), (("--force",), "is not a bundle")):
        status, _, err = _run(capfd, "build", "--model", tiny_checkpoint("llama"), "-o", kept, *force)
        assert status == 2 and message in err
    assert [p.name for p in kept.iterdir()] == ["photo.jpg"]


@pytest.mark.parametrize("moment", ["before", "while writing"])
def test_a_full_disk_loses_nothing(
    tiny_bundle: Callable,
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    from vlmexport.exporter.graphs.weights import WeightStore
    from vlmexport.exporter.output import folder as output_folder

    source, model = tiny_bundle("llama")
    bundle = Path(shutil.copytree(source, tmp_path / "bundle"))
    before = {p.name: p.read_bytes() for p in bundle.iterdir()}
    if moment == "before":
        usage = type("Usage", (), {"free": 1000})
        monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda _path: usage)
    else:

        def full(self: WeightStore, folder: Path, progress: object = None) -> Path:
            (folder / "weights.bin").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(WeightStore, "write", full)
    status, _, err = _run(capfd, "build", "--model", model, "--draft-layer", 1, "-o", bundle, "--force")
    assert status == 2 and "no space left" in err
    assert {p.name: p.read_bytes() for p in bundle.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_failed_parity_writes_no_bundle(
    tiny_bundle: Callable, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlmexport.exporter.parity import compare

    monkeypatch.setattr(compare, "SHARE", 0.01)
    monkeypatch.setattr(compare, "FLOOR", 0.0)
    out = tmp_path / "bundle"
    status, _, err = _run(capfd, "build", "--model", tiny_bundle("llama")[1], "--draft-layer", 1, "-o", out)
    assert status == 2 and "parity failed" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_build_keeps_the_old_bundle(
    tiny_bundle: Callable, tmp_path: Path, number: int, status: int
) -> None:
    source, model = tiny_bundle("llama")
    bundle = Path(shutil.copytree(source, tmp_path / "bundle"))
    before = {p.name: p.read_bytes() for p in bundle.iterdir()}
    command = [
        sys.executable,
        "-m",
        "vlmexport.runtime.cli",
        "build",
        "--model",
        str(model),
        "--draft-layer",
        "1",
    ]
    process = subprocess.Popen(
        [*command, "-o", str(bundle), "--force"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A shell that starts the tests in the background makes its children ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 240
    while not list(
        tmp_path.glob(".bundle.building-*/tokenizer.json")
    ):  # in the middle: parity is still to come
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    assert b"Next:" not in out
    assert {p.name: p.read_bytes() for p in bundle.iterdir()} == before
    left = [p.name for p in tmp_path.iterdir() if p.name != "bundle"]
    assert (
        left == []
        if number != signal.SIGKILL
        else all(n.startswith((".bundle.building-", ".bundle.lock")) for n in left)
    )
    if number == signal.SIGKILL:  # the next build clears what the killed one left
        assert (
            main(
                ["build", "--model", str(model), "--draft-layer", "1", "-o", str(bundle), "--force", "--json"]
            )
            == 0
        )
        assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 << 30), ("512M", 512 << 20), ("0", 0), ("1.5k", 1536), ("12", 12), (" 2 gb ", 2 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--parity-memory") == size


@pytest.mark.parametrize("text", ["", "-1", "four", "1e9x", "4 G i"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(OptionError, match="is not a size"):
        parse_size(text, "--parity-memory")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from vlmexport.runtime.cli import main; main(['build', '--help']);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'onnx', 'onnxruntime')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
