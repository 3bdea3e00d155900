"""The exact `trtexec` command of every plan, profile and width, and the files that it reads.

TensorRT 10.x, 11.x and TensorRT-RTX spell the same run differently: from 11 on CUDA graphs, no transfers and a run of its
own for layers are what trtexec does unasked.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...bundle.manifest import FLOATS, Manifest
from ...common.errors import InputError, OptionError
from ...common.foreign_errors import raise_if_foreign
from ...engines.base import DTYPES
from ..synthetic_inputs import named_sizes, stand_in
from .points import Point, parse_name
from .results import LAYER_INFO, LAYERS, TIMES, Timing, read_layer_info, read_layers, read_times

WARM_UP_MS, ITERATIONS = 500, 200
TOOLS = {"tensorrt": "trtexec", "tensorrt-rtx": "tensorrt_rtx"}
"""Backend of a plan → its program."""

PLACES = ("/usr/src/tensorrt/bin",)
"""Where JetPack and the Debian packages put it, beside PATH."""

_OLD_FLAGS = ("--noDataTransfers", "--useSpinWait", "--separateProfileRun")


@dataclass(frozen=True)
class Run:
    """One run of trtexec. `inputs`: contents of the files that it loads, by input."""

    point: Point
    plan: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    inputs: Mapping[str, np.ndarray]

    def flags(self, bundle: str, inputs: str, out: str, iterations: int = ITERATIONS) -> list[str]:
        """What follows the program's name; `bundle`, `inputs` and `out` are its folders."""
        profile = [each["name"] for each in self.plan["profiles"]].index(self.point.profile)
        shapes = ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in self.shapes.items())
        files = ",".join(f"{name}:{inputs}/{self.input_file(name)}" for name in self.inputs)
        stem = f"{out}/{self.point.name}"
        return [
            f"--loadEngine={bundle}/{self.plan['file']}",
            f"--useProfile={profile}",
            f"--shapes={shapes}",
            *([f"--loadInputs={files}"] if files else []),
            f"--warmUp={WARM_UP_MS}",
            "--duration=0",
            f"--iterations={iterations}",
            "--avgRuns=1",
            f"--exportTimes={stem}{TIMES}",
            f"--exportProfile={stem}{LAYERS}",
            f"--exportLayerInfo={stem}{LAYER_INFO}",
            *version_flags(self.plan["backend"], self.plan["version"]),
        ]

    def input_file(self, name: str) -> str:
        """The file of an input."""
        return f"{self.point.name}.{name}.bin"


def version_flags(backend: str, version: str) -> list[str]:
    """What makes trtexec of this version keep buffers on the device, replay CUDA graphs and time layers apart."""
    if backend == "tensorrt-rtx":
        return [*_OLD_FLAGS, "--rtxCudaGraphStrategy=wholeGraph"]
    major = version.partition(".")[0]
    return [] if major.isdigit() and int(major) >= 11 else [*_OLD_FLAGS, "--useCudaGraph"]


def choose_plans(manifest: Manifest, target: str | None, backend: str | None = None) -> list[dict[str, Any]]:
    """The plans of one target and backend, by default of the only one. Raises OptionError where that is not clear."""
    plans = manifest.plans
    for option, field, choice in (("--target", "target", target), ("--backend", "backend", backend)):
        known = sorted({str(plan.get(field)) for plan in plans})
        if choice is None and len(known) > 1:
            raise OptionError(f"the bundle has plans for {', '.join(known)}; choose one with {option}")
        if choice is not None and choice not in known:
            has = ", ".join(known) or "none; `vlmexport compile` adds them"
            raise OptionError(f"{option} {choice}: the bundle has plans for {has}")
        plans = [plan for plan in plans if choice in (None, plan.get(field))]
    return plans


def list_runs(manifest: Manifest, plans: Iterable[Mapping[str, Any]], points: Sequence[Point]) -> list[Run]:
    """A run for every point whose plan has its profile, at a shape that the plan takes."""
    by_graph = {plan["graph"]: plan for plan in plans}
    rng, runs = np.random.default_rng(0), []
    for point in points:
        plan = by_graph.get(point.graph)
        profile = plan and next((p for p in plan["profiles"] if p["name"] == point.profile), None)
        if not plan or not profile:
            continue
        inputs = [each for each in plan["bindings"] if each["mode"] == "input"]
        given = named_sizes(((each["name"], tuple(each["shape"])) for each in inputs), point.given)
        sizes = {**point.sizes, **given}
        ranges = profile["dimensions"]
        if any(not ranges[d][0] <= sizes[d] <= ranges[d][2] for d in ranges if d in sizes):
            continue
        shapes = {
            each["name"]: tuple(d if isinstance(d, int) else sizes[d] for d in each["shape"])
            for each in inputs
        }
        contents = {
            each["name"]: array
            for each in inputs
            if (array := _content(each, shapes[each["name"]], point, sizes, rng)) is not None
        }
        runs.append(Run(point, plan, shapes, contents))
    return runs


def _content(
    binding: Mapping[str, Any],
    shape: tuple[int, ...],
    point: Point,
    sizes: Mapping[str, int],
    rng: np.random.Generator,
) -> np.ndarray | None:
    """What an input must hold; None where trtexec's random numbers do: hidden states, caches, pixels."""
    name, dtype = binding["name"], binding["dtype"]
    if name in point.given and dtype not in FLOATS:
        return np.ascontiguousarray(point.given[name])
    if dtype in FLOATS and not name.endswith("mask"):
        return None
    made = stand_in(name, dtype, shape, sizes, rng)
    return np.zeros(shape, DTYPES[dtype]) if made is None else made


def write_inputs(runs: Iterable[Run], folder: Path) -> None:
    """The files that the runs load."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        for name, array in run.inputs.items():
            assert array.size == prod(run.shapes[name])
            (folder / run.input_file(name)).write_bytes(array.tobytes())


def find_tool(backend: str, path: Path | None = None) -> str | None:
    """The program that runs plans of this backend: `path`, or where it usually is. Raises OptionError for a `path` that
    is no program."""
    if path is not None:
        tool = shutil.which(path)
        if tool is None:
            raise OptionError(f"--trtexec {path}: there is no such program")
        return tool
    name = TOOLS.get(backend, "trtexec")
    return shutil.which(name) or next(
        filter(None, (shutil.which(f"{place}/{name}") for place in PLACES)), None
    )


def script(runs: Sequence[Run], inputs: str, bundle: Path) -> str:
    """A shell script of all runs, for the device; `inputs` is the folder beside it. Takes bundle and output folder."""
    tool = TOOLS.get(runs[0].plan["backend"], "trtexec")
    lines = [
        "#!/usr/bin/env bash",
        f"# Times the plans of a bundle with {tool} {runs[0].plan['version']}, by `vlmexport profile --save-commands`.",
        "#   bash FILE [BUNDLE [RESULTS]]    then    vlmexport profile BUNDLE --import RESULTS",
        "set -euo pipefail",
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
        f"bundle=${{1:-{shlex.quote(str(bundle.resolve()))}}}",
        'out=${2:-"$here/results"}',
        f'inputs="$here"/{shlex.quote(inputs)}',
        f"tool=${{TRTEXEC:-$(command -v {tool} || echo {PLACES[0]}/{tool})}}",
        'mkdir -p "$out"',
    ]
    for run in runs:
        flags = " ".join(_quoted(flag) for flag in run.flags("$bundle", "$inputs", "$out"))
        lines.append(f'"$tool" {flags}')
    return "\n".join(lines) + "\n"


def _quoted(flag: str) -> str:
    """In double quotes: `$bundle` and the like are the script's; names of tensors and files hold nothing else."""
    escaped = flag.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")
    return f'"{escaped}"'


def execute(runs: Sequence[Run], tool: str, bundle: Path, folder: Path, iterations: int) -> list[Timing]:
    """Runs trtexec for every run, one after the other; files go to `folder`. Raises InputError with its last words."""
    inputs, out = folder / "inputs", folder / "results"
    write_inputs(runs, inputs)
    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        line = [tool, *run.flags(str(bundle), str(inputs), str(out), iterations)]
        try:
            process = subprocess.run(line, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise_if_foreign(error)
            raise OptionError(f"{tool} cannot be started: {error.strerror}") from error
        if process.returncode:
            errors = [text for text in (process.stdout + process.stderr).splitlines() if "[E]" in text] or [
                "nothing"
            ]
            raise InputError(
                f"{tool} failed on {run.point.name} (status {process.returncode}): {errors[-1]:.300}"
            )
    return read_results(out)


def read_results(folder: Path) -> list[Timing]:
    """What trtexec wrote into a folder. Raises InputError where that is nothing, or nothing of its kind."""
    timings = []
    for path in sorted(folder.glob(f"*{TIMES}")):
        named = parse_name(path.name.removesuffix(TIMES))
        if named is None:
            raise InputError(f"{path}: not a name that --save-commands gives (GRAPH.PROFILE.WIDTH{TIMES})")
        layers, info = (path.with_name(path.name.removesuffix(TIMES) + end) for end in (LAYERS, LAYER_INFO))
        milliseconds, enqueue = read_times(path)
        kinds = read_layer_info(info) if info.exists() else None
        slowest = read_layers(layers, kinds=kinds) if layers.exists() else ()
        count = None if kinds is None else len(kinds)
        timings.append(Timing(*named, milliseconds, enqueue, slowest, count))
    if not timings:
        raise InputError(f"{folder} holds no results (*{TIMES}) of the commands of --save-commands")
    return timings
