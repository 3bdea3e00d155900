"""Writes the tensors in this folder: one small matrix in each layout, by the library that writes it, with that library's own
dequantised form as `want`.

    python tests/data/quantized/make.py

needs compressed-tensors 0.20 and auto-round 0.16 (with accelerate, datasets and py-cpuinfo), which no test needs. AutoRound
packs GPTQ's and AWQ's layouts, too. What `float32` is not written in is rounded as the library rounds it (`want`'s type).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

FOLDER = Path(__file__).parent
OUT, INTO = 32, 128
PATH = "model.layers.0.mlp.up_proj"


def weight() -> torch.Tensor:
    """Around a mean that is not zero, so that zero points differ from the middle and from each other."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(OUT, 1, generator=generator)
    return torch.randn(OUT, INTO, generator=generator) + rows


def compressed(name: str, form: str, dtype: torch.dtype, **options: object) -> None:
    """Of compressed-tensors: `options` are those of QuantizationArgs."""
    args = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    matrix = weight()
    if args.strategy == "group":
        blocks = matrix.unflatten(1, (-1, args.group_size))
        low, high = blocks.amin(-1), blocks.amax(-1)
    elif args.strategy == "channel":
        low, high = matrix.amin(1, keepdim=True), matrix.amax(1, keepdim=True)
    elif args.strategy == "block":
        down, across = args.block_structure
        tiles = matrix.unflatten(1, (-1, across)).unflatten(0, (-1, down))
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    else:
        low, high = matrix.amin().reshape(1), matrix.amax().reshape(1)
    scale, zero = calculate_qparams(low, high, args)
    state = {"weight": matrix, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    state = compressor.compress(state, scheme)
    want = compressor.decompress(state, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {**json.loads(scheme.model_dump_json()), "format": form}},
    }
    write(name, config, state, want)


def auto_round(name: str, bits: int, group: int, *, symmetric: bool, packing: str) -> None:
    """Of AutoRound, whose packers also write GPTQ's layout."""
    if packing == "awq":
        from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
    elif packing == "auto_round:auto_gptq":
        from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
    else:
        from auto_round_extension.torch.qlinear_torch import QuantLinear
    linear = torch.nn.Linear(INTO, OUT, bias=False)
    linear.weight.data = weight()
    blocks = weight().unflatten(1, (-1, group))
    top = 2**bits - 1
    if symmetric:
        scale = (blocks.abs().amax(-1) / (2 ** (bits - 1) - 1)).half()
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = ((high - low) / top).half()
        zero = (-low / scale.float()).round().clamp(1, top)
    common = {"bits": bits, "group_size": group, "sym": symmetric}
    if packing == "awq":
        layer = WQLinear_GEMM.from_linear(
            linear, bits, group, scales=scale.t().contiguous(), zeros=zero.t().contiguous()
        )
        want = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, bits, group).t()
        config = {
            "quant_method": "awq",
            "bits": bits,
            "group_size": group,
            "version": "gemm",
            "zero_point": True,
        }
    else:
        layer = QuantLinear(bits, group, INTO, OUT, bias=False)
        layer.device = "cpu"
        layer.pack(linear, scale.float(), zero.float(), None, device="cpu")
        want = layer(torch.eye(INTO)).t().half()  # which it computes in
        config = {"quant_method": "auto-round", "packing_format": packing, "data_type": "int", **common}
    state = {end: value for end, value in layer.state_dict().items() if value is not None}
    write(name, config, state, want)


def write(name: str, config: dict[str, object], state: dict[str, torch.Tensor], want: torch.Tensor) -> None:
    """The module's tensors under its path, and the configuration beside `want` in the file's metadata."""
    tensors = {f"{PATH}.{end}": value.detach().contiguous() for end, value in state.items()}
    tensors["want"] = want.detach().contiguous()
    save_file(tensors, FOLDER / f"{name}.safetensors", metadata={"config": json.dumps(config, default=str)})
    print(name, {k.removeprefix(PATH): (tuple(v.shape), v.dtype) for k, v in tensors.items()})


def main() -> None:
    """Writes all of them."""
    pack, group = "pack-quantized", {"strategy": "group", "group_size": 32}
    compressed("ct-int4", pack, torch.float16, num_bits=4, symmetric=True, **group)
    compressed("ct-int4-zero-points", pack, torch.float32, num_bits=4, symmetric=False, **group)
    compressed("ct-int4-channel", pack, torch.bfloat16, num_bits=4, symmetric=True, strategy="channel")
    compressed("ct-int8", pack, torch.float32, num_bits=8, symmetric=False, **group)
    compressed("ct-int8-channel", pack, torch.bfloat16, num_bits=8, symmetric=True, strategy="channel")
    compressed(
        "ct-plain-int8", "int-quantized", torch.float32, num_bits=8, symmetric=True, strategy="channel"
    )
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    compressed("ct-float8-channel", "float-quantized", torch.float32, strategy="channel", **fp8)
    compressed("ct-float8-tensor", "float-quantized", torch.bfloat16, strategy="tensor", **fp8)
    compressed(
        "ct-float8-block", "float-quantized", torch.float32, strategy="block", block_structure=[16, 32], **fp8
    )
    auto_round("gptq-int4", 4, 32, symmetric=True, packing="auto_round:auto_gptq")
    auto_round("gptq-int4-zero-points", 4, 32, symmetric=False, packing="auto_round:auto_gptq")
    auto_round("gptq-int8-zero-points", 8, 32, symmetric=False, packing="auto_round:auto_gptq")
    auto_round("gptq-v2-int4-zero-points", 4, 32, symmetric=False, packing="auto_round")
    auto_round("awq-int4", 4, 32, symmetric=False, packing="awq")


if __name__ == "__main__":
    main()
