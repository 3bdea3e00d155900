"""Layouts of quantized checkpoints against the libraries that write them, and what is refused.

`tests/data/quantized/make.py` had each library pack a small matrix, and dequantise it. The numbers must be those, bit for
bit: where the library multiplies in float16 or bfloat16, ours rounded to that type, for both round one product once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from vlmexport.exporter.checkpoint.integer_tensors import IntegerTensors
from vlmexport.exporter.checkpoint.layouts import awq, bits, compressed_tensors, float8, gptq, matrix
from vlmexport.exporter.checkpoint.layouts.table import find_layout
from vlmexport.exporter.checkpoint.tensors import TensorFiles
from vlmexport.exporter.quantization.blocks import dequantize
from vlmexport.exporter.quantization.matrix import INTEGERS, ORDER, SCALES, ZERO_POINTS, QuantizedMatrix
from vlmexport.runtime.common.errors import ExportError, UnsupportedModelError, VlmexportError

DATA = Path(__file__).parents[2] / "data" / "quantized"
PATH = "model.layers.0.mlp.up_proj"
NAME = f"{PATH}.weight"

FORMS = {
    "ct-int4": QuantizedMatrix("int4", 32),
    "ct-int4-zero-points": QuantizedMatrix("int4", 32, zero_points=True),
    "ct-int4-channel": QuantizedMatrix("int4", 128),
    "ct-int8": QuantizedMatrix("int8", 32, zero_points=True),
    "ct-int8-channel": QuantizedMatrix("int8", 128),
    "ct-plain-int8": QuantizedMatrix("int8", 128),
    "ct-float8-channel": None,
    "ct-float8-tensor": None,
    "ct-float8-block": None,
    "gptq-int4": QuantizedMatrix("int4", 32),
    "gptq-int4-zero-points": QuantizedMatrix("int4", 32, zero_points=True),
    "gptq-int8-zero-points": QuantizedMatrix("int8", 32, zero_points=True),
    "gptq-v2-int4-zero-points": QuantizedMatrix("int4", 32, zero_points=True),
    "awq-int4": QuantizedMatrix("int4", 32, zero_points=True),
}


def made(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(configuration, tensors) of a file."""
    path = DATA / f"{name}.safetensors"
    with safe_open(str(path), "pt") as file:
        return json.loads(file.metadata()["config"]), load_file(path)


def opened(
    config: dict[str, Any], tensors: dict[str, Tensor], folder: Path, *, readable: bool = True
) -> IntegerTensors:
    """The tensors, saved, as the layout of `config` shows them."""
    save_file({n: t.contiguous() for n, t in tensors.items() if n != "want"}, folder / "model.safetensors")
    files = TensorFiles(folder)
    files.readable = readable
    layout = find_layout([SimpleNamespace(quantization_config=config)], str(folder))
    assert layout is not None
    return IntegerTensors(files, layout)


def shown(name: str, folder: Path) -> tuple[Tensor, Tensor]:
    """(values, those of the library)."""
    config, tensors = made(name)
    want = tensors["want"]
    return opened(config, tensors, folder).read(NAME).to(want.dtype), want


def test_every_file_has_a_form() -> None:
    assert {path.stem for path in DATA.glob("*.safetensors")} == set(FORMS)


@pytest.mark.parametrize("name", FORMS)
def test_values_are_those_of_the_library_that_wrote_them(name: str, tmp_path: Path) -> None:
    config, tensors = made(name)
    files = opened(config, tensors, tmp_path)
    values, want = files.read(NAME), tensors["want"]
    assert values.dtype == torch.float32 and torch.equal(values.to(want.dtype), want)
    assert list(files) == [NAME] and files.shape(NAME) == (32, 128) and files.dtype(NAME) == "float32"
    assert files.quantized.get(NAME) == FORMS[name]
    assert files.place(NAME) is None and NAME in files and f"{PATH}.scales" not in files


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form is not None])
def test_parts_give_the_values(name: str, tmp_path: Path) -> None:
    files = opened(*made(name), tmp_path)
    form = files.quantized[NAME]
    integers, scales = files.read(NAME + INTEGERS), files.read(NAME + SCALES)
    assert (NAME + ZERO_POINTS in files) == form.zero_points
    zero_points = files.read(NAME + ZERO_POINTS) if form.zero_points else None
    assert torch.equal(dequantize(integers, scales, zero_points), files.read(NAME))
    low, high = {"int4": (-8, 7), "int8": (-128, 127)}[form.dtype]
    for part in (integers, scales, zero_points):
        assert part is not None or not form.zero_points
        if part is not None and part.dtype == torch.int8:
            assert low <= int(part.min()) and int(part.max()) <= high
    for end in (INTEGERS, SCALES, *([ZERO_POINTS] if form.zero_points else [])):
        part = files.read(NAME + end)
        assert files.shape(NAME + end) == tuple(part.shape)
        assert files.dtype(NAME + end) == str(part.dtype).removeprefix("torch.")
    assert files.shape(NAME + SCALES) == (32, 128 // form.block)


def test_headers_alone_tell_the_same(tmp_path: Path) -> None:
    for name, form in FORMS.items():
        files = opened(*made(name), tmp_path, readable=False)
        assert files.shape(NAME) == (32, 128) and not files.readable
        assert files.quantized.get(NAME) == form, name


FOUR = {"bits": 4, "group_size": 32}
GROUPS = {
    "a": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}},
    "b": {
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    },
    "c": {"targets": ["re:.*attn"], "weights": None},
}
SAID_OTHERWISE: list[tuple[str, dict[str, Any]]] = [
    ("awq-int4", {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", **FOUR}),
    ("awq-int4", {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
    ("gptq-int4", {"quant_method": "gptq", "sym": True, **FOUR}),
    ("gptq-int4-zero-points", {"quant_method": "gptq", "sym": False, "checkpoint_format": "gptq", **FOUR}),
    ("gptq-v2-int4-zero-points", {"quant_method": "gptq", "sym": False, "format": "gptq_v2", **FOUR}),
    ("gptq-v2-int4-zero-points", {"quant_method": "intel/auto-round", "packing_format": "auto_round:gptqmodel", **FOUR}),
    ("gptq-int4", {"quant_method": "gptq", "bits": 8, "group_size": 64, "dynamic": {"+:.*up": FOUR, "-:.*head": {}}}),
    ("gptq-int8-zero-points", {"quant_method": "auto-round", **FOUR, "extra_config": {PATH: {"bits": 8}, "lm_head": {"bits": 16, "data_type": "float"}}}),
    ("ct-int4-zero-points", {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": GROUPS}),
    ("ct-int8-channel", {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": GROUPS}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config"), SAID_OTHERWISE)
def test_other_configurations_of_the_same_tensors(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    _, tensors = made(name)
    files = opened(config, tensors, tmp_path)
    assert torch.equal(files.read(NAME).to(tensors["want"].dtype), tensors["want"])
    assert files.quantized[NAME] == FORMS[name]


@pytest.mark.parametrize(
    ("name", "block"),
    [("ct-float8-tensor", None), ("ct-float8-channel", None), ("ct-float8-block", [16, 32])],
)
def test_floats_of_8_bits_as_deepseek_and_vllm_name_them(
    name: str, block: list[int] | None, tmp_path: Path
) -> None:
    _, tensors = made(name)
    tensors[f"{PATH}.weight_scale_inv"] = tensors.pop(f"{PATH}.weight_scale")
    tensors[f"{PATH}.input_scale"] = torch.ones(1)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static", "weight_block_size": block}
    files = opened(config, tensors, tmp_path)
    assert list(files) == [NAME] and torch.equal(files.read(NAME).to(tensors["want"].dtype), tensors["want"])


def test_tiles_at_the_edge_are_smaller(tmp_path: Path) -> None:
    """128 × 128 of a matrix of 200 × 300: the last tiles have 72 outputs, and 44 inputs."""
    weight = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    values = opened(config, {NAME: weight, f"{PATH}.weight_scale_inv": scales}, tmp_path).read(NAME)
    assert torch.equal(values[128:, 256:], weight[128:, 256:].float() * scales[1, 2])
    assert torch.equal(values[:128, 128:256], weight[:128, 128:256].float() * scales[0, 1])


@pytest.mark.parametrize("name", FORMS)
def test_parts_of_a_matrix_join(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix with more outputs than are dequantized together, and no multiple of them."""
    files = opened(*made(name), tmp_path)
    whole = files.read(NAME)
    monkeypatch.setattr(matrix, "ROWS", 5)
    monkeypatch.setattr(float8, "ROWS", 5)
    assert torch.equal(files.read(NAME), whole)


# --- order of inputs ---


def reordered(name: str, belongs: Tensor) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """A file of GPTQ with inputs in groups that do not stand side by side, and the values by the formula."""
    config, tensors = made(name)
    config = {
        "quant_method": "gptq",
        "bits": config["bits"],
        "group_size": 32,
        "desc_act": True,
        "sym": config["sym"],
    }
    if name.startswith("gptq-v2"):
        config["checkpoint_format"] = "gptq_v2"
    tensors[f"{PATH}.g_idx"] = belongs.to(torch.int32)
    per, mask = 32 // config["bits"], 2 ** config["bits"] - 1
    shift = torch.arange(per) * config["bits"]
    words = tensors[f"{PATH}.qweight"].long()
    codes = ((words[:, None] >> shift[:, None]) & mask).reshape(-1, words.shape[1])
    zeros = ((tensors[f"{PATH}.qzeros"].long()[..., None] >> shift) & mask).flatten(1)
    if not name.startswith("gptq-v2"):
        zeros += 1
    scales = tensors[f"{PATH}.scales"].float()
    want = ((codes - zeros[belongs.long()]).float() * scales[belongs.long()]).t()
    return config, tensors, want


SHUFFLED = torch.randperm(128, generator=torch.Generator().manual_seed(3)) // 32


@pytest.mark.parametrize(
    "name", ["gptq-int4", "gptq-int4-zero-points", "gptq-int8-zero-points", "gptq-v2-int4-zero-points"]
)
def test_act_order_is_an_order_of_inputs(name: str, tmp_path: Path) -> None:
    config, tensors, want = reordered(name, SHUFFLED)
    files = opened(config, tensors, tmp_path)
    form = files.quantized[NAME]
    assert form.order and torch.equal(files.read(NAME), want)
    order = files.read(NAME + ORDER)
    assert order.dtype == torch.int32 and files.shape(NAME + ORDER) == (128,)
    zero_points = files.read(NAME + ZERO_POINTS) if form.zero_points else None
    columns = dequantize(files.read(NAME + INTEGERS), files.read(NAME + SCALES), zero_points)
    assert torch.equal(columns, want[:, order.long()])


def test_groups_in_a_row_need_no_order(tmp_path: Path) -> None:
    config, tensors, want = reordered("gptq-int4", torch.arange(128) // 32)
    files = opened(config, tensors, tmp_path)
    assert not files.quantized[NAME].order and torch.equal(files.read(NAME), want)


def test_compressed_tensors_has_act_order_too(tmp_path: Path) -> None:
    config, tensors = made("ct-int4-zero-points")
    plain = opened(config, tensors, tmp_path).read(NAME)
    steps = (plain.unflatten(1, (4, 32)) / tensors[f"{PATH}.weight_scale"][..., None]).round()
    tensors[f"{PATH}.weight_g_idx"] = torch.full((128,), -1, dtype=torch.int32)
    files = opened(config, tensors, tmp_path)
    assert not files.quantized[NAME].order and torch.equal(files.read(NAME), plain)
    tensors[f"{PATH}.weight_g_idx"] = (torch.arange(128) // 32).flip(0).to(torch.int32)
    files = opened(config, tensors, tmp_path)
    scales, zero_points = (
        tensors[f"{PATH}.weight_scale"],
        opened(*made("ct-int4-zero-points"), tmp_path).read(NAME + ZERO_POINTS),
    )
    codes = steps + zero_points[..., None]
    want = ((codes - zero_points.flip(1)[..., None]) * scales.flip(1)[..., None]).flatten(1)
    config, tensors = made("ct-int4-zero-points")
    tensors[f"{PATH}.weight_g_idx"] = (torch.arange(128) // 32).flip(0).to(torch.int32)
    files = opened(config, tensors, tmp_path)
    assert files.quantized[NAME].order and torch.equal(files.read(NAME), want)


# --- blocks ---


@pytest.mark.parametrize(
    ("into", "block"), [(96, 32), (48, 16), (320, 64), (256, 128), (40, None), (24, None)]
)
def test_channels_are_cut_into_blocks_that_engines_have(into: int, block: int | None, tmp_path: Path) -> None:
    """Without such a block the matrix is floats, of the same values."""
    config, tensors = made("ct-plain-int8")
    tensors = {
        NAME: tensors[NAME][:, :1].expand(32, into).clone(),
        f"{PATH}.weight_scale": tensors[f"{PATH}.weight_scale"],
    }
    files = opened(config, tensors, tmp_path)
    form = files.quantized.get(NAME)
    assert (None if form is None else form.block) == block
    assert torch.equal(files.read(NAME), tensors[NAME].float() * tensors[f"{PATH}.weight_scale"])
    assert (NAME + SCALES in files) == (block is not None)


# --- planted errors: each must be seen by the comparison with the library ---


def _swapped(words: Tensor, width: int) -> Tensor:
    octets = words.contiguous().view(torch.uint8)
    return octets if width == 8 else torch.stack([octets >> 4, octets & 15], -1).flatten(1)


MUTANTS: dict[str, tuple[str, Any, str, Any]] = {
    "nibbles swapped, gptq": ("gptq-int4", gptq, "unpack", _swapped),
    "nibbles swapped, compressed-tensors": ("ct-int4", compressed_tensors, "unpack", _swapped),
    "awq's order forgotten": ("awq-int4", awq, "unpack_awq", lambda words: bits.unpack(words, 4)),
    "zero point dropped": (
        "gptq-v2-int4-zero-points", matrix, "dequantize", lambda i, s, z: dequantize(i, s)
    ),
    "zero point dropped, awq": ("awq-int4", matrix, "dequantize", lambda i, s, z: dequantize(i, s)),
    "zero point dropped, int8": ("ct-int8", matrix, "dequantize", lambda i, s, z: dequantize(i, s)),
    "scale of the neighbor": (
        "ct-int4", matrix, "dequantize", lambda i, s, z: dequantize(i, s.roll(1, 1), z)
    ),
    "scale of the neighbor's output": (
        "ct-int8-channel", matrix, "dequantize", lambda i, s, z: dequantize(i, s.roll(1, 0), z)
    ),
    "middle forgotten": ("ct-int4", compressed_tensors, "signed", lambda codes, width: codes.view(torch.int8)),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_errors_are_found(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, module, attribute, wrong = MUTANTS[mutant]
    values, want = shown(name, tmp_path)
    assert torch.equal(values, want)
    monkeypatch.setattr(module, attribute, wrong)
    values, want = shown(name, tmp_path)
    assert not torch.equal(values, want)


@pytest.mark.parametrize("name", ["gptq-int4", "gptq-int4-zero-points", "gptq-int8-zero-points"])
def test_a_forgotten_less_one_is_found(name: str, tmp_path: Path) -> None:
    config, tensors = made(name)
    config["packing_format"] = "auto_round"
    assert not torch.equal(opened(config, tensors, tmp_path).read(NAME).half(), tensors["want"])


def test_an_ignored_order_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors, want = reordered("gptq-int4", SHUFFLED)
    monkeypatch.setattr(gptq.GptqMatrix, "_input_groups", lambda self, read: None)
    assert not torch.equal(opened(config, tensors, tmp_path).read(NAME), want)


# --- what is refused ---

CT = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}},
}  # fmt: skip


def ct(**changes: Any) -> dict[str, Any]:
    """CT with other weights, or with other values beside them."""
    group = CT["config_groups"]["group_0"]
    own = {k: v for k, v in changes.items() if k in group["weights"] or k == "dynamic"}
    beside = {k: v for k, v in changes.items() if k.endswith("_activations")}
    rest = {k: v for k, v in changes.items() if k not in own and k not in beside}
    return CT | {"config_groups": {"g": group | {"weights": group["weights"] | own} | beside}} | rest


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
REFUSED: dict[str, tuple[Any, str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes': this method is not read"),
    "hqq": ({"quant_method": "hqq"}, "'hqq': this method"),
    "quanto": ({"quant_method": "quanto", "weights": "int8"}, "'quanto': this method"),
    "torchao": ({"quant_method": "torchao"}, "'torchao': this method"),
    "aqlm": ({"quant_method": "aqlm"}, "'aqlm': this method"),
    "mxfp4": ({"quant_method": "mxfp4"}, "'mxfp4': this method"),
    "modelopt": ({"quant_algo": "NVFP4"}, "'NVFP4': this method"),
    "no method": ({"bits": 4}, "None, 4 bits: this method"),
    "gptq 3": ({"quant_method": "gptq", "bits": 3}, "'gptq', 3 bits: only 4 and 8 bits"),
    "gptq 2": ({"quant_method": "gptq", "bits": 2}, "'gptq', 2 bits: only"),
    "gptq marlin": ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "'marlin' is not read"),
    "gptq form": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "bitblas"}, "'bitblas' is not read"),
    "gptq words": ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "pack_dtype='int16'"),
    "gptq dynamic": ({"quant_method": "gptq", "bits": 4, "dynamic": {"x": {"bits": 3}}}, "some matrices are of 3 bits"),
    "awq 8": ({"quant_method": "awq", "bits": 8}, "'awq', 8 bits: only 4 bits"),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "the version 'gemv'"),
    "awq marlin": ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "the version 'marlin'"),
    "llm-awq": ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "the version 'llm-awq'"),
    "round packing": ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:mlx"}, "packing_format='auto_round:mlx'"),
    "round type": ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type='mx_fp'"),
    "round rows": ({"quant_method": "auto-round", "bits": 4, "act_bits": 8}, "activations of 8 bits"),
    "ct 3": (ct(num_bits=3), "'compressed-tensors', 3 bits: the format 'pack-quantized'"),
    "ct marlin": (ct(format="marlin-24"), "the format 'marlin-24'"),
    "ct nvfp4": (ct(format="nvfp4-pack-quantized", type="float"), "the format 'nvfp4-pack-quantized'"),
    "ct mxfp4": (ct(format="mxfp4-pack-quantized", type="float"), "the format 'mxfp4-pack-quantized'"),
    "ct w8a8": (ct(format="int-quantized", num_bits=8, strategy="channel", group_size=None, input_activations=INT8), "input_activations"),
    "ct sparse": (ct(sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights"),
    "ct transform": (ct(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    "ct dynamic": (ct(dynamic=True), "rounded when the model runs"),
    "ct empty": (CT | {"config_groups": {}}, "describe no weights"),
    "fp8 e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
    "fp8 experts": ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype='fp4'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_before_a_weight_is_touched(case: str) -> None:
    config, reason = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        find_layout([SimpleNamespace(), SimpleNamespace(compression_config=config)], "folder")
    line = str(caught.value)
    assert line.startswith("folder: quantized by ") and "\n" not in line
    assert line.endswith("give the original in float32, float16 or bfloat16")


def test_two_descriptions_that_differ_are_refused() -> None:
    one, other = ({"quant_method": "gptq", "bits": bits} for bits in (4, 8))
    assert find_layout([SimpleNamespace(quantization_config=one)] * 2, "folder") is not None
    assert find_layout([SimpleNamespace()], "folder") is None
    with pytest.raises(UnsupportedModelError, match="in another part, otherwise"):
        find_layout([SimpleNamespace(quantization_config=v) for v in (one, other)], "folder")


JUNK = (
    None,
    True,
    -1,
    0,
    3,
    2**70,
    1.5,
    float("nan"),
    "",
    "x",
    "é" * 200,
    [],
    [1],
    [0, 0],
    {},
    {"a": 1},
    {"weights": 3},
    {"weights": []},
)


@pytest.mark.parametrize("name", ["ct-int4", "ct-float8-block", "gptq-int4", "awq-int4", "fp8"])
def test_damaged_values_of_a_configuration_are_one_line(name: str, tmp_path: Path) -> None:
    """Every value of every object, replaced by each of `JUNK`, or missing: read, or one line of ours."""
    if name == "fp8":
        _, tensors = made("ct-float8-channel")
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": None,
            "activation_scheme": "static",
        }
    else:
        config, tensors = made(name)
    save_file({n: t for n, t in tensors.items() if n != "want"}, tmp_path / "model.safetensors")
    files, read = TensorFiles(tmp_path), 0
    for where in _places(config):
        for junk in (*JUNK, "missing"):
            changed = json.loads(json.dumps(config))
            inner = changed
            for key in where[:-1]:
                inner = inner[key]
            inner[where[-1]] = junk
            if junk == "missing":
                del inner[where[-1]]
            try:
                layout = find_layout([SimpleNamespace(quantization_config=changed)], "folder")
                if layout is not None:
                    IntegerTensors(files, layout).read(NAME)
                    read += 1
            except VlmexportError as error:
                assert "\n" not in str(error) and len(str(error)) < 600
    assert read > 0


def _places(value: Any, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, inner in value.items():
        found.append((*before, key))
        if isinstance(inner, dict):
            found += _places(inner, (*before, key))
    return found


# --- damaged tensors ---

Edit = Callable[[dict[str, Tensor]], Any]


def _replace(end: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda t: t.update({f"{PATH}.{end}": change(t[f"{PATH}.{end}"])})


def _drop(end: str) -> Edit:
    return lambda t: t.pop(f"{PATH}.{end}")


DAMAGED: dict[str, tuple[str, Edit, str]] = {
    "no scales": ("gptq-int4", _drop("scales"), "has no tensor .*up_proj.scales"),
    "no zero points": ("awq-int4", _drop("qzeros"), "has no tensor .*up_proj.qzeros"),
    "no integers": ("awq-int4", _drop("qweight"), r"up_proj.qzeros belongs to no .*up_proj.qweight|scales belongs to no"),
    "no packed": ("ct-int4", _drop("weight_packed"), "weight_s.* belongs to no matrix"),
    "no scale": ("ct-int4", _drop("weight_scale"), "has no tensor .*weight_scale"),
    "float8 without scale": ("ct-float8-channel", _drop("weight_scale"), "without .*up_proj.weight_scale"),
    "short scales": ("gptq-int4", _replace("scales", lambda t: t[:, :16]), "is float16 .4, 16., not"),
    "fewer groups": ("awq-int4", _replace("scales", lambda t: t[:3]), "3 groups of scales are not 128 inputs in groups of 32"),
    "more groups": ("gptq-int4", _replace("scales", lambda t: torch.cat([t, t])), "8 groups of scales are not 128 inputs"),
    "short zero points": ("gptq-int4", _replace("qzeros", lambda t: t[:, :3]), "qzeros .4, 3. beside 32 outputs"),
    "zero points of floats": ("awq-int4", _replace("qzeros", lambda t: t.float()), "is float32 .*, not int32"),
    "empty": ("gptq-int4", _replace("qweight", lambda t: t[:0]), "not a matrix of int32"),
    "flat": ("ct-int4", _replace("weight_packed", lambda t: t.flatten()), "not a matrix of int32"),
    "cut words": ("ct-int4", _replace("weight_packed", lambda t: t[:, :15]), "fit none of the config_groups"),
    "another shape": ("ct-int4", _replace("weight_shape", lambda t: t + 1), r"weight_shape says .33, 129."),
    "shape of three": ("ct-int4", _replace("weight_shape", lambda t: torch.cat([t, t[:1]])), "weight_shape is int64 .3."),
    "long scale": ("ct-float8-block", _replace("weight_scale", lambda t: torch.cat([t, t])), "does not fit a matrix"),
    "infinite float8 scale": ("ct-float8-channel", _replace("weight_scale", lambda t: t / 0), "not finite"),
    "infinite scale": ("gptq-int4", _replace("scales", lambda t: t * torch.inf), "scales are not finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_tensors_are_named(case: str, tmp_path: Path) -> None:
    name, edit, reason = DAMAGED[case]
    config, tensors = made(name)
    edit(tensors)
    with pytest.raises(ExportError, match=reason) as caught:
        opened(config, tensors, tmp_path).read(NAME)
    assert PATH in str(caught.value) and "\n" not in str(caught.value)


CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t[:1], lambda t: t[:0], lambda t: t.flatten(), lambda t: t[..., None], lambda t: t[..., :1],
    lambda t: torch.cat([t, t]), lambda t: torch.cat([t, t], -1), lambda t: t.float(), lambda t: t.double(),
    lambda t: t.to(torch.int8), lambda t: t.to(torch.int64), lambda t: t.float().to(torch.float8_e5m2), lambda t: t.bool(),
)  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_any_damage_of_shape_or_type_is_one_line_or_read(name: str, tmp_path: Path) -> None:
    config, tensors = made(name)
    refused = 0
    for own in [own for own in tensors if own != "want"]:
        for change in CHANGES:
            changed = tensors | {own: change(tensors[own])}
            try:
                files = opened(config, changed, tmp_path)
                assert files.read(NAME).shape == files.shape(NAME)
            except VlmexportError as error:
                refused += 1
                assert "\n" not in str(error) and PATH in str(error)
    assert refused > 10


@pytest.mark.parametrize(
    ("belongs", "reason"),
    [
        (torch.arange(128) // 32 + 1, "names groups 1 to 4 of 4"),
        (torch.arange(128) // 32 - 1, "names groups -1 to 2 of 4"),
        (torch.zeros(128), "gives a group 128 inputs in place of 32"),
        (torch.arange(64) // 32, "g_idx is int32 .64."),
    ],
)
def test_damaged_orders_are_named(belongs: Tensor, reason: str, tmp_path: Path) -> None:
    config, tensors = made("gptq-int4")
    tensors[f"{PATH}.g_idx"] = belongs.to(torch.int32)
    with pytest.raises(ExportError, match=reason):
        opened(config, tensors, tmp_path)


def test_a_zero_point_that_readers_disagree_about_is_refused(tmp_path: Path) -> None:
    config, tensors = made("gptq-int4")
    tensors[f"{PATH}.qzeros"][0, 0] = -1
    with pytest.raises(UnsupportedModelError, match="a zero point of gptq's first form is 15"):
        opened(config, tensors, tmp_path)


def test_groups_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    config, tensors = made("gptq-int4")
    with pytest.raises(UnsupportedModelError, match="groups of 48 inputs do not divide its 128"):
        opened(config | {"group_size": 48}, tensors, tmp_path)


def test_a_matrix_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    config, tensors = made("gptq-int4")
    with pytest.raises(ExportError, match="is stored twice"):
        opened(config, tensors | {NAME: tensors["want"]}, tmp_path)


def test_a_checkpoint_of_floats_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    config, tensors = made("gptq-int4")
    with pytest.raises(UnsupportedModelError, match="no tensor is stored so"):
        opened(config, {NAME: tensors["want"].clone()}, tmp_path)
