"""Which engine answers: the runtime on a CPU, PyTorch where it has a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...exporter.checkpoint import open_checkpoint
from ...runtime.common.errors import OptionError
from ...runtime.engines.onnxruntime import use_global_pool
from ..targets.devices import find_device
from ..targets.target import load_target
from .answers import Answers
from .bundle_answers import BundleAnswers
from .target_bundle import given_bundle, target_bundle, target_name
from .torch_answers import TorchAnswers

ENGINES = ("auto", "runtime", "torch")


def open_answers(
    model: str,
    engine: str,
    device: str,
    bundle: Path | None,
    max_new_tokens: int,
    batch_size: int | None,
    threads: int | None,
    say: Callable[[str], None],
    ray: str | None = None,
) -> Answers:
    """Whoever answers as `generate-data` is asked for.

    Raises:
        OptionError: an engine that is none, or that does not go with the other options.
    """
    if engine not in ENGINES:
        raise OptionError(f"--engine {engine!r} is not one of {', '.join(ENGINES)}")
    if ray is not None and engine == "torch":
        raise OptionError("--engine torch runs in this process alone: leave --ray out")
    if ray is not None:
        engine = "runtime"
    if engine == "runtime" and device not in ("auto", "cpu"):
        raise OptionError(
            f"--engine runtime decodes on the CPU, not on --device {device}; --engine torch does"
        )
    on_cpu = find_device(device).type == "cpu"
    if engine == "torch" or (engine == "auto" and bundle is None and not on_cpu):
        if bundle is not None:
            raise OptionError("--engine torch reads no bundle: leave --bundle out")
        return TorchAnswers(load_target(model, device), batch_size, say)
    if threads is not None:
        use_global_pool(threads)  # the checks of an export would begin one of all cores
    chosen = target_bundle(model, max_new_tokens, say) if bundle is None else given_bundle(bundle, model)
    return BundleAnswers(chosen, target_name(open_checkpoint(model)), batch_size, threads, ray)
