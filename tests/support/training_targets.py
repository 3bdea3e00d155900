"""Tiny random targets and data for the tests of training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from vlmexport.calibration.data import RecordSet, load_records
from vlmexport.calibration.data.reading.records import Record
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target, load_target
from vlmexport.exporter.families.common.reference import collate

from tests.support import tiny_models

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5},
    "t5": {"num_decoder_layers": 5, "decoder_start_token_id": 2},
    "blip2-t5": {"num_decoder_layers": 5, "decoder_start_token_id": 2},  # another start than id 0
    "blip2-opt": {"num_hidden_layers": 5},
    "vit-gpt2": {"n_layer": 5},
    "llava": {"num_hidden_layers": 5},
    "llava-next": {"num_hidden_layers": 5},
    "qwen2-vl": {"num_hidden_layers": 5},
    "qwen2.5-vl": {"num_hidden_layers": 5},
    "qwen3-vl": {"num_hidden_layers": 5},
    "qwen3.5": {
        "layer_types": (
            "linear_attention",
            "full_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
        )
    },
    # Untied: rows of zeros, which keep marks silent in the head, would enter its norms, whose gradients then explode.
    "paligemma2": {"num_hidden_layers": 5, "tied": False},
    "gemma3": {"num_hidden_layers": 5, "tied": False},
    "internvl": {"num_hidden_layers": 5},
    "lfm2-vl": {"num_hidden_layers": 5, "tied": False},
    "smolvlm": {"num_hidden_layers": 5},
    "qwen3": {"num_hidden_layers": 5, "tie_word_embeddings": False},
}
"""Tiny checkpoint of every family → changes that give its decoder 5 layers. A new family is one line here."""


def make_target(kind: str, folder: Path, seed: int = 1) -> Target:
    """A target of 5 decoder layers, one of `KINDS`."""
    return load_target(tiny_models.checkpoint(kind, folder, seed=seed, **KINDS[kind]))


def with_answers(records: Iterable[Record], answers: Iterable[Sequence[int]]) -> RecordSet:
    """The records with these answers, tokens of each."""
    return RecordSet("told", [replace(r, tokens=tuple(a)) for r, a in zip(records, answers, strict=True)])


def own_answers(target: Target, records: Iterable[Record], new_tokens: int) -> RecordSet:
    """The records with what the target answers, greedily."""
    asked = list(records)
    return with_answers(asked, target.generate(asked, new_tokens))


@contextmanager
def entering(target: Target) -> Iterator[list[torch.Tensor]]:
    """What enters the target's decoder meanwhile, a tensor [B, T, E] for every pass."""
    entered: list[torch.Tensor] = []
    parent = next(m for m in target.model.modules() if getattr(m, "layers", None) is target.layers)
    hook = parent.register_forward_pre_hook(
        lambda _module, _given, named: entered.append(named["inputs_embeds"]), with_kwargs=True
    )
    try:
        yield entered
    finally:
        hook.remove()


def logits_after(target: Target, record: Any, text: list[int]) -> torch.Tensor:
    """The model's own logits [V] of the token behind `text`, from one pass over everything before it."""
    inputs = collate(target.family, [target.prompt(record)], [text])
    with torch.no_grad():
        return target.model(**inputs, use_cache=False).logits[0, -1]


def options(layer: int, **values: Any) -> tuple[ImitationOptions, LoopOptions]:
    """Options of an imitation draft and of the loop, from one set of names."""
    own = {f.name for f in fields(ImitationOptions)}
    mine = {k: values.pop(k) for k in list(values) if k in own}
    return ImitationOptions(layer, **mine), LoopOptions(**values)


TRAINED: dict[str, dict[str, Any]] = {
    "imitation": {"layer": 2, "cosine": 1.0},
    "medusa": {"heads": 3},
    "eagle": {"own_steps": 1},
    "eagle3": {"own_steps": 1},
    "vispec": {"compressed_tokens": 2},
}
"""The training table: draft kind → options with which it learns something in a few steps. A new kind is one line."""


def make_jsonl(path: Path, count: int, images: bool) -> Path:
    """A JSONL file of `count` records with different prompts and answers."""
    rng = np.random.default_rng(3)
    words = tiny_models.WORDS
    with path.open("w") as out:
        for i in range(count):
            record = {"prompt": " ".join(rng.choice(words, 4)), "answer": " ".join(rng.choice(words, 6))}
            if images:
                name = f"picture-{i}.png"
                pixels = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path.parent / name)
                record["image"] = name
            out.write(json.dumps(record) + "\n")
    return path


def make_records(folder: Path, kind: str, count: int = 12) -> RecordSet:
    """Records that suit a target of that kind."""
    images = kind not in ("llama", "qwen3", "t5")
    return load_records(str(make_jsonl(folder / "data.jsonl", count, images=images)))
