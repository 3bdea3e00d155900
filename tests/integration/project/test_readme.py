"""The README's blocks are executed as they stand, in their order, in an empty folder; then marked blocks of the docs, and
the examples.

A block that cannot run here says so in an HTML comment above it; those of the README are listed below.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.cli import MOUNTED_COMMANDS, RUNTIME_COMMANDS, build_app

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

TRAINING = ROOT / "docs" / "get-started" / "train-a-draft.md"
"""Whose block with the comment `run with: …` is run."""

NOT_RUN = {"pip install -c constraints.txt": "installs packages"}
"""Start of a block of the README → its comment."""

SHORTENED = {
    "tiny-blip2-flant5 for M, shortened": {
        "--model M": "--model tiny-blip2-flant5", "--draft-layer 12": "--draft-layer 3",
        "scenes:train:4000:offset=64000 ": "scenes:train:24 --max-new-tokens 12 ", "--data data ": "--data data --steps 3 ",
        "scenes:heldout:48": "scenes:heldout:2 --repeats 1 --max-new-tokens 12",
    },
}  # fmt: skip
"""Comment → what is replaced in its block."""


@dataclass
class Block:
    """One fenced block of a page: its language, the comment right above it, its text."""

    language: str
    comment: str | None
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"(?:<!-- ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [Block(language, comment or None, text) for comment, language, text in found]


def test_skipped_readme_blocks_are_known() -> None:
    left_out = [b for b in blocks(ROOT / "README.md") if (b.comment or "").startswith("not run: ")]
    assert {start: f"not run: {why}" for start, why in NOT_RUN.items()} == {
        next((start for start in NOT_RUN if b.text.startswith(start)), b.text): b.comment for b in left_out
    }


def run(block: Block, folder: Path) -> str:
    """Runs a block in `folder` as a reader would; what it printed. Fails with all of it when a line of it fails."""
    text = block.text
    kind, _, what = (block.comment or "").partition(": ")
    for before, after in SHORTENED[what].items() if kind == "run with" else ():
        assert before in text
        text = text.replace(before, after)
    if block.language == "python":
        command = [sys.executable, "-c", text]
    else:
        tool = f'set -eu; vlmexport() {{ "{sys.executable}" -m vlmexport.runtime.cli "$@"; }}\n'
        command = ["bash", "-c", tool + text]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty: what the blocks name, blocks before them have made."""
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def shown(folder: Path) -> str:
    """What the README's own blocks print; `folder / "bundle"` is there afterwards."""
    return "".join(run(block, folder) for block in blocks(ROOT / "README.md") if block.comment is None)


def test_the_readme_runs(folder: Path, shown: str) -> None:
    assert [b.text.split()[0] for b in blocks(ROOT / "README.md") if b.comment is None] == [
        "vlmexport",
        "from",
    ]
    assert "tiny-blip2-flant5" in shown and "segment.0" in shown  # of `models` and of `inspect`
    assert shown.count(caption_of(shown)) >= 3  # of `run`, `generate` and `stream`


def caption_of(shown: str) -> str:
    """What the README's stream tells: the last line."""
    return shown.splitlines()[-1]


RUNNING = [(page, block) for page in PAGES for block in blocks(page) if block.comment == "runs"]
"""Blocks of other pages that run where the README's bundle is."""


@pytest.mark.parametrize(("page", "block"), RUNNING, ids=[page.stem for page, _ in RUNNING])
def test_blocks_of_pages_run(page: Path, block: Block, folder: Path, shown: str) -> None:
    assert caption_of(shown) in run(block, folder)


@pytest.mark.slow
def test_the_training_page_runs(folder: Path) -> None:
    (block,) = (b for b in blocks(TRAINING) if (b.comment or "").startswith("run with: "))
    run(block, folder)
    draft = Bundle.open(folder / "faster-bundle").manifest.drafts[0]
    assert (draft.kind, draft.layer, draft.trained) == ("imitation", 3, True)


# --- examples ---


def example(
    name: str, *arguments: str | Path, cwd: Path, python_path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)


def test_stream(folder: Path, shown: str) -> None:
    done = example("stream.py", "bundle", "bundle/example.png", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == caption_of(shown)


def test_newest_frame(folder: Path, shown: str) -> None:
    (folder / "camera").mkdir()
    shutil.copy(folder / "bundle" / "example.png", folder / "camera")
    done = example("newest_frame.py", "bundle", "camera", "--answers", "2", "--fps", "200", cwd=folder)
    assert done.returncode == 0, done.stderr
    said = [line.partition(": ") for line in done.stdout.splitlines()]
    assert [text for _, _, text in said] == [caption_of(shown)] * 2
    numbers = [int(number.removeprefix("frame ")) for number, _, _ in said]
    assert numbers[0] < numbers[1]


def test_control_loop(folder: Path, shown: str) -> None:
    done = example(
        "control_loop.py", "bundle", "bundle/example.png", "--period", "60", "--ticks", "1", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tick 0: ") and done.stdout.strip().endswith(caption_of(shown))


def test_watch(folder: Path, shown: str, tmp_path: Path) -> None:
    """The bundled film: what the model says of it changes, and every token is that of plain decoding."""
    done = example(
        "watch.py", "bundle", "--ticks", "6", "--rate", "50", "--deadline", "60", "--compare",
        "--figure", tmp_path / "watch.png", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert "objects: " in first and "scene: " in first and len(others) == 5
    assert all(" tokens a pass  " in line and "(plainly " in line for line in others)
    assert (tmp_path / "watch.png").stat().st_size > 10_000


def test_watch_with_a_schema(folder: Path, shown: str, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    shutil.copy(folder / "bundle" / "example.png", tmp_path / "pictures")
    schema = {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "minimum": 0, "maximum": 9},
            "clear": {"type": "boolean"},
        },
        "required": ["count", "clear"],
        "additionalProperties": False,
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    asked = [
        "bundle",
        tmp_path / "pictures",
        "--schema",
        tmp_path / "schema.json",
        "--rate",
        "20",
        "--ticks",
        "3",
    ]
    done = example("watch.py", *asked, "--deadline", "60", "--similar", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "count: " in lines[0] and "clear: " in lines[0]
    assert [line.endswith("no change") for line in lines] == [False, True, True]
    done = example("watch.py", *asked, "--deadline", "1e-9", cwd=folder)
    assert done.returncode == 0 and "[cut: answer]" in done.stdout


def test_ros2_node(folder: Path, shown: str) -> None:
    """Against stand-ins for ROS, which deliver the picture three times: rgb8, bgr8 with padded rows, and an unknown one."""
    stand_ins = Path(__file__).parent / "ros2_stand_ins"
    done = example("ros2_node.py", "bundle", "bundle/example.png", cwd=folder, python_path=stand_ins)
    assert done.returncode == 0, done.stderr
    caption = caption_of(shown)
    assert done.stdout.splitlines() == [
        caption,
        caption,
        "error: image encoding 'mono8': convert to rgb8 or bgr8 first",
    ]


@pytest.mark.slow
def test_demo(folder: Path) -> None:
    done = example("demo.py", "--output", "demo", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Same tokens, " in done.stdout
    assert {"scene.png", "demo.png", "bench.png", "bench.json"} <= {
        path.name for path in (folder / "demo").iterdir()
    }


# --- every option that a page names is one that the command has ---


def known_options(command: str) -> set[str]:
    application = typer.main.get_command(build_app(command))
    found = application.commands[command]  # type: ignore[attr-defined]
    return {name for parameter in found.params for name in [*parameter.opts, *parameter.secondary_opts]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page: Path) -> None:
    text = "".join(block.text for block in blocks(page)) + "\n".join(
        re.findall(r"`(vlmexport [^`]*)`", page.read_text())
    )
    for line in text.replace("\\\n", " ").splitlines():
        words = line.partition("#")[0].split()
        if len(words) < 2 or words[0] != "vlmexport" or words[1].startswith("-"):
            continue
        assert words[1] in {**RUNTIME_COMMANDS, **MOUNTED_COMMANDS}, line
        named = {re.sub(r"=.*", "", word) for word in words[2:] if re.match(r"--?[a-z]", word)}
        assert named <= known_options(words[1]), line
