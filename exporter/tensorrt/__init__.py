"""TensorRT plans: a bundle's graphs, retyped and compiled by NVIDIA's own builder for one GPU architecture.

The builder module works over the API that `tensorrt` and `tensorrt_rtx` share. TensorRT-RTX compiles for a named
architecture on any x86 CPU; the full TensorRT builds on the GPU it is for. Where it has no cache update the graphs are
lowered first (`exporter/lowering`). See docs/how-to/tensorrt.md.
"""

from .api import BACKENDS, TARGETS, TensorRT, load_tensorrt
from .network import NetworkSummary, inspect_network
from .options import PlanOptions
from .plans import PlanReport, add_plans

__all__ = [
    "BACKENDS",
    "TARGETS",
    "NetworkSummary",
    "PlanOptions",
    "PlanReport",
    "TensorRT",
    "add_plans",
    "inspect_network",
    "load_tensorrt",
]
