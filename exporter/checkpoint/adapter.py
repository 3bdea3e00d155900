"""Adapters of peft: a folder with `adapter_config.json` and the tensors that were trained beside a frozen model.

What is read here needs neither peft nor the model: where the adapter is, whether it can become a part of the weights,
and what it was trained on. `merging` puts it into them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...runtime.common.bounded_files import read_json
from ...runtime.common.errors import ExportError, OptionError, UnsupportedModelError
from ...runtime.common.paths import is_folder
from ..common.adapter_names import CONFIG, NONE, check_adapter
from .hub import download_adapter
from .small_files import read_weights
from .tensors import WEIGHT_FILES

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""In the order in which peft looks for them."""

LONGEST_CONFIG = 16 << 20
"""Bytes. A list of every module of a large model has some hundred kilobytes."""

KINDS = (
    "LORA", "ADALORA", "VERA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "HRA", "MISS", "FOURIERFT", "LN_TUNING",
    "TRAINABLE_TOKENS", "SHIRA", "C3A", "RANDLORA", "ROAD", "VBLORA", "DELORA", "TINYLORA", "WAVEFT", "HIRA", "GRALORA",
    "PVERA", "GLORA", "UNILORA",
)  # fmt: skip
"""What peft merges into weights, of which a test shows that it is the same. Others add embeddings to the prompt, choose between
weights for every token, or keep parts of the weights that they were made for."""

RESIDUAL = ("pissa", "corda", "olora", "mica", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights`: trained on what such a decomposition left of the weights, not on the weights."""

UNMERGEABLE = {
    "layer_replication": "repeats layers of the model",
    "alora_invocation_tokens": "is active behind certain tokens only",
    "target_parameters": "changes stacked parameters of experts",
    "arrow_config": "chooses between adapters for every token",
    "megatron_config": "belongs to Megatron's layers",
}
"""Field of the configuration → what an adapter does that has it, which no weights of the model can do."""

SILENT = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
    "task_type",
)
"""Fields that say nothing of the numbers: two adapters that differ in these alone are the same."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter on disk. `source` is what the user typed, `config` the content of `adapter_config.json`."""

    source: str
    folder: Path
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """How a bundle calls it: its hub id, or the name of its folder, which says nothing of the machine."""
        return self.folder.resolve().name if Path(self.source).is_dir() else self.source

    @property
    def kind(self) -> str:
        """peft's name of the kind: `LORA`, ..."""
        return str(self.config.get("peft_type", "")).upper()

    @property
    def base(self) -> str:
        """The model that it was trained on, as its trainer called it; empty where it does not say."""
        return str(self.config.get("base_model_name_or_path") or "")

    @functools.cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Name → tensor. Raises ExportError for a file that is missing, damaged, or holds numbers that are not finite."""
        path = next((self.folder / name for name in WEIGHTS if (self.folder / name).is_file()), None)
        if path is None:
            raise ExportError(f"the adapter {self.folder} has no weights ({' or '.join(WEIGHTS)})")
        try:
            weights = read_weights(path)
        except ExportError as error:
            raise ExportError(f"{error}; save the adapter again") from error
        for name, tensor in weights.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
                raise ExportError(
                    f"{path}: {name:.200} holds values that are not finite; the training diverged"
                )
        return weights

    @functools.cached_property
    def fingerprint(self) -> str:
        """`sha256:<hex>` over the tensors and over what of the configuration decides about numbers."""
        decisive = {name: self.config[name] for name in sorted(self.config) if name not in SILENT}
        for name, value in decisive.items():
            if name in ("target_modules", "modules_to_save", "exclude_modules") and isinstance(value, list):
                decisive[name] = sorted(map(str, value))  # peft writes sets, in any order
        digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name}|{tensor.dtype}|{','.join(map(str, tensor.shape))}|".encode())
            if tensor.numel():
                digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return "sha256:" + digest.hexdigest()

    def notices(self, names: Iterable[str], tokenizer: Path) -> list[str]:
        """Lines for the user, where it is merged into the model of these names, whose tokenizer is in `tokenizer`."""
        lines = []
        if self.base and not {_last(self.base)} & {_last(name) for name in names if name}:
            lines.append(
                f"The adapter {self.name} was trained on {self.base}; it is merged into the model that --model names."
            )
        template = self.folder / "tokenizer_config.json"
        if template.is_file() and not _same_file(template, tokenizer / template.name):
            lines.append(
                f"The adapter {self.name} has a tokenizer_config.json of its own, which may have another chat template; "
                "the model's is used."
            )
        return lines


def find_adapter(source: str) -> Adapter:
    """The adapter in a folder or of the hub. Raises OptionError for a name that is neither, ExportError where it cannot be
    fetched or read, UnsupportedModelError where no weights of a model can do what it does."""
    check_adapter(source)
    folder = Path(source)
    if not is_folder(folder):
        folder = download_adapter(source)
    if not (folder / CONFIG).is_file():
        raise OptionError(f"--adapter {source}: {_remedy(folder)}")
    return _opened(source, folder)


def adapter_for(folder: Path, source: str, wanted: str | None, *, described: bool = False) -> Adapter | None:
    """What is to be merged into the model in `folder`, which the user calls `source`: `wanted` is the value of `--adapter`.
    The weights of a model that is only `described` are not in the folder.

    An adapter is never left out without a word: raises OptionError for one beside the model's weights that `wanted` does
    not name, and for a folder that holds nothing else.
    """
    beside = (folder / CONFIG).is_file()
    if beside and not ((folder / "config.json").is_file() and (described or _has_weights(folder))):
        base = _opened(source, folder).base
        if not base or Path(base).resolve() == folder.resolve():  # trained there, and the model has gone
            base = "BASE"
        raise OptionError(f"{source} is an adapter, not a model; give --model {base} --adapter {source}")
    if wanted == NONE:
        return None
    adapter = None if wanted is None else find_adapter(wanted)
    if beside and (adapter is None or adapter.folder.resolve() != folder.resolve()):
        raise OptionError(
            f"{source} holds an adapter ({CONFIG}) beside the model's weights: `build` and `verify` merge it with --adapter {source} "
            f"and leave it out with --adapter {NONE}; for other commands give a folder without it, or with it merged"
        )
    return adapter


def _opened(source: str, folder: Path) -> Adapter:
    path = folder / CONFIG
    config = read_json(path, LONGEST_CONFIG, ExportError)
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise ExportError(f"{path} has no peft_type, so it describes no adapter of peft")
    adapter = Adapter(source, folder, config)
    _check(adapter)
    return adapter


def _check(adapter: Adapter) -> None:
    """UnsupportedModelError for what no weights of the model can do, as far as the configuration tells."""
    place, init = adapter.folder / CONFIG, adapter.config.get("init_lora_weights")
    if adapter.kind not in KINDS:
        raise UnsupportedModelError(
            f"{place}: an adapter of peft_type {adapter.kind:.40} is not merged into weights, only {', '.join(KINDS)}"
        )
    for name, what in UNMERGEABLE.items():
        if adapter.config.get(name):
            raise UnsupportedModelError(
                f"{place}: with {name} the adapter {what}, which cannot be merged into weights"
            )
    if isinstance(init, str) and init.lower().startswith(RESIDUAL):
        raise UnsupportedModelError(
            f"{place}: init_lora_weights {init!r:.40} was trained on changed weights of the model; save the adapter with "
            "path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        )


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in WEIGHT_FILES)


def _remedy(folder: Path) -> str:
    """What to do with a folder that is no adapter."""
    inner = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    if inner:
        return f"it holds the adapters {', '.join(inner[:8])}; name the folder of one of them"
    if (folder / "config.json").is_file():
        return f"it holds a model and no {CONFIG}; give it as --model"
    return f"it holds no {CONFIG}"


def _last(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].casefold()


def _same_file(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()
