"""What the operators of a decode pass cost on a GPU, one switch at a time: layout and type of weights, forms of attention, fused
normalizations.

    python -m benchmarks.gpu_operators [--shape llava-1.5-7b] [--rows 1,4,16] [--repeats 15] [--output FILE]
    python -m benchmarks.gpu_operators --provider cpu --shape small          # a rehearsal without a GPU

Each arm is a graph of `COPIES` nodes of one kind. Each node has weights, or a KV cache, of its own, so that no cache of the
processor holds them. The CUDA provider captures the graph and replays it. Arms take turns; a figure is the median time of one
node. `of_bandwidth` divides the bytes that a node must read by its time and by the memory's published bandwidth.

Not every arm is a graph that `vlmexport` writes: the table shows what another form would bring.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper
from vlmexport.runtime.engines.onnxruntime import session_options

from benchmarks.machine import write

COPIES = 12
VALID = 700
"""Rows of a KV cache that are filled."""

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder layer, and of its KV cache in tokens."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    caches: tuple[int, ...]


SHAPES = {
    "llava-1.5-7b": Shape(4096, 11008, 32, 32, 128, (1024, 4096)),
    "qwen2.5-vl-7b": Shape(3584, 18944, 28, 4, 128, (1024, 4096)),
    "small": Shape(256, 512, 4, 2, 64, (1024,)),
}


@dataclass
class Graph:
    """An ONNX graph that grows by nodes, and the values of its inputs."""

    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    bytes: int = 0
    """Bytes that all nodes together must read."""

    def input(self, name: str, value: np.ndarray) -> str:
        """An input of the graph."""
        self.inputs[name] = value
        return name

    def weight(self, name: str, value: np.ndarray) -> str:
        """An input that a node must read whole. Weights are inputs, so that no model of gigabytes is parsed; the provider's
        kernels for them are those of constants."""
        self.bytes += value.nbytes
        return self.input(name, value)

    def constant(self, name: str, value: np.ndarray) -> str:
        """A small constant, which the provider may keep on the host."""
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def add(
        self, op: str, inputs: list[str], outputs: int = 1, domain: str = "", **attributes: Any
    ) -> list[str]:
        """A node, and the names of its outputs."""
        names = [f"{op}_{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, domain=domain, **attributes))
        return names

    def model(self) -> bytes:
        """The serialized model."""
        graph = helper.make_graph(
            self.nodes,
            "arm",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
                for name, value in self.inputs.items()
            ],
            [helper.make_value_info(name, onnx.TypeProto()) for name in self.outputs],
            self.constants,
        )
        opsets = [helper.make_opsetid("", 24), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()


Arms = Iterator[tuple[dict[str, Any], Callable[[], Graph]]]
"""What an arm is, as a row of the table, and how its graph is made."""


def normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Small random numbers, float16."""
    block = random.standard_normal(min(int(np.prod(shape)), 1 << 20), dtype=np.float32) / shape[0] ** 0.5
    return np.resize(block.astype(np.float16), shape)


def product(form: str, rows: int, inner: int, outer: int) -> Graph:
    """`COPIES` products of [rows, inner] with weights of inner × outer numbers."""
    random, graph = np.random.default_rng(1), Graph()
    flat = form.startswith("gemm")
    x = graph.input("x", normal(random, rows, inner) if flat else normal(random, 1, rows, inner))
    if form.startswith("int"):
        bits, block = (int(word) for word in form.removeprefix("int").split(" block "))
        count = inner // block
        packed = np.resize(
            random.integers(0, 256, 1 << 20, dtype=np.uint8), (outer, count, block * bits // 8)
        )
        scales = np.full((outer, count), 0.01, np.float16)
        for copy in range(COPIES):
            operands = [x, graph.weight(f"weight{copy}", packed), graph.weight(f"scales{copy}", scales)]
            graph.outputs += graph.add(
                "MatMulNBits", operands, domain=MICROSOFT, K=inner, N=outer, bits=bits, block_size=block
            )
        return graph
    weight = normal(random, *((outer, inner) if form == "gemm [out, in]" else (inner, outer)))
    for copy in range(COPIES):
        operands = [x, graph.weight(f"weight{copy}", weight)]
        graph.outputs += (
            graph.add("Gemm", operands, transB=int(form == "gemm [out, in]"))
            if flat
            else graph.add("MatMul", operands)
        )
    return graph


PRODUCTS = (
    "matmul [in, out]", "gemm [in, out]", "gemm [out, in]", "int8 block 128", "int4 block 32", "int4 block 128",
)  # fmt: skip


def products(shape: Shape, rows: tuple[int, ...]) -> Arms:
    """The layer's products: queries, keys and values; gate and up; down."""
    kv = 2 * shape.kv_heads * shape.head_dim
    for inner, outer in (
        (shape.hidden, shape.heads * shape.head_dim + kv),
        (shape.hidden, 2 * shape.inner),
        (shape.inner, shape.hidden),
    ):
        for count in rows:
            for form in PRODUCTS:
                arm = {"operator": "product", "form": form, "shape": [inner, outer], "rows": count}
                yield (
                    arm,
                    lambda form=form, count=count, inner=inner, outer=outer: product(
                        form, count, inner, outer
                    ),
                )


def attention(form: str, rows: int, cache: int, shape: Shape) -> Graph:
    """`COPIES` attentions of new rows over a KV cache of which `VALID` tokens are filled."""
    random, graph = np.random.default_rng(1), Graph()
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    group = heads // kv_heads
    filled = VALID + rows
    scale = dim**-0.5
    graph.bytes = COPIES * 2 * kv_heads * filled * dim * 2
    caches = [
        [graph.input(f"{name}{copy}", normal(random, 1, kv_heads, cache, dim)) for name in ("key", "value")]
        for copy in range(COPIES)
    ]
    if form == "contrib GroupQueryAttention":  # writes the cache and rotates, too
        width = (heads + 2 * kv_heads) * dim
        x = graph.input("x", normal(random, 1, rows, width))
        last = graph.input("last", np.array([filled - 1], np.int32))
        total = graph.constant("total", np.array([filled], np.int32))
        cos = graph.input("cos", normal(random, cache, dim // 2))
        sin = graph.input("sin", normal(random, cache, dim // 2))
        for key, value in caches:
            out = graph.add(
                "GroupQueryAttention", [x, "", "", key, value, last, total, cos, sin], 3, MICROSOFT, num_heads=heads,
                kv_num_heads=kv_heads, do_rotary=1, scale=scale,
            )  # fmt: skip
            graph.outputs += out
        return graph
    folded = form.startswith("folded")
    queries = (1, kv_heads, group * rows, dim) if folded else (1, heads, rows, dim)
    x = graph.input("x", normal(random, *queries))
    more: list[str] = []
    if form.endswith("mask"):
        width = group * rows if folded else rows
        seen = np.arange(cache)[None, :] <= VALID + np.tile(np.arange(rows), width // rows)[:, None]
        more = [graph.input("mask", seen[None, None])]
    elif form.endswith("nonpad_kv_seqlen"):
        more = ["", "", "", graph.input("seqlen", np.array([filled], np.int64))]
    for key, value in caches:
        graph.outputs += graph.add("Attention", [x, key, value, *more], scale=scale)
    return graph


ATTENTIONS = (
    "mask", "folded, mask", "nonpad_kv_seqlen", "folded, nonpad_kv_seqlen", "full buffer",
    "contrib GroupQueryAttention",
)  # fmt: skip
"""Forms without a mask let every new row see all valid ones: they are right for one row, and show the kernel's cost for more."""


def attentions(shape: Shape, rows: tuple[int, ...]) -> Arms:
    """Attention over each cache."""
    for cache in shape.caches:
        for count in rows:
            for form in ATTENTIONS:
                if form.startswith("folded") and shape.heads == shape.kv_heads:
                    continue
                arm = {"operator": "attention", "form": form, "cache": cache, "valid": VALID, "rows": count}
                yield arm, lambda form=form, count=count, cache=cache: attention(form, count, cache, shape)


def elementwise(form: str, rows: int, shape: Shape) -> Graph:
    """`COPIES` of what lies between two products."""
    random, graph = np.random.default_rng(1), Graph()
    x = graph.input("x", normal(random, 1, rows, shape.hidden))
    for copy in range(COPIES):
        scale = graph.input(f"scale{copy}", normal(random, shape.hidden))
        gate = graph.input(f"gate{copy}", normal(random, 1, rows, 2 * shape.inner))
        residual = graph.input(f"residual{copy}", normal(random, 1, rows, shape.hidden))
        if form == "Add, RMSNormalization":
            total = graph.add("Add", [x, residual])
            graph.outputs += [*graph.add("RMSNormalization", [*total, scale], epsilon=1e-5), *total]
        elif form == "SkipSimplifiedLayerNormalization":
            out = graph.add(form, [x, residual, scale], 4, MICROSOFT, epsilon=1e-5)
            graph.nodes[-1].output[1] = graph.nodes[-1].output[2] = ""
            graph.outputs += [out[0], out[3]]
        elif form == "Split, Sigmoid, Mul, Mul":
            first, second = graph.add("Split", [gate], 2, axis=-1, num_outputs=2)
            sigmoid = graph.add("Sigmoid", [first])
            silu = graph.add("Mul", [first, *sigmoid])
            graph.outputs += graph.add("Mul", [*silu, second])
        elif form == "Split, Swish, Mul":
            first, second = graph.add("Split", [gate], 2, axis=-1, num_outputs=2)
            graph.outputs += graph.add("Mul", [*graph.add("Swish", [first]), second])
        else:  # Add
            graph.outputs += graph.add("Add", [x, residual])
    return graph


ELEMENTWISE = (
    "Add", "Add, RMSNormalization", "SkipSimplifiedLayerNormalization", "Split, Sigmoid, Mul, Mul", "Split, Swish, Mul",
)  # fmt: skip


def elementwise_arms(shape: Shape, rows: tuple[int, ...]) -> Arms:
    """What lies between products."""
    for count in rows:
        for form in ELEMENTWISE:
            arm = {"operator": "elementwise", "form": form, "rows": count}
            yield arm, lambda form=form, count=count: elementwise(form, count, shape)


class Runner:
    """A session of an arm with its memory on the device."""

    def __init__(self, graph: Graph, provider: str):
        options = session_options(pooled=False)
        cuda = provider == "cuda"
        providers: list[Any] = (
            [("CUDAExecutionProvider", {"use_tf32": "0", "enable_cuda_graph": "1"})] if cuda else []
        )
        session = ort.InferenceSession(
            graph.model(), options, providers=[*providers, "CPUExecutionProvider"], enable_fallback=0
        )
        if cuda and "CUDAExecutionProvider" not in session.get_providers():
            raise SystemExit("ONNX Runtime cannot load its CUDA provider")
        self._binding = session.io_binding()
        self._values = [
            ort.OrtValue.ortvalue_from_numpy(value, provider, 0) for value in graph.inputs.values()
        ]
        for name, value in zip(graph.inputs, self._values, strict=True):
            self._binding.bind_ortvalue_input(name, value)
        for name in graph.outputs:
            self._binding.bind_output(name, provider, 0)
        uncaptured = ort.RunOptions()
        uncaptured.add_run_config_entry("gpu_graph_id", "-1")
        session.run_with_iobinding(self._binding, uncaptured)
        outputs = dict(zip(graph.outputs, self._binding.get_outputs(), strict=True))
        self._values += outputs.values()  # addresses that a captured graph writes to
        self._binding.clear_binding_outputs()
        for name, value in outputs.items():
            self._binding.bind_ortvalue_output(name, value)
        self._session = session
        for _ in range(3):
            self.seconds()

    def seconds(self, runs: int = 4) -> float:
        """Seconds of one node, in `runs` replays."""
        begin = time.perf_counter()
        for _ in range(runs):
            self._session.run_with_iobinding(self._binding)
        return (time.perf_counter() - begin) / runs / COPIES


def measure(arms: Arms, provider: str, repeats: int, bandwidth: float | None) -> list[dict[str, Any]]:
    """A row for each arm. Arms of one operator, shape and number of rows take turns."""
    groups: dict[str, list[tuple[dict[str, Any], Callable[[], Graph]]]] = {}
    for arm, make in arms:
        groups.setdefault(str({key: value for key, value in arm.items() if key != "form"}), []).append(
            (arm, make)
        )
    rows = []
    for group in groups.values():
        runners = []
        for arm, make in group:
            graph = make()
            try:
                runners.append((arm, graph.bytes / COPIES, Runner(graph, provider), []))
            except Exception as error:  # a form that this ONNX Runtime does not have is a result
                rows.append({**arm, "not_run": " ".join(str(error).split())[:300]})
        for _ in range(repeats):
            for _, _, runner, seconds in runners:
                seconds.append(runner.seconds())
        for arm, size, _, seconds in runners:
            row = {**arm, "us": round(1e6 * statistics.median(seconds), 2)}
            if bandwidth is not None and size:
                row["of_bandwidth"] = round(size / statistics.median(seconds) / bandwidth, 3)
            rows.append(row)
        print(*(line(row) for row in rows[-len(group) :]), sep="\n", flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    what = " ".join(str(value) for key, value in row.items() if key not in ("us", "of_bandwidth", "not_run"))
    if "not_run" in row:
        return f"{what}: {row['not_run'][:90]}"
    share = f" {row['of_bandwidth']:.0%}" if "of_bandwidth" in row else ""
    return f"{what}: {row['us']:.1f} us{share}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llava-1.5-7b")
    parser.add_argument("--rows", default="1,4,16", help="new positions of a pass")
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", choices=("product", "attention", "elementwise"))
    parser.add_argument("--output", type=Path, metavar="FILE")
    args = parser.parse_args()
    shape, rows = SHAPES[args.shape], tuple(int(count) for count in args.rows.split(","))
    facts: dict[str, Any] = {}
    bandwidth = None
    if args.provider == "cuda":
        from vlmexport.runtime.engines.onnxruntime_cuda import preload

        from benchmarks.gpu import gpu_facts, published_bandwidth

        preload()
        facts = gpu_facts()
        bandwidth = published_bandwidth(facts["gpu"])
    makers = {"attention": attentions, "elementwise": elementwise_arms, "product": products}
    result: dict[str, Any] = {
        "script": "benchmarks/gpu_operators.py",
        **facts,
        "shape": args.shape,
        "rows": [],
    }
    for name, arms in makers.items():
        if args.only in (None, name):
            result["rows"] += measure(arms(shape, rows), args.provider, args.repeats, bandwidth)
            if args.output is not None:
                write(args.output, result, "onnxruntime-gpu")


if __name__ == "__main__":
    main()
