"""Devices that bundles are planned for: memory and its bandwidth, as their makers publish them, and which TensorRT runs there."""

from __future__ import annotations

import difflib
import re
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

FAMILY = "jetson-"
"""What names of Jetson boards begin with here; they are known without it, too."""


def short_name(name: str) -> str:
    """Without `FAMILY`."""
    return name.removeprefix(FAMILY)


def devices_named(text: str) -> list[Device]:
    """The devices that `text` names as a whole (`orin-nano-8gb`, `Orin Nano 8 GB`), else those whose name or title has words
    that begin so (`orin-nano`, `AGX Orin`: both memories, `4090`); none for an unknown one."""
    query = _letters(text)
    whole = [
        device for name, device in DEVICES.items() if query in (_letters(name), _letters(short_name(name)))
    ]
    if whole or not query:
        return whole
    return [device for device in DEVICES.values() if any(end.startswith(query) for end in _ends(device))]


def nearest_devices(text: str) -> list[str]:
    """Names that look like `text`, short ones, the nearest first."""
    known = {_letters(short_name(name)): short_name(name) for name in DEVICES}
    query = _letters(text).removeprefix(_letters(FAMILY))
    return [known[match] for match in difflib.get_close_matches(query, known, n=3, cutoff=0.5)]


def _ends(device: Device) -> list[str]:
    """Name and title from each of their words on."""
    return [
        _letters("".join(words[first:]))
        for words in (re.findall(r"[^\W_]+", text) for text in (device.name, device.title))
        for first in range(len(words))
    ]


def _letters(text: str) -> str:
    """Letters and digits alone, small."""
    return "".join(character for character in text.lower() if character.isalnum())


def lowerings(device: Device) -> dict[str, str]:
    """Lowering of a plan (docs/explanation/tensorrt-plans.md) → the oldest software of the device that runs it, by its makers' tables.

    JetPack 7.0 and 7.1 are for Thor alone, 6.2 for Orin alone; 7.2 brings a TensorRT with the in-place cache update to both.
    """
    if device.capability in JETSON:
        return {
            "native": "JetPack 7.2",
            "portable": "JetPack 6.2" if device.capability == "sm87" else "JetPack 7.0",
        }
    native, blackwell = "TensorRT 10.15", device.capability in ("sm120", "sm121")
    if device.capability in RTX_TARGETS:
        native = f"TensorRT-RTX or {native}"
    return {
        "native": native,
        "portable": "the first TensorRT with Blackwell" if blackwell else "TensorRT 10.3",
    }
