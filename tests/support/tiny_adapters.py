"""Tiny adapters of peft, with numbers that change what a tiny checkpoint answers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from vlmexport.exporter.checkpoint import open_checkpoint

TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "llava": ["q_proj", "v_proj", "linear_1"],
    "qwen2.5-vl": ["q_proj", "v_proj", "qkv"],
    "t5": ["q", "v", "wo"],
}
"""Name of a tiny checkpoint → modules to adapt: of the language model and, where there is one, of what sees."""


def train(config: PeftConfig, base: Path, folder: Path, *, scale: float = 0.15, seed: int = 1) -> Any:
    """Writes an adapter of `config` for the checkpoint `base` into `folder`; returns the model with it active.

    Every number of the adapter moves by `scale` times a normal one.
    """
    model = open_checkpoint(base).model_class.from_pretrained(base, dtype=torch.float32)
    before = {id(p) for p in model.parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned = get_peft_model(model, config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in tuned.named_parameters():
                # AdaLoRA's rank is a parameter too, which no file holds.
                if (id(parameter) not in before or parameter.requires_grad) and "ranknum" not in name:
                    parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        tuned.save_pretrained(str(folder))
    return tuned.eval()
