"""Decode speed-up of speculation on the bundled model: `vlmexport bench` over several held-out scenes.

vlmexport build --model tiny-blip2-flant5 --draft-layer 3 --max-width 17 -o runs/tiny
python benchmarks/speculation.py runs/tiny --scenes 8
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import save
from PIL import Image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--scenes", type=int, default=8)
    parser.add_argument(
        "--draft", action="append", help="drafts to bench; default: every draft of the bundle"
    )
    options = parser.parse_args()
    from vlmexport.calibration.scenes import HELDOUT, render, sample_scene
    from vlmexport.runtime import Bundle

    drafts = options.draft or [draft.name for draft in Bundle.open(Path(options.bundle)).manifest.drafts]
    reports = {}
    with tempfile.TemporaryDirectory() as folder:
        images = []
        for index in range(options.scenes):
            path = Path(folder) / f"scene-{index}.png"
            Image.fromarray(render(sample_scene(0, HELDOUT[index]))).save(path)
            images += ["--image", str(path)]
        for draft in drafts:
            command = [sys.executable, "-m", "vlmexport.runtime.cli", "bench", options.bundle, *images]
            output = subprocess.check_output([*command, "--draft", draft, "--json"])
            reports[draft] = json.loads(output)
            reports[draft]["bundle"] = Path(options.bundle).name
    result = {"script": "benchmarks/speculation.py", "scenes": options.scenes, "drafts": reports}
    print(json.dumps(result, indent=1)[:4000])
    print(save("speculation-tiny", result))


if __name__ == "__main__":
    main()
