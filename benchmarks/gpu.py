"""Plain and speculative decoding on a GPU: every draft of a bundle, by ONNX Runtime or by TensorRT plans. No machine has run
it yet; a test runs it on emulated ones.

    make bench-gpu
    python benchmarks/gpu.py BUNDLE … [--device cuda|tensorrt] [--tokens N] [--repeats N] [--force-acceptance A …]
    python benchmarks/gpu.py --case llava-1.5-7b --folder DIR --force-acceptance 0.6 --force-acceptance 0.8

Without a bundle `tiny-blip2-flant5` is built. `--case` takes a model of `real_size.py` (the papers' shapes, random weights),
builds it in float16 below DIR, measures and deletes it; its drafts guess, so that acceptance is forced. With `tensorrt` plans
for this GPU are compiled where there are none. Arms take turns; the median of their tokens per second is printed beside the
name of the GPU, and with `--bandwidth` (GB/s, as published) plain decoding as a share of what reading the weights allows.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vlmexport.runtime import Bundle, Session
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.measure.fit import roofline

SIDES = 120, 160


def vlmexport(*arguments: str | Path) -> None:
    """Run a command."""
    subprocess.run([sys.executable, "-m", "vlmexport", *map(str, arguments)], check=True)


def built(folder: Path) -> Path:
    """A bundle of a small model."""
    vlmexport("build", "--model", "tiny-blip2-flant5", "--draft-layer", "3", "-o", folder / "bundle")
    return folder / "bundle"


def random_bundle(name: str, folder: Path) -> Path:
    """A bundle of a paper's shape, whose weights are the checkpoint's own files: nothing is on the disk twice."""
    import real_size

    model = folder / "model"
    maker = Path(__file__).with_name("real_size.py")
    subprocess.run([sys.executable, maker, "--make", name, model], check=True)
    case = real_size.resolved(name)
    options = [*case["build"], "--precision", "float16", "--link-weights", "--parity-memory", "0"]
    vlmexport("build", "--model", model, *options, "-o", folder / "bundle")
    shutil.rmtree(model)
    return folder / "bundle"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", nargs="*", type=Path)
    parser.add_argument("--device", choices=("cuda", "tensorrt"), default="tensorrt")
    parser.add_argument("--case", action="append", default=[], help="a model of real_size.py")
    parser.add_argument("--folder", type=Path, help="for --case")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--force-acceptance", type=float, action="append", default=[], metavar="A")
    parser.add_argument("--bandwidth", type=float, help="of the GPU's memory, GB/s")
    asked = parser.parse_args()

    def run(bundle: Path) -> None:
        if asked.device == "tensorrt" and not Bundle.open(bundle).manifest.plans:
            vlmexport("compile", bundle, "--backend", "tensorrt")
        lines = measure(
            bundle,
            asked.device,
            asked.tokens,
            asked.repeats,
            [None, *asked.force_acceptance],
            asked.bandwidth,
        )
        print("\n".join(lines), flush=True)

    for bundle in asked.bundle:
        run(bundle)
    for name in asked.case:
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            run(random_bundle(name, Path(folder)))
    if not asked.bundle and not asked.case:
        with tempfile.TemporaryDirectory() as folder:
            run(built(Path(folder)))


def measure(
    bundle: Path,
    device: str,
    tokens: int,
    repeats: int,
    acceptances: Sequence[float | None] = (None,),
    bandwidth: float | None = None,
) -> list[str]:
    """Lines of the table: an arm per draft and acceptance, None being the draft's own."""
    with Session.load(bundle, device=device) as session:
        manifest = session.bundle.manifest
        picture = None if manifest.image is None else synthetic_image(*SIDES)
        arms = [("none", None), *((draft.name, a) for draft in manifest.drafts for a in acceptances)]
        rates: dict[tuple[str, float | None], list[float]] = {arm: [] for arm in arms}
        for number in range(repeats + 1):  # the first round captures
            for arm in arms:
                result = session.generate(
                    picture,
                    None if picture is not None else "a",
                    max_new_tokens=tokens,
                    draft=arm[0],
                    force_acceptance=arm[1],
                    ignore_eos=True,
                )
                if number and result.stats.tokens_per_second is not None:
                    rates[arm].append(result.stats.tokens_per_second)
        machine = session.decoder.engine.machine
    plain = statistics.median(rates["none", None])
    lines = [f"{machine}, {device}, {manifest.model.source}, {tokens} tokens"]
    for (draft, acceptance), found in rates.items():
        rate = statistics.median(found)
        name = draft if acceptance is None else f"{draft} at {acceptance:g}"
        lines.append(f"{name:28} {rate:8.1f} tokens/s {rate / plain:6.2f} ×")
    if bandwidth is not None:
        bound = 1 / roofline(manifest, bandwidth * 1e9, manifest.limits.max_length // 2).token_seconds()
        lines.append(f"plain: {plain / bound:.0%} of the {bound:.0f} tokens/s that {bandwidth:g} GB/s allow")
    return lines


if __name__ == "__main__":
    main()
