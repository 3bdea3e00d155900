"""What the host does in a cycle that stays on a device: microseconds of Python, with a device that takes no time.

    vlmexport build --model tiny-blip2-flant5 --draft-layer 3 -o runs/tiny
    python benchmarks/device_host.py runs/tiny

The device is none: it holds memory, computes nothing, and says that every drafted token is right. What is timed is all
that is left of a request's cycles: the policy, what goes up, the launch, the wait, the verdict, text and limits. Arms
take turns; a figure is the median over requests of (seconds of the request − seconds to its first token) / cycles.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from machine import describe, save
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import GraphInfo, ValueInfo
from vlmexport.runtime.decode.passes import Decoder
from vlmexport.runtime.engines.base import DTYPES, Buffer, Call, Engine, Program, View
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.session import Session

LIMIT_US = 150.0
LENGTHS = (0, 1, 3, 5, 8)
TOKENS = 96


class Nothing:
    """A call or a program that is done at once."""

    upload: np.ndarray
    download: np.ndarray

    def run(self) -> None:
        """Done."""

    launch = wait = run


class NoDevice(Engine):
    """See the module."""

    name = "no-device"
    static_cache = True
    alignment = 256

    def interface(self, graph: str) -> GraphInfo:
        found = super().interface(graph)
        if found.role == "head":
            rows = [next(value for value in found.outputs if value.name == "logits").shape[0]]
            more = [
                ValueInfo(name=n, dtype=d, shape=rows) for n, d in (("best", "int64"), ("finite", "bool"))
            ]
            found = replace(found, outputs=[*found.outputs, *more])
        return found

    def allocate(self, name: str, nbytes: int, zeroed: bool = False) -> Buffer:
        memory = np.zeros(nbytes + self.alignment, np.uint8)
        start = -memory.ctypes.data % self.alignment
        return Buffer(name, nbytes, memory.ctypes.data + start, memory[start : start + nbytes])

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        if "finite" in outputs:
            self._bytes(outputs["finite"])[:] = 1
        return Nothing()

    def _copy(self, target: View, source: View) -> Call:
        self._bytes(target)[:] = self._bytes(source)  # flags never change
        return Nothing()

    def program(self, calls: Sequence[Call], upload: View, download: View) -> Program:
        found = Nothing()
        found.upload, found.download = self._bytes(upload), self._bytes(download)
        return found

    def write(self, view: View, array: np.ndarray) -> None:
        self._bytes(view)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def read(self, view: View) -> np.ndarray:
        return self._bytes(view).view(DTYPES[view.dtype]).reshape(view.shape).copy()

    def _bytes(self, view: View) -> np.ndarray:
        start = view.address - view.buffer.address
        return view.buffer.data[start : start + view.nbytes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--requests", type=int, default=40, help="of every draft length")
    parser.add_argument("--no-save", action="store_true", help="print only")
    arguments = parser.parse_args()
    bundle = Bundle.open(arguments.bundle)
    manifest = bundle.manifest
    engine = NoDevice(manifest.graphs)
    session = Session(bundle, Decoder(engine, manifest, bundle.tensor), None)
    picture = (
        None
        if manifest.image is None
        else synthetic_image(manifest.image.height or 224, manifest.image.width or 224)
    )
    draft = next(draft.name for draft in manifest.drafts if draft.layer)
    taken: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for number in range(arguments.requests + 2):
        for length in LENGTHS:
            options: dict[str, Any] = (
                {"draft": draft, "draft_length": length} if length else {"draft": "none"}
            )
            result = session.generate(
                image=picture, prompt="describe", max_new_tokens=TOKENS, ignore_eos=True, **options
            )
            stats = result.stats
            assert len(result.tokens) == TOKENS and stats.accepted == stats.proposed, (
                "the device was asked otherwise"
            )
            if number >= 2:  # programs are made in the first requests
                rest = stats.total_seconds - (stats.time_to_first_token or 0.0)
                taken[length].append(1e6 * rest / stats.cycles)
    rows = {
        str(length): {"median_us": round(statistics.median(values), 1), "largest_us": round(max(values), 1)}
        for length, values in taken.items()
    }
    within = all(row["median_us"] <= LIMIT_US for row in rows.values())
    result = {"script": "benchmarks/device_host.py", "model": manifest.model.source, "draft": draft,
              "limit_us": LIMIT_US, "within_limit": within, "by_draft_length": rows}  # fmt: skip
    for length, row in rows.items():
        print(f"d = {length}: {row['median_us']:.1f} µs a cycle (largest {row['largest_us']:.1f})")
    print(f"{'within' if within else 'beyond'} {LIMIT_US:.0f} µs; {describe()['cpu']}")
    if not arguments.no_save:
        print(save("device-host", result))


if __name__ == "__main__":
    main()
