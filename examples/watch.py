"""Watch a scene, and say what changed: answers in a grammar, with a memory, a picture cache and a deadline.

    python examples/watch.py demo/bundle                                  # a film of the bundled scenes
    python examples/watch.py bundle 0 --schema hazard.json                # a camera of OpenCV's, a schema of yours
    python examples/watch.py bundle film.mp4 --schema hazard.json --rate 2

At each tick the newest frame is looked at. With --schema the model answers once, in JSON. Without, it answers the questions
of the bundled scenes, each with one of a few words, and then describes the scene. The vision tower sees a frame once for all
of its questions, and not at all where the picture did not change. Each question has a memory: what was said of the frames before
is proposed again, and verified. --compare also decodes each answer plainly, with nothing kept.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import json
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from newest_frame import NewestFrame, capture  # beside this file
from vlmexport.runtime import Result, Session, VlmexportError

FILM = "film"
NOISE = 4.0
"""Standard deviation of the sensor noise of the film, of 255."""
EXPOSURES = 3
"""Of every frame of the film."""
QUESTIONS: dict[str, dict[str, Any]] = {
    "objects": {"prompt": "how many objects are there?", "choices": ["one", "two", "three", "four", "five"]},
    "light": {"prompt": "where does the light come from?", "choices": ["left", "right"]},
    "scene": {"prompt": None, "regex": "[a-z ,.:]+"},
}
"""What the bundled models are asked: the field → options of its request."""


@dataclass
class Tick:
    """One look at the scene."""

    frame: int
    picture: Any
    fields: dict[str, Any]
    changed: dict[str, str]
    seconds: float
    tokens: int = 0
    passes: int = 0
    plain_seconds: float | None = None
    cut: list[str] = field(default_factory=list)


def film(number: int, rate: float) -> Iterator[np.ndarray]:
    """The frames of a bundled film, forth and back, each a few times with other noise; uint8 [96, 96, 3]."""
    from vlmexport.calibration.data.scenes.dataset import film_pictures

    pictures, noise = film_pictures(2, number, 96), np.random.default_rng(number)
    order = [*range(len(pictures)), *range(len(pictures) - 2, 0, -1)]
    for at in itertools.cycle(order):
        for _ in range(EXPOSURES):
            yield (pictures[at] + noise.normal(0, NOISE, pictures[at].shape)).clip(0, 255).astype(np.uint8)
            time.sleep(1 / rate)


def questions_of(schema: Path | None, prompt: str | None) -> dict[str, dict[str, Any]]:
    """The field → options of its request; "" stands for a schema, whose answer has the fields itself."""
    if schema is None:
        return QUESTIONS
    return {"": {"prompt": prompt, "schema": json.loads(schema.read_text(encoding="utf-8"))}}


def look(
    session: Session, picture: Any, questions: dict[str, dict[str, Any]], options: argparse.Namespace
) -> tuple[dict[str, Any], list[Result], list[str]]:
    """What the model says of a picture now: fields, results, and the questions whose answers were cut."""
    end = time.monotonic() + options.deadline
    fields, results, cut = {}, [], []
    for name, request in questions.items():
        left = end - time.monotonic()
        if left <= 0:
            cut.append(name or "answer")
            continue
        result = session.generate(
            image=picture, memory=f"watch {name}", deadline=left, similar=options.similar,
            max_new_tokens=options.max_new_tokens, **request,
        )  # fmt: skip
        results.append(result)
        if result.parsed is None:
            cut.append(name or "answer")
        else:
            fields |= {name: result.parsed} if name else result.parsed
    return fields, results, cut


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """The field → what changed in it, in words."""
    found = {}
    for name, value in now.items():
        old = before.get(name)
        if value == old:
            continue
        if isinstance(old, str) and isinstance(value, str) and len(value.split()) > 3:
            found[name] = "; ".join(_words(old.split(), value.split()))
        else:
            found[name] = f"{value}" if old is None else f"{old} → {value}"
    return found


def _words(old: list[str], new: list[str]) -> Iterator[str]:
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            yield f"{' '.join(old[a:b]) or '…'} → {' '.join(new[c:d]) or '…'}"


def watch(session: Session, plain: Session | None, options: argparse.Namespace) -> Iterator[Tick]:
    """A tick for each frame that is looked at; `plain` answers the same, with nothing kept."""
    newest, questions = NewestFrame(), questions_of(options.schema, options.prompt)
    source = (lambda: film(options.film, options.rate)) if options.source == FILM else None
    threading.Thread(target=_capture, args=(options, newest, source), daemon=True).start()
    session.generate(image=newest.take()[1], max_new_tokens=8)  # warm-up: the first request allocates
    fields: dict[str, Any] = {}
    for _ in range(options.ticks) if options.ticks else itertools.count():
        begin = time.monotonic()
        number, picture = newest.take()
        start = time.perf_counter()
        said, results, cut = look(session, picture, questions, options)
        tick = Tick(number, picture, said, changes(fields, said), time.perf_counter() - start, cut=cut)
        tick.tokens = sum(len(result.tokens) for result in results)
        tick.passes = sum(1 + result.stats.cycles for result in results)
        if plain is not None and not cut:
            tick.plain_seconds = plainly(plain, picture, questions, options, results)
        fields |= said
        yield tick
        time.sleep(max(0.0, 1 / options.rate - (time.monotonic() - begin)))


def _capture(options: argparse.Namespace, newest: NewestFrame, source: Any) -> None:
    if source is None:
        capture(options.source, options.rate, newest)
        return
    for frame in source():
        newest.put(frame)


def plainly(
    session: Session, picture: Any, questions: dict[str, dict[str, Any]], options: argparse.Namespace,
    results: list[Result],
) -> float:  # fmt: skip
    """Seconds for the same answers with nothing kept and nothing drafted."""
    begin = time.perf_counter()
    for request, known in zip(questions.values(), results, strict=True):
        limit = options.max_new_tokens
        result = session.generate(image=picture, draft="none", max_new_tokens=limit, **request)
        if known.lossy is None:
            assert result.tokens == known.tokens, "the same tokens"
    return time.perf_counter() - begin


def line(tick: Tick) -> str:
    """What is printed of a tick."""
    per_pass = tick.tokens / max(1, tick.passes)
    said = "; ".join(f"{name}: {text}" for name, text in tick.changed.items()) or "no change"
    plain = "" if tick.plain_seconds is None else f" (plainly {1e3 * tick.plain_seconds:.0f})"
    late = f" [cut: {', '.join(tick.cut)}]" if tick.cut else ""
    return f"frame {tick.frame:4}: {1e3 * tick.seconds:5.1f} ms{plain}, {per_pass:4.1f} tokens a pass{late}  {said}"


def poster(ticks: list[Tick], where: str) -> Any:
    """A figure (`matplotlib.figure.Figure`): frames at which something changed, what changed, and the time of every tick."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [tick for tick in ticks if tick.changed][:4]
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subfigures(2, 1, height_ratios=(1.5, 1))
    for axes, tick in zip(rows[0].subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.imshow(tick.picture)
        axes.set_xticks([])
        axes.set_yticks([])
        text = "; ".join(f"{name}: {change}" for name, change in tick.changed.items())
        said = textwrap.shorten(text, 110, placeholder=" …")
        axes.set_xlabel("\n".join(textwrap.wrap(said, 30)), fontsize=7.5, loc="left")
        axes.set_title(f"frame {tick.frame}", fontsize=8, loc="left")
    axes = rows[1].subplots()
    numbers = [tick.frame for tick in ticks]
    if all(tick.plain_seconds is not None for tick in ticks):
        axes.bar(
            numbers, [1e3 * (tick.plain_seconds or 0) for tick in ticks], color="#c9cdd3", label="plainly"
        )
    axes.bar(numbers, [1e3 * tick.seconds for tick in ticks], width=0.5, color="#1f77b4", label="watching")
    axes.set_ylabel("ms an answer", fontsize=8)
    axes.set_xlabel(where, fontsize=7.5, loc="left", color="#8a8f98")
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7.5, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle")
    parser.add_argument(
        "source",
        nargs="?",
        default=FILM,
        help="film, a camera's number, what cv2.VideoCapture opens, a folder of pictures",
    )
    parser.add_argument("--rate", type=float, default=5.0, help="frames a second")
    parser.add_argument("--deadline", type=float, help="seconds for a tick (default: 0.8 of its period)")
    parser.add_argument("--ticks", type=int, help="end after so many (default: never)")
    parser.add_argument("--schema", type=Path, help="JSON schema of the answer; its strings want a maxLength")
    parser.add_argument("--prompt", help="with --schema: what is asked (default: the bundle's)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--similar", type=float, help="LOSSY: let a picture stand for one that differs so little"
    )
    parser.add_argument("--film", type=int, default=5, help="which bundled film")
    parser.add_argument("--compare", action="store_true", help="decode each answer plainly, too")
    parser.add_argument("--figure", type=Path, help="draw the ticks to this file (needs the extra [eval])")
    parser.add_argument("--device", default="cpu", help="cpu; on a GPU cuda or tensorrt")
    options = parser.parse_args()
    options.deadline = options.deadline or 0.8 / options.rate
    ticks: list[Tick] = []
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(Session.load(options.bundle, options.device))
        plain = None
        if options.compare:
            plain = stack.enter_context(Session.load(options.bundle, options.device, picture_cache=0))
        for tick in watch(session, plain, options):
            print(line(tick), flush=True)
            ticks.append(tick)
        model = session.bundle.manifest.model.source
    if options.figure is not None:
        from vlmexport.runtime.commands.plot import save_figure
        from vlmexport.runtime.hardware.machine import processor

        save_figure(
            poster(ticks, f"{model} on {processor()}, a film with sensor noise"), options.figure, dpi=110
        )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (VlmexportError, OSError, json.JSONDecodeError) as error:  # one line that names the cause
        sys.exit(str(error))
