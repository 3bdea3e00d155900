"""Every weight once: bundle size on disk, and proportional set size (PSS) of a process that decodes.

    python -m benchmarks.memory BUNDLE [BUNDLE …]

Base = parameters × bytes. Disk must stay below 1.05 × base, PSS below 1.3 × base + 120 MB. Growth between requests
20 and 220 is reported too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.machine import save
from tests.support.programs import program


def pss_bytes() -> int:
    """Proportional set size of this process (Linux)."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no Pss line in smaps_rollup")


def probe(bundle: str) -> None:
    """Worker: decode requests and print the memory after some of them."""
    import numpy as np
    from vlmexport.runtime import Session

    before = pss_bytes()
    session = Session.load(bundle, max_length=512)
    has_image = session.bundle.manifest.image is not None
    random = np.random.default_rng(0)
    picture = random.integers(0, 255, (96, 96, 3), dtype=np.uint8)
    big = session.bundle.manifest.model.parameters > 50_000_000
    marks: dict[str, int] = {"before": before, "loaded": pss_bytes()}
    for request in range(1, 221):
        tokens = 2 if big and request > 2 else 24
        if has_image:
            session.generate(image=picture, max_new_tokens=tokens, ignore_eos=True)
        else:
            prompt = "Describe the table. " * int(random.integers(1, 8))
            session.generate(prompt=prompt, max_new_tokens=tokens, ignore_eos=True)
        if request in (1, 20, 220):
            marks[f"request_{request}"] = pss_bytes()
    manifest = session.bundle.manifest
    size = {"float32": 4, "float16": 2, "bfloat16": 2}[manifest.cache_dtype]
    base = manifest.model.parameters * size
    disk = sum(f.stat().st_size for f in Path(bundle).rglob("*") if f.is_file() and f.suffix != ".plan")
    print(json.dumps({"base": base, "disk": disk, **marks}))


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--probe":
        probe(sys.argv[2])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", nargs="+")
    rows = {}
    for bundle in parser.parse_args().bundles:
        out = subprocess.run(
            program("benchmarks.memory", "--probe", bundle), capture_output=True, text=True, check=True
        )
        mark = json.loads(out.stdout.splitlines()[-1])
        base, limit = mark["base"], 1.3 * mark["base"] + 120e6
        rows[Path(bundle).name] = {
            "base_mb": round(base / 1e6, 1),
            "disk_over_base": round(mark["disk"] / base, 3),
            "pss_mb": round(mark["request_220"] / 1e6, 1),
            "pss_limit_mb": round(limit / 1e6, 1),
            "within_limit": mark["request_220"] <= limit,
            "growth_requests_20_to_220_mb": round((mark["request_220"] - mark["request_20"]) / 1e6, 2),
        }
    result = {"script": "benchmarks/memory.py", "bundles": rows}
    print(json.dumps(result, indent=1))
    print(save("memory", result))


if __name__ == "__main__":
    main()
