"""Files of draft checkpoints as others publish them. Nothing in them is trusted: pickled tensors are read with
`weights_only=True`."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ...runtime.errors import ExportError, OptionError
from .base import TrainedKind
from .files import DESCRIPTION, read_json
from .trained import TrainedDraft

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files of checkpoints in the layout of transformers."""
TABLE = "embed_tokens.weight"

C = TypeVar("C")
N = TypeVar("N", bound=nn.Module)


class PublishedKind(TrainedKind):
    """Base of kinds whose drafts are folders of `vlmexport train`, or checkpoints as their authors publish them."""

    has_layer = False
    draft: ClassVar[type[TrainedDraft]]

    def load(self, folder: Path) -> TrainedDraft:
        """A draft of either form. Raises ExportError naming what does not fit."""
        if not self.recognises(folder):
            return self.draft.load(folder)
        network, target = self.read_published(folder)
        return self.draft(
            network=network,
            target={"name": "", "fingerprint": None, **target},
            provenance={"checkpoint": folder.name},
        )

    def recognises(self, folder: Path) -> bool:
        return not (folder / DESCRIPTION).exists() and self.is_published(folder)

    @abstractmethod
    def is_published(self, folder: Path) -> bool:
        """Whether `folder`, which is none of `vlmexport train`, looks like such a checkpoint."""

    @abstractmethod
    def read_published(self, folder: Path) -> tuple[Any, Mapping[str, Any]]:
        """(the network of such a checkpoint, what it says of its target: ``name``, ``architectures``)."""


def find_weights(folder: Path, names: Iterable[str]) -> Path | None:
    """The first of these files that `folder` has."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_config(path: Path) -> dict[str, Any]:
    """A `config.json`. Raises ExportError for anything but a JSON object."""
    try:
        found = read_json(path, "configuration")
    except OSError as error:
        raise ExportError(f"{path} cannot be read ({error.strerror})") from error
    if not isinstance(found, dict):
        raise ExportError(f"{path} is not a JSON object")
    return found


def read_weights(path: Path) -> dict[str, Tensor]:
    """Name → tensor of a safetensors file, or of one that torch pickled. Raises ExportError with one line."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (
        SafetensorError,
        OSError,
        EOFError,
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        KeyError,
    ) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ExportError(f"{path} cannot be read: {reason:.200}") from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise ExportError(f"{path} is not a mapping of names to tensors")
    return {str(name): value for name, value in found.items()}


def check_table(path: Path, name: str, table: Tensor | None, vocab_size: int, hidden_size: int) -> None:
    """ExportError unless a copy of one of the target's tables, which some checkpoints hold, has the target's sizes."""
    if table is not None and tuple(table.shape) != (vocab_size, hidden_size):
        raise ExportError(
            f"{path}: {name} has shape {list(table.shape)}, {CONFIG} implies {[vocab_size, hidden_size]}"
        )


def read_names(path: Path) -> set[str]:
    """Names of the tensors of such a file, without reading them; none where it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return set(file.keys())
        found = torch.load(path, map_location="meta", weights_only=True)
    except (SafetensorError, OSError, EOFError, pickle.UnpicklingError, RuntimeError, ValueError, KeyError):
        return set()
    return {str(name) for name in found} if isinstance(found, dict) else set()


def layer_shape(path: Path, document: Mapping[str, Any], shape: Callable[..., C], **more: Any) -> C:
    """The shape that a Llama's configuration at `path` tells, in the defaults of a Llama; `more` are further options.

    Raises ExportError for what no layer of a draft has.
    """
    scaling = document.get("rope_scaling")
    parameters = document.get("rope_parameters") or {}
    if (
        scaling is None
        and isinstance(parameters, dict)
        and parameters.get("rope_type", "default") != "default"
    ):
        scaling = parameters
    if scaling is not None or not isinstance(parameters, dict):
        raise ExportError(
            f"{path}: rope_scaling {scaling or parameters!r:.80} is not supported in a draft, only plain rotary positions"
        )
    activation = document.get("hidden_act", "silu")
    if activation != "silu":
        raise ExportError(f"{path}: hidden_act {activation!r:.40} is not supported, only silu")
    heads: Any = document.get("num_attention_heads")
    width: Any = document.get("hidden_size")
    size: Any = document.get("head_dim")
    if size is None and type(heads) is int and type(width) is int and heads > 0:
        size = width // heads
    given: dict[str, Any] = {
        "hidden_size": width,
        "vocab_size": document.get("vocab_size"),
        "num_heads": heads,
        "num_kv_heads": document.get("num_key_value_heads") or heads,
        "head_dim": size,
        "intermediate_size": document.get("intermediate_size"),
        "rope_theta": document.get("rope_theta", parameters.get("rope_theta", 10000.0)),
        "norm_eps": document.get("rms_norm_eps", 1e-6),
    }
    try:
        return shape(**given, **more)
    except (OptionError, TypeError) as error:
        raise ExportError(f"{path}: {error}") from error


def filled(network: N, tensors: Mapping[str, Tensor], path: Path, beside: str) -> N:
    """`network`, made on the device "meta", with these tensors in float32, for inference.

    Raises ExportError naming the first tensor of `path` that is missing, that it has `beside` what is known, or that has
    another shape.
    """
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    for name in sorted(wanted.keys() ^ tensors.keys()):
        what = "misses" if name in wanted else f"holds, beside {beside},"
        raise ExportError(f"{path}: {what} the tensor {name:.80}")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ExportError(f"{path}: {name} has shape {list(tensors[name].shape)}, not {list(shape)}")
    network.load_state_dict({name: tensors[name].float() for name in wanted}, assign=True)
    return network.eval()
