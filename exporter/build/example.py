"""The picture that a bundled model's bundle holds: something to try it with, where there is no picture at hand."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..aliases import BUNDLED
from ..checkpoint.load import Checkpoint

EXAMPLE_FILE = "example.png"


def write_example(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy a drawn tabletop into `folder` for the models that come with the package: they know nothing else."""
    if checkpoint.alias is not None and checkpoint.alias.bundled:
        shutil.copyfile(BUNDLED / EXAMPLE_FILE, folder / EXAMPLE_FILE)
