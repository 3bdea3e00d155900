"""Names of tensors: what a module of the model is called in its class, and what its tensor is called on disk.

The two differ for most models: transformers renames modules between releases and keeps reading, and writing, the names
of published checkpoints. Its own table of renamings decides here too, so that no family spells one out.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils.loading_report import LoadStateDictInfo

from ...runtime.common.errors import ExportError, UnsupportedModelError
from ...runtime.common.foreign_errors import raise_if_foreign
from .tensors import TensorFiles


class StoredNames:
    """Module names of one model class → names of a checkpoint's tensors."""

    def __init__(self, tensors: TensorFiles, model: Any) -> None:
        """`model` is the whole class, with or without memory; only its names are read."""
        self._tensors = tensors
        self._stored, self._converted = _resolve(tensors, model)
        self._sources: dict[str, str] = dict(model.all_tied_weights_keys)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        """Parameter → shape that the configuration gives it; of tied ones, the first."""
        self.modules = {
            path: not any(module.children())
            for path, module in model.named_modules()
            if any(p is not None for p in module._parameters.values())
        }
        """Path of every module with parameters of its own → whether it holds no other modules."""
        self.unread = _unread(self._stored, model)
        """(name in the model's words, tensor) of what belongs to no parameter and no buffer of the model, sorted."""

    def find(self, name: str) -> str | None:
        """The tensor of exactly this parameter, or None where the checkpoint does not hold it.

        Raises UnsupportedModelError for a parameter that transformers computes from other tensors.
        """
        if name in self._converted:
            raise UnsupportedModelError(
                f"{self._tensors.folder}: {name} is made of other tensors ({self._converted[name]}) when the model is "
                "loaded, which is not supported; save the model with this version of transformers"
            )
        return self._stored.get(name)

    def held(self, name: str) -> str | None:
        """The tensor of exactly this parameter as it is stored; None where there is none, or where it is made of others."""
        return self._stored.get(name)

    def tied(self, one: str, other: str) -> bool:
        """Whether transformers ties two parameters, by whichever flag of the configuration it asks."""
        return self._sources.get(one, one) == self._sources.get(other, other)

    def stored(self, name: str) -> str:
        """The tensor of a parameter, or of one that it is tied to. Raises ExportError when there is neither."""
        tensor = self.find_tied(name)
        if tensor is None:
            raise ExportError(f"the checkpoint {self._tensors.folder} has no tensor {name!r}")
        return tensor

    def find_tied(self, name: str) -> str | None:
        """The tensor of a parameter, or of one that it is tied to; None when there is neither. Raises as `find`."""
        source = self._sources.get(name, name)
        group = (source, *(target for target, of in self._sources.items() if of == source))
        return next((tensor for n in (name, *group) if (tensor := self.find(n)) is not None), None)


def renaming(model: Any) -> Callable[[str], str]:
    """Name that a parameter has, or once had, on disk → what the model calls it."""
    renamings = [s for s in get_model_conversion_mapping(model) if isinstance(s, WeightRenaming)]
    known = model.state_dict()
    return lambda disk: rename_source_key(disk, renamings, [], model.base_model_prefix, known)[0]


def hollow_names(kind: Any, config: PreTrainedConfig) -> Any:
    """The model class `kind` on the meta device. UnsupportedModelError where the configuration cannot be built."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return kind(copy.deepcopy(config))  # some classes change the configuration that they are given
    except Exception as error:  # sizes that do not divide, unknown activations, …: each raises its own kind
        raise_if_foreign(error)
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UnsupportedModelError(
            f"the configuration cannot be built as a model ({type(error).__name__}: {reason}); correct config.json"
        ) from error


def _resolve(tensors: Iterable[str], model: Any) -> tuple[dict[str, str], dict[str, str]]:
    """({module name: disk name}, {module name: disk name of a tensor that would have to be converted}).

    The order of the steps is that of transformers' `convert_and_load_state_dict_in_model`.
    """
    steps = get_model_conversion_mapping(model)
    renamings = [s for s in steps if isinstance(s, WeightRenaming)]
    converters = [s for s in steps if isinstance(s, WeightConverter)]
    known, prefix = model.state_dict(), model.base_model_prefix
    stored: dict[str, str] = {}
    converted: dict[str, str] = {}
    for disk in sorted(tensors, key=_natural):
        name, pattern = rename_source_key(disk, renamings, converters, prefix, known)
        if name not in known and disk in known:
            name, pattern = rename_source_key(disk, [], [], prefix, known)
        if pattern is None:
            stored.setdefault(name, disk)
        else:
            converted[name] = disk
    return stored, converted


def _unread(stored: dict[str, str], model: Any) -> tuple[tuple[str, str], ...]:
    """What transformers would call unexpected; it knows which leftovers of older releases it lets pass."""
    unexpected = set(stored) - set(model.state_dict())
    loading = LoadStateDictInfo(set(), unexpected, set(), [], {}, set())
    model._adjust_missing_and_unexpected_keys(loading)
    return tuple((name, stored[name]) for name in sorted(loading.unexpected_keys, key=_natural))


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Layer 2 before layer 10, as transformers reads them: some renamings depend on what came before."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"\.", name)]
