"""`generate-data` in parts against one run: are the joined shards the same, byte for byte?

    python -m benchmarks.generation_parts --records 2048 --parts 4 --save

Everything runs on this machine, one part after another, with the runtime on a CPU. A part decodes other records together
than the whole run does, so a near-tie may end otherwise; the number of answers that differ is what is counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.machine import save

MODEL = "tiny-blip2-flant5"


def generate(*words: object) -> None:
    """The command. Raises CalledProcessError."""
    command = [sys.executable, "-m", "vlmexport.runtime.cli", "generate-data", *map(str, words)]
    subprocess.run(command, check=True)


def lines(folder: Path) -> dict[str, list[str]]:
    """The lines of every shard."""
    return {path.name: path.read_text("utf-8").splitlines() for path in sorted(folder.glob("shard-*"))}


def main() -> None:
    """Runs, compares, and saves with --save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=2048)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--save", action="store_true", help="write results/generation-parts.json")
    given = parser.parse_args()
    data = f"scenes:train:{given.records}:offset=64000"
    asked = ["--model", MODEL, "--data", data, "--engine", "runtime", "--device", "cpu"]
    with tempfile.TemporaryDirectory() as place:
        whole, joined = Path(place, "whole"), Path(place, "joined")
        parts = [Path(place, f"part-{number}") for number in range(given.parts)]
        generate(*asked, "-o", whole)
        for number, part in enumerate(parts):
            generate(*asked, "--part", f"{number}/{given.parts}", "-o", part)
        generate("--join", *parts, "-o", joined)
        one, other = lines(whole), lines(joined)
    assert one.keys() == other.keys()
    result = {
        "model": MODEL,
        "data": data,
        "parts": given.parts,
        "answers": sum(map(len, one.values())),
        "tokens": sum(len(json.loads(line)["tokens"]) for shard in one.values() for line in shard),
        "answers that differ": sum(
            a != b for name in one for a, b in zip(one[name], other[name], strict=True)
        ),
        "shards that are equal": sum(one[name] == other[name] for name in one),
        "shards": len(one),
    }
    print(json.dumps(result, indent=1))
    if given.save:
        save("generation-parts", result)


if __name__ == "__main__":
    main()
