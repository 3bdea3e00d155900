"""What needs no weights is refused before PyTorch is imported."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.cli import progress
from vlmexport.exporter.common.aliases import ALIASES, check_known
from vlmexport.runtime.common.errors import OptionError

PROGRAM = """
import contextlib, io, json, sys
from vlmexport.runtime.cli import main
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(line)
    print(json.dumps([status, err.getvalue(), [m for m in ("torch", "transformers") if m in sys.modules]]))
"""


def test_refusals_come_before_pytorch(tiny_bundle: Callable, tmp_path: Path) -> None:
    bundle = str(tiny_bundle("llama")[0])
    empty, own, new = tmp_path / "empty", tmp_path / "own", str(tmp_path / "new")
    empty.mkdir()
    own.mkdir()
    (own / "draft.json").write_text("{}")
    (tmp_path / "a-file").write_text("")
    build = ["build", "--model", "tiny-vit-gpt2", "-o", new]
    evaluate = ["eval", "--model", "tiny-vit-gpt2", "--data", "scenes:heldout:2"]
    draft = str(Path(__file__).parents[3] / "models/vlmexport_tiny_models/drafts/tiny-vit-gpt2/medusa")
    unknown = "unknown model 'tiny-vit-gpt': no alias, folder or hub id; did you mean tiny-vit-gpt2"
    nowhere = "/nowhere is not a draft folder: /nowhere/draft.json cannot be read"
    cases: list[tuple[list[str], str]] = [
        (["build", "--model", "tiny-vit-gpt", "-o", new], unknown),
        (["build", "--model", str(tmp_path / "a-file"), "-o", new], "a-file is a file; give the folder"),
        ([*build[:-1], bundle], f"{bundle} exists; choose another -o or replace it with --force"),
        ([*build, "--precision", "int4"], "store the model's matrices so with --weights int4"),
        ([*build, "--precision", "fp8"], "--precision 'fp8' is unknown; choose float32, float16 or bfloat16"),
        ([*build, "--draft-precision", "int5"], "--draft-precision 'int5' is unknown; choose int8 or int4"),
        ([*build, "--max-width", "1"], "--max-width 1 is out of range 2..1024"),
        ([*build, "--max-length", "x"], "x"),
        ([*build, "--draft", "/nowhere"], "--draft '/nowhere' is neither a kind"),
        ([*build, "--draft", "none", "--draft", "medusa"], "--draft none excludes other drafts"),
        ([*build, "--draft", str(empty)], "has neither draft.json, which vlmexport train writes, nor the config.json"),
        ([*build, "--draft", str(own)], "does not say format 'vlmexport-draft'"),
        ([*build, "--skip-mlp", "1,1"], "skipped mlp"),
        ([*build, "--dry-run", "--draft", "/nowhere"], "--draft '/nowhere' is neither a kind"),
        (["verify", new, "--model", "tiny-vit-gpt2"], "does not exist; give the folder"),
        (["verify", bundle, "--model", "tiny-vit-gpt"], unknown),
        (["verify", bundle, "--model", "tiny-vit-gpt2", "--draft", "/nowhere"], nowhere),
        (["verify", bundle, "--model", "tiny-vit-gpt2", "--parity-memory", "much"], "'much' is not a size"),
        (["fit", "tiny-vit-gpt"], unknown),
        (["fit", "tiny-vit-gpt2", "--max-length", "1"], "--max-length 1 is out of range"),
        (["fit", "qwen2.5-vl-3b", "--max-length", "128001"], "beyond the model's 128000 positions"),
        (["eval", "--model", "tiny-vit-gpt", "--data", "scenes:heldout:2"], unknown),
        ([*evaluate[:-1], "nothing.jsonl"], "--data 'nothing.jsonl' names no data"),
        ([*evaluate, "--draft", "/nowhere"], "--draft '/nowhere' is neither a kind"),
        ([*evaluate, "--draft", "earlyexit"], "--draft 'earlyexit' is neither a kind"),
        ([*evaluate, "--draft", "none"], "--draft none: eval measures drafts"),
        ([*evaluate, "--task", "captions", "--answers", "/nowhere/a.jsonl"], "the folder /nowhere does not exist"),
        ([*build, "--adapter", "/nowhere!"], "--adapter '/nowhere!': there is no such folder"),
        (["train", "--model", "tiny-vit-gpt", "--data", "scenes:train:2", "--draft", "medusa", "-o", new], unknown),
        (["generate-data", "--model", "tiny-vit-gpt2", "--data", "x.jsonl", "-o", new], "'x.jsonl' names no data"),
        ([*evaluate, "--task", "poems"], "--task 'poems' is none of auto, none"),
        ([*evaluate, "--bundle", new], "does not exist; give the folder"),
        (["export-draft", "/nowhere", "-o", new], nowhere),
        (["export-draft", draft, "-o", bundle], "exists; choose another -o"),
        (["export-draft", draft, "-o", new, "--format", "x"], "--format 'x' is unknown; choose one of speculators"),
        (["export-draft", draft, "-o", new, "--model", "tiny-vit-gpt"], unknown),
    ]  # fmt: skip
    line = [sys.executable, "-c", PROGRAM, json.dumps([case for case, _ in cases])]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    found = [json.loads(each) for each in done.stdout.splitlines()]
    for (case, message), (status, error, heavy) in zip(cases, found, strict=True):
        assert status == 2 and message in error, (case, error)
        assert heavy == [], case
    assert not Path(new).exists()


@pytest.mark.parametrize(
    "name",
    ["nope", "./nope/x", "a/b/c", "..", "", "Qwen/Qwen2.5-VL-3B-Instruct", *(a.name for a in ALIASES[:3])],
)
def test_the_early_check_refuses_what_opening_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlmexport.exporter.checkpoint import load

    def opened(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(load, "described", opened)
    monkeypatch.setattr(load, "_check_files", opened)
    said = []
    for attempt in (lambda: check_known(name), lambda: open_checkpoint(name, weights=False)):
        try:
            attempt()
            said.append("")
        except OptionError as error:
            said.append(str(error))
        except InterruptedError:
            said.append("")
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("terminal", "loaded", "told"), [(True, False, 1), (True, True, 0), (False, False, 0)]
)
def test_terminal_shows_progress(
    terminal: bool, loaded: bool, told: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if loaded:
        monkeypatch.setitem(sys.modules, "torch", progress)
    with caplog.at_level(logging.INFO, progress.log.name):
        progress.tell_loading()
    assert [record.getMessage() for record in caplog.records] == ["Loading PyTorch"] * told


def test_every_stage_item_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(0, 100, 7))
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: next(seconds)))
    with caplog.at_level(logging.INFO, progress.log.name):
        tell = next(progress._lines())
        tell("graphs", 0, 2)
        tell("graphs", 2, 2)
        for done, name in enumerate(("commit", "mask", "")):
            tell("plans", done, 2, name)
    assert [record.getMessage() for record in caplog.records] == [
        "Tracing graphs", "Building TensorRT plans", "graph 1/2 commit, 7 s", "graph 2/2 mask, 7 s",
    ]  # fmt: skip
