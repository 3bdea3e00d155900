"""Writes a published draft's folder, small, with random weights under the published names.

`weights` of its layout: `file`, `dtype`, and `tensors`, name → shape in letters: E the width, V the target's tokens and D
the draft's, I the width of the MLP, Q and K the widths of queries and keys, H and S heads and the size of one, N queries of
an adaptor; "3E" is three times E. `d2t` and `t2d` are the tables of a trimmed vocabulary.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.published.layouts import Layout

SEED = 45
WIDTH, INNER, HEADS, SIZE, ADAPTOR_QUERIES = 96, 128, 3, 32, 2
INNERMOST = "transformer_layer_config"


def write(layout: Layout, folder: Path, rows: int) -> Path:
    """The folder of a draft for a target of `scaling.LLAMA`'s width whose head has so many `rows`."""
    folder.mkdir(parents=True)
    config = small(layout.json("config.json"), rows)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    said: dict[str, Any] = layout.weights or {}
    sizes = letters(config, rows)
    generator = torch.Generator().manual_seed(SEED)
    tensors = {name: drawn(name, shape, sizes, generator) for name, shape in said["tensors"].items()}
    if "d2t" in tensors:
        ids = torch.randperm(rows, generator=generator)[: sizes["D"]].sort().values
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(rows), ids)}
    dtype = getattr(torch, said["dtype"])
    tensors = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()
    }
    save = save_file if said["file"].endswith(".safetensors") else torch.save
    save(tensors, folder / said["file"])
    return folder


def small(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """`config.json` at the size of a test. How many layers it names stays as published: only one of them is the draft's."""
    found = copy.deepcopy(dict(config))
    part = found.get(INNERMOST, found)
    heads, groups = part.get("num_attention_heads"), part.get("num_key_value_heads")
    sizes = {
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS, "head_dim": SIZE,
        "num_key_value_heads": HEADS if groups == heads else 1, "vocab_size": rows,
    }  # fmt: skip
    part.update({name: value for name, value in sizes.items() if part.get(name) is not None})
    if "draft_vocab_size" in found:
        whole = config["draft_vocab_size"] == config.get(INNERMOST, config)["vocab_size"]
        found["draft_vocab_size"] = rows if whole else 2 * rows // 3
    for place in ("rope_scaling", "rope_parameters"):
        if "mrope_section" in (part.get(place) or {}):
            part[place]["mrope_section"] = [4, 6, 6]
    return found


def letters(config: Mapping[str, Any], rows: int) -> dict[str, int]:
    """What the letters of shapes stand for."""
    part = config.get(INNERMOST, config)
    groups = part.get("num_key_value_heads") or HEADS
    sizes = {"E": WIDTH, "V": rows, "D": config.get("draft_vocab_size", rows), "I": INNER, "Q": HEADS * SIZE}
    return sizes | {"K": groups * SIZE, "H": HEADS, "S": SIZE, "N": ADAPTOR_QUERIES}


def drawn(name: str, shape: list[str], sizes: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
    """Norms near one, biases that show, matrices that keep the size of what passes them."""
    found = [re.fullmatch(r"(\d*)([A-Z])", letter) for letter in shape]
    numbers = [int(each[1] or 1) * sizes[each[2]] for each in found if each is not None]
    assert len(numbers) == len(shape), f"{name}: {shape}"
    value = torch.randn(numbers, generator=generator)
    if name.endswith("bias"):
        return 0.3 * value
    return 1.0 + 0.1 * value if len(numbers) == 1 else value / numbers[-1] ** 0.5
