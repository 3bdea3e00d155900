"""Plain and speculative decoding on a GPU: every draft of a bundle, by its TensorRT plans. No machine has run it yet.

    make bench-gpu
    python benchmarks/gpu.py BUNDLE [--tokens N] [--repeats N]

Without a bundle `tiny-blip2-flant5` is built, with plans for this GPU. Arms take turns; the median of their tokens per second
is printed beside the name of the GPU.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from vlmexport.runtime import Session
from vlmexport.runtime.images.synthetic import synthetic_image


def built(folder: Path) -> Path:
    """A bundle with plans for this GPU."""
    bundle = folder / "bundle"
    command = [sys.executable, "-m", "vlmexport"]
    options = ["--model", "tiny-blip2-flant5", "--draft-layer", "3", "-o", str(bundle)]
    subprocess.run([*command, "build", *options], check=True)
    subprocess.run([*command, "compile", str(bundle), "--backend", "tensorrt"], check=True)
    return bundle


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(asked.bundle or built(Path(folder)), asked.tokens, asked.repeats)


def measure(bundle: Path, tokens: int, repeats: int) -> None:
    """Print the table."""
    with Session.load(bundle, device="tensorrt") as session:
        manifest = session.bundle.manifest
        picture = None if manifest.image is None else synthetic_image(120, 160)
        arms = ["none", *(draft.name for draft in manifest.drafts)]
        rates: dict[str, list[float]] = {arm: [] for arm in arms}
        for number in range(repeats + 1):  # the first round captures
            for arm in arms:
                result = session.generate(
                    picture,
                    None if picture is not None else "a",
                    max_new_tokens=tokens,
                    draft=arm,
                    ignore_eos=True,
                )
                if number and result.stats.tokens_per_second is not None:
                    rates[arm].append(result.stats.tokens_per_second)
        print(f"{session.decoder.engine.machine}, {manifest.model.source}, {tokens} tokens")
        for arm in arms:
            print(f"{arm:20} {statistics.median(rates[arm]):8.1f} tokens/s")


if __name__ == "__main__":
    main()
