"""A model with an adapter in it, by peft: which module takes which tensor, and what is refused."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...runtime.common.errors import ExportError, UnsupportedModelError
from ...runtime.common.foreign_errors import raise_if_foreign
from ..common.one_line import first_line
from .adapter import CONFIG, Adapter
from .names import renaming

ACTIVE = "default"
"""peft's name for the adapter in the model."""

PREFIX = "base_model.model."
"""Of names in an adapter's file: what stands before the names of the model's modules."""

SHARED = ("vblora_vector_bank", "tinylora_v", "unilora_theta_d")
"""Tensors that a file holds once and peft's layers name again."""


def attach_adapter(model: Any, adapter: Adapter) -> tuple[Any, dict[str, Tensor]]:
    """(the model within peft's, parameters of the model that the file holds themselves). `model` is changed.

    Which modules are changed is read off the names of the tensors: a configuration may name modules as an older release
    of transformers called them. Raises ExportError for tensors that are missing or that nothing takes.
    """
    import peft

    path = adapter.folder / CONFIG
    with quiet_peft():
        try:
            config: Any = peft.PeftConfig.from_pretrained(str(adapter.folder))
            prefix = peft.mapping.PEFT_TYPE_TO_PREFIX_MAPPING[config.peft_type]
        except (KeyError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"{path}: peft {peft.__version__} does not understand it ({type(error).__name__}: {first_line(error)}); "
                "install a newer peft"
            ) from error
        config.inference_mode = True
        fitted = _fit(model, adapter, str(prefix), config)
        if fitted.modules:
            config.target_modules = set(fitted.modules)
        _untie(model, fitted.paths)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name in fitted.given:
            parameters[name].data = torch.empty(parameters[name].shape)
        try:
            tuned = peft.PeftModel(model, config, adapter_name=ACTIVE)
            result = peft.set_peft_model_state_dict(tuned, fitted.tensors, ACTIVE)
        except KeyError as error:
            raise ExportError(f"the adapter {adapter.folder} misses the tensor {error}") from error
        except (ValueError, RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
            raise_if_foreign(error)
            raise ExportError(
                f"the adapter {adapter.folder} does not fit the model: {first_line(error)}"
            ) from error
    for name in result.unexpected_keys:
        raise _untaken(adapter, name.replace(f".{ACTIVE}", ""))
    for name in result.missing_keys:
        if prefix in name and f".{ACTIVE}" in name and not any(part in name for part in SHARED):
            raise ExportError(
                f"the adapter {adapter.folder} misses the tensor {name.replace(f'.{ACTIVE}', ''):.200}"
            )
    tuned.eval()
    return tuned, {name: parameters[name].detach() for name in fitted.given}


@dataclass(frozen=True)
class _Fitted:
    """Tensors of an adapter under the names of a model's modules: `paths` are those of the modules that they belong to,
    `modules` those that have an adapter; `given` are parameters of the model that the file holds themselves."""

    tensors: dict[str, Tensor]
    paths: set[str]
    modules: list[str]
    given: list[str]


def _fit(model: Any, adapter: Adapter, prefix: str, config: Any) -> _Fitted:
    """Raises ExportError for a tensor of a module that the model does not have."""
    modules = {name for name, _ in model.named_modules() if name}
    renamed = functools.cache(renaming(model))
    shapes = {n: p.shape for n, p in model.named_parameters(remove_duplicate=False)}
    saved = tuple(config.modules_to_save or ()) if hasattr(config, "modules_to_save") else ()
    tensors: dict[str, Tensor] = {}
    tuned: dict[str, None] = {}
    paths: set[str] = set()
    given: list[str] = []
    for name, tensor in adapter.tensors.items():
        inner = name.removeprefix(PREFIX)
        path, rest = ("", inner) if inner == name else _split_name(inner, modules, renamed)
        own = rest.removeprefix("base_layer.")
        if inner != name and not path:
            raise _untaken(adapter, name)
        paths.add(path)
        if rest.startswith(prefix):
            tuned[path] = None
        elif f"{path}.{own}" in shapes and not _is_within(path, saved):
            parameter = f"{path}.{own}"
            if tensor.shape != shapes[parameter]:
                raise ExportError(
                    f"the adapter {adapter.folder} holds {parameter} of shape {list(tensor.shape)}, the model's has "
                    f"{list(shapes[parameter])}: its vocabulary was resized; merge it with peft and save the model"
                )
            given.append(parameter)
            rest = own
        tensors[f"{PREFIX}{path}.{rest}" if path else name] = tensor
    for parameter in given:
        path, _, own = parameter.rpartition(".")
        if path in tuned:
            tensors[f"{PREFIX}{path}.base_layer.{own}"] = tensors.pop(f"{PREFIX}{parameter}")
    _check_patterns(adapter, tuned)
    return _Fitted(tensors, paths, list(tuned), given)


def _untaken(adapter: Adapter, name: str) -> ExportError:
    return ExportError(
        f"the adapter {adapter.folder} holds the tensor {name:.200}, which no module takes; was it trained on this model "
        f"({adapter.base or 'it does not say on which'})?"
    )


def _split_name(name: str, modules: set[str], renamed: Callable[[str], str]) -> tuple[str, str]:
    """(path of the innermost module that a tensor belongs to, the rest of its name), as the model calls it now; ("", name)
    where it has none. Older names are translated by transformers' own table, as those of the weights are."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:count])
        if path not in modules:
            path = renamed(f"{path}.weight").removesuffix(".weight")
        if path in modules and path.rpartition(".")[2] == parts[count - 1]:
            return path, ".".join(parts[count:])
    return "", name


def _check_patterns(adapter: Adapter, tuned: Mapping[str, None]) -> None:
    """ExportError for a rank or scale of modules that are not there: their own would be silently another."""
    if adapter.kind == "ADALORA":  # whose pattern says which ranks are left of each tensor
        return
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in adapter.config.get(field) or {}:
            with contextlib.suppress(re.error):
                if not any(re.match(rf"(.*\.)?({pattern})$", path) for path in tuned):
                    raise ExportError(
                        f"{adapter.folder / CONFIG}: {field} names {pattern:.100}, but the adapter changes no such module"
                    )


def _is_within(path: str, saved: tuple[str, ...]) -> bool:
    """Whether a module is, or is inside, one of those that the adapter replaces."""
    return any(f".{path}.".find(f".{name}.") >= 0 for name in saved)


def tied_names(model: Any) -> list[list[str]]:
    """Groups of names of one shared parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _untie(model: Any, paths: set[str]) -> None:
    """Gives shared tables memory of their own where the adapter changes one: peft would change it for all."""
    for group in tied_names(model):
        if not paths & {name.rpartition(".")[0] for name in group}:
            continue
        for name in group[1:]:
            path, _, own = name.rpartition(".")
            shared = model.get_parameter(name)
            setattr(model.get_submodule(path), own, nn.Parameter(shared.detach().clone(), False))


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """peft warns of what is checked here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def changed_modules(tuned: Any) -> dict[str, nn.Module]:
    """Outermost modules of peft, by their path in the model."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    modules: dict[str, nn.Module] = {}
    for path, module in tuned.base_model.model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in modules)
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not inside:
            modules[path] = cast(nn.Module, module)
    return modules


def base_module(module: Any) -> nn.Module:
    """What a module of peft stands around."""
    inner = module.get_base_layer() if hasattr(module, "get_base_layer") else module.original_module
    while hasattr(inner, "base_layer"):
        inner = inner.base_layer
    return inner


def merge_into(model: Any, adapter: Adapter) -> Any:
    """A whole float32 model with the adapter in its weights, by peft's own `merge_and_unload`."""
    with quiet_peft():
        tuned, _ = attach_adapter(model, adapter)
        return tuned.merge_and_unload()
