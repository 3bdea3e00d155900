"""A training's state in half the bytes, to go on with on another machine.

    python -m recipes.common.carry FOLDER OUT

FOLDER is the `--out` of a recipe; `--begin-with OUT` of the same recipe continues there. Parameters are rounded to
float16, which moves them by less than a tenth of what one step does, and momenta to bfloat16: the continued training is
not that of the first machine to the bit. What can be computed again (rows of the image side, the model) stays behind.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vlmexport.runtime.common.errors import OptionError

from .folder import digest

VISION, STATE, LOG = "vision", "state.pt", "log.jsonl"


def rounded(value: Any, dtype: torch.dtype) -> Any:
    """The same structure with every float32 tensor in `dtype`; single numbers, such as counts of steps, are kept."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype == torch.float32 and value.ndim else value
    if isinstance(value, Mapping):
        return {key: rounded(item, dtype) for key, item in value.items()}
    return [rounded(item, dtype) for item in value] if isinstance(value, list) else value


def pack(folder: Path, out: Path) -> int:
    """Writes the states and logs of a recipe's folder, and of its vision stage where it has one; returns the bytes.

    Raises:
        OptionError: there is no state in `folder`, or already one in `out`.
    """
    if not _states(folder):
        raise OptionError(f"{folder} has no {STATE} to carry; give the --out of a recipe that has begun")
    if _states(out):
        raise OptionError(f"{_states(out)[0]} exists; give a new folder")
    renamed = {}
    for part in (path.parent for path in _states(folder)):
        place = out / part.relative_to(folder)
        place.mkdir(parents=True, exist_ok=True)
        state = torch.load(part / STATE, map_location="cpu", weights_only=True)
        for name, dtype in (("model", torch.float16), ("optimizers", torch.bfloat16)):
            state[name] = rounded(state[name], dtype)
        known = state["settings"].get(VISION)
        state["settings"] |= {VISION: renamed[known]} if known in renamed else {}
        torch.save(state, place / STATE)
        renamed[digest(part / STATE)] = digest(place / STATE)
        shutil.copyfile(part / LOG, place / LOG)
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def begin_with(packed: Path, out: Path) -> None:
    """Copies a packed state to where a recipe looks for its own. OptionError where there is one already, or none in
    `packed`."""
    if not _states(packed):
        raise OptionError(f"--begin-with {packed}: there is no {STATE}; give a folder that carry has written")
    if _states(out):
        raise OptionError(
            f"--begin-with {packed}: {out} holds a state of its own; leave the option out to continue that one"
        )
    shutil.copytree(packed, out, dirs_exist_ok=True)


def _states(folder: Path) -> list[Path]:
    """What there is of the vision stage's state and of the state that names its digest, in this order."""
    return [path for path in (folder / VISION / STATE, folder / STATE) if path.exists()]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    print(f"{pack(options.folder, options.out) / 1e6:.1f} MB in {options.out}")


if __name__ == "__main__":
    main()
