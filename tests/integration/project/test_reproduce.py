"""docs/results/reproduce.md is executed, in its order, on small stand-ins: a random LLaVA, drawn pictures in COCO's layout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support import tiny_models

PAGE = Path(__file__).resolve().parents[3] / "docs" / "results" / "reproduce.md"
LAYERS = 3
SMALLER = {
    "--draft-layer 8": "--draft-layer 1", "early-exit@8": "early-exit@1", " --device cuda": "",
    "--precision float16": "--precision float32 --max-length 192", "--limit 20000": "--limit 8",
    "--limit 10000": "--limit 4", "--limit 5000": "--limit 3", "--limit 2000": "--limit 2", "--limit 200": "--limit 2",
    "--limit 16": "--limit 2 --repeats 1", "--max-new-tokens 64": "--max-new-tokens 8", "--max-new-tokens 32": "--max-new-tokens 8",
    "--steps 4000": "--steps 2 --batch-size 4",
}  # fmt: skip


def commands() -> list[str]:
    """Every line of a block that is run."""
    found = re.findall(r"<!-- run with: stand-ins -->\n```\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    return [line for block in found for line in block.splitlines() if line.strip()]


def stand_ins(folder: Path) -> None:
    """COCO with Karpathy's splits, both parts of VQA v2, and VisDial, each a few entries about drawn pictures."""
    rng = np.random.default_rng(0)
    images = []
    for n in range(42, 54):
        split = "test" if n < 46 else "train" if n < 50 else "restval"
        part = "train2014" if split == "train" else "val2014"
        name = f"COCO_{part}_{n:012d}.jpg"
        for path in (
            folder / "coco" / part / name,
            folder / "visdial" / "images" / f"VisualDialog_val2018_{n:012d}.jpg",
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)).save(path)
        told = [{"raw": text} for text in ("a red cup", "the cup is on the table")]
        images.append({"filepath": part, "filename": name, "split": split, "sentences": told})
    write(folder / "coco" / "dataset_coco.json", {"images": images})
    for start, part, before in ((42, "val2014", ""), (46, "train2014", "train-")):
        numbers = range(start, start + 4)
        questions = [{"question_id": n, "image_id": n, "question": "the red cup"} for n in numbers]
        people = [{"answer": "red"}] * 10
        notes = [{"question_id": n, "multiple_choice_answer": "red", "answers": people} for n in numbers]
        write(folder / "vqa" / f"{before}questions.json", {"questions": questions, "data_subtype": part})
        write(folder / "vqa" / f"{before}annotations.json", {"annotations": notes})
    rounds = [{"question": 0, "answer": n, "answer_options": [0, 1, 2], "gt_index": n} for n in range(2)]
    data = {
        "questions": ["the cup"], "answers": ["red", "a cup", "table"],
        "dialogs": [{"image_id": 42, "caption": "a red cup", "dialog": rounds}],
    }  # fmt: skip
    write(folder / "visdial" / "dialogs.json", {"split": "val2018", "data": data})


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_every_number_that_is_made_smaller_stands_there() -> None:
    text = "\n".join(commands())
    assert [old for old in SMALLER if old not in text] == []
    assert len(commands()) == 12 and all(line.startswith("vlmexport ") for line in commands())


def test_no_question_is_trained_on_and_evaluated_with() -> None:
    asked = {
        line.split()[1]: file for line in commands() for file in re.findall(r"vqav2:(\S+?),coco,\S+ ", line)
    }
    assert asked == {"generate-data": "vqa/train-questions.json", "eval": "vqa/questions.json"}


def test_whatever_runs_the_target_runs_on_the_gpu() -> None:
    """`build` alone does not decode."""
    elsewhere = [line for line in commands() if "--device cuda" not in line]
    assert [line.split()[1] for line in elsewhere] == ["build"]


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    stand_ins(tmp_path)
    tiny_models.checkpoint("llava", tmp_path / "model", num_hidden_layers=LAYERS)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "VLMEXPORT_CACHE": str(tmp_path / "cache")}
    for line in commands():
        # Longer keys first: `--limit 200` begins `--limit 20000`.
        for old in sorted(SMALLER, key=len, reverse=True):
            line = re.sub(rf"{re.escape(old)}(?!\d)", SMALLER[old], line)
        line = line.replace("--model llava-1.5-7b", f"--model {tmp_path / 'model'}")
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        if "--bundle bundle" in line:
            assert re.search(r"^drafts/our-cs .* × +\d+\.\d\d ×$", done.stdout, re.M), done.stdout
    coco, vqa, visdial = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("coco", "vqa", "visdial")
    )
    answered = (tmp_path / "answers" / "vqa" / "shard-00000.jsonl").read_text().splitlines()
    seen = [Path(json.loads(line)["image"]["file"]).parent.name for line in answered]
    assert seen == ["train2014"] * 4
    assert list(coco["drafts"]) == ["early-exit@1", "drafts/our", "drafts/our-cs", "drafts/our-cs-kd"]
    assert coco["score"]["task"] == "captions" and coco["score"]["count"] == 4
    assert {"BLEU-4", "CIDEr", "ROUGE-L"} <= set(coco["score"]["values"]) | set(coco["score"]["left_out"])
    assert (vqa["score"]["count"], visdial["score"]["count"]) == (3, 2)
    assert visdial["score"]["values"]["R@5"] == 100.0 and visdial["drafts"] == {}
    assert (tmp_path / "coco.png").stat().st_size > 1000
