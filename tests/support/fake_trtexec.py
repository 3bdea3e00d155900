"""A program in the place of trtexec, where no GPU is."""

from __future__ import annotations

import sys
from pathlib import Path

TRTEXEC = """#!{python}
# Stands in for trtexec: reads its flags, checks the files, writes results whose times are the graph's name and width.
import json, math, sys
from pathlib import Path
flags = dict(flag[2:].partition("=")[::2] for flag in sys.argv[1:])
assert Path(flags["loadEngine"]).is_file(), flags["loadEngine"]
shapes = dict(part.split(":") for part in flags["shapes"].split(","))
for part in filter(None, flags.get("loadInputs", "").split(",")):
    name, file = part.split(":", 1)
    count = math.prod(map(int, shapes[name].split("x")))
    size = Path(file).stat().st_size
    assert size % count == 0 and size // count in (1, 2, 4, 8), (name, size, count)
if "broken" in sys.argv[0]:
    print("[E] the plan is of another GPU"); sys.exit(1)
width = int(flags["exportTimes"].removesuffix(".times.json").rpartition(".")[2])
run = dict(startEnqMs=0.0, endEnqMs=0.05, h2dMs=0.0, d2hMs=0.0, computeMs=0.1 + 0.01 * width, latencyMs=1.0)
Path(flags["exportTimes"]).write_text(json.dumps([run] * int(flags["iterations"])))
layers = [dict(count=3), dict(name="mm <1>", timeMs=3.0, averageMs=1.0, medianMs=1.0, percentage=75.0),
          dict(name="norm", timeMs=1.0, averageMs=0.25, medianMs=0.3, percentage=25.0)]
Path(flags["exportProfile"]).write_text(json.dumps(layers))
# One layer as a plan of detailed verbosity has it, others by name alone; from 11 on bindings have another name.
about = {"Layers": [dict(Name="mm <1>", LayerType="gemm"), "norm", "copy"], "I/O Tensors": []}
Path(flags["exportLayerInfo"]).write_text(json.dumps(about))
"""


def fake_trtexec(folder: Path, name: str = "trtexec") -> Path:
    """Put it into a folder."""
    path = folder / name
    path.write_text(TRTEXEC.replace("{python}", sys.executable))
    path.chmod(0o755)
    return path
