"""The campaign of hostile inputs and the soak run: a few cases of each, and that they notice what they are for."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.fuzz.cases import Case, denied, judge
from tests.support.programs import environment, program
from tests.support.published import folders, layouts


def crash() -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def hang() -> int:
    time.sleep(60)
    return 0


def stumble() -> int:
    raise KeyError("odd")


def devour() -> int:
    held = bytearray(1200 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    return 0


def chatter() -> int:
    sys.stderr.write("vlmexport: one\nand two\n")
    return 2


@pytest.mark.parametrize(
    ("serve", "problem"),
    [
        (crash, "ends by signal SIGSEGV"), (hang, "hangs for more than 1 s"), (stumble, "a traceback"), (devour, "GB"),
        (chatter, "2 lines of errors"), (lambda: 3, "exit status 3"), (lambda: 0, "another answer"), (lambda: 2, None),
    ],
)  # fmt: skip
def test_failure_verdicts_of_a_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[[], int], problem: str | None
) -> None:
    monkeypatch.setattr(
        "tests.integration.fuzz.cases.MEMORY", 1 << 30
    )  # a machine of tests may not have the campaign's

    def refusal() -> int:
        sys.stderr.write("vlmexport: no\n")
        return serve()

    def wrong(status: int, output: str) -> str | None:
        return None if status else "another answer"

    limit = 1.0 if serve is hang else 60.0
    quiet = serve in (crash, hang, stumble, devour, chatter)
    verdict = judge(Case(serve if quiet else refusal, wrong, limit=limit), tmp_path)
    assert verdict.problem == problem if problem is None else problem in str(verdict.problem)


def test_memory_of_the_process_that_forks_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.integration.fuzz.cases.MEMORY", 200 << 20)
    held = bytearray(300 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    (tmp_path / "file").write_bytes(bytes(held))
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert len(mapped[:]) == len(held)  # pages of a file, of which a fork begins with none
        verdict = judge(Case(lambda: 0 * len(held)), tmp_path)
        assert verdict.problem is None and verdict.peak < 200 << 20
        assert "GB" in str(judge(Case(devour), tmp_path).problem)


def test_waiting_for_cpu_is_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow() -> int:
        time.sleep(2)
        return 0

    assert denied(os.getpid()) >= 0.0
    monkeypatch.setattr("tests.integration.fuzz.cases.denied", lambda process: 60.0)
    assert judge(Case(slow, limit=0.5), tmp_path).problem is None
    monkeypatch.setattr("tests.integration.fuzz.cases.denied", lambda process: 0.0)
    assert "hangs" in str(judge(Case(slow, limit=0.5), tmp_path).problem)


TRACED = ("checkpoint", "draft", "layout", "published-draft")
"""Kinds whose cases build bundles."""


@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sample_cases_of_every_kind_pass(tmp_path: Path, traced: bool) -> None:
    from tests.integration.fuzz.kinds import KINDS

    kinds = [kind for kind in KINDS if traced or kind not in TRACED]
    words = ["--count", str(len(kinds)), "--seed", "7", "--save", tmp_path / "found.json"]
    words += [word for kind in kinds for word in ("--kind", kind)]
    words += ["--patience", "20"]  # how fast is not a test's question
    command = program("tests.integration.fuzz.campaign", *words)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failures"] == [] and list(found["kinds"]) == kinds
    for kind, row in found["kinds"].items():
        assert row.get("refused", 0) + row.get("served", 0) == 1, kind
    # Which one a kind draws moves with the files that a bundle has: some damage is none that a reader can see.
    mutants = [
        row for kind, row in found["kinds"].items() if kind != "two-writers"
    ]  # whose changes are all good
    refused = sum(row.get("refused", 0) for row in mutants)
    assert 2 * refused >= len(mutants), f"{refused} of {len(mutants)} are refused: are these mutants?"


def test_changes_of_folders_are_functions_of_their_seed(tmp_path: Path) -> None:
    from tests.integration.fuzz.layout_changes import CHANGES, change_folder

    def folder(name: str, seed: int) -> dict[str, bytes]:
        place = tmp_path / name
        place.mkdir()
        config = {"vocab_size": 9, "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 1}
        for file in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
            (place / file).write_text(json.dumps(config))
        save_file({"model.embed_tokens.weight": torch.ones(9, 4)}, place / "model.safetensors")
        change_folder(place, random.Random(seed))
        return {
            str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()
        }

    made = [folder(f"a{seed}", seed) for seed in range(4 * len(CHANGES))]
    assert made == [folder(f"b{seed}", seed) for seed in range(len(made))]
    assert len({json.dumps({name: str(data) for name, data in each.items()}) for each in made}) > len(CHANGES)


def test_a_bundle_of_another_model_differs(tmp_path: Path) -> None:
    from tests.integration.fuzz.kinds import published as kind

    name = "HuggingFaceTB--SmolLM2-135M-Instruct"
    model = folders.write(layouts.read(name), tmp_path / "model")
    kind.build(model, tmp_path / "bundle")
    assert kind.compared(model, tmp_path / "bundle") == "equal: 3 requests"
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    save_file({key: value.flip(0) for key, value in tensors.items()}, model / "model.safetensors")
    said = kind.compared(model, tmp_path / "bundle")
    assert said.startswith("DIFFERS") and kind.differs(0, f"\n{said}\n") == said[:300]
    assert kind.differs(0, "equal\n") is None


@pytest.mark.slow
def test_a_campaign_that_is_stopped_says_what_it_found_and_goes_on(tmp_path: Path) -> None:
    def campaign(*words: object) -> list[str]:
        return program("tests.integration.fuzz.campaign", *words)

    shared = ("--kind", "image", "--kind", "data", "--seed", 3)
    parts = [tmp_path / f"{name}.json" for name in ("one", "two", "whole", "merged")]
    # Nobody could wait for all of them: it ends because it is told to.
    running = subprocess.Popen(
        campaign(*shared, "--count", 10**6, "--save", parts[0], "--folder", tmp_path / "kept"),
        env=environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not list(tmp_path.glob("kept/data-3-*")):  # the campaign is at its cases
        assert running.poll() is None, "it ended by itself"
        time.sleep(0.01)
    running.send_signal(signal.SIGTERM)
    table = running.communicate(timeout=120)[0]
    first = json.loads(parts[0].read_text())
    assert running.returncode == 0 and f"go on with --first {first['next']}" in table and first["next"] > 0
    rest = ("--first", first["next"], "--count", 7, "--save", parts[1])
    whole = ("--count", first["next"] + 7, "--save", parts[2])
    for words in (rest, whole):
        subprocess.run(
            campaign(*shared, *words), env=environment(), check=True, capture_output=True, timeout=300
        )
    command = campaign("--merge", parts[1], parts[0], "--save", parts[3])
    merged = subprocess.run(
        command, env=environment(), check=True, capture_output=True, text=True, timeout=60
    ).stdout
    counts = []
    for path in parts[2:]:
        found = json.loads(path.read_text())
        assert found["ranges"] == [[0, first["next"] + 7]] and found["failures"] == []
        counts.append({k: (row["refused"], row["served"]) for k, row in found["kinds"].items()})
    assert counts[0] == counts[1]
    assert f"cases 0 to {first['next'] + 6};" in merged
    twice = subprocess.run(
        campaign("--merge", parts[0], parts[2]), env=environment(), capture_output=True, text=True, timeout=60
    )
    assert twice.returncode == 2 and "are in two files" in twice.stderr


def test_parts_of_different_kinds_make_one_table(tmp_path: Path) -> None:
    from tests.integration.fuzz import campaign

    def part(kind: str, first: int, last: int, seed: int = 1, *others: str) -> dict[str, Any]:
        row = campaign.new_row() | {"refused": last - first, "most_bytes": last}
        return {
            "seed": seed,
            "order": [kind, *others],
            "ranges": [[first, last]],
            "failures": [],
            "kinds": {kind: row},
        }

    images, data = campaign.merged([part("image", 5, 9), part("image", 0, 5)]), part("data", 0, 3)
    assert images["ranges"] == [[0, 9]]
    both = campaign.merged([images, data])
    assert both["orders"] == {"image": [[0, 9]], "data": [[0, 3]]}
    assert {kind: row["refused"] for kind, row in both["kinds"].items()} == {"image": 9, "data": 3}
    more = campaign.merged([both, part("data", 3, 4)])
    assert more["orders"]["data"] == [[0, 4]] and more["kinds"]["data"]["most_bytes"] == 4
    for wrong in (part("image", 8, 10), part("image", 9, 10, 2), part("image", 9, 10, 1, "draft")):
        with pytest.raises(ValueError, match=r"in two files|other seeds|other numbers"):
            campaign.merged([both, wrong])


@pytest.mark.slow
def test_kept_traces_change_nothing_and_are_of_the_same_configuration(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="a dry run needs [export]")
    code = f"""
import contextlib, io, json, sys
from pathlib import Path
from tests.integration.fuzz.kinds import traces
from tests.integration.fuzz.kinds.base import command
from tests.support import tiny_models

whole = tiny_models.checkpoint("llama", Path({str(tmp_path / "whole")!r}))
serve = command("-q", "build", "--model", whole, "--draft-layer", 1, "-o", whole / "no", "--dry-run", "--json")

def said(serve):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert serve() == 0
    return {{k: v for k, v in json.loads(out.getvalue()).items() if "seconds" not in k and k != "disk_free"}}

fresh, sizes = said(serve), []
for _ in range(traces.THRICE):
    sizes.append(len(traces._kept))
    traces.chosen(whole, "--draft-layer", 1)
sizes.append(len(traces._kept))
again = said(traces.with_traces(whole, serve))
sizes.append(len(traces._kept))
config = json.loads((whole / "config.json").read_text())
(whole / "config.json").write_text(json.dumps(config | {{"rms_norm_eps": 0.25}}))
said(traces.with_traces(whole, serve))
print(json.dumps([fresh == again, *sizes, len(traces._kept)]))
"""
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    same, *sizes = json.loads(done.stdout.splitlines()[-1])
    assert same and sizes[:3] == [0, 0, 0]
    assert 0 < sizes[3] == sizes[4] < sizes[5]  # used as they are, but not for another configuration


def test_soak_of_mixed_requests(tiny_bundle: Callable, tmp_path: Path) -> None:
    words = [tiny_bundle("t5").path, "--requests", "400", "--save", tmp_path / "found.json"]
    command = program("tests.integration.soak.soak", *words)
    subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    found = json.loads((tmp_path / "found.json").read_text())
    # So few requests fill caches still: memory is the business of `make soak`.
    assert [problem for problem in found["problems"] if "memory" not in problem] == []
    assert found["requests"] >= 400 and min(found["calls"].values()) > 3
