"""The whole product in one minute: build the bundled model, caption a picture, show the speed-up.

`make demo` runs this. Every step prints the command that a user would type.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from vlmexport.calibration.data.scenes import HELDOUT, render, sample_scene, tell
from vlmexport.runtime.measure.headline import headline

BUNDLED = "tiny-blip2-flant5"
CLI = [sys.executable, "-m", "vlmexport.runtime.cli"]


def command(*words: str) -> None:
    """Print a command as a user would type it, then run it."""
    print(f"\n$ vlmexport {shlex.join(words)}", flush=True)
    subprocess.run([*CLI, *words], check=True)


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
    command("run", str(bundle), "--image", str(picture))
    print(f"\nThe same scene in one author's words: {tell(scene).text}")
    plot, report = options.output / "bench.png", options.output / "bench.json"
    command("bench", str(bundle), "--image", str(picture), "--plot", str(plot), "--report", str(report))
    why = (
        " (its wording is open on purpose: docs/results/tiny-models/scenes.md)"
        if options.model == BUNDLED
        else ""
    )
    print(f"\n{summary(json.loads(report.read_text('utf-8')), why)}\nLook at {picture} and {plot}.")


def summary(bench: dict[str, Any], why: str) -> str:
    """What a report of `vlmexport bench` says, in two lines; `why`: what is behind the acceptance."""
    rates = [bench[arm]["tokens_per_second"] for arm in ("plain", "speculative")]
    alpha = "none" if bench["alpha"] is None else f"{bench['alpha']:.0%}"
    same = "Same tokens" if bench["identical"] else "Not the same tokens"
    return (
        f"{same}, decoding {headline(bench)} ({rates[0]:.0f} → {rates[1]:.0f} tokens/s, {bench['tau']:.1f} tokens per "
        f"verification).\nAcceptance decides it: the model took {alpha} of the drafted tokens that it looked at{why}."
    )


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:  # the command has said why
        sys.exit(error.returncode)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
