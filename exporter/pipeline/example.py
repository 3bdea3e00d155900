"""The picture that the bundle of a tiny model holds: something to try it with, where there is no picture at hand."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..checkpoint.checkpoint import Checkpoint
from ..common.tiny_models import tiny_model

EXAMPLE_FILE = "example.png"


def write_example(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy a drawn tabletop into `folder` for a tiny model: it knows nothing else."""
    if checkpoint.alias is not None and checkpoint.alias.bundled:
        shutil.copyfile(tiny_model(checkpoint.alias.bundled).with_name(EXAMPLE_FILE), folder / EXAMPLE_FILE)
