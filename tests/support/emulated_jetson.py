"""A Jetson that is not there: runs `vlmexport` or a program with an emulated CUDA and the TensorRT of a JetPack.

python -m tests.support.emulated_jetson 10.3.0.30 vlmexport ARGUMENTS …
python -m tests.support.emulated_jetson 10.3.0.30 program.py ARGUMENTS …
python -m tests.support.emulated_jetson 10.3.0.30 -m MODULE ARGUMENTS …
python -m tests.support.emulated_jetson --without-onnxruntime 10.3.0.30 …      # nor torch; plans are computed by numpy
"""

from __future__ import annotations

import runpy
import sys
from importlib import machinery

ARCHITECTURE = "sm87"
NO_CACHE_UPDATE = (10, 15)
"""TensorRT has none before."""

REFUSED = ("onnxruntime", "torch", "transformers")


class Refuse:
    """Finds no package of `REFUSED`, also where it is installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main() -> None:
    alone = sys.argv[1] == "--without-onnxruntime"
    if alone:
        del sys.argv[1]
        sys.meta_path.insert(0, Refuse())
    from vlmexport.exporter.tensorrt import api
    from vlmexport.runtime.engines.cuda import Cuda

    from tests.support.engines.fake_cuda import FakeCuda
    from tests.support.engines.fake_tensorrt import library
    from tests.support.engines.plan_runs import ByNumpy, ByOnnxRuntime

    _, version, program, *arguments = sys.argv
    cuda = FakeCuda(ARCHITECTURE)
    tensorrt = library(cuda, version, ByNumpy if alone else ByOnnxRuntime)
    tensorrt.__spec__ = machinery.ModuleSpec("tensorrt", None)
    if tuple(map(int, version.split(".")[:2])) < NO_CACHE_UPDATE:
        del tensorrt.IKVCacheUpdateLayer
    sys.modules["tensorrt"] = tensorrt
    Cuda.open = classmethod(lambda cls: cuda)  # type: ignore[assignment, method-assign]
    api.local_architecture = lambda: ARCHITECTURE
    sys.argv = [program, *arguments]
    if program == "vlmexport":
        from vlmexport.runtime.cli import main as vlmexport

        sys.exit(vlmexport(arguments))
    if program == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
