"""Devices that bundles are planned for: memory and its bandwidth, as their makers publish them, and which TensorRT runs there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """`memory` in bytes (of decimal gigabytes, the smaller reading) and `bandwidth` in bytes per second as published; `shared`: the processor and its system live in
    the same memory; `capability`: the compute capability, as a plan's target writes it."""

    name: str
    title: str
    memory: int
    bandwidth: float
    capability: str
    shared: bool = False


def _gpu(
    name: str, title: str, gigabytes: int, bandwidth: float, capability: str, shared: bool = False
) -> Device:
    return Device(name, title, gigabytes * 10**9, bandwidth * 1e9, capability, shared)


DEVICES = {
    device.name: device
    for device in (
        _gpu(
            "jetson-orin-nano-8gb",
            "Jetson Orin Nano 8 GB (102 GB/s: super mode)",
            8,
            102,
            "sm87",
            shared=True,
        ),
        _gpu("jetson-orin-nx-16gb", "Jetson Orin NX 16 GB", 16, 102.4, "sm87", shared=True),
        _gpu("jetson-agx-orin-32gb", "Jetson AGX Orin 32 GB", 32, 204.8, "sm87", shared=True),
        _gpu("jetson-agx-orin-64gb", "Jetson AGX Orin 64 GB", 64, 204.8, "sm87", shared=True),
        _gpu("jetson-thor", "Jetson AGX Thor (T5000)", 128, 273, "sm110", shared=True),
        _gpu("t4", "T4", 16, 320, "sm75"),
        _gpu("a10", "A10", 24, 600, "sm86"),
        _gpu("l4", "L4", 24, 300, "sm89"),
        _gpu("rtx-3090", "GeForce RTX 3090", 24, 936, "sm86"),
        _gpu("rtx-4090", "GeForce RTX 4090", 24, 1008, "sm89"),
        _gpu("rtx-5090", "GeForce RTX 5090", 32, 1792, "sm120"),
        _gpu("a100-80gb", "A100 80 GB (SXM)", 80, 2039, "sm80"),
        _gpu("h100", "H100 80 GB (SXM)", 80, 3350, "sm90"),
        _gpu("h200", "H200 141 GB (SXM)", 141, 4800, "sm90"),
    )
}
"""By name. Bandwidths are the makers' peaks, which no program reaches."""

RTX_TARGETS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
"""What TensorRT-RTX compiles for."""

JETSON = ("sm87", "sm110")
