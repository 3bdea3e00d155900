"""Decode speed-up of speculation: `vlmexport bench` over several held-out scenes, or chat prompts for a text model.

vlmexport build --model tiny-blip2-flant5 --draft medusa --draft imitation --draft-layer 3 --max-width 17 -o runs/tiny
python -m benchmarks.speculation runs/tiny

vlmexport build --model runs/smollm2 --draft runs/smollm2-n10 -o runs/smollm2-bundle
python -m benchmarks.speculation runs/smollm2-bundle --name smollm2-n10 --draft-length 1
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from benchmarks.machine import save


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle")
    parser.add_argument("--name", default="tiny", help="of the result file")
    parser.add_argument("--requests", type=int, default=8, help="scenes or prompts")
    parser.add_argument("--draft-length", type=int, help="default: the bundle's")
    parser.add_argument(
        "--draft", action="append", help="drafts to bench; default: every draft of the bundle"
    )
    options = parser.parse_args()
    from vlmexport.runtime import Bundle

    manifest = Bundle.open(Path(options.bundle)).manifest
    drafts = options.draft or [draft.name for draft in manifest.drafts]
    reports = {}
    with tempfile.TemporaryDirectory() as folder:
        requests = (
            prompts(options.requests) if manifest.image is None else scenes(options.requests, Path(folder))
        )
        if options.draft_length is not None:
            requests += ["--draft-length", str(options.draft_length)]
        for draft in drafts:
            command = [sys.executable, "-m", "vlmexport.runtime.cli", "bench", options.bundle, *requests]
            output = subprocess.check_output([*command, "--draft", draft, "--json"])
            reports[draft] = json.loads(output)
            reports[draft]["bundle"] = Path(options.bundle).name
    result = {"script": "benchmarks/speculation.py", "requests": options.requests, "drafts": reports}
    print(json.dumps(result, indent=1)[:4000])
    print(save(f"speculation-{options.name}", result))


def scenes(count: int, folder: Path) -> list[str]:
    """Options of `bench` for held-out pictures."""
    from vlmexport.calibration.data.scenes import HELDOUT, render, sample_scene

    options = []
    for index in range(count):
        path = folder / f"scene-{index}.png"
        Image.fromarray(render(sample_scene(0, HELDOUT[index]))).save(path)
        options += ["--image", str(path)]
    return options


def prompts(count: int) -> list[str]:
    """Options of `bench` for prompts whose topics are in no training prompt, spread over the kinds of prompts."""
    from recipes.smollm2_prompts import chat_prompts

    heldout = chat_prompts()[1]
    return [part for prompt in heldout[:: len(heldout) // count][:count] for part in ("--prompt", prompt)]


if __name__ == "__main__":
    main()
