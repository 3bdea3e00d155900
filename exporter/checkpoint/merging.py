"""An adapter merged into a checkpoint's weights: peft merges, module by module, when a tensor is read.

Nothing merged is kept or written: a bundle of 7 billion parameters needs no second copy of 14 GB on the disk or in
memory, and each tensor takes a product of two thin matrices more whenever it is read. The model that peft changes has
no memory of its own (`_hollow`); a module gets its weights for as long as it is merged. Merged tensors are float32:
they are rounded once, by the bundle.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...runtime.common.errors import ExportError, UnsupportedModelError
from ...runtime.common.foreign_errors import raise_if_foreign
from ...runtime.common.optional_deps import need_extra
from ..common.one_line import first_line
from .adapter import Adapter
from .names import StoredNames, hollow_names
from .peft_model import ACTIVE, attach_adapter, base_module, changed_modules, quiet_peft, tied_names
from .tensors import Place, TensorFiles

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Merger:
    """An adapter in a model without memory, which merges one module at a time."""

    def __init__(self, adapter: Adapter, model_class: Any, config: PreTrainedConfig) -> None:
        """Of a checkpoint's class in transformers and its configuration. Raises OptionError without peft, ExportError for an adapter that does not fit the model, UnsupportedModelError for
        one that cannot be merged."""
        need_extra("adapter", "`--adapter`")
        self.adapter = adapter
        model = hollow_names(model_class, config)
        self._tied = tied_names(model)
        _fill(model)
        self._hollow = dict(model.named_parameters())
        names = {id(p): name for name, p in self._hollow.items()}
        tuned, self._given = attach_adapter(model, adapter)
        self._modules = changed_modules(tuned)
        self._refuse_changed_base(set(names))
        self.changed: dict[str, str] = {}
        """Parameter of the model's class → path of the module that it belongs to."""
        for path, module in self._modules.items():
            for parameter in base_module(module).parameters():
                if id(parameter) in names:
                    self.changed[names[id(parameter)]] = path
        self.changed |= {name: "" for name in self._given if name not in self.changed}
        self._refuse_idle()

    def over(self, tensors: TensorFiles, names: StoredNames) -> MergedTensors:
        """`tensors` with what the adapter changes merged in; `names` are those of `tensors` alone."""
        entries: dict[str, Merged] = {}
        for name in self.changed:
            source = names.find_tied(name)
            if source is None:
                raise ExportError(
                    f"the adapter {self.adapter.name} changes {name}, which {tensors.folder} does not hold"
                )
            twins = [n for n in self._group(name) if n != name and names.find_tied(n) == source]
            if len(twins) > 1:
                raise UnsupportedModelError(
                    f"the adapter {self.adapter.name} changes {name}, which the model shares with {' and '.join(twins)}; "
                    "merge it with peft and save the model"
                )
            entries[names.held(name) or name] = Merged(name, source)
            # A table that the model ties to a changed one keeps the numbers that it had.
            entries |= {n: Merged(None, source) for n in twins if n not in self.changed and not names.held(n)}
        return MergedTensors(tensors, self, entries)

    def merge(self, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        """The merged parameter `name` in float32. `stored`: the parameters of its module as the checkpoint has them."""
        path = self.changed[name]
        values = {n: self._given.get(n, v) for n, v in stored.items()}
        if not path:
            return values[name]
        return self._merged(path, values)[name]

    def siblings(self, name: str) -> list[str]:
        """The parameters that `merge` needs for this one: those of its module."""
        path = self.changed[name]
        return [n for n, p in self.changed.items() if p == path] if path else [name]

    def _group(self, name: str) -> list[str]:
        """Names of the parameter that the model's class shares with others."""
        return next((g for g in self._tied if name in g), [name])

    def _merged(self, path: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of one module with the adapter in them, by name."""
        own: Any = self._modules[path]
        names = {id(self._hollow[n]): n for n in values}
        memo: dict[int, Any] = {
            i: nn.Parameter(values[n].clone(), requires_grad=False) for i, n in names.items()
        }  # clones: peft adds in place
        order = [names[id(p)] for p in base_module(own).parameters()]
        with torch.no_grad(), quiet_peft():
            replaced = hasattr(own, "modules_to_save")
            # The copy takes the weights in `memo` as they are.
            module: Any = None if replaced else copy.deepcopy(own, memo)
            try:
                if replaced:
                    result = own.modules_to_save[ACTIVE]
                elif hasattr(module, "unload_and_optionally_merge_module"):
                    result = module.unload_and_optionally_merge_module(True, False, [ACTIVE])
                else:
                    module.merge(safe_merge=False, adapter_names=[ACTIVE])
                    result = module.get_base_layer()
            except (NotImplementedError, ValueError, RuntimeError, TypeError, AttributeError) as error:
                raise_if_foreign(error)
                raise UnsupportedModelError(
                    f"peft cannot merge the adapter {self.adapter.name} into {path}: {first_line(error)}"
                ) from error
            return {
                n: p.detach().to(torch.float32).contiguous()
                for n, p in zip(order, result.parameters(), strict=True)
            }

    def _refuse_changed_base(self, known: set[int]) -> None:
        """Some kinds decompose the model's weights when they are made: those here are none."""
        for path, module in self._modules.items():
            for parameter in base_module(module).parameters():
                hollow = parameter.numel() < 2 or not any(parameter.stride())
                name = next((n for n, p in self._hollow.items() if p is parameter), None)
                if id(parameter) not in known or not (hollow or name in self._given):
                    raise UnsupportedModelError(
                        f"adapters of peft_type {self.adapter.kind} change the weights of {path} before they are trained, "
                        "which is not supported; merge it with peft and save the model"
                    )

    def _refuse_idle(self) -> None:
        """Merges into random numbers until every kind of module was tried and one was changed."""
        tried: set[Any] = set()
        effective = bool(self._given)
        generator = torch.Generator().manual_seed(0)
        for path, module in self._modules.items():
            kind = (type(module), *(type(v) for v in getattr(module, "lora_variant", {}).values()))
            if effective and kind in tried:
                continue
            tried.add(kind)
            own = [n for n, p in self.changed.items() if p == path]
            values = {n: torch.randn(self._hollow[n].shape, generator=generator) for n in own}
            merged = self._merged(path, values)
            for name in own:
                if merged[name].shape != values[name].shape:
                    raise ExportError(
                        f"the adapter {self.adapter.name} gives {name} the shape {list(merged[name].shape)}; the model's "
                        f"has {list(values[name].shape)}"
                    )
                effective |= not torch.equal(merged[name], values[name])
        if not effective:
            raise ExportError(
                f"the adapter {self.adapter.name} changes no weight of the model; is it the trained one?"
            )


@dataclass(frozen=True)
class Merged:
    """A tensor of a checkpoint with an adapter: the parameter that is merged, and the tensor that it is merged into.
    `parameter` None: that tensor, unchanged, under a name of its own."""

    parameter: str | None
    source: str


class MergedTensors(TensorFiles):
    """A checkpoint's tensors with an adapter merged into some of them, as float32."""

    def __init__(self, base: TensorFiles, merger: Merger, entries: Mapping[str, Merged]) -> None:
        vars(self).update(vars(base))  # the files are the same
        vars(self).pop("_fingerprint", None)
        self.readable = base.readable
        self._base, self._merger, self._merged = base, merger, dict(entries)
        self.quantized = {n: form for n, form in base.quantized.items() if n not in self._merged}
        self._sources = {e.parameter: e.source for e in entries.values() if e.parameter is not None}

    @property
    def base(self) -> TensorFiles:
        """The tensors without the adapter."""
        return self._base

    @property
    def adapter(self) -> Adapter:
        """What is merged into them."""
        return self._merger.adapter

    def identity(self, base: str) -> str:
        """Fingerprint of the merged weights, of that of the base. Of what both are, not of the sums: these depend on the
        machine that adds."""
        return (
            "sha256:"
            + hashlib.sha256(f"adapter|{base}|{self._merger.adapter.fingerprint}".encode()).hexdigest()
        )

    def __contains__(self, name: str) -> bool:
        return name in self._base or name in self._merged

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._base, *self._merged}))

    def order(self, name: str) -> tuple[int, int]:
        return self._base.order(self._source(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(self._source(name))

    def dtype(self, name: str) -> str:
        return "float32" if name in self._merged else self._base.dtype(name)

    def place(self, name: str) -> Place | None:
        return None if name in self._merged else self._base.place(name)

    def read(self, name: str) -> Tensor:
        entry = self._merged.get(name)
        if entry is None:
            return self._base.read(name)
        if entry.parameter is None:
            return self._base.read(entry.source).to(torch.float32)
        stored = {
            n: self._base.read(self._sources[n]).to(torch.float32)
            for n in self._merger.siblings(entry.parameter)
        }
        return self._merger.merge(entry.parameter, stored)

    def _source(self, name: str) -> str:
        entry = self._merged.get(name)
        return name if entry is None else entry.source


def _fill(model: nn.Module) -> None:
    """Gives every parameter of a model on the device "meta" float32 zeros that take no memory, each its own."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros(()).expand(parameter.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
