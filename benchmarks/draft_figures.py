"""What the drafts of a folder reached on held-out data, in one file: for drafts that a recipe makes and nobody ships.

    python -m benchmarks.draft_figures runs/llava-drafts/out --name smollm2-llava-drafts

FOLDER has one folder for each draft, as `recipes.tiny_drafts --out` leaves it. The figures are those that the recipe measured
and wrote into each `draft.json`; nothing is measured here. Run it on the machine that trained them: the file names it.
Writes results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.machine import save


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True, help="of the file of results")
    options = parser.parse_args()
    try:
        print(save(options.name, figures(options.folder), "torch", "transformers"))
    except ValueError as error:
        parser.error(str(error))


def figures(folder: Path) -> dict[str, Any]:
    """Target, options and evaluation of every draft below `folder`.

    Raises ValueError where there is none, for one without held-out figures, and for drafts of different targets.
    """
    drafts: dict[str, Any] = {}
    targets: list[Any] = []
    for path in sorted(folder.glob("*/draft.json")):
        draft = json.loads(path.read_text())
        if "heldout" not in draft["evaluation"]:
            raise ValueError(f"{path}: not measured on held-out data; `recipes.tiny_drafts` does")
        if draft["target"] not in targets:
            targets.append(draft["target"])
        drafts[path.parent.name] = {
            "kind": draft["kind"],
            "layer": draft.get("layer"),
            "network": draft["network"],
            "command": draft["provenance"]["command"],
            "options": draft["provenance"]["options"],
            "evaluation": draft["evaluation"],
        }
    if len(targets) != 1:
        raise ValueError(f"{folder} has drafts of {len(targets)} targets; one is needed")
    return {"script": "benchmarks/draft_figures.py", "target": targets[0], "drafts": drafts}


if __name__ == "__main__":
    main()
