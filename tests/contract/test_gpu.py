"""What only a GPU can show: `make test-gpu`. Skipped, with what is missing, everywhere else. An H200 has run what needs no TensorRT."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from vlmexport.exporter.tensorrt import PlanOptions
from vlmexport.exporter.tensorrt.compile import compile_bundle
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import DeviceError
from vlmexport.runtime.engines import tensorrt_library
from vlmexport.runtime.engines.base import DTYPES
from vlmexport.runtime.engines.cuda import Cuda
from vlmexport.runtime.engines.device import DeviceEngine
from vlmexport.runtime.engines.kv_append import append_kv, split_mask
from vlmexport.runtime.engines.kv_append_kernels import Appending
from vlmexport.runtime.hardware.devices import RTX_TARGETS
from vlmexport.runtime.measure.pass_costs import runnable
from vlmexport.runtime.session.session import Session

from tests.support import lossless
from tests.support.rig import FAMILIES

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cuda() -> Cuda:
    try:
        return Cuda.open()
    except DeviceError as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")


@pytest.fixture(scope="module")
def planned(
    cuda: Cuda, tiny_bundle: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`planned(name, lowering)`: a bundle with float32 plans for this GPU, built here."""
    if not tensorrt_library.installed("tensorrt"):
        pytest.skip("needs the module tensorrt: pip install '.[tensorrt]'")
    made: dict[tuple[str, str], Path] = {}

    def get(name: str, lowering: str = "native") -> Path:
        if (name, lowering) not in made:
            folder = tmp_path_factory.mktemp("gpu") / "bundle"
            shutil.copytree(tiny_bundle(name).path, folder)
            compile_bundle(folder, PlanOptions("tensorrt", "native", "fp32", lowering))
            made[name, lowering] = folder
        return made[name, lowering]

    return get


class _Device(DeviceEngine):
    """Memory and transfers alone."""

    name = "memory"

    def _bind(self, graph: str, inputs: Any, outputs: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def device(cuda: Cuda) -> Any:
    engine = _Device({}, cuda)
    yield engine
    engine.close()


def test_gpu_memory_round_trip(device: Any) -> None:
    values = np.random.default_rng(0).integers(0, 255, (3, 5 << 20), np.uint8)
    view = device.allocate("bytes", values.nbytes).view(values.shape, "uint8")
    device.write(view, values)
    other = device.allocate("copy", values.nbytes, zeroed=True).view(values.shape, "uint8")
    device.copy(other, view).run()
    assert np.array_equal(device.read(other), values)


def test_a_program_does_the_same_again(device: Any) -> None:
    up, down = (device.allocate(name, 256).view((256,), "uint8") for name in ("up", "down"))
    program = device.program([device.copy(down, up)], up, down)
    for number in range(4):
        program.upload[:] = number
        program.launch()
        program.wait()
        assert (program.download == number).all()


@pytest.mark.parametrize("dtype", ["bool", "float16", "float32", "bfloat16"])
def test_the_kernels_do_what_numpy_does(device: Any, dtype: str) -> None:
    rng, kind = np.random.default_rng(1), DTYPES[dtype]

    def some(*shape: int) -> np.ndarray:
        return rng.integers(0, 2 if dtype == "bool" else 1000, shape).astype(kind)

    def held(array: np.ndarray, as_dtype: str = dtype) -> Any:
        view = device.allocate("x", array.nbytes).view(array.shape, as_dtype)
        device.write(view, array)
        return view

    appending, starts = Appending(device), [3, 0, 17]
    at = held(np.array(starts, np.int64), "int64")
    mask = some(3, 2, 5, 40)
    before, own = held(np.zeros_like(mask)), held(some(3, 2, 5, 5))
    appending.split(held(mask), at, before, own).run()
    wanted = split_mask(mask, starts)
    assert np.array_equal(device.read(before), wanted[0]) and np.array_equal(device.read(own), wanted[1])
    rows, caches = [some(3, 2, 5, 8) for _ in range(3)], [some(3, 2, 40, 8) for _ in range(3)]
    views = [held(cache) for cache in caches]
    appending.append([(held(one), view) for one, view in zip(rows, views, strict=True)], at).run()
    for one, cache, view in zip(rows, caches, views, strict=True):
        append_kv(cache, one, starts)
        assert np.array_equal(device.read(view), cache)


NARROW_LENGTH = 3
"""Of chains in a narrow type: a layer of random weights gives features that are five times as large with every token that it
drafts for itself, and float16 ends at 65,504."""


def every_draft(
    folder: Path, device: str, verify_width: int | None = None, plain: bool = False
) -> dict[str, list[list[int]]]:
    """Tokens of three requests by draft, `none` first; with `plain` that alone. With `verify_width`, for narrow types, chains
    of `NARROW_LENGTH`."""
    shape = {} if verify_width is None else {"draft_length": NARROW_LENGTH}
    opened = Bundle.open(folder)
    if verify_width is not None:
        opened = opened.with_verify_width(verify_width)
    with Session.load(opened, device=device) as session:
        drafts = () if plain else runnable(session.bundle.manifest.drafts, session.decoder.engine.graphs)
        picture = session.bundle.manifest.image is not None
        return {
            name: [
                session.generate(
                    lossless.image_array(seed) if picture else None,
                    prompt,
                    max_new_tokens=24,
                    draft=name,
                    **({} if name == "none" else shape),
                ).tokens
                for seed, prompt in enumerate(("the red cup", "describe it", "a"))
            ]
            for name in ("none", *(draft.name for draft in drafts))
        }


def says_one_thing(said: dict[str, list[list[int]]]) -> list[list[int]]:
    """What plain decoding says, which every draft says."""
    plain = said["none"]
    assert {name: tokens == plain for name, tokens in said.items()} == dict.fromkeys(said, True)
    return plain


def as_on_a_cpu(folder: Path, plain: list[list[int]]) -> None:
    """Asserts the first token of every request, which is no near-tie where both compute in float32."""
    on_a_cpu = every_draft(folder, "cpu", plain=True)["none"]
    assert [tokens[0] for tokens in plain] == [tokens[0] for tokens in on_a_cpu]


@pytest.mark.parametrize("lowering", ["native", "portable"])
@pytest.mark.parametrize("family", ["t5", "llama", "vit-gpt2", "qwen2.5-vl"])
def test_drafts_change_no_token(planned: Callable, family: str, lowering: str) -> None:
    """Every draft on the GPU says what plain decoding on it says, and nearly always what a CPU says."""
    folder = planned(family, lowering)
    as_on_a_cpu(folder, says_one_thing(every_draft(folder, "tensorrt")))


NARROW = ("t5-float16", "llama-bfloat16", "llama-float16", "blip2-opt-int8")
VERIFY_WIDTH = 8
"""Of narrow bundles: a GPU's kernels round by the shape of a pass, and in a narrow type that changes tokens."""


@pytest.mark.parametrize("name", list(dict.fromkeys((*FAMILIES, *NARROW))))
def test_drafts_change_no_token_on_the_cuda_provider(cuda: Cuda, tiny_bundle: Callable, name: str) -> None:
    """Of a float32 bundle in float32 (`use_tf32=0`), of a narrow one in its own type with passes of one shape."""
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("needs ONNX Runtime's CUDA provider: pip uninstall onnxruntime; pip install '.[gpu]'")
    tiny = tiny_bundle(name)
    narrow = tiny.bundle.manifest.compute_dtype != "float32"
    plain = says_one_thing(every_draft(tiny.path, "cuda", VERIFY_WIDTH if narrow else None))
    if not narrow:
        as_on_a_cpu(tiny.path, plain)


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_drafts_change_no_token_on_tensorrt_rtx(
    cuda: Cuda, tiny_bundle: Callable, tmp_path: Path, family: str
) -> None:
    target = cuda.gpu().architecture
    if target not in RTX_TARGETS:
        pytest.skip(
            f"needs a GPU of {', '.join(RTX_TARGETS)}, for which TensorRT-RTX compiles; this is {target}"
        )
    if not tensorrt_library.installed("tensorrt-rtx"):
        pytest.skip("needs TensorRT-RTX: pip install '.[tensorrt-rtx]'")
    folder = Path(shutil.copytree(tiny_bundle(family).path, tmp_path / "bundle"))
    compile_bundle(folder, PlanOptions("tensorrt-rtx", target, "fp16"))
    says_one_thing(every_draft(folder, "tensorrt"))
