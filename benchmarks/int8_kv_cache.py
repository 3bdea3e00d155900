"""Would a key/value cache of int8 pay? Time of attention over it, what a whole token gains, and what it loses.

    python -m benchmarks.int8_kv_cache [--smollm2 runs/smollm2]

Time: one layer's attention of one position over a full cache, as a graph of its own, by what ONNX Runtime offers on a
CPU: `Attention` over float32 (what bundles have), `DequantizeLinear` of an int8 cache in front of it, and its own
`GroupQueryAttention` over float32 and over int8 (a scale per channel). Median of rounds, the forms one after the other in
random order. Beside it the product of the same layer's int4 weights, once, so that a token's share is known.
Loss: KL divergence on held-out text between the model with its cache and with one that was rounded to int8, in PyTorch:
a scale per head and position, as an engine that writes rows could compute it, or per channel, as `GroupQueryAttention`
wants it before the first token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from benchmarks.machine import save

SHAPES = {
    "SmolLM2-135M": {"heads": 9, "kv_heads": 3, "head_dim": 64, "hidden": 576, "intermediate": 1536},
    "Qwen2.5-VL-3B": {"heads": 16, "kv_heads": 2, "head_dim": 128, "hidden": 2048, "intermediate": 11008},
    "LLaVA-1.5-7B": {"heads": 32, "kv_heads": 32, "head_dim": 128, "hidden": 4096, "intermediate": 11008},
}
LENGTHS = (512, 4096)
THREADS = 2
BLOCK = 32
FLOAT, INT8 = TensorProto.FLOAT, TensorProto.INT8


def attention_model(heads: int, kv_heads: int, head_dim: int, length: int, cache: int) -> bytes:
    """`Attention` as the folded graphs of a bundle have it: query heads of one key head are rows."""
    query = helper.make_tensor_value_info("query", FLOAT, [1, kv_heads, heads // kv_heads, head_dim])
    inputs = [
        query,
        *(helper.make_tensor_value_info(n, cache, [1, kv_heads, length, head_dim]) for n in ("key", "value")),
    ]
    nodes, rows, scales = [], ["key", "value"], []
    if cache == INT8:
        scales = [
            helper.make_tensor(f"{name}_scale", FLOAT, [1], np.array([0.02], np.float32)) for name in rows
        ]
        nodes = [
            helper.make_node("DequantizeLinear", [name, f"{name}_scale"], [f"{name}_float"]) for name in rows
        ]
        # One scale is the fastest that the operator can do: more are no cheaper.
        for scale in scales:
            del scale.dims[:]
        rows = ["key_float", "value_float"]
    nodes.append(helper.make_node("Attention", ["query", *rows], ["out"], scale=head_dim**-0.5))
    out = helper.make_tensor_value_info("out", FLOAT, None)
    return _bytes(nodes, inputs, [out], scales)


def grouped_model(heads: int, kv_heads: int, head_dim: int, length: int, cache: int) -> bytes:
    """`GroupQueryAttention` of ONNX Runtime, which also writes the new row."""
    width = head_dim * kv_heads
    row = [
        ("query", FLOAT, [1, 1, heads * head_dim]),
        ("key", FLOAT, [1, 1, width]),
        ("value", FLOAT, [1, 1, width]),
    ]
    caches = [(name, cache, [1, kv_heads, length, head_dim]) for name in ("past_key", "past_value")]
    inputs = [helper.make_tensor_value_info(*each) for each in (*row, *caches)]
    constants = [
        helper.make_tensor("seqlens", TensorProto.INT32, [1], [length - 1]),
        helper.make_tensor("total", TensorProto.INT32, [1], [length]),
    ]
    names = ["query", "key", "value", "past_key", "past_value", "seqlens", "total"]
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads}
    if cache == INT8:
        scale = np.full((1, kv_heads, 1, head_dim), 0.02, np.float32)
        constants += [
            helper.make_tensor(n, FLOAT, scale.shape, scale.ravel()) for n in ("k_scale", "v_scale")
        ]
        names += [""] * 5 + ["k_scale", "v_scale"]
        attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        ["out", "present_key", "present_value"],
        domain="com.microsoft",
        **attributes,
    )
    outputs = [helper.make_tensor_value_info("out", FLOAT, None)]
    outputs += [helper.make_tensor_value_info(f"present_{n}", cache, caches[0][2]) for n in ("key", "value")]
    return _bytes([node], inputs, outputs, constants)


def layer_model(hidden: int, intermediate: int, kv_width: int) -> bytes:
    """The products of a layer with int4 weights in blocks, as a bundle has them."""
    generator = np.random.default_rng(0)
    nodes, constants = [], []

    def product(x: str, name: str, rows: int, columns: int) -> str:
        packed = generator.integers(0, 256, rows * columns // 2, dtype=np.uint8).tobytes()
        constants.append(
            helper.make_tensor(f"{name}_integers", TensorProto.INT4, [rows, columns], packed, raw=True)
        )
        scales = np.full((rows // BLOCK, columns), 0.01, np.float32)
        constants.append(
            helper.make_tensor(f"{name}_scales", FLOAT, scales.shape, scales.tobytes(), raw=True)
        )
        nodes.append(
            helper.make_node(
                "DequantizeLinear",
                [f"{name}_integers", f"{name}_scales"],
                [f"{name}_float"],
                axis=0,
                block_size=BLOCK,
            )
        )
        nodes.append(helper.make_node("MatMul", [x, f"{name}_float"], [f"{name}_out"]))
        return f"{name}_out"

    outs = [product("x", "qkv", hidden, hidden + 2 * kv_width), product("x", "o", hidden, hidden)]
    outs += [product("x", "gate_up", hidden, 2 * intermediate), product("y", "down", intermediate, hidden)]
    inputs = [helper.make_tensor_value_info("x", FLOAT, [1, 1, hidden])]
    inputs += [helper.make_tensor_value_info("y", FLOAT, [1, 1, intermediate])]
    return _bytes(
        nodes, inputs, [helper.make_tensor_value_info(name, FLOAT, None) for name in outs], constants
    )


def _bytes(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: list[Any]) -> bytes:
    graph = helper.make_graph(nodes, "layer", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()


def call(model: bytes) -> Callable[[], None]:
    """Runs a model on bound values; caches stay where they are."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    generator = np.random.default_rng(0)
    for value in session.get_inputs():
        array = generator.standard_normal(value.shape).astype(np.float32)
        if value.type == "tensor(int8)":
            array = (array * 30).clip(-127, 127).astype(np.int8)
        held = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(value.name, held)
        if value.name.startswith("past_"):
            binding.bind_ortvalue_output(value.name.replace("past", "present"), held)
    for value in session.get_outputs():
        if not value.name.startswith("present_"):
            binding.bind_output(value.name)
    return lambda: session.run_with_iobinding(binding)


def times(shape: dict[str, int], length: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each form."""
    attention = shape["heads"], shape["kv_heads"], shape["head_dim"]
    kv_width = shape["kv_heads"] * shape["head_dim"]
    forms = {
        "Attention, float32": call(attention_model(*attention, length, FLOAT)),
        "DequantizeLinear, Attention, int8": call(attention_model(*attention, length, INT8)),
        "GroupQueryAttention, float32": call(grouped_model(*attention, length, FLOAT)),
        "GroupQueryAttention, int8": call(grouped_model(*attention, length, INT8)),
        "int4 products of the layer": call(layer_model(shape["hidden"], shape["intermediate"], kv_width)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    order, shuffle = list(forms), random.Random(0)
    evict = np.zeros(8 << 20)  # 64 MB: in a model other layers pass between two calls of one
    for number in range(rounds + 2):
        shuffle.shuffle(order)
        for name in order:
            evict += 1
            begin = time.perf_counter()
            forms[name]()
            if number > 1:
                seconds[name].append(time.perf_counter() - begin)
    return {name: round(1e3 * statistics.median(values), 3) for name, values in seconds.items()}


def rounded(rows: Any, axis: int, scale: Any = None) -> Any:
    """Rows [batch, heads, positions, head_dim] as int8 says them, with a scale along `axis` or a given one."""
    scale = rows.abs().amax(axis, keepdim=True).clamp_min(1e-9) / 127 if scale is None else scale
    return (rows / scale).round().clamp(-127, 127) * scale


def divergence(model: str, texts: int, length: int) -> dict[str, float]:
    """Mean KL divergence per position to the model with a float32 cache."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    from benchmarks.quantization import HELD_OUT, prose

    class Int8Cache(DynamicCache):
        """What attention reads was rounded; keys after their rotation, as bundles keep them."""

        scales: dict[tuple[int, int], Any] | None = None

        def update(self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any, **named: Any) -> Any:
            pair = []
            for which, rows in enumerate((key_states, value_states)):
                if self.scales is None:
                    pair.append(rounded(rows, -1))
                else:
                    pair.append(rounded(rows, 2, self.scales[layer_idx, which]))
            return super().update(*pair, layer_idx, *rest, **named)

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = tokenizer(prose(HELD_OUT), return_tensors="pt").input_ids[0]
    pieces = ids[: (texts + 1) * length].split(length)[: texts + 1]
    found: dict[str, list[float]] = {"per head and position": [], "per channel, from another text": []}
    with torch.no_grad():
        first = network(pieces[0][None], past_key_values=DynamicCache(), use_cache=True).past_key_values
        scales = {
            (layer, which): rows.abs().amax(2, keepdim=True) / 127
            for layer, each in enumerate(first.layers)
            for which, rows in enumerate((each.keys, each.values))
        }
        for piece in pieces[1:]:
            float_logits = network(piece[None]).logits.log_softmax(-1)
            for name, values in found.items():
                cache = Int8Cache()
                cache.scales = scales if "channel" in name else None
                logits = network(piece[None], past_key_values=cache, use_cache=True).logits.log_softmax(-1)
                values.append(float((float_logits.exp() * (float_logits - logits)).sum(-1).mean()))
    return {name: round(statistics.mean(values), 6) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--smollm2", metavar="DIR", help="measure the loss on this model")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="positions of a text")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {"script": "benchmarks/int8_kv_cache.py", "threads": THREADS, "ms": {}}
    for name, shape in SHAPES.items():
        for length in LENGTHS:
            row = result["ms"][f"{name}, {length} positions"] = times(shape, length, options.rounds)
            token = row["int4 products of the layer"] + row["Attention, float32"]
            best = min(value for form, value in row.items() if form.endswith("int8"))
            row["a layer gains, times"] = round(token / (row["int4 products of the layer"] + best), 3)
            print(name, length, json.dumps(row), flush=True)
    if options.smollm2:
        result["kl"] = divergence(options.smollm2, options.texts, options.length)
    print(json.dumps(result, indent=1))
    if not options.no_save:
        print(save("int8-kv-cache", result, "onnxruntime", "torch", "transformers"))


if __name__ == "__main__":
    main()
