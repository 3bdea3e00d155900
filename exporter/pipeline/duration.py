"""How long a build would take here: its work, by rates that are measured in a second on this machine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..parity.recorded import KINDS


@dataclass(frozen=True)
class Rates:
    """A second of this machine: float32 and float64 operations of a matrix product, bytes hashed, and bytes copied from
    float16 to float32 (of what is written)."""

    flops: float
    exact_flops: float
    hashed: float
    copied: float


@dataclass(frozen=True)
class BuildWork:
    """What a build has to do. Bytes of the checkpoint, of the weights that are stored anew and of linked files; parameters; tokens that parity runs
    through every layer, of all inputs together; seconds that tracing took."""

    checkpoint_bytes: int
    weight_bytes: int
    linked_bytes: int
    parameters: int
    tokens: int
    tracing: float


def build_seconds(work: BuildWork, rates: Rates, *, parity: bool) -> float:
    """Seconds of computing; a slow disk takes its own time beside that.

    Every tensor is hashed as read and as written, and converted once. Parity reads every parameter for each input in
    float32 and in float64, and ONNX Runtime packs it once; then each token's hidden state is multiplied with it three times.
    """
    seconds = work.tracing + (work.checkpoint_bytes + work.weight_bytes + work.linked_bytes) / rates.hashed
    seconds += work.weight_bytes / rates.copied
    if parity:
        seconds += work.parameters * (len(KINDS) * (4 + 8) + 2 * 4) / rates.copied
        seconds += 2 * work.tokens * work.parameters * (2 / rates.flops + 1 / rates.exact_flops)
    return seconds


def measured_rates() -> Rates:
    """Rates of this machine as it is now, in about a second."""
    one, other = torch.ones(64, 2048), torch.ones(2048, 2048)
    wide, wider = one.double(), other.double()
    operations = 2 * one.numel() * 2048
    narrow = torch.ones(1 << 24, dtype=torch.float16)
    target = torch.empty(1 << 24)
    block = memoryview(bytearray(1 << 24))
    return Rates(
        operations / _seconds(lambda: torch.mm(one, other)),
        operations / _seconds(lambda: torch.mm(wide, wider)),
        len(block) / _seconds(lambda: hashlib.sha256(block).digest()),
        target.nbytes / _seconds(lambda: target.copy_(narrow)),
    )


def _seconds(work: Callable[[], object], least: float = 0.15) -> float:
    """Of one call, after one that does not count."""
    work()
    begin, calls = time.perf_counter(), 0
    while time.perf_counter() - begin < least:
        work()
        calls += 1
    return (time.perf_counter() - begin) / calls
