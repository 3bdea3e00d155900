"""What the host does in a cycle that stays on a device: microseconds of Python, with a device that takes no time.

    vlmexport build --model tiny-qwen2.5-vl --draft-layer 3 --draft imitation --draft medusa --draft eagle --draft vispec -o runs/tiny
    python -m benchmarks.device_host runs/tiny

The device is none: it holds memory, computes nothing, and says that every drafted token is right. What is timed is all
that is left of a request's cycles: the policy, what goes up, the launch, the wait, the verdict, text and limits. Arms
take turns; a figure is the median over requests of (seconds of the request − seconds to its first token) / cycles.

| engine | what of it is real |
|---|---|
| none | the decoder above engines |
| DeviceEngine | and how programs are launched, captured and waited for, over a CUDA whose calls do nothing |
| OnnxRuntimeCuda | and its calls one by one, over sessions whose runs do nothing |

Each with the chains of every draft that a device drafts with (one on the trunk stands for all such, Medusa's heads, layers of
their own), and each plain, with a repetition penalty, which adds the graph `penalties` to every cycle, and with that and n-grams
of which none comes twice, which adds `repeats` in its place.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from vlmexport.runtime.bundle.float32_view import as_float32
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import GenerationInfo, GraphInfo, Manifest
from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.engines.argmax import answers
from vlmexport.runtime.engines.base import DTYPES, Buffer, Call, Engine, Program, View
from vlmexport.runtime.engines.cuda import Gpu
from vlmexport.runtime.engines.device import DeviceEngine
from vlmexport.runtime.engines.onnxruntime import session_options
from vlmexport.runtime.engines.onnxruntime_cuda import OnnxRuntimeCuda
from vlmexport.runtime.graphs.on_device import CHANGING
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.session.session import Session

from benchmarks.machine import describe, save

LIMIT_US = 150.0
LENGTHS = (1, 3, 5, 8)
TOKENS = 96
CHANGED = {
    "plain": GenerationInfo(),
    "penalty": GenerationInfo(repetition_penalty=1.2),
    "n-grams": GenerationInfo(repetition_penalty=1.2, no_repeat_ngram_size=3),
}
"""What is asked of logits."""


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
        info = super().interface(graph)
        return answers(info) if info.role in ("head", *CHANGING) else info

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
        program = Nothing()
        program.upload, program.download = self._bytes(upload), self._bytes(download)
        return program

    def write(self, view: View, array: np.ndarray) -> None:
        self._bytes(view)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def read(self, view: View) -> np.ndarray:
        return self._bytes(view).view(DTYPES[view.dtype]).reshape(view.shape).copy()

    def _bytes(self, view: View) -> np.ndarray:
        start = view.address - view.buffer.address
        return view.buffer.data[start : start + view.nbytes]


class NoCuda:
    """Stands in for `Cuda`: memory of the host, transfers at once, captured work that is none."""

    def __init__(self) -> None:
        self._held: dict[int, np.ndarray] = {}
        self._capturing = False

    def gpu(self) -> Gpu:
        return Gpu("no GPU", "sm00")

    def allocate(self, name: str, nbytes: int) -> int:
        memory = np.zeros(nbytes + 256, np.uint8)
        address = memory.ctypes.data + -memory.ctypes.data % 256
        self._held[address] = memory
        return address

    allocate_host = allocate

    def free(self, address: int) -> None:
        del self._held[address]

    free_host = free

    def copy(self, target: int, source: int, nbytes: int, direction: int, stream: int) -> None:
        if not self._capturing:
            ctypes.memmove(target, source, nbytes)

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        ctypes.memset(address, value, nbytes)

    def begin_capture(self, stream: int) -> None:
        self._capturing = True

    def end_capture(self, stream: int) -> int:
        self._capturing = False
        return 1

    def create_stream(self) -> int:
        return 1

    def launch(self, captured: int, stream: int) -> None:
        """What was downloaded before is what it would bring."""

    def synchronise(self, stream: int) -> None: ...

    def free_captured(self, captured: int) -> None: ...

    def destroy_stream(self, stream: int) -> None: ...


def said_to_be_finite(outputs: Mapping[str, View]) -> None:
    """What no graph will write."""
    if "finite" in outputs:
        ctypes.memset(outputs["finite"].address, 1, outputs["finite"].nbytes)


class BareDevice(DeviceEngine):
    """Launches, captures and waits of an engine on CUDA, and calls that do nothing."""

    name = "bare-device"
    static_cache = True

    def interface(self, graph: str) -> GraphInfo:
        info = super().interface(graph)
        return answers(info) if info.role in ("head", *CHANGING) else info

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        said_to_be_finite(outputs)
        return Nothing()


class Idle:
    """An ONNX Runtime session whose runs do nothing."""

    def __init__(self, path: Path) -> None:
        session = ort.InferenceSession(
            str(path), session_options(pooled=False), providers=["CPUExecutionProvider"]
        )
        self.get_inputs, self.get_outputs, self.io_binding = (
            session.get_inputs,
            session.get_outputs,
            session.io_binding,
        )

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        """Done."""


class BareProvider(OnnxRuntimeCuda):
    """Bindings and options of the CUDA provider's engine."""

    place = "cpu"

    def open_session(self, path: Path, captures: bool) -> Any:
        return Idle(path)

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        said_to_be_finite(outputs)
        return super()._bind(graph, inputs, outputs)


def engines(bundle: Bundle) -> dict[str, Engine]:
    """By name, as the module lists them."""
    manifest: Manifest = as_float32(bundle.manifest)
    return {
        "none": NoDevice(manifest.graphs),
        "DeviceEngine": BareDevice(manifest.graphs, NoCuda()),  # type: ignore[arg-type]
        "OnnxRuntimeCuda": BareProvider(bundle.path, manifest, NoCuda()),  # type: ignore[arg-type]
    }


def chains(manifest: Manifest) -> list[tuple[str, int]]:
    """Drafts and lengths of chains, plain decoding first. Of drafts on the trunk one stands for all."""
    drafts = [("none", 0)]
    trunk = [draft for draft in manifest.drafts if draft.layer and draft.kind in ("imitation", "early-exit")]
    own = [draft for draft in manifest.drafts if draft.options.offers_trees]
    for draft in (*trunk[:1], *own):
        most = draft.options.most_tokens or max(LENGTHS)
        drafts += [(draft.name, length) for length in LENGTHS if length <= most]
    return drafts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=40, help="of every arm")
    parser.add_argument("--no-save", action="store_true", help="print only")
    arguments = parser.parse_args()
    bundle = Bundle.open(arguments.bundle)
    manifest = bundle.manifest
    sessions = {
        name: Session(bundle, Decoder(engine, manifest, bundle.tensor), None)
        for name, engine in engines(bundle).items()
    }
    picture = (
        None
        if manifest.image is None
        else synthetic_image(manifest.image.height or 224, manifest.image.width or 224)
    )
    arms = [
        (engine, logits, draft, length)
        for engine, logits in itertools.product(sessions, CHANGED)
        for draft, length in chains(manifest)
    ]
    taken: dict[tuple[str, str, str, int], list[float]] = {arm: [] for arm in arms}
    for number in range(arguments.requests + 2):
        for engine, logits, draft, length in arms:
            bundle.manifest.generation = CHANGED[logits]
            result = sessions[engine].generate(
                image=picture, prompt="describe", max_new_tokens=TOKENS, ignore_eos=True,
                draft=draft, draft_length=length or None,
            )  # fmt: skip
            stats = result.stats
            assert len(result.tokens) == TOKENS and stats.accepted == stats.proposed, (
                "the device was asked otherwise"
            )
            if number >= 2:  # programs are made in the first requests
                rest = stats.total_seconds - (stats.time_to_first_token or 0.0)
                taken[engine, logits, draft, length].append(1e6 * rest / stats.cycles)
    rows = [
        {
            "engine": engine, "logits": logits, "draft": draft, "draft_length": length,
            "median_us": round(statistics.median(values), 1), "largest_us": round(max(values), 1),
        }
        for (engine, logits, draft, length), values in taken.items()
    ]  # fmt: skip
    within = all(row["median_us"] <= LIMIT_US for row in rows)
    result = {"script": "benchmarks/device_host.py", "model": manifest.model.source, "limit_us": LIMIT_US,
              "within_limit": within, "load_average": round(os.getloadavg()[0], 2), "arms": rows}  # fmt: skip
    for row in rows:
        how = f"{row['engine']}, {row['logits']}, {row['draft']}, d = {row['draft_length']}"
        print(f"{how:60} {row['median_us']:6.1f} µs a cycle (largest {row['largest_us']:.1f})")
    print(
        f"{'within' if within else 'beyond'} {LIMIT_US:.0f} µs; {describe()['cpu']}, load average {os.getloadavg()[0]:.2f}"
    )
    if not arguments.no_save:
        print(save("device-host", result))


if __name__ == "__main__":
    main()
