"""The kernels around portable plans: their program is that of their source, and NVIDIA's assembler takes it."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import vlmexport.runtime.engines

ENGINES = Path(vlmexport.runtime.engines.__file__).parent
GPUS = {12: ("sm_75", "sm_86", "sm_87", "sm_90"), 13: ("sm_75", "sm_87", "sm_90", "sm_110")}
"""By the CUDA of an assembler: JetPack 6 has 12, 7 has 13, with Thor."""


def test_kernel_binary_matches_its_source() -> None:
    """Whoever changes `rows.cu` compiles it again; its first lines say how."""
    program = (ENGINES / "rows.ptx").read_text("ascii")
    source = hashlib.sha256((ENGINES / "rows.cu").read_bytes()).hexdigest()
    assert program.startswith(f"// rows.cu: sha256 {source}\n"), "rows.ptx is of another rows.cu"
    kernels = re.findall(r"__global__ void (\w+)\(", (ENGINES / "rows.cu").read_text("ascii"))
    assert kernels and re.findall(r"\.visible \.entry (\w+)\(", program) == kernels


def assemblers() -> Iterator[str]:
    """On PATH, or in NVIDIA's packages."""
    found = shutil.which("ptxas")
    if found:
        yield found
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from map(str, sorted(Path(root).glob("*/bin/ptxas")))


def test_kernel_is_accepted_by_ptxas(tmp_path: Path) -> None:
    found = list(assemblers())
    if not found:
        pytest.skip(
            "needs ptxas: pip install nvidia-cuda-nvcc (CUDA 13) or nvidia-cuda-nvcc-cu12, or a CUDA toolkit"
        )
    for ptxas in found:
        said = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
        release = re.search(r"release (\d+)\.", said)
        assert release is not None, said
        for gpu in GPUS.get(int(release[1]), ("sm_75",)):
            line = [ptxas, f"-arch={gpu}", str(ENGINES / "rows.ptx"), "-o", str(tmp_path / "rows.cubin")]
            done = subprocess.run(line, capture_output=True, text=True)
            assert done.returncode == 0, f"{said}{gpu}: {done.stderr}"
