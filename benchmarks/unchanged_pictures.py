"""Time to the first token about a picture that did not change, and about one that nearly did not.

    vlmexport build --model tiny-qwen2.5-vl -o runs/tiny-qwen2.5-vl
    python -m benchmarks.unchanged_pictures runs/tiny-qwen2.5-vl [BUNDLE …]
    python -m benchmarks.real_size --random-weights "qwen2.5-vl, 0.1 B" runs/qwen2.5-vl-0.1b
    python -m benchmarks.unchanged_pictures runs/qwen2.5-vl-0.1b --side 448 --scenes 0

Every round brings another picture, in random order to a session that keeps pictures and prompts and to one that keeps
nothing (`whole`). The questions of the first follow each other:

| figure | what is asked |
|---|---|
| `new` | the first question about the picture |
| `other question` | a second question about it |
| `same question` | the second question once more |
| `other question, pictures only` | the first question again, without `reuse_prompt` |

`of_whole` is the ratio to the first question of the session that keeps nothing, in the same round, `of_new` that to `new`.
Sessions have as many threads as they choose. Then `similar`: exposures of one scene with sensor noise, and
films with an event in about every third frame, at several thresholds: which share of pictures an earlier one stood for, and
how many answers had the same tokens as without it.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from vlmexport.calibration.data.scenes.dataset import film_pictures
from vlmexport.runtime import Result, Session
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.families.base import View
from vlmexport.runtime.images.load import load_image
from vlmexport.runtime.session.picture_cache import PictureCache

from benchmarks.answer_memory import SIDE as FILM_SIDE
from benchmarks.answer_memory import film, static
from benchmarks.intervals import shown, with_interval
from benchmarks.machine import save, stored

QUESTIONS = ("What is in the picture?", "How many cups are there?")
SYSTEM = (
    "You see through the camera of a robot that tidies a table. Answer in one short sentence. Name the things that you see, "
    "their colours and where they stand. Say so where you are not sure."
)
"""What a model with a chat template is told first, in a part of its own."""
WORLD = 2
NEW_TOKENS = 8
THRESHOLDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
WIDE = (*THRESHOLDS[2:], 24.0, 32.0, 48.0)
WARM = 3
"""Rounds that are not counted."""
WHOLE, NEW = "whole", "new"
KINDS = {
    NEW: (0, True),
    "other question": (1, True),
    "same question": (1, True),
    "other question, pictures only": (0, False),
}
"""Kind → which question is asked, and whether the prompt is kept."""


def ask(session: Session, picture: np.ndarray, system: bool, question: int, reuse: bool) -> Result:
    """An answer about a picture that comes as another object each time."""
    prompt: Any = QUESTIONS[question]
    if system:
        told, asked = ({"type": "text", "text": text} for text in (SYSTEM, prompt))
        prompt = [
            {"role": "system", "content": [told]},
            {"role": "user", "content": [{"type": "image"}, asked]},
        ]
    return session.generate(picture.copy(), prompt, max_new_tokens=NEW_TOKENS, reuse_prompt=reuse)


def first_tokens(path: str, side: int, rounds: int, system: bool) -> dict[str, Any]:
    """Seconds to the first token of every kind of question, and how many answers differed between the sessions."""
    shuffle, changed, answers = random.Random(0), 0, 0
    seconds: dict[str, list[float]] = {kind: [] for kind in (WHOLE, *KINDS)}
    with Session.load(path) as session, Session.load(path, picture_cache=0) as nothing:
        for number in range(WARM + rounds):
            picture = film_pictures(WORLD, number, side)[0]
            found, wanted = {}, []
            for keeps in shuffle.sample((True, False), 2):
                if keeps:
                    found = {kind: ask(session, picture, system, *asked) for kind, asked in KINDS.items()}
                else:
                    wanted = [ask(nothing, picture, system, at, False) for at in range(len(QUESTIONS))]
            if number >= WARM:
                seconds[WHOLE].append(wanted[0].stats.time_to_first_token)
                for kind, result in found.items():
                    seconds[kind].append(result.stats.time_to_first_token)
                    answers += 1
                    changed += result.tokens != wanted[KINDS[kind][0]].tokens
    whole = seconds[WHOLE]

    def ratio(kind: str, to: list[float]) -> dict[str, float | None]:
        return with_interval([a / b for a, b in zip(seconds[kind], to, strict=True)])

    return {
        "side": side,
        "prompt_tokens": wanted[0].stats.prompt_tokens,
        "answers": answers,
        "answers_with_a_changed_token": changed,
        "first_question_ms": round(1e3 * statistics.median(whole), 2),
        "rows": {
            kind: {
                "milliseconds": round(1e3 * statistics.median(seconds[kind]), 2),
                "of_whole": ratio(kind, whole),
                "of_new": ratio(kind, seconds[NEW]),
            }
            for kind in KINDS
        },
    }


def similar(path: str, scenes: int, length: int) -> dict[str, Any]:
    """By kind of picture and threshold: replaced share, unchanged answers."""
    rows: dict[str, Any] = {}
    with Session.load(path, picture_cache=0) as plain:
        for kind, make in (("static", static), ("films", film)):
            series = [make(20 + number, length) for number in range(scenes)]
            wanted = [[plain.generate(each, max_new_tokens=96) for each in pictures] for pictures in series]
            for threshold in THRESHOLDS:
                replaced, same = [], []
                for pictures, whole in zip(series, wanted, strict=True):
                    with Session.load(path) as session:
                        for picture, want in zip(pictures, whole, strict=True):
                            found = session.generate(
                                picture, similar=threshold, reuse_prompt=True, max_new_tokens=96
                            )
                            replaced.append(found.stats.similar_pictures)
                            same.append(found.tokens == want.tokens)
                rows[f"{kind}, {threshold:g}"] = {
                    "pictures": len(replaced),
                    "replaced": round(statistics.mean(replaced), 3),
                    "same_answer": round(statistics.mean(same), 3),
                }
    return rows


class Untouched:
    """In place of a decoder: its embeddings are the number of a frame."""

    def __init__(self) -> None:
        self.manifest = self.model = self
        self.fingerprint = "untouched"

    def image_embeds(self, runs: Any) -> np.ndarray:
        return np.full((1, 1), runs[0]["frame"], np.float32)


def other_scenes(films: int, length: int) -> dict[str, Any]:
    """By threshold: how many frames of noisy films an earlier one stood for, and how many of those, without noise, show
    something else."""
    rows = {}
    for threshold in WIDE:
        replaced = other = 0
        for number in range(20, 20 + films):
            cache, frames = PictureCache(1 << 30), film_pictures(WORLD, number, FILM_SIDE)
            there_and_back = [*range(len(frames)), *range(len(frames) - 2, 0, -1)]
            for at, noisy in enumerate(film(number, length)):
                frame = there_and_back[at % len(there_and_back)]
                view = View(
                    "image", 1, lambda frame=frame: ({"frame": np.array(frame)},), picture=load_image(noisy)
                )
                view = cache.recall(view, threshold)
                if not view.similar:
                    cache.encode(Untouched(), view)  # type: ignore[arg-type]
                    continue
                assert view.encoded is not None
                replaced += 1
                other += not np.array_equal(frames[int(view.encoded[0, 0])], frames[frame])
        rows[f"{threshold:g}"] = {"frames": films * length, "replaced": replaced, "by_another_scene": other}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", nargs="*", help="none: only films by threshold")
    parser.add_argument(
        "--side", type=int, default=224, help="pixels a side of the pictures of the first part"
    )
    parser.add_argument("--rounds", type=int, default=40, help="pictures of the first part")
    parser.add_argument("--scenes", type=int, default=8, help="scenes and films of the second part; 0: none")
    parser.add_argument("--length", type=int, default=9, help="pictures of each")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    models = stored("unchanged-pictures", "models")
    for path in options.bundles:
        name = Path(path).name
        row: dict[str, Any] = {}
        chat = bool(Bundle.open(path).manifest.text.chat_template)
        for part in ("first_tokens", "with_a_system_prompt")[: 1 + chat]:
            row[part] = first_tokens(path, options.side, options.rounds, part != "first_tokens")
            print(name, {key: value for key, value in row[part].items() if key != "rows"}, flush=True)
            for kind, each in row[part]["rows"].items():
                print(
                    f"{name:20} {kind:30} {each['milliseconds']:6.2f} ms, {shown(each['of_whole'])} of a whole request, "
                    f"{shown(each['of_new'])} of new",
                    flush=True,
                )
        if options.scenes:
            row["similar"] = similar(path, options.scenes, options.length)
            for kind, each in row["similar"].items():
                print(f"{name:20} {kind:14} {each}", flush=True)
        models[name] = row
    scenes = other_scenes(options.scenes, options.length) if options.scenes else {}
    print(scenes, flush=True)
    if not options.no_save:
        scenes = scenes or stored("unchanged-pictures", "films_by_threshold")
        result = {
            "script": "benchmarks/unchanged_pictures.py",
            "films_by_threshold": scenes,
            "models": models,
        }
        print(save("unchanged-pictures", result, "onnxruntime"))


if __name__ == "__main__":
    main()
