"""What plans are asked for, and what that comes to with the TensorRT that is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...runtime.bundle.decoder_info import DecoderInfo
from ...runtime.bundle.manifest import LOWERINGS as FORMS
from ...runtime.bundle.target_weights import TargetWeights
from ...runtime.common.errors import OptionError
from ..graphs.retype import WIDE_RESIDUAL
from .api import TensorRT, load_tensorrt, resolve_target
from .graph_copy import PRECISIONS

PLAN_PRECISIONS = {"auto": "auto", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"} | {
    p: p for p in PRECISIONS
}

NATIVE, PORTABLE = FORMS
LOWERINGS = ("auto", *FORMS)


@dataclass(frozen=True)
class PlanOptions:
    """What to build. `precision`: auto (bfloat16 for T5 where the target has it, else float16), fp16, bf16 or fp32;
    `lowering`: auto (native where TensorRT has a cache update), native or portable; `lean`: for the lean runtime."""

    backend: str = "tensorrt-rtx"
    target: str = "sm86"
    precision: str = "auto"
    lowering: str = "auto"
    lean: bool = False


@dataclass(frozen=True)
class Resolved:
    """What will be built, and with what; `capability` is None for the GPU of this machine."""

    library: TensorRT
    target: str
    capability: Any
    precision: str
    lowering: str
    lean: bool = False


def resolve(options: PlanOptions, decoder: str = "llama", source: str = "float32") -> Resolved:
    """What `options` come to for a bundle with this decoder, whose graphs are of type `source`. Raises OptionError or
    ExportError, before any work, for an option that is unknown or does not fit, and where TensorRT is missing."""
    lowering_known(options.lowering)
    if options.lean and options.backend != "tensorrt":
        raise OptionError(
            f"--lean: {options.backend} has no lean runtime; leave it out, or build on the device with --backend tensorrt"
        )
    library = load_tensorrt(options.backend)
    target, capability = resolve_target(library, options.target)
    precision = plan_precision(options.precision, target, decoder, source)
    lowering = chosen_lowering(options.lowering, library)
    return Resolved(library, target, capability, precision, lowering, options.lean)


def check_attention(decoder: DecoderInfo) -> None:
    """OptionError for a decoder whose layers no plan holds."""
    if decoder.linear_attention is not None:
        raise OptionError(
            "TensorRT plans hold no layers with linear attention; build without --backend, and run the bundle on device 'cpu'"
        )


def check_integers(
    wanted: Resolved, precisions: Mapping[str, str | None], target: TargetWeights | None = None
) -> None:
    """Raises OptionError where portable plans are asked for of drafts (name → dtype of their matrices) or of a `target` of
    integers: the operators of `exporter/lowering/opset.py` have no integer weights in blocks."""
    if target is not None and wanted.lowering == PORTABLE:
        raise OptionError(
            f"portable plans cannot hold the model's integer weights ({target.dtype}); use --lowering native, where TensorRT "
            "is 10.15 or newer, or build the bundle without --weights"
        )
    light = [f"{name} ({dtype})" for name, dtype in precisions.items() if dtype in ("int8", "int4")]
    if light and wanted.lowering == PORTABLE:
        raise OptionError(
            f"portable plans cannot hold the integer weights of {', '.join(light)}; use --lowering native, where TensorRT is "
            "10.15 or newer, or build the bundle without --draft-precision"
        )


def lowering_known(lowering: str) -> None:
    """Raises OptionError for a lowering that there is not."""
    if lowering not in LOWERINGS:
        raise OptionError(f"unknown --lowering {lowering!r:.40}; choose one of {', '.join(LOWERINGS)}")


def chosen_lowering(lowering: str, library: TensorRT) -> str:
    """native or portable. Raises OptionError for native plans where TensorRT has no cache update."""
    if lowering == "auto":
        return NATIVE if library.updates_caches else PORTABLE
    if lowering == NATIVE and not library.updates_caches:
        raise OptionError(
            f"--lowering native: {library.backend} {library.version} has no key/value cache update (TensorRT 10.15 has); "
            "use --lowering portable or auto"
        )
    return lowering


def plan_precision(precision: str, target: str, decoder: str, source: str = "float32") -> str:
    """The dtype of the plans of a bundle whose graphs are of type `source`. Raises OptionError for an unknown one, for
    one that Turing (sm75) does not have, and for another than a narrow bundle has."""
    if precision not in PLAN_PRECISIONS:
        raise OptionError(f"unknown --plan-precision {precision!r}; choose auto, fp16, bf16 or fp32")
    wanted = PLAN_PRECISIONS[precision]
    if source != "float32":
        if wanted not in ("auto", source):
            raise OptionError(
                f"--plan-precision {precision} does not fit a bundle of {source}, whose plans take its graphs as they are; "
                "leave it out, or build with --precision float32"
            )
        wanted = source
    has_bfloat = target != "sm75"
    if wanted == "bfloat16" and not has_bfloat:
        raise OptionError(
            f"--plan-precision {precision} cannot be built for {target}, which has no bfloat16; use fp16"
        )
    if wanted == "float32" and target == "sm75":
        raise OptionError(
            f"--plan-precision {precision} cannot be built for {target}: TensorRT has no float32 products there; use fp16"
        )
    if wanted == "auto":
        return "bfloat16" if decoder in WIDE_RESIDUAL and has_bfloat else "float16"
    return wanted
