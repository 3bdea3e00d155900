"""Writes a layout's folder as published, small, with random weights in the published names, files and types.

`weights` of a layout: `container` ("safetensors", "bin" or both in a list), `shards`, `dtype`, and what the names on disk are:
`rename`, pairs of a pattern and its replacement, over transformers' own names; `extra`, buffers that old releases stored,
name (`{n}` for every layer) → shape and dtype; `absent`, patterns of names that are not stored; `packed`, the method whose
numbers stand in the place of matrices (`PACKED`).
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoConfig

from tests.support import tiny_models
from tests.support.published import vocabularies
from tests.support.published.layouts import Layout
from tests.support.published.scaling import (
    patches_of,
    renumbered,
    scaled,
    scaled_processor,
    sides,
    small_ids,
    tile_rows,
)
from tests.support.quantized_checkpoints import FORMS

SEED = 44
Tensors = dict[str, torch.Tensor]


def write(layout: Layout, folder: Path) -> Path:
    """The folder of a layout's checkpoint; the same bytes every time."""
    folder.mkdir(parents=True)
    flags = {
        entry["content"]: {name: entry[name] for name in ("lstrip", "rstrip", "normalized", "special") if name in entry}
        for entry in layout.json("tokenizer_config.json").get("added_tokens_decoder", {}).values()
    }  # fmt: skip
    flags |= {content: {"special": False} for content in layout.ranged}
    core = vocabularies.tokenizer(layout.tokenizer, layout.tokens | layout.ranged, flags)
    vocabularies.write(core, layout.tokenizer["files"], folder)
    for name, path in layout.files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            document = small(layout, core, name, layout.json(name))
            target.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        else:
            shutil.copyfile(path, target)
    if layout.weights is not None:
        write_weights(layout, core, folder)
    return folder


def small(layout: Layout, core: Tokenizer, name: str, document: dict[str, Any]) -> dict[str, Any]:
    """What one JSON file holds, at the size of a test."""
    ids = small_ids(layout.tokens, core, layout.tokenizer["size"])
    if name == "config.json":
        return scaled(document, layout.tokenizer["size"], core.get_vocab_size(), ids)
    if name == "generation_config.json":
        return renumbered(document, ids)
    if name == "added_tokens.json":
        return {content: ids(number) for content, number in document.items()}
    if name == "tokenizer_config.json":
        found = copy.deepcopy(document)
        if "added_tokens_decoder" in found:
            entries = found["added_tokens_decoder"]
            found["added_tokens_decoder"] = {
                str(ids(int(number))): entry for number, entry in entries.items()
            } | {str(core.token_to_id(each)): _added(each) for each in layout.ranged}
        return found
    if name.endswith("processor_config.json"):
        config = layout.json("config.json")
        found = scaled_processor(document, *sides(config))
        if config.get("model_type") == "paligemma":
            found["image_seq_length"] = patches_of(config)
        return found | ({"image_seq_len": tile_rows(config)} if "image_seq_len" in found else {})
    return document


def _added(content: str) -> dict[str, Any]:
    """An added token of `Layout.ranges` in tokenizer_config.json."""
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
    return {"content": content, **flags}


def model_of(folder: Path, kind: str | None = None) -> Any:
    """A model of the folder's own class (or of `kind`) and configuration, in float32, as transformers makes one."""
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return getattr(transformers, kind or config.architectures[0])(config).float().eval()


def write_weights(layout: Layout, core: Tokenizer, folder: Path) -> None:
    """Draws the weights and stores them as `layout.weights` says."""
    said: dict[str, Any] = layout.weights or {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = model_of(folder, said.get("class"))
    if type(model) in tiny_models.FILLS:
        rows = model.get_output_embeddings().weight.shape[0]
        vocabulary = core.get_vocab()
        ordinary = {vocabulary[content] for content in layout.tokens}
        every = ordinary | set(range(core.get_vocab_size(), rows))
        silent = tuple(sorted(i for i in every if i < rows))  # a token that is only written may have no row
        tiny_models.fill(model, silent, torch.Generator().manual_seed(SEED))
    dtype = getattr(torch, said["dtype"])
    tensors = {
        renamed(name, said.get("rename", [])): value.detach().to(dtype).clone()
        for name, value in model.state_dict().items()
    }
    tensors = {
        n: v for n, v in tensors.items() if not any(re.fullmatch(p, n) for p in said.get("absent", []))
    }
    tensors |= extras(said.get("extra", {}), depth=2)
    if (method := said.get("packed")) is not None:
        tensors, values = packed(tensors, method)
        _write_floats(folder, values)
    containers = said["container"]
    for container in [containers] if isinstance(containers, str) else containers:
        store(tensors, container, said["shards"], folder)


def renamed(name: str, rules: list[list[str]]) -> str:
    """The first rule whose pattern begins a name decides."""
    for pattern, replacement in rules:
        found, count = re.subn(f"^(?:{pattern})", replacement, name)
        if count:
            return found
    return name


def extras(described: dict[str, Any], depth: int) -> Tensors:
    """Buffers: `{"decoder.h.{n}.attn.bias": [[1, 1, 8, 8], "uint8"]}`."""
    return {
        name.format(n=layer): torch.ones(shape, dtype=getattr(torch, dtype))
        for name, (shape, dtype) in described.items()
        for layer in (range(depth) if "{n}" in name else [0])
    }


def _nf4(value: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Tensors that nobody reads."""
    return {
        "weight": torch.zeros(value.numel() // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.ones(-(-value.numel() // 64), dtype=torch.uint8),
        "weight.nested_absmax": torch.ones(1),
        "weight.nested_quant_map": torch.zeros(256),
        "weight.quant_map": torch.zeros(16),
        "weight.quant_state.bitsandbytes__nf4": torch.zeros(64, dtype=torch.uint8),
    }, value


PACKED: dict[str, Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]] = {
    "awq": FORMS["awq"][1],
    "gptq": FORMS["gptq"][1],
    "fp8": FORMS["fp8-dynamic"][1],
    "nf4": _nf4,
}
"""Method → what it stores in the place of a matrix [out, in], by the end of its name, and the values that this stands for."""


def packed(tensors: Tensors, method: str) -> tuple[Tensors, Tensors]:
    """The layers' matrices as a quantised release has them, and by their values; towers, tables and heads are as they were."""
    depth = re.compile(
        r"(?<!visual\.)(?<!vision_model\.encoder\.)\blayers\.\d+\.(self_attn|mlp)\..*\.weight$"
    )
    found: Tensors = {}
    values: Tensors = {}
    for name, value in tensors.items():
        values[name] = value
        if depth.search(name) and value.dim() == 2 and "vision" not in name:
            base = name.removesuffix("weight")
            ends, values[name] = PACKED[method](value)
            found |= {base + end: each for end, each in ends.items()}
        else:
            found[name] = value
    return found, values


def floats_of(folder: Path) -> Path:
    """Where the model of a quantised folder's values lies, which transformers loads without the library that packed it; the
    folder itself for one that is not quantised."""
    twin = folder.with_name(f"{folder.name}-floats")
    return twin if twin.is_dir() else folder


def _write_floats(folder: Path, values: Tensors) -> None:
    twin = folder.with_name(f"{folder.name}-floats")
    shutil.copytree(folder, twin)
    document = json.loads((twin / "config.json").read_text("utf-8"))
    del document["quantization_config"]
    (twin / "config.json").write_text(json.dumps(document))
    store(values, "safetensors", 1, twin)


def store(tensors: Tensors, container: str, shards: int, folder: Path) -> None:
    """One file, or as many as published with their index."""
    stem, save, end = {
        "safetensors": ("model", lambda part, path: save_file(part, path, metadata={"format": "pt"}), "safetensors"),
        "bin": ("pytorch_model", torch.save, "bin"),
    }[container]  # fmt: skip
    names = list(tensors)
    if shards == 1:
        save(tensors, folder / f"{stem}.{end}")
        return
    each = -(-len(names) // shards)
    placed = {}
    for number in range(shards):
        part = names[number * each : (number + 1) * each]
        file = f"{stem}-{number + 1:05d}-of-{shards:05d}.{end}"
        save({name: tensors[name] for name in part}, folder / file)
        placed |= dict.fromkeys(part, file)
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / f"{stem}.{end}.index.json").write_text(json.dumps(index, indent=2) + "\n")
