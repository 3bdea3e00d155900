"""Models of the Hugging Face hub: the whole model, or only what describes it.

A description is the small files (configuration, tokenizer, processor, index) and the headers of the safetensors shards,
which the hub's client reads by ranges: 100 kB of every shard, and the rest of a header that is longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.common.errors import ExportError
from ...runtime.common.foreign_errors import raise_if_foreign
from ..common.one_line import first_line
from .tensors import INDEX, SINGLE, TensorFiles, TensorSpan, index_shards

SMALL = ["*.json", "*.model", "*.txt", "*.jinja"]
"""Files of a model beside its weights."""


class DescribedTensors(TensorFiles):
    """Names, shapes and types of tensors that are not on this machine."""

    readable = False

    def __init__(self, folder: Path, headers: Mapping[str, Any]) -> None:
        """`headers`: shard's file name → the hub's `SafetensorsFileMetadata`."""
        spans = {
            name: {
                tensor: TensorSpan(info.dtype, tuple(info.shape), info.data_offsets[0])
                for tensor, info in header.tensors.items()
            }
            for name, header in headers.items()
        }
        self._set_up(folder, [folder / name for name in headers], list(spans.values()))


def download(hub_id: str, revision: str | None = None) -> Path:
    """The folder of a whole model in the hub's cache. Raises ExportError where it cannot be fetched."""
    try:
        folder = _snapshot(hub_id, [*SMALL, "*.safetensors"], revision)
        if all(file.name.startswith("adapter_") for file in folder.glob("*.safetensors")):
            folder = _snapshot(hub_id, [*SMALL, "*.bin"], revision)
        return folder
    except Exception as error:
        raise_if_foreign(error)
        raise _unreachable(hub_id, error) from error


def download_adapter(hub_id: str) -> Path:
    """The folder of an adapter in the hub's cache. Raises ExportError where it cannot be fetched."""
    try:
        folder = _snapshot(hub_id, [*SMALL, "adapter_model.safetensors"])
        if not (folder / "adapter_model.safetensors").is_file():
            folder = _snapshot(hub_id, [*SMALL, "adapter_model.bin"])
        return folder
    except Exception as error:
        raise_if_foreign(error)
        raise _unreachable(hub_id, error) from error


def described(hub_id: str) -> tuple[Path, TensorFiles | None]:
    """(folder in the hub's cache, description of its tensors); None for the tensors of a model that is there as a
    whole: it was downloaded before, or has no safetensors, whose headers alone could be read.

    Raises ExportError where it cannot be fetched or a header cannot be read.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError

    try:
        folder = _snapshot(hub_id, SMALL)
    except Exception as error:
        raise_if_foreign(error)
        raise _unreachable(hub_id, error) from error
    shards = index_shards(folder / INDEX) if (folder / INDEX).is_file() else []
    for names in ([SINGLE], shards):
        if names and all((folder / name).is_file() for name in names):
            return folder, None
    for names in ([SINGLE], shards):  # transformers' order: one file before an index
        headers: dict[str, Any] = {}
        try:
            for name in names:
                headers[name] = HfApi().parse_safetensors_file_metadata(hub_id, name, revision=folder.name)
        except EntryNotFoundError as error:
            if names is shards:
                raise ExportError(f"{hub_id} misses the shard {name} that its index names") from error
        except Exception as error:
            raise_if_foreign(error)
            raise _unreachable(hub_id, error) from error
        if headers:
            return folder, DescribedTensors(folder, headers)
    return download(hub_id, folder.name), None


def _snapshot(hub_id: str, patterns: list[str], revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"])
    )


def _unreachable(hub_id: str, error: Exception) -> ExportError:
    return ExportError(
        f"{hub_id} is neither a local folder nor reachable on the Hugging Face hub ({type(error).__name__}: "
        f"{first_line(error)}); download it elsewhere and give its folder"
    )
