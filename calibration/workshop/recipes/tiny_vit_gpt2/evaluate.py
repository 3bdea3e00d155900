"""Evaluates a model folder against what it must reach, and writes the figures as JSON.

python -m vlmexport.calibration.workshop.recipes.tiny_vit_gpt2.evaluate FOLDER [--json FILE]
"""

from ..common.evaluate import evaluate_command
from .captioner import load_captioner

if __name__ == "__main__":
    evaluate_command(load_captioner, __doc__)
