"""From a parsed network to the bytes of a plan."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...runtime.common.errors import ExportError
from ...runtime.engines.tensorrt_library import first_error
from .api import TensorRT
from .graph_copy import CopyOptions, GraphCopy, copy_graph, symbolic_shapes
from .interrupt import check, interruptible, make_monitor
from .network import NetworkSummary, ParsedNetwork, parse
from .profiles import Profile


@dataclass(frozen=True)
class BuiltPlan:
    """A plan in memory, and what it was made of."""

    data: Any
    """Host memory of TensorRT; a buffer."""
    bytes: int
    copy: GraphCopy
    summary: NetworkSummary
    fused_attention: bool | None
    """Whether attention is one layer; None when the graph has none."""
    input_shapes: Mapping[str, Sequence[int | str]]
    output_shapes: Mapping[str, Sequence[int | str]]


def build_plan(
    library: TensorRT,
    capability: Any,
    source: Path,
    scratch: Path,
    options: CopyOptions,
    profiles: Sequence[Profile],
    lean: bool = False,
) -> BuiltPlan:
    """Copies, parses and builds one graph for `capability` (None: the GPU of this machine).

    Attention is built fused; where TensorRT has no fused kernel (float32, some head sizes) it is built again with
    `decomposable` set. Portable copies have no attention layer. With `lean` the lean runtime loads the plan.
    Raises ExportError with TensorRT's own reason. KeyboardInterrupt ends it at TensorRT's next step.
    """

    def build(stop: threading.Event) -> BuiltPlan:
        attempts = [options]
        if options.lowering == "native":
            first = replace(options, decomposable=options.decomposable or options.precision == "float32")
            attempts = [first] if first.decomposable else [first, replace(first, decomposable=True)]
        reason = ""
        for attempt in attempts:
            copied = copy_graph(source, scratch, attempt)
            check(stop)
            parsed = parse(library, copied.path)
            inputs, outputs = symbolic_shapes(copied.path)
            data = _serialize(parsed, capability, profiles, inputs, attempt.precision, lean, stop)
            check(stop)
            if data is not None:
                kept = attempt.lowering == "native" and not (attempt.decomposable or copied.decomposed)
                fused = kept if copied.attentions else None
                return BuiltPlan(data, len(memoryview(data)), copied, parsed.summary, fused, inputs, outputs)
            reason = reason or first_error(parsed.logger.errors)
            if copied.attentions == copied.decomposed:
                break
        raise ExportError(f"{library.backend} {library.version} cannot build {source.name}: {reason}")

    return interruptible(build)


def _serialize(
    parsed: ParsedNetwork,
    capability: Any,
    profiles: Sequence[Profile],
    inputs: Mapping[str, Sequence[int | str]],
    precision: str,
    lean: bool,
    stop: threading.Event,
) -> Any:
    trt = parsed.library.module
    config = parsed.builder.create_builder_config()
    monitor = make_monitor(trt, stop)  # TensorRT does not keep it alive
    config.progress_monitor = monitor
    if capability is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)
    if precision == "float32":
        config.clear_flag(trt.BuilderFlag.TF32)  # float32 means float32
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        # Without it TensorRT-RTX allocates while it runs, and what allocates cannot be captured.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if lean:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        # Else each plan would carry the runtime's own library, which is code for the host.
        config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
    for profile in profiles:
        made = parsed.builder.create_optimization_profile()
        for name, shape in inputs.items():
            if any(isinstance(d, str) for d in shape):
                made.set_shape(name, *profile.shapes(shape, name))
        if config.add_optimization_profile(made) < 0:
            raise ExportError(
                f"TensorRT refuses the profile {profile.name!r}: {first_error(parsed.logger.errors)}"
            )
    with _captured_stderr() as lines:
        data = parsed.builder.build_serialized_network(parsed.network, config)
    parsed.logger.errors[:0] = lines
    return data


@contextlib.contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """Collects what TensorRT's compiler writes past the logger (lines of file descriptor 2).

    What Python writes to `sys.stderr` meanwhile, in other threads, is shown: bars that move, how a build ends.
    """
    lines: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file, open(os.dup(2), "w", errors="replace", buffering=1) as shown:  # noqa: PTH123
        python = sys.stderr
        if _writes_to(python, 2):
            sys.stderr = shown
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(shown.fileno(), 2)
            if sys.stderr is shown:
                sys.stderr = python
            file.seek(0)
            lines += file.read().decode("utf-8", "replace").splitlines()


def _writes_to(stream: Any, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (AttributeError, OSError, ValueError):  # no file, or a closed one
        return False
