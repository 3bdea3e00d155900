"""What a build takes and what there is: the arithmetic, with files of a made-up machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vlmexport.exporter.checkpoint.tensors import TensorFiles
from vlmexport.exporter.common import memory
from vlmexport.exporter.common.memory import (
    CheckpointMemory,
    GraphMemory,
    RecordedMemory,
    available_memory,
    fits_whole,
    graph_memory,
)
from vlmexport.exporter.graphs.weights import WeightRef, WeightStore
from vlmexport.runtime.common.errors import ExportError

GIB = 1 << 30


def test_pieces_are_runs_of_nodes_with_one_prefix() -> None:
    nodes = [("layer.0/MatMul_0", ["hidden", "a"]), ("layer.0/Add_1", ["x", "b"]), ("layer.1/MatMul_2", ["x", "c"]),
             ("logits", ["x", "a"])]  # fmt: skip
    found = graph_memory(nodes, {"a": 100, "b": 1, "c": 60})
    assert found == GraphMemory(weights=161, largest=100, piece=201)
    assert graph_memory([("cast", ["hidden"])], {}) == GraphMemory(0, 0, 0)


def test_whole_counts_the_reference_beside_its_shards_and_beside_the_sessions() -> None:
    graphs = [GraphMemory(700, 90, 300), GraphMemory(200, 200, 400)]
    left = memory.LEFTOVER_BYTES

    def model(stored: int, widened: int) -> CheckpointMemory:
        return CheckpointMemory(stored, float32=1000, largest=10, widened=widened)

    kept = RecordedMemory(module=30, passed=40, graphs=20)
    assert memory.whole_parity_bytes(graphs, model(500, 70), kept) == 1000 + left + 20 + 900 + 200
    assert memory.whole_parity_bytes(graphs, model(500, 5000), kept) == 1000 + left + 30 + 5000
    assert memory.whole_parity_bytes(graphs, model(5000 + left, 70), kept) == 6000 + left
    assert memory.streamed_parity_bytes(graphs, model(500, 350), kept) == left + 20 + 400
    assert memory.streamed_parity_bytes(graphs, model(500, 450), kept) == left + 30 + 450
    assert memory.streamed_parity_bytes([], model(500, 5), kept) == left + 40


def test_recordings_of_every_input_are_counted_when_they_exist() -> None:
    """The second input's float64 comes beside the first one's values and errors."""
    assert RecordedMemory.of([100, 10]) == RecordedMemory(module=300, passed=400, graphs=220)
    assert RecordedMemory.of([10, 100]) == RecordedMemory(module=320, passed=420, graphs=220)


def test_available_memory_is_the_default_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 10 * GIB)
    assert fits_whole(9 * GIB, None, GIB) and not fits_whole(9 * GIB + 1, None, GIB)
    assert fits_whole(99 * GIB, GIB, GIB) and not fits_whole(0, GIB, GIB + 1)
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    assert fits_whole(99 * GIB, None, 4 * GIB) and not fits_whole(0, None, 4 * GIB + 1)


def machine(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_machine_says_what_is_available(tmp_path: Path) -> None:
    machine(tmp_path, {"meminfo": "MemTotal:       2000 kB\nMemAvailable:   1500 kB\n"})
    assert memory._machine_memory(tmp_path / "meminfo") == 1500 * 1024
    assert (memory._machine_memory(tmp_path / "nothing") or 1) > 0
    assert available_memory()


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        (  # version 2: the group's own bound, and a tighter one above it; page cache counts as free
            "0::/a/b\n",
            {"a/b/memory.max": "max\n", "a/b/memory.current": "5", "a/b/memory.stat": "",
             "a/memory.max": "1000\n", "a/memory.current": "700\n", "a/memory.stat": "inactive_file 100\nactive_file 50\n"},
            [450],
        ),
        (  # version 1
            "4:cpu:/x\n7:memory:/x\n",
            {"memory/x/memory.limit_in_bytes": "900", "memory/x/memory.usage_in_bytes": "400", "memory/x/memory.stat": "rss 1"},
            [500],
        ),
        ("0::/\n", {}, []),
    ],
)  # fmt: skip
def test_control_groups_bound_it(
    membership: str, files: dict[str, str], left: list[int], tmp_path: Path
) -> None:
    root = machine(tmp_path / "cgroup", files)
    (tmp_path / "self").write_text(membership)
    assert memory._group_memory(root, tmp_path / "self") == left
    assert memory._group_memory(root, tmp_path / "missing") == []


# --- reading ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_are_read_as_the_library_reads_them(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {"b": torch.randn(3, 5).mul(9).to(dtype), "a": torch.ones(7).to(dtype), "one": torch.tensor(3).to(dtype),
               "none": torch.zeros(0, 4).to(dtype)}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    assert set(files) == set(tensors)
    for name, tensor in tensors.items():
        found = files.read(name)
        assert found.dtype == dtype and torch.equal(found, tensor)


def test_a_file_that_was_cut_off_after_it_was_opened_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ExportError, match=r"model\.safetensors is cut off; download it again"):
        files.read("a")
    with pytest.raises(ExportError, match=r"model\.safetensors cannot be read"):
        TensorFiles(tmp_path)


class Parts:
    """Two tensors in half precision."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tensors = {
            n: torch.randn(rows, 5, generator=generator).half() for n, rows in (("a", 3), ("b", 2))
        }

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def order(self, name: str) -> tuple[int, int]:
        return 0, 0


def store_of(parts: Parts, dtype: str = "float32") -> WeightStore:
    described: Any = SimpleNamespace(weights_dtype=dtype)  # all that storing needs of a manifest
    return WeightStore([parts], described)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("transpose", [False, True])
def test_parts_are_joined_then_transposed(transpose: bool, dtype: str) -> None:
    parts = Parts()
    joined = torch.cat(list(parts.tensors.values())).to(getattr(torch, dtype))
    found = store_of(parts, dtype).materialize(WeightRef(("a", "b"), transpose, (5, 5)))
    assert found.dtype == getattr(torch, dtype) and found.is_contiguous()
    assert torch.equal(found, joined.T if transpose else joined)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_named(bad: float) -> None:
    parts = Parts()
    parts.tensors["b"][1, 2] = bad
    with pytest.raises(ExportError, match=r"tensor b holds 1 number\(s\) that are NaN or infinite"):
        store_of(parts).materialize(WeightRef(("a", "b"), False, (5, 5)))


def test_opposite_infinities_are_detected() -> None:
    parts = Parts()
    parts.tensors["a"][0, :2] = torch.tensor([float("inf"), float("-inf")])
    with pytest.raises(ExportError, match="tensor a holds 2"):
        store_of(parts).materialize(WeightRef(("a", "b"), False, (5, 5)))


def test_weights_beyond_float16_are_named() -> None:
    parts = Parts()
    parts.tensors["a"] = parts.tensors["a"].float()
    parts.tensors["a"][2, 4] = -7e4
    ref = WeightRef(("a", "b"), True, (5, 5))
    with pytest.raises(
        ExportError, match=r"tensor a reaches 7e\+04, beyond float16; use --precision bfloat16"
    ):
        store_of(parts, "float16").materialize(ref)
    assert store_of(parts, "bfloat16").materialize(ref).isfinite().all()


def test_one_part_is_held_at_a_time() -> None:
    parts, read = Parts(), []

    def fresh(name: str) -> torch.Tensor:
        assert all(part() is None for part in read)
        tensor = parts.tensors[name].clone()
        read.append(weakref.ref(tensor))
        return tensor

    parts.read = fresh  # type: ignore[method-assign]
    store_of(parts).materialize(WeightRef(("a", "b"), True, (5, 5)))
    assert len(read) == 2 and all(part() is None for part in read)


def test_checkpoint_reports_its_memory(tiny_checkpoint: Callable[..., Path]) -> None:
    files = TensorFiles(tiny_checkpoint("llama", dtype=torch.float16))
    count = sum(files.read(name).numel() for name in files)
    biggest = max(files.read(name).numel() for name in files)
    assert (files.memory.stored, files.memory.float32) == (2 * count, 4 * count)
    assert (files.memory.largest, files.memory.widened) == (2 * biggest, 10 * biggest)
