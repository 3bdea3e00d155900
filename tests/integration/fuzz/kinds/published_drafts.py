"""Drafts as others publish them, and as `vlmexport` writes them: odd tensors, numbers of config.json, damaged files, and
pickles that want to run code."""

from __future__ import annotations

import json
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.integration.fuzz.cases import Case
from tests.integration.fuzz.mutate import linked_copy, mutate_bytes, mutate_header, mutate_json
from tests.integration.fuzz.odd_tensors import odd_kind, odd_table, odd_values

from .base import call

LAYOUTS = (
    "FasterDecoding--medusa-vicuna-7b-v1.3", "siyuehuang--Qwen2-7B-Instruct-medusa", "yuhuili--EAGLE-LLaMA3-Instruct-8B",
    "yuhuili--EAGLE-Qwen2-7B-Instruct", "yuhuili--EAGLE3-LLaMA3.1-Instruct-8B", "AngelSlim--Qwen2.5-VL-3B-Instruct_eagle3",
    "JLKang--ViSpec-llava-1.5-7b-hf", "RedHatAI--Llama-3.1-8B-Instruct-speculator.eagle3",
)  # fmt: skip
NUMBERS = (
    10**399, -(10**399), float("nan"), float("inf"), -1, 0, 0.0, -0.5, 1e-320, 1e308, True, False, None, "", "10000", "NaN",
    [], {}, [10**399], 2**31, 2**63, 0.5, 3,
)  # fmt: skip


class Seeds:
    """A draft of every layout."""

    def __init__(self, folder: Path):
        from tests.support import tiny_bundles, tiny_models
        from tests.support.published import drafts, layouts

        self._drafts = []
        for name in LAYOUTS:
            place = folder / name
            self._drafts.append(place if place.is_dir() else drafts.write(layouts.read(name), place, 600))
        self._drafts += _own(folder, tiny_models, tiny_bundles)

    def make(self, rng: random.Random, folder: Path) -> Case:
        draft = linked_copy(rng.choice(self._drafts), folder / "draft")
        mark = folder / "mark"
        weights = next(path for path in draft.iterdir() if path.suffix != ".json")
        kind = rng.randrange(8)
        if kind < 4:
            _change_tensors(weights, rng, mark)
        elif kind < 7:
            _change_numbers(next(draft.glob("*.json")), rng)
        else:
            data = weights.read_bytes()
            change = (
                mutate_header if weights.suffix == ".safetensors" and rng.random() < 0.6 else mutate_bytes
            )
            weights.unlink()
            weights.write_bytes(change(data, rng))

        def no_code_ran(status: int, output: str) -> str | None:
            return "code of a pickle ran" if mark.exists() else None

        return Case(call(lambda: _read(draft)), no_code_ran)


def _read(draft: Path) -> None:
    """Reads the draft, which has weights then; a warning is a failure."""
    from vlmexport.exporter.drafts.folders import open_draft

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network = open_draft(draft).network  # type: ignore[attr-defined]
    for name, value in network.state_dict().items():
        assert value.dtype in (torch.float32, torch.int64) and value.device.type == "cpu", name
        assert value.dtype == torch.int64 or torch.isfinite(value).all(), name


def _change_tensors(path: Path, rng: random.Random, mark: Path) -> None:
    safe = path.suffix == ".safetensors"
    tensors: Any = load_file(path) if safe else torch.load(path)
    path.unlink()
    for name in rng.sample(sorted(tensors), rng.choice((1, 1, 2))):
        change = odd_values if safe or rng.random() < 0.5 else odd_kind
        tensors[name] = change(tensors[name], rng)
    if not safe and rng.random() < 0.25:
        tensors = odd_table(tensors, rng, mark)
        if rng.random() < 0.3:
            path.write_bytes(pickle.dumps(tensors))
            return
    if safe:
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(tensors, path, _use_new_zipfile_serialization=rng.random() < 0.7)


def _change_numbers(path: Path, rng: random.Random) -> None:
    """Numbers of a configuration by others, of any size and type; or any other change."""
    document = json.loads(path.read_bytes())
    path.unlink()
    if rng.random() < 0.2:
        document = mutate_json(document, rng)
    else:
        inner = document.get("network", document.get("transformer_layer_config", document))
        numbers = [name for name, value in inner.items() if isinstance(value, int | float)]
        named = (
            "rope_theta",
            "rms_norm_eps",
            "norm_eps",
            "partial_rotary_factor",
            "head_dim",
            *numbers,
            *numbers,
        )
        inner[rng.choice(named)] = rng.choice(NUMBERS)
    text = json.dumps(document)
    if rng.random() < 0.05:
        text = text.replace(": 1", f": 1{'0' * 6000}", 1)
    path.write_text(text, "utf-8")


def _own(folder: Path, tiny_models: Any, tiny_bundles: Any) -> list[Path]:
    """Folders of `vlmexport train`, and checkpoints that `vlmexport export-draft` makes of them."""
    from vlmexport.exporter.pipeline.export_draft import export_draft

    model = folder / "target"
    if not model.is_dir():
        tiny_models.checkpoint("llama", model)
    makers = {
        "imitation": lambda place: tiny_bundles.untrained_draft(model, 1, place),
        "heads": lambda place: tiny_bundles.untrained_heads(model, place, "trimmed"),
        "layer": lambda place: tiny_bundles.untrained_layer(model, place),
        "wide": lambda place: tiny_bundles.untrained_wide(model, place, (1, 1, 1), "trimmed"),
        "exported-layer": lambda place: export_draft(folder / "layer", place, "speculators", str(model)),
        "exported-wide": lambda place: export_draft(folder / "wide", place, "speculators", str(model)),
    }
    for name, make in makers.items():
        if not (folder / name).is_dir():
            make(folder / name)
    return [folder / name for name in makers]


def prepare(folder: Path) -> Seeds:
    """A draft of every layout."""
    return Seeds(folder)
