"""What torch traces of a module is kept for the run, so that tests that build the same small models trace each once.

Tracing is nine tenths of building a tiny model, and every other test builds one. A trace is used again only where
nothing differs that decides it: the module by the exporter's own `signature`, its configurations, the functions that it
calls (an error that a test plants in them is traced anew), the traced function and what it closes over. What comes out
is the same byte for byte. `anew` is for tests of tracing itself.

Workers share their traces in the folder that the environment variable VLMEXPORT_KEPT_TRACES names (`stored_traces`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.library import CustomOpDef
from transformers import PretrainedConfig
from transformers.modeling_utils import AttentionInterface
from vlmexport.exporter.families.languages.base import Language
from vlmexport.exporter.graphs import traced_module
from vlmexport.exporter.graphs.hooks import ATTENTION
from vlmexport.exporter.graphs.meta_model import signature
from vlmexport.exporter.graphs.traced_module import Template, TraceInput

from tests.support import stored_traces

FOLDER = "VLMEXPORT_KEPT_TRACES"

_trace = traced_module.trace
_kept: dict[Any, Template] = {}
_anew = False


UNREAD = frozenset(
    (
        "_name_or_path", "architectures", "auto_map", "bos_token_id", "decoder_start_token_id", "dtype", "eos_token_id", "id2label",
        "initializer_factor", "initializer_range", "label2id", "layer_types", "max_position_embeddings", "max_window_layers",
        "n_layer", "n_positions", "num_decoder_layers", "num_hidden_layers", "num_layers", "output_past", "pad_token_id",
        "pretraining_tp", "problem_type", "sep_token_id", "task_specific_params", "tie_word_embeddings",
        "transformers_version", "use_cache", "vocab_size",
    )
)  # fmt: skip
"""Fields of configurations that no layer reads: where a model lies, ids of tokens, how its weights were drawn, how many layers
of which type there are. (What a layer is made with, and tables of tokens and positions, show in the signature of a module.)"""


def install() -> None:
    """Let the exporter, in this process, look for a kept trace before it traces."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vlmexport.exporter.") and getattr(module, "trace", None) is _trace:
            module.trace = trace  # type: ignore[attr-defined]


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Within, everything is traced."""
    global _anew
    before, _anew = _anew, True
    try:
        yield
    finally:
        _anew = before


def trace(module: Any, function: Callable[..., Any], inputs: Any, outputs: Any, **options: Any) -> Template:
    """As the exporter's `trace`."""
    key = None if _anew else key_of(module, function, inputs, outputs, options)
    if key is None:
        return _trace(module, function, inputs, outputs, **options)
    if key not in _kept:
        _kept[key] = _stored(key, lambda: _trace(module, function, inputs, outputs, **options))
    return _kept[key]


def _stored(key: Any, make: Callable[[], Template]) -> Template:
    """A trace that another worker has made, or a new one, which the others find."""
    folder = os.environ.get(FOLDER)
    name = stored_traces.name_of(key) if folder else None
    if folder is None or name is None:
        return make()
    path = Path(folder) / name
    template = stored_traces.load(path)
    if template is None:
        template = make()
        stored_traces.save(path, template)
    return template


def key_of(module: Any, function: Any, inputs: Any, outputs: Any, options: Any) -> Any:
    """All that decides a trace, hashable; None where something cannot be compared."""
    children = list(module.modules())
    classes = {type(child) for child in children}
    sources = {sys.modules[kind.__module__] for kind in classes} | {sys.modules[function.__module__]}
    try:
        return (
            signature(module),
            frozenset(_value(child.config) for child in children if hasattr(child, "config")),
            frozenset((kind, _methods(kind)) for kind in classes),
            frozenset(map(_functions, sources)),
            _code(AttentionInterface._global_mapping.get(ATTENTION)),
            _value(function),
            (tuple(inputs), tuple(outputs), tuple(sorted(options.items()))),
        )
    except NotComparable:
        return None


class NotComparable(Exception):
    """A value of which it is not known whether it decides a trace."""


def _functions(scope: ModuleType | type) -> tuple[tuple[str, Any], ...]:
    """Functions and classes that the code of a module finds by name, or methods of a class."""
    names = vars(scope).items()
    return tuple((name, _code(value)) for name, value in names if isinstance(value, FunctionType | type))


def _methods(kind: type) -> tuple[tuple[str, Any], ...]:
    """Methods of a class and of what it derives from, without those that all modules have."""
    bases = [base for base in kind.__mro__ if base not in (object, torch.nn.Module)]
    return tuple(pair for base in bases for pair in _functions(base))


def _read(fields: Any) -> Any:
    """A configuration, its parts and theirs, without what is `UNREAD`."""
    if not isinstance(fields, dict):
        return fields
    return {name: _read(value) for name, value in fields.items() if name not in UNREAD}


def _code(value: Any) -> Any:
    """Of a function that closes over nothing, its code: hooks may make it again and again."""
    return value.__code__ if isinstance(value, FunctionType) and not value.__closure__ else value


def _value(value: Any) -> Any:
    """A hashable stand-in that is equal only for values that trace alike."""
    if value is None or isinstance(value, int | float | str | torch.dtype | TraceInput):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_value, value))
    if isinstance(value, FunctionType):
        closed = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, _value([*closed, *(value.__defaults__ or ())])
    if isinstance(value, type):
        return value, _methods(value)
    if isinstance(value, CustomOpDef):
        return type(value), value._qualname
    if isinstance(value, PretrainedConfig):
        return type(value), json.dumps(_read(value.to_dict()), sort_keys=True, default=repr)
    if isinstance(value, Language):
        return type(value), type(value).run_layer, _value(value.config)
    if dataclasses.is_dataclass(value):
        return type(value), tuple(_value(getattr(value, field.name)) for field in dataclasses.fields(value))
    raise NotComparable(type(value))
