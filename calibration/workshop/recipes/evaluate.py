"""Evaluates a model folder against what a bundled model must reach, and writes the figures as JSON.

python -m vlmexport.calibration.workshop.recipes.evaluate FOLDER [--json FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ....runtime.cores import cores
from ..precision import DEVICES, device_of
from .common.evaluation import evaluate, report
from .models import open_captioner


def main() -> None:
    """Command line of the evaluation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scenes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument(
        "--device", choices=DEVICES, default="cpu", help="cuda: for models whose recipe can run there"
    )
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    captioner = open_captioner(options.folder, device_of(options.device))
    report(evaluate(captioner, options.folder, options.scenes, options.seed), options.json)


if __name__ == "__main__":
    main()
