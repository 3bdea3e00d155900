"""`-v`, `-q` and logging: what stderr says, that stdout never changes, and that a library user decides for himself."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from vlmexport.runtime import Session, cli
from vlmexport.runtime.commands.verbosity import LOGGER, saying, with_verbosity
from vlmexport.runtime.images.synthetic import synthetic_image

from tests.support import handmade_bundle

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle

Capture = pytest.CaptureFixture[str]
Bundles = Callable[[str], "TinyBundle"]


def main(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


@pytest.fixture
def request_of(tiny_bundle: Bundles, tmp_path: Path, capsys: Capture) -> tuple[object, ...]:
    Image.fromarray(synthetic_image(50, 70)).save(tmp_path / "scene.png")
    found = (tiny_bundle("t5").path, "--image", tmp_path / "scene.png", "--max-new-tokens", 12)
    capsys.readouterr()  # what building it printed
    return found


def test_verbosity_changes_stderr_only(request_of: tuple[object, ...], capsys: Capture) -> None:
    assert main("run", *request_of) == 0
    usual = capsys.readouterr()
    for words in (("run", *request_of, "-q"), ("--quiet", "run", *request_of)):
        assert main(*words) == 0
        assert capsys.readouterr() == (usual.out, "")
    for words in (("run", *request_of, "--verbose"), ("-v", "run", *request_of)):
        assert main(*words) == 0
        shown = capsys.readouterr()
        assert shown.out == usual.out
        lines = shown.err.splitlines()
        assert all(re.match(r" *\d+\.\d\d s  \S", line) for line in lines)
        for what in (
            "bundle .*, 15 graphs, .* cut at 1",
            "compared: the manifest's checksum, the sizes of 18 files, the SHA-256 of the",
            "picture: 70 × 50, mode RGB, read in ",
            r"prompt: \d+ tokens, \d+ of them image rows",
            "draft: imitation@1 .*after layer 1 of 2, .*chosen as it pays",
            r"loaded segment\.0\.onnx in ",
            "engine: onnxruntime-cpu, 1 thread of ",
            "key/value cache: .* for 1 sequence of 160 positions",
            "pass times: assumed",
            "time: .* to the first token, .*vision .* verify ",
            r"cycles: \d+; drafted \d+ tokens",
            r"12 tokens, .*; 1\.0 tokens per pass, 0 % of drafted accepted; draft imitation@1",
        ):
            assert sum(re.search(f"s  {what}", line) is not None for line in lines) == 1, (what, shown.err)


def test_json_is_the_same_whatever_stderr_says(request_of: tuple[object, ...], capsys: Capture) -> None:
    found = []
    for options in ((), ("-v",), ("-q",)):
        assert main("run", *request_of, "--json", *options) == 0
        shown = capsys.readouterr()
        document = json.loads(shown.out)
        document["stats"] = sorted(document["stats"])  # times differ
        found.append(document)
        assert ("engine: " in shown.err) == (options == ("-v",))
        assert options == ("-v",) or shown.err == ""
    assert found[0] == found[1] == found[2]


def test_bench_logs_its_steps(request_of: tuple[object, ...], capsys: Capture) -> None:
    assert main("bench", *request_of, "--repeats", 1, "-v") == 0
    shown = capsys.readouterr()
    assert (
        "decoding: 1 of 2" in shown.err and "timing graphs" in shown.err and "draft: imitation@1" in shown.err
    )
    assert "tokens/s" in shown.out and "engine:" not in shown.out


def test_inspect_logs_what_it_compares(tmp_path: Path, capsys: Capture) -> None:
    folder = handmade_bundle.write_bundle(tmp_path / "bundle")
    assert main("inspect", folder, "--check", "-v") == 0
    assert capsys.readouterr().err.count("comparing weights.bin") == 1
    assert main("inspect", folder, "--check", "-q") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", [("-q", "inspect", "nowhere"), ("inspect", "nowhere", "-q")])
def test_quiet_keeps_errors(words: tuple[str, ...], capsys: Capture) -> None:
    assert main(*words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("vlmexport: nowhere: does not exist") and shown.count("\n") == 1


@pytest.mark.parametrize(
    "words", [("-v", "-q", "inspect", "b"), ("-v", "inspect", "b", "-q"), ("inspect", "b", "-qv")]
)
def test_verbose_with_quiet_is_refused(words: tuple[str, ...], capsys: Capture) -> None:
    assert main(*words) == 2
    assert "-v and -q" in capsys.readouterr().err


def test_quiet_drops_prints_and_keeps_logged_errors(capsys: Capture) -> None:
    def command(name: str) -> None:
        sys.stderr.write(f"{name} printed\n")
        log = logging.getLogger("vlmexport.somewhere")
        log.info("told")
        log.error("wrong \x1b[2J\n%s", name)

    for quiet, expected in ((False, "it printed\ntold\nwrong ?[2J it\n"), (True, "wrong ?[2J it\n")):
        with saying():
            with_verbosity(command)(name="it", verbose=False, quiet=quiet)
        assert capsys.readouterr().err == expected
    assert LOGGER.handlers == [] and LOGGER.level == logging.NOTSET and LOGGER.propagate


def test_library_logging_is_silent_by_default(tiny_bundle: Bundles) -> None:
    code = (
        "import logging, sys\nfrom vlmexport.runtime import Session\n"
        "with Session.load(sys.argv[1]) as session:\n    session.generate(prompt='a cup', max_new_tokens=4)\n"
        "assert not logging.getLogger().handlers and not logging.getLogger('vlmexport').handlers\n"
    )
    command = [sys.executable, "-c", code, str(tiny_bundle("llama").path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == ("", "")


def test_loggers_are_named_after_modules(tiny_bundle: Bundles, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "vlmexport")
    Session.load(tiny_bundle("llama").path).close()
    assert {record.name for record in caplog.records} == {"vlmexport.runtime.engines.onnxruntime"}
    assert "loaded head.onnx" in caplog.text
