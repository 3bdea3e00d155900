"""The engine of TensorRT plans: what it refuses and how it says so, what it holds and gives back, and the way from a bundle
to text by the commands. CUDA and TensorRT are not there (`engines/fake_cuda.py`, `engines/fake_tensorrt.py`)."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import machinery
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vlmexport.exporter.output import write_manifest
from vlmexport.exporter.tensorrt import PlanOptions, add_plans, api
from vlmexport.exporter.tensorrt.options import resolve
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.bundle.plans import choose_plans
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.bfloat16 import widen
from vlmexport.runtime.common.errors import BundleError, CapacityError, DeviceError, OptionError
from vlmexport.runtime.engines import DEVICES, create
from vlmexport.runtime.engines.cuda import Cuda
from vlmexport.runtime.engines.kernel_cache import KernelCache
from vlmexport.runtime.engines.tensorrt import TensorRTEngine
from vlmexport.runtime.measure.timing import GraphTimer, sampled_seconds
from vlmexport.runtime.session import session

from tests.support import lossless
from tests.support.engines import emulated, fake_tensorrt
from tests.support.engines.emulated import TARGET, Emulated, with_plans
from tests.support.engines.fake_cuda import FakeCuda
from tests.support.rig import Rig


@pytest.fixture(scope="module")
def planned(tiny_bundle: Callable, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of a tiny Llama with plans."""
    tiny = tiny_bundle("llama")
    return with_plans(tiny.path, tiny.bundle.manifest, tmp_path_factory.mktemp("planned"))


@pytest.fixture
def engine(planned: Bundle) -> Iterator[Emulated]:
    made = Emulated(planned)
    yield made
    made.close()


def changed(bundle: Bundle, **fields: Any) -> Bundle:
    """The bundle with other values in the manifest's entry of every plan."""
    return Bundle(
        bundle.path, replace(bundle.manifest, plans=[plan | fields for plan in bundle.manifest.plans])
    )


def test_a_gpu_that_is_not_there_is_like_the_one_that_is() -> None:
    for name, method in inspect.getmembers(Cuda, inspect.isfunction):
        if not name.startswith("_"):
            stand_in = getattr(FakeCuda, name)
            assert list(inspect.signature(stand_in).parameters) == list(inspect.signature(method).parameters)


# --- what is refused ---


def test_a_plan_of_a_newer_cuda_than_the_driver_knows(planned: Bundle) -> None:
    """The driver of the stand-in knows 13.0."""
    for cuda in (None, "12.8", "13.2"):
        Emulated(changed(planned, cuda=cuda, driver=cuda)).close()
    with pytest.raises(
        DeviceError,
        match=r"built with CUDA 14\.0, the driver here knows CUDA 13\.0 at most: update the driver, or build the plans again "
        "with `vlmexport compile",
    ):
        Emulated(changed(planned, cuda="14.0"))


def test_entries_name_the_cuda_of_the_machine_that_built_them(
    tiny_bundle: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: Bundle
) -> None:
    assert not any({"driver", "cuda"} & entry.keys() for entry in planned.manifest.plans), "no GPU is here"
    monkeypatch.setattr(api.Cuda, "open", FakeCuda)
    tiny = tiny_bundle("llama")
    bundle = with_plans(tiny.path, tiny.bundle.manifest, tmp_path / "planned")
    assert {(entry["driver"], entry["cuda"]) for entry in bundle.manifest.plans} == {("13.0", "12.6")}


@pytest.mark.parametrize(
    "said",
    [
        "Error Code 2: OutOfMemory (Requested size was 8589934592 bytes.)",
        "[defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)",
    ],
)
@pytest.mark.parametrize("step", ["load", "make an execution context of", "run"])
def test_out_of_memory_names_the_remedy(
    engine: Emulated, monkeypatch: pytest.MonkeyPatch, said: str, step: str
) -> None:
    def nothing(*arguments: Any) -> None:
        engine._logger.errors.append(said)

    kind, method = {
        "load": (fake_tensorrt.Runtime, "deserialize_cuda_engine"),
        "run": (fake_tensorrt.ExecutionContext, "execute_async_v3"),
    }.get(step, (fake_tensorrt.Engine, "create_execution_context"))
    monkeypatch.setattr(kind, method, nothing)
    table = (
        engine.constant("embedding_table", engine._bundle.tensor("embedding_table"))
        if step != "load"
        else None
    )
    with pytest.raises(
        CapacityError,
        match=rf"TensorRT has no memory to {step} .*embed.*smaller max_length or max_batch, or .*--max-length or "
        "--max-batch or in fp16",
    ):
        engine.load("embed")
        ids = engine.allocate("ids", 8, True).view((1, 1), "int64")
        size = int(engine.interface("embed").outputs[0].shape[2])
        kind_ = engine.dtype("embed", "hidden")
        rows = engine.allocate("rows", 4 * size).view((1, 1, size), kind_)
        engine.bind("embed", {"token_ids": ids, "embedding_table": table}, {"hidden": rows}).run()


def test_plans_for_another_gpu(planned: Bundle) -> None:
    with pytest.raises(
        OptionError, match=r"no TensorRT plans for this GPU \(sm86\); the bundle has tensorrt for sm87"
    ) as caught:
        choose_plans(planned.manifest, "bundle", "sm86", lambda backend: True)
    assert str(caught.value).endswith("`vlmexport compile bundle --backend tensorrt-rtx --target sm86`")
    none = replace(planned.manifest, plans=[])
    with pytest.raises(
        OptionError,
        match=r"the bundle has none; .*`vlmexport compile 'a b' --backend tensorrt on the device`",
    ):
        choose_plans(none, "a b", "sm90", lambda backend: True)


def test_a_graph_without_a_plan(planned: Bundle) -> None:
    some = replace(planned.manifest, plans=[p for p in planned.manifest.plans if p["graph"] != "head"])
    with pytest.raises(
        BundleError, match="no tensorrt plan for sm87 of head; build them again with `vlmexport compile"
    ):
        choose_plans(some, planned.path, TARGET, lambda backend: True)


def test_an_installed_library_is_chosen(planned: Bundle) -> None:
    both = [
        {**plan, "backend": name} for plan in planned.manifest.plans for name in ("tensorrt", "tensorrt-rtx")
    ]
    manifest = replace(planned.manifest, plans=both)
    for here in ("tensorrt", "tensorrt-rtx"):
        plans = choose_plans(manifest, planned.path, TARGET, lambda backend, here=here: backend == here)
        assert {plan.backend for plan in plans.values()} == {here}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"file": "plans/other.plan"}, r"'plans\[0\].file'.* is not a file listed under 'files'"),
        ({"file": "../head.plan"}, r"'plans\[0\].file'.* a path inside the bundle"),
        ({"bindings": [{"name": "hidden"}]}, r"'plans\[0\].bindings\[0\].mode' is missing"),
        ({"backend": "other"}, r"'plans\[0\].backend'.*tensorrt, tensorrt-rtx"),
    ],
)  # fmt: skip
def test_invalid_plan_entry_is_refused(planned: Bundle, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BundleError, match=said):
        Manifest.from_dict(changed(planned, **fields).manifest.to_dict())


def test_plans_of_another_version(planned: Bundle) -> None:
    with pytest.raises(
        BundleError,
        match=r"built by tensorrt 10\.13\.0\.1, here is 10\.16\.1\.11, which cannot run it; .*`vlmexp",
    ):
        Emulated(changed(planned, version="10.13.0.1"))
    Emulated(changed(planned, version="10.16.1.2")).close()  # the same release, built another day


def test_a_changed_file_never_reaches_tensorrt(planned: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(planned.path, tmp_path / "bundle"))
    plan = folder / next(p["file"] for p in planned.manifest.plans if p["graph"] == "head")
    data = plan.read_bytes()
    plan.unlink()  # other names of the file keep it
    plan.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    engine = Emulated(Bundle(folder, planned.manifest))
    engine.load("segment.0")
    with pytest.raises(
        BundleError, match=r"head.plan: SHA-256 is .*: the file was changed; build it again with"
    ):
        engine.load("head")


def test_unloadable_plan_is_reported(engine: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_checked_bytes", lambda plan: b"no plan")
    with pytest.raises(
        BundleError,
        match=r"tensorrt 10\.16\.1\.11 cannot load .*head.plan: .*magic tag mismatch; build it again",
    ):
        engine.load("head")


@pytest.mark.parametrize("field", ["dtype", "name", "alias_of"])
def test_a_plan_that_is_not_as_the_manifest_says(planned: Bundle, field: str) -> None:
    wrong = {"dtype": "float16", "name": "hidden_in", "alias_of": "value_cache.0"}[field]
    which = {"dtype": "hidden", "name": "hidden", "alias_of": "updated_key_cache.0"}[field]
    plans = [
        {**plan, "bindings": [{**b, field: wrong} if b["name"] == which else b for b in plan["bindings"]]}
        if plan["graph"] == "segment.0"
        else plan
        for plan in planned.manifest.plans
    ]
    engine = Emulated(Bundle(planned.path, replace(planned.manifest, plans=plans)))
    with pytest.raises(
        BundleError, match=r"segment\.0\.plan: .*(differ from manifest field 'plans'|as the manifest says)"
    ):
        engine.load("segment.0")


def test_a_shape_outside_every_profile(engine: Emulated) -> None:
    graph = next(name for name in engine.graphs if name.startswith("imitation"))
    hidden = engine.interface(graph).inputs[0]
    width = engine._bundle.manifest.limits.max_width + 1
    shape = (1, width, hidden.shape[2])
    given, made = (
        engine.allocate(name, 4 * width * int(hidden.shape[2])).view(shape, "float32")
        for name in ("in", "out")
    )
    with pytest.raises(
        ValueError,
        match=rf"{graph}: no profile of .*\.plan has batch 1, width {width}; it has batch 1 to 16, width 1 to 1; .*`vlmexport compile",
    ):
        engine.bind(graph, {"hidden": given}, {"hidden_out": made})


def test_devices(planned: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="threads: 2 asked for, but device 'tensorrt' computes on a GPU"):
        create(planned, "tensorrt", threads=2)
    with pytest.raises(OptionError, match=f"unknown device 'gpu'; choose one of: {', '.join(DEVICES)}"):
        create(planned, "gpu")
    monkeypatch.setattr(Cuda, "open", lambda: FakeCuda(TARGET))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt_lean", None)
    with pytest.raises(
        DeviceError, match=r"are of tensorrt, and the module tensorrt is missing: pip install .*\(JetPack"
    ):
        create(planned, "tensorrt")


# --- what it holds ---


def test_all_memory_is_released(planned: Bundle, rigs: Callable) -> None:
    rig: Rig = rigs("llama", "tensorrt")
    request = rig.request(51)
    lossless.generate(rig, request, 20, proposer=lossless.DRAFTS["early-exit"](rig, ()), length=3)
    engine: Emulated = rig.engine
    cuda = engine.cuda
    engine.close()
    engine.close()
    assert {where for _, where in cuda._blocks.values()} <= {"host"}
    assert not any(captured.work for captured in cuda._captures.values())
    rig.fresh()
    gc.collect()
    assert not cuda._blocks, "page-locked memory goes with whoever could read it"


def test_memory_is_given_back_while_it_runs(engine: Emulated) -> None:
    first = engine.allocate("first", 1000)
    engine.write(first.view((1000,), "uint8"), np.ones(1000, np.uint8))
    address = first.address
    del first
    assert address in engine.cuda._blocks, "the transfer is still in the stream"
    engine.synchronise()
    assert address not in engine.cuda._blocks


def test_large_transfers_go_in_parts(engine: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlmexport.runtime.engines import device

    monkeypatch.setattr(device, "STAGED", 1 << 10)
    values = np.arange(10_000, dtype=np.int64).reshape(10, 1000)
    view = engine.allocate("large", values.nbytes).view(values.shape, "int64")
    engine.write(view, values)
    assert np.array_equal(engine.read(view), values)


def test_oversized_write_is_refused(engine: Emulated) -> None:
    view = engine.allocate("a", 16).view((4,), "float32")
    with pytest.raises(ValueError, match=r"a: wrote float64 \(4,\) into float32 \(4,\)"):
        engine.write(view, np.zeros(4))
    with pytest.raises(ValueError, match=r"a: wrote float32 \(2,\)"):
        engine.write(view, np.zeros(2, np.float32))


def test_calls_beyond_the_most_are_dropped(engine: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmexport.runtime.engines.calls.MAX_CALLS", 2)
    graph = next(name for name in engine.graphs if name.startswith("imitation"))
    size = int(engine.interface(graph).inputs[0].shape[2])

    def bound(width: int) -> Any:
        views = [
            engine.allocate(f"rows.{width}", 4 * width * size, True).view((1, width, size), "float32")
            for _ in range(2)
        ]
        return engine.bind(graph, {"hidden": views[0]}, {"hidden_out": views[1]}), views[1]

    calls = [bound(width) for width in (1, 2, 3, 4)]
    assert len(engine._calls) == 2
    for call, out in calls:  # whoever holds a call may run it
        call.run()
        assert np.isfinite(engine.read(out)).all()


def test_outputs_that_nobody_reads_have_memory(engine: Emulated) -> None:
    size = int(engine.interface("head").inputs[0].shape[2])
    hidden = engine.allocate("hidden", 4 * size, True).view((1, 1, size), "float32")
    index = engine.allocate("index", 8, True).view((1,), "int64")
    best = engine.allocate("best", 8).view((1,), "int64")
    engine.bind("head", {"hidden": hidden, "row_index": index}, {"best": best}).run()
    assert 0 <= engine.read(best)[0] < engine._bundle.manifest.text.vocab_size


def test_plans_of_another_precision(tiny_bundle: Callable, tmp_path: Path) -> None:
    """Types are the plans', a shared table is cast to what they bind and held once, and the session says so."""
    tiny = tiny_bundle("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt", fake_tensorrt.library(FakeCuda()))
        patch.setattr(api, "local_architecture", lambda: TARGET)
        folder = Path(shutil.copytree(tiny.path, tmp_path / "bundle"))
        bundle = Bundle.open(folder)
        add_plans(bundle, PlanOptions("tensorrt", "native", "fp16"))
        write_manifest(folder, bundle.manifest)
    engine = Emulated(Bundle.open(folder))
    for graph, value in (("segment.0", "key_cache.0"), ("segment.0", "hidden"), ("embed", "embedding_table")):
        assert engine.dtype(graph, value) == "float16"
    assert engine.dtype("head", "logits") == "float32"
    assert (engine.dtype("head", "best"), engine.dtype("head", "finite")) == ("int64", "bool")
    table = np.asarray(tiny.bundle.tensor("embedding_table"))
    held = engine.constant("embedding_table", table)
    assert held is engine.constant("embedding_table", table) and held.dtype == "float16"
    assert np.array_equal(engine.read(held), widen(table, np.dtype(np.float16)))
    assert engine.note is not None and "computes and caches in float16" in engine.note


def test_with_tensorrt_rtx(planned: Bundle, rigs: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which compiles kernels for shapes when it likes to, unless it is told."""
    monkeypatch.setattr(emulated, "library", fake_tensorrt.rtx_library)
    rig: Rig = rigs("llama", "tensorrt").fresh()
    request = rig.request(51)
    run = lossless.generate(rig, request, 20, proposer=lossless.DRAFTS["early-exit"](rig, ()), length=3)
    assert run.tokens == rig.oracle.greedy(request, 20) and rig.engine.counts.launches


# --- what TensorRT-RTX compiled ---


def with_kernels(bundle: Bundle, folder: Path) -> tuple[int, str]:
    """How many kernels a process compiles for one call of every imitation draft, and nothing else; what was logged stays."""
    cuda = FakeCuda(TARGET)
    plans = choose_plans(bundle.manifest, bundle.path, TARGET, lambda backend: True)
    before = fake_tensorrt.RuntimeCache.compiled
    engine = TensorRTEngine(bundle, plans, fake_tensorrt.rtx_library(cuda), cuda, KernelCache(folder))  # type: ignore[arg-type]
    graph = next(name for name in engine.graphs if name.startswith("imitation"))
    size = int(engine.interface(graph).inputs[0].shape[2])
    given, made = (
        engine.allocate(name, 4 * size, True).view((1, 1, size), "float32") for name in ("in", "out")
    )
    engine.bind(graph, {"hidden": given}, {"hidden_out": made}).run()
    engine.close()
    return fake_tensorrt.RuntimeCache.compiled - before, graph


def test_kernels_are_compiled_once_and_kept(planned: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "kernels"
    compiled, graph = with_kernels(planned, folder)
    assert compiled == 1
    plan = next(plan for plan in planned.manifest.plans if plan["graph"] == graph)
    (file,) = folder.iterdir()
    assert file.name == f"{plan['sha256']}.kernels"
    written = file.stat().st_mtime_ns
    assert with_kernels(planned, folder)[0] == 0, "the second process compiles nothing"
    assert file.stat().st_mtime_ns == written, "what did not change is not written"


@pytest.mark.parametrize("what", ["another GPU", "damage"])
def test_kernels_that_do_not_fit_are_compiled_anew(
    planned: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with_kernels(planned, tmp_path)
    (file,) = tmp_path.iterdir()
    if what == "damage":
        file.write_bytes(b"\xff none")
    else:
        monkeypatch.setattr(fake_tensorrt.RuntimeCache, "environment", "another GPU")
    assert with_kernels(planned, tmp_path)[0] == 1
    assert with_kernels(planned, tmp_path)[0] == 0, "they took the place of what did not fit"


def test_a_kernel_cache_that_cannot_be_used(
    planned: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"kernel cache .*file/x: cannot be made \(Not a directory\)"):
        KernelCache(tmp_path / "file" / "x")
    with pytest.raises(OptionError, match=r"kernel cache: x asked for, but device 'cpu' compiles no kernels"):
        create(planned, "cpu", kernel_cache=Path("x"))
    folder = tmp_path / "gone"
    cache = KernelCache(folder)
    folder.rmdir()
    config: Any = fake_tensorrt.Engine.create_runtime_config(None)  # type: ignore[arg-type]
    cache.attach(config, "0" * 64)
    config.cache.compile("a kernel")
    cache.save()
    assert "cannot be written" in caplog.text


# --- the lean runtime ---


@pytest.fixture(scope="module")
def lean(tiny_bundle: Callable, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with plans for the lean runtime."""
    tiny = tiny_bundle("llama")
    return with_plans(tiny.path, tiny.bundle.manifest, tmp_path_factory.mktemp("lean"), lean=True)


def test_the_lean_runtime_runs_plans_that_are_for_it(lean: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(plan["lean"] is True for plan in lean.manifest.plans)
    monkeypatch.setattr(emulated, "library", fake_tensorrt.lean_library)
    engine = Emulated(lean)
    engine.load(*engine.graphs)
    engine.close()
    newer = functools.partial(fake_tensorrt.lean_library, version="10.20.0.1")
    monkeypatch.setattr(emulated, "library", newer)
    Emulated(lean).close()
    for version in ("10.15.9.9", "11.0.0.1"):
        monkeypatch.setattr(
            emulated, "library", functools.partial(fake_tensorrt.lean_library, version=version)
        )
        with pytest.raises(
            BundleError, match=rf"here is {version}, which cannot run it; .* --lean on the dev"
        ):
            Emulated(lean)


def test_plans_and_runtimes_that_do_not_fit(
    lean: Bundle, planned: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which module is imported follows the plans, and the error names both ways out."""
    monkeypatch.setattr(Cuda, "open", lambda: FakeCuda(TARGET))
    full, small = fake_tensorrt.library(FakeCuda()), fake_tensorrt.lean_library(FakeCuda())
    full.__spec__ = small.__spec__ = machinery.ModuleSpec("tensorrt", None)
    for bundle, here, missing, other in (
        (lean, ("tensorrt", full), "tensorrt_lean", r"pip install tensorrt-lean; or build them for the full runtime.*tensorrt on"),
        (planned, ("tensorrt_lean", small), "tensorrt", r"JetPack brings it along\); or build them for the lean.*--lean on"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            patch.setitem(sys.modules, *here)
            with pytest.raises(DeviceError, match=rf"the module {missing} is missing: .*{other} the device`"):
                create(bundle, "tensorrt")
    with pytest.raises(OptionError, match="--lean: tensorrt-rtx has no lean runtime"):
        resolve(PlanOptions(lean=True))


def test_plans_for_either_runtime_are_not_mixed(planned: Bundle) -> None:
    first, *others = planned.manifest.plans
    mixed = replace(planned.manifest, plans=[first | {"lean": True}, *others])
    with pytest.raises(BundleError, match="some plans for sm87 are for the lean runtime, others are not"):
        choose_plans(mixed, planned.path, TARGET, lambda backend: True)


def test_an_older_tensorrt_has_memory_as_a_field(
    planned: Bundle, rigs: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = fake_tensorrt.ExecutionContext.set_device_memory
    monkeypatch.delattr(fake_tensorrt.ExecutionContext, "set_device_memory")
    field = property(lambda self: self._memory[0], lambda self, address: taken(self, address, self._need))
    monkeypatch.setattr(fake_tensorrt.ExecutionContext, "device_memory", field, raising=False)
    rig: Rig = rigs("llama", "tensorrt").fresh()
    request = rig.request(51)
    run = lossless.generate(rig, request, 20, proposer=lossless.DRAFTS["early-exit"](rig, ()), length=3)
    assert run.tokens == rig.oracle.greedy(request, 20) and rig.engine.counts.launches


def test_a_plan_that_allocates_is_not_captured(
    planned: Bundle, rigs: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans of an older exporter let TensorRT allocate: their cycles are put into the stream call by call."""
    loaded = fake_tensorrt.Engine.__init__

    def older(self: Any, *arguments: Any) -> None:
        loaded(self, *arguments)
        self.user_allocation = False

    monkeypatch.setattr(fake_tensorrt.Engine, "__init__", older)
    rig: Rig = rigs("llama", "tensorrt").fresh()
    request = rig.request(51)
    run = lossless.generate(rig, request, 20, proposer=lossless.DRAFTS["early-exit"](rig, ()), length=3)
    assert run.tokens == rig.oracle.greedy(request, 20)
    assert rig.engine.counts.launches == 0


def test_a_shorter_session_binds_the_whole_cache(planned: Bundle) -> None:
    from vlmexport.runtime.decoder.decoder import Decoder

    limits = planned.manifest.limits
    decoder = Decoder(Emulated(planned), planned.manifest, planned.tensor, max_length=20)
    assert decoder.max_length == 20
    assert decoder.arena.cache_len == decoder.arena.capacity == limits.max_length + limits.max_width


def test_passes_are_timed_to_their_end(planned: Bundle) -> None:
    """On an engine with a queue a pass has not begun when `run` returns."""
    engine = Emulated(planned)
    timer = GraphTimer(planned, engine, cache=20, source=1)
    calls = timer.calls(["segment.0", "head"], 2)
    found = sampled_seconds({"pass": calls}, budget=0.0, wait=timer.wait)
    assert not engine.cuda.queue.queue
    assert engine.counts.synchronisations >= len(found["pass"]) == 15


def test_passes_are_timed_as_decoding_runs_them(planned: Bundle) -> None:
    engine = Emulated(planned)
    timer = GraphTimer(planned, engine, cache=20, source=1)
    graphs = ["segment.0", "head"]
    calls = timer.repeated(graphs, timer.calls(graphs, 2))
    sampled_seconds({"pass": calls}, budget=0.0, wait=timer.wait)
    assert engine.counts.launches == 5 * 5 - 1, "all but the first run are replayed"
    commit = [timer.call("commit", 2)]
    assert timer.repeated(["commit"], commit) is commit
    engine.close()


def test_a_session_that_cannot_be_loaded_leaves_nothing(
    planned: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Emulated(planned)
    monkeypatch.setattr(session.engines, "create", lambda *_: engine)
    monkeypatch.setattr(engine, "_checked_bytes", lambda plan: b"no plan")
    with pytest.raises(BundleError, match="magic tag mismatch"):
        session.Session.load(planned, "tensorrt")
    assert not {where for _, where in engine.cuda._blocks.values()} - {"host"}


# --- from a bundle to text ---


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and TensorRT."""
    cuda = FakeCuda(TARGET)
    monkeypatch.setattr(Cuda, "open", lambda: cuda)
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.library(cuda))
    monkeypatch.setattr(api, "local_architecture", lambda: TARGET)


@pytest.mark.usefixtures("here")
def test_from_plans_to_text(
    tiny_bundle: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tiny = tiny_bundle("llama")
    folder = str(shutil.copytree(tiny.path, tmp_path / "bundle"))
    line = ["run", folder, "--prompt", "the red cup", "--max-new-tokens", "20", "--draft", "early-exit"]
    assert main([*line, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert main([*line, "--device", "tensorrt"]) == 2
    assert (
        "no TensorRT plans for this GPU (sm87); the bundle has none; build them with `vlmexport compile"
        in capsys.readouterr().err
    )
    assert main(["compile", folder, "--backend", "tensorrt-rtx", "--lean"]) == 2
    assert "--lean: tensorrt-rtx has no lean runtime" in capsys.readouterr().err
    assert main(["compile", folder, "--backend", "tensorrt", "--plan-precision", "fp32"]) == 0
    capsys.readouterr()
    assert main([*line, "--device", "tensorrt"]) == 0
    assert capsys.readouterr().out == said and len(said) > 10
    assert (
        main(["bench", folder, "--device", "tensorrt", "--prompt", "a", "--max-new-tokens", "8", "--json"])
        == 0
    )
    report = capsys.readouterr().out
    assert '"gpu": "a GPU that is not there"' in report
    assert main(["profile", folder, "--device", "tensorrt", "--widths", "1,2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["timed_with"], report["device"]) == ("the engine tensorrt", "a GPU that is not there")
    assert report["request"]["ms"]["host"] is not None and {"embed", "mask"} <= {
        row["graph"] for row in report["graphs"]
    }
    assert (
        main(["verify", folder, "--model", str(tiny.checkpoint), "--device", "tensorrt", "--prompts", "1"])
        == 0
    )
    assert "Verified." in capsys.readouterr().out


def test_a_machine_without_a_gpu_is_one_line(
    tiny_bundle: Callable, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise DeviceError("no NVIDIA GPU was found")

    monkeypatch.setattr(Cuda, "open", missing)
    path = str(tiny_bundle("llama").path)
    capsys.readouterr()
    assert main(["run", path, "--prompt", "a", "--device", "tensorrt"]) == 2
    assert capsys.readouterr().err.strip().endswith("no NVIDIA GPU was found")
