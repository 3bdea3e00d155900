"""The whole product in one minute: build a tiny model, caption a picture, show the speed-up.

`make demo` runs this. Every step prints the command that a user would type.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from PIL import Image
from vlmexport.calibration.data.scenes import HELDOUT, render, sample_scene, tell
from vlmexport.runtime.commands.plot import save_figure
from vlmexport.runtime.measure.headline import headline

BUNDLED = "tiny-blip2-flant5"
CLI = [sys.executable, "-m", "vlmexport.runtime.cli"]


def command(*words: str, capture: bool = False) -> str:
    """Print a command as a user would type it, then run it; with `capture`, what it writes to stdout."""
    print(f"\n$ vlmexport {shlex.join(words)}", flush=True)
    if not capture:
        subprocess.run([*CLI, *words], check=True)
        return ""
    done = subprocess.run([*CLI, *words], check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    print(done.stdout, end="", flush=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=BUNDLED, help="alias, folder or hub id of a model with pictures")
    parser.add_argument(
        "--draft-layer", help="let the first so many decoder layers draft (default: the model's own draft)"
    )
    parser.add_argument("--output", type=Path, default=Path("demo"))
    parser.add_argument("--scene", type=int, default=7, help="which held-out tabletop scene")
    options = parser.parse_args()
    if not 0 <= options.scene < len(HELDOUT):
        parser.error(f"--scene {options.scene}: there are the scenes 0 to {len(HELDOUT) - 1}")
    options.output.mkdir(parents=True, exist_ok=True)
    bundle, picture = options.output / "bundle", options.output / "scene.png"

    scene = sample_scene(0, HELDOUT[options.scene])
    Image.fromarray(render(scene)).save(picture)
    print(f"A tabletop scene that no model has seen: {picture}")

    layer = [] if options.draft_layer is None else ["--draft-layer", options.draft_layer]
    command("build", "--model", options.model, *layer, "-o", str(bundle), "--force")
    caption = command("run", str(bundle), "--image", str(picture), capture=True)
    print(f"\nThe same scene in one author's words: {tell(scene).text}")
    plot, report = options.output / "bench.png", options.output / "bench.json"
    command("bench", str(bundle), "--image", str(picture), "--plot", str(plot), "--report", str(report))
    why = (
        " (its wording is open on purpose: docs/results/tiny-models/scenes.md)"
        if options.model == BUNDLED
        else ""
    )
    bench = json.loads(report.read_text("utf-8"))
    figure = options.output / "demo.png"
    save_figure(poster(picture, caption, bench), figure, dpi=110)
    print(f"\n{summary(bench, why)}\nLook at {figure} and {plot}.")


def summary(bench: dict[str, Any], why: str) -> str:
    """What a report of `vlmexport bench` says, in two lines; `why`: what is behind the acceptance."""
    rates = [bench[arm]["tokens_per_second"] for arm in ("plain", "speculative")]
    alpha = "none" if bench["alpha"] is None else f"{bench['alpha']:.0%}"
    same = "Same tokens" if bench["identical"] else "Not the same tokens"
    return (
        f"{same}, decoding {headline(bench)} ({rates[0]:.0f} → {rates[1]:.0f} tokens/s, {bench['tau']:.1f} tokens per "
        f"verification).\nAcceptance decides it: the model took {alpha} of the drafted tokens that it looked at{why}."
    )


def poster(picture: Path, caption: str, bench: dict[str, Any]) -> Any:
    """A figure (`matplotlib.figure.Figure`): the picture, its caption, and the speed of both ways of decoding."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    scene, text, speed = figure.subplot_mosaic(
        "ab;ac", width_ratios=(1, 2.1), height_ratios=(1.15, 1)
    ).values()
    scene.imshow(Image.open(picture), interpolation="nearest")
    scene.axis("off")
    text.axis("off")
    said = "\n".join(textwrap.wrap(caption, 68))
    text.text(0, 0.95, said, va="top", fontsize=10.5, transform=text.transAxes)

    arms = ("plain", "speculative")
    rates = [bench[arm]["tokens_per_second"] for arm in arms]
    bars = speed.barh(arms, rates, color=("#8a8f98", "#1f77b4"), height=0.62)
    speed.bar_label(bars, [f"{rate:,.0f} tokens/s" for rate in rates], padding=4, fontsize=9)
    speed.invert_yaxis()
    speed.set_xlim(0, 1.25 * max(rates))
    speed.set_xticks([])
    speed.spines[["top", "right", "bottom"]].set_visible(False)
    same = "the same tokens" if bench["identical"] else "not the same tokens"
    title = f"{bench['speedup']['decode']:.2f} times as fast, {same} ({bench['draft']['name']})"
    speed.set_title(title, loc="left", fontsize=10)
    machine = bench["machine"]
    where = f"{bench['model']} on {machine['cpu']}, {machine['cores']} cores"
    speed.set_xlabel(where, loc="left", fontsize=7.5, color="#8a8f98")
    return figure


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:  # the command has said why
        sys.exit(error.returncode)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
