"""`vlmexport quantize` on tiny models of every family: what is written, read back by a formula of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from vlmexport.calibration.quantization.options import QuantizeOptions
from vlmexport.calibration.quantization.packed import pack
from vlmexport.calibration.quantization.run import quantize
from vlmexport.calibration.targets.target import Target
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.checkpoint.origin import QUANTIZED, Origin
from vlmexport.exporter.quantization.choice import parse_weights
from vlmexport.runtime.common.errors import InputError, OptionError

from tests.support.tiny_bundles import HOST_ALONE
from tests.support.training_targets import KINDS, make_records, make_target

LAYERS = {
    "llama": r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    "qwen3": r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    "t5": r"(en|de)coder\.block\.\d+\.layer\.\d\.(SelfAttention|EncDecAttention|DenseReluDense)\.(?!rel)\w+",
    "blip2-t5": r"language_model\.(en|de)coder\.block\.\d+\.layer\.\d\.(SelfAttention|EncDecAttention|DenseReluDense)\.(?!rel)\w+",
    "blip2-opt": r"language_model\.model\.decoder\.layers\.\d+\.(self_attn\.([qkv]|out)_proj|fc[12])",
    "vit-gpt2": r"decoder\.transformer\.h\.\d+\.((cross)?att\w+\.(c_attn|c_proj|q_attn)|mlp\.c_(fc|proj))",
    "llava": r"language_model\.model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    "llava-next": r"language_model\.model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    "internvl": r"language_model\.model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    "lfm2-vl": r"model\.language_model\.layers\.\d+\.(self_attn\.([qkv]|out)_proj|conv\.(in|out)_proj|feed_forward\.w[123])",
    "qwen2.5-vl": r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    "qwen2-vl": r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    "qwen3-vl": r"model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    "gemma3": r"language_model\.model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    "paligemma2": r"language_model\.model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    "smolvlm": r"model\.text_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
}
"""Names on disk of the modules whose matrices become integers. A new family is one line here."""


def unpacked(packed: Tensor, scales: Tensor, shape: Tensor, bits: int) -> np.ndarray:
    """The matrix float32 [out, in]: bit by bit, as the layout is described."""
    words = packed.numpy().view(np.uint32)
    each = 32 // bits
    columns = [(words[:, i // each] >> (bits * (i % each))) & (2**bits - 1) for i in range(int(shape[1]))]
    integers = np.stack(columns, 1).astype(np.int64) - 2 ** (bits - 1)
    block = int(shape[1]) // scales.shape[1]
    return integers.astype(np.float32) * scales.float().numpy().repeat(block, 1)


def write(kind: str, folder: Path, weights: str = "int4", **changes: Any) -> tuple[Target, dict[str, Any]]:
    target = make_target(kind, folder / "model")
    records = make_records(folder, kind, 6)
    options = QuantizeOptions(parse_weights(weights), **changes)
    return target, quantize(target, records, None, options, folder / "out")


@pytest.mark.parametrize("kind", HOST_ALONE)
def test_a_model_that_no_bundle_computes_with_integers_is_refused_before_work(kind: str, tmp_path: Path):
    with pytest.raises(OptionError, match="int4 weights: with linear attention"):
        write(kind, tmp_path)
    assert not (tmp_path / "out").exists()


def bits_of(module: str, config: dict[str, Any]) -> int | None:
    """By the first of `config_groups` that targets it, as the library matches names."""
    for group in config["config_groups"].values():
        for target in group["targets"]:
            if re.match(target[3:], module) if target.startswith("re:") else target == module:
                return group["weights"]["num_bits"]
    return None


FAST = ("llama", "llava", "vit-gpt2")
"""Of the forms of layers: one is stored [in, out], and one has other names on disk than in its class."""


@pytest.mark.parametrize(
    "kind",
    [k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k not in HOST_ALONE],
)
def test_every_family_is_written_as_it_computes(kind: str, tmp_path: Path):
    target, report = write(kind, tmp_path)

    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("model", "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))["quantization_config"]
    modules = dict(target.model.named_modules())
    computed = {
        target.checkpoint.stored(f"{n}.weight"): n for n, m in modules.items() if hasattr(m, "weight")
    }
    packed = {name.removesuffix("_packed") for name in after if name.endswith("_packed")}
    heads = {name for name in packed if name.endswith("lm_head.weight")}
    assert {n for n in before if re.fullmatch(LAYERS[kind] + r"\.weight", n)} == packed - heads
    assert packed
    for tensor in packed:
        parts = [after[tensor + part] for part in ("_packed", "_scale", "_shape")]
        bits = 8 if tensor in heads else 4
        matrix = unpacked(*parts, bits)  # type: ignore[arg-type]
        weight = modules[computed[tensor]].weight.detach()
        is_conv = kind == "vit-gpt2"
        assert np.array_equal(matrix, (weight.T if is_conv else weight).numpy())
        assert not torch.equal(before[tensor].float(), weight)
        for name in (tensor.removesuffix(".weight"), computed[tensor]):
            assert bits_of(name, config) == bits
        assert parts[1].dtype == before[tensor].dtype
    untouched = set(before) - packed
    assert untouched | {t + p for t in packed for p in ("_packed", "_scale", "_shape")} == set(after)
    for name in untouched:
        assert torch.equal(before[name], after[name])
        assert bits_of(name.removesuffix(".weight"), config) is None
    assert Origin.read(tmp_path / "out", QUANTIZED) == Origin(target.name, target.fingerprint)
    assert report["head"]["tied"] == (not heads)
    assert report["quality"]["kl"] > 0
    stored = json.loads((tmp_path / "out" / "quantization.json").read_text("utf-8"))
    assert {**stored, "output": str(tmp_path / "out")} == report
    kinds = report["kinds"]
    assert sum(row["bytes"] for row in kinds.values()) == sum(t.nbytes for t in after.values())
    assert sum(row["numbers"] for row in kinds.values()) == sum(t.numel() for t in before.values())


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_packed_as_the_layout_says(bits: int):
    generator = torch.Generator().manual_seed(bits)
    least = -(2 ** (bits - 1))
    integers = torch.randint(least, -least, (5, 64), generator=generator, dtype=torch.int8)
    integers[0, :2] = torch.tensor([least, -least - 1])

    words = pack(integers, bits)

    assert words.dtype == torch.int32 and words.shape == (5, 64 * bits // 32)
    back = unpacked(words, torch.ones(5, 2), torch.tensor(integers.shape), bits)
    assert np.array_equal(back, integers.numpy())


def test_the_first_input_lies_in_the_lowest_bits():
    integers = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, 7]], dtype=torch.int8)

    assert pack(integers, 4).numpy().view(np.uint32).tolist() == [[0xF6543210]]


def test_parts_of_other_kinds_and_layers_are_written_so(tmp_path: Path):
    _, report = write("llama", tmp_path, "int4,down_proj=int8,layers.3=float,q_proj=int8", method="rounding")

    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))["quantization_config"]
    after = load_file(tmp_path / "out" / "model.safetensors")
    for layer in range(5):
        for name, bits in (("mlp.up_proj", 4), ("mlp.down_proj", 8), ("self_attn.q_proj", 8)):
            module = f"model.layers.{layer}.{name}"
            assert bits_of(module, config) == (None if layer == 3 else bits)
            assert (f"{module}.weight" in after) == (layer == 3)
    assert report["kinds"]["float"]["matrices"] == 7


def test_a_limit_widens_as_few_groups_as_it_takes(tmp_path: Path):
    _, loose = write("llama", tmp_path)
    four = loose["quality"]["kl"]
    assert not any(group["widened"] for group in loose["groups"])

    reports = {}
    for share in (0.5, 0.05):
        folder = tmp_path / str(share)
        folder.mkdir()
        _, reports[share] = write("llama", folder, max_loss=four * share)
        assert 0 < reports[share]["quality"]["kl"] <= four * share
        widened = [group for group in reports[share]["groups"] if group["widened"]]
        assert all(set(group["kinds"]) == {"int8"} for group in widened)
        others = [
            group for group in reports[share]["groups"] if not group["widened"] and group["layer"] != "head"
        ]
        assert all(set(group["kinds"]) == {"int4"} for group in others)
        after = load_file(folder / "out" / "model.safetensors")
        group = widened[0]
        name = f"{group['layer']}.{group['modules'][0]}.weight"
        assert after[f"{name}_packed"].shape[1] * 4 == int(after[f"{name}_shape"][1])
    counts = [sum(group["widened"] for group in reports[share]["groups"]) for share in (0.5, 0.05)]
    assert 0 < counts[0] < counts[1]


def test_a_limit_that_eight_bits_do_not_reach_is_refused_in_one_line(tmp_path: Path):
    with pytest.raises(
        OptionError, match=r"--max-loss 1e-12: the KL to the float model is \S+ even with 8 bits"
    ) as error:
        write("llama", tmp_path, max_loss=1e-12)

    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("weights", "told"), [("float", "stays float"), ("int4,fc1=int8", "no matrix .* 'fc1'")]
)
def test_a_choice_without_a_matrix_is_refused(weights: str, told: str, tmp_path: Path):
    with pytest.raises(OptionError, match=told):
        write("llama", tmp_path, weights)


def test_eight_bits_cost_less_than_four(tmp_path: Path):
    losses = []
    for weights in ("int8", "int4"):
        folder = tmp_path / weights
        folder.mkdir()
        losses.append(write("llama", folder, weights)[1]["quality"]["kl"])

    assert losses[0] < 0.1 * losses[1]


def test_records_that_give_no_finite_numbers_are_refused(tmp_path: Path):
    target = make_target("llama", tmp_path / "model")
    with torch.no_grad():
        for weight in target.embed.parameters():
            weight.fill_(torch.inf)
    records = make_records(tmp_path, "llama", 6)

    with pytest.raises(InputError, match="not finite"):
        quantize(target, records, None, QuantizeOptions(parse_weights("int4")), tmp_path / "out")


def test_the_default_prompt_of_the_float_model_stays(tmp_path: Path):
    folder = make_target("llama", tmp_path / "model").checkpoint.folder
    Origin("trained", "sha256:0", "describe").write(folder)
    assert open_checkpoint(folder).default_prompt == "describe"

    origin = Origin("float", "sha256:1", "describe the scene")
    origin.write(folder, QUANTIZED)

    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantized_from == origin
    assert checkpoint.default_prompt == "describe the scene"
