"""What torch traces of a model that is whole is kept, so that mutants that leave the model as it is need not trace again.

Tracing takes nine tenths of a dry run. A trace is used again only where the model's config.json is the same byte for
byte and the exporter itself would take the two modules for equal (`hollow.signature`); drafts are traced in every case.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .base import command

PATCHED = ("vlmexport.exporter.families.", "vlmexport.exporter.pipeline.")

THRICE = 3
"""How often a model is chosen before it is traced here: a campaign of few cases does without."""

_kept: dict[Any, Any] = {}
_chosen: Counter[Path] = Counter()
_config: bytes | None = None
"""What the model that is exported now declares; None where traces are not kept."""


def warm() -> None:
    """Load what torch loads with its first trace: hundreds of modules and its operators, seconds in every case."""
    import torch
    from vlmexport.exporter.graphs.hooks import export_hooks
    from vlmexport.exporter.graphs.traced_module import TraceInput, trace

    with export_hooks():
        inputs = [TraceInput("hidden", ("batch", 8))]
        trace(torch.nn.Linear(8, 8), lambda module, rows: (module(rows),), inputs, ("rows",))


def chosen(model: Path, *options: object) -> None:
    """A case begins from the whole checkpoint `model`: trace it in this process when that pays.

    Called where cases are made, before one is forked: it inherits what is kept.
    """
    _chosen[model] += 1
    if _chosen[model] != THRICE:
        return
    _patch()
    whole = with_traces(
        model, command("-q", "build", "--model", model, *options, "-o", model / "no", "--dry-run")
    )
    with contextlib.redirect_stdout(io.StringIO()):
        status = whole()
    assert status == 0, f"a dry run of {model} ends with {status}"


def with_traces(model: Path, serve: Callable[[], int]) -> Callable[[], int]:
    """`serve`, which exports `model`, with the traces that were kept of a model with the same config.json."""

    def run() -> int:
        global _config
        config = model / "config.json"
        with contextlib.suppress(OSError):
            _config = config.read_bytes() if config.is_file() and not config.is_symlink() else None
        try:
            return serve()
        finally:
            _config = None

    return run


def _patch() -> None:
    """Let the families, and the check of activations, trace through what is kept."""
    from vlmexport.exporter.graphs.meta_model import signature
    from vlmexport.exporter.graphs.traced_module import trace

    def traced(module: Any, function: Any, inputs: Any, outputs: Any, **options: Any) -> Any:
        if _config is None:
            return trace(module, function, inputs, outputs, **options)
        what = tuple(inputs), tuple(outputs), tuple(sorted(options.items()))
        key = (_config, signature(module), function.__code__, what)
        if key not in _kept:
            _kept[key] = trace(module, function, inputs, outputs, **options)
        return _kept[key]

    for name, module in list(sys.modules.items()):
        if name.startswith(PATCHED) and getattr(module, "trace", None) is trace:
            module.trace = traced  # type: ignore[attr-defined]
