"""Whole quantized checkpoints: opened like ordinary ones, equal to the model of the numbers that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from vlmexport.exporter.checkpoint import fingerprint, open_checkpoint
from vlmexport.exporter.checkpoint import load as load_module
from vlmexport.exporter.checkpoint.changed import ChangedTensors, write_changed
from vlmexport.exporter.checkpoint.integer_tensors import IntegerTensors
from vlmexport.exporter.checkpoint.origin import Origin
from vlmexport.exporter.checkpoint.tensors import TensorFiles
from vlmexport.exporter.checkpoint.whole import load_whole
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.parity.reference import load_reference
from vlmexport.exporter.quantization.matrix import INTEGERS
from vlmexport.runtime.common.errors import ExportError, UnsupportedModelError

from tests.support import tiny_adapters, tiny_models
from tests.support.quantized_checkpoints import FORMS, write_quantized

FLOATS = ("fp8", "fp8-dynamic")
IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[Path, Path, dict[str, torch.Tensor]]]:
    """(kind, form, part of config.json) → (the plain model's folder, the quantized one's, values of its matrices)."""
    kept: dict[Any, Any] = {}

    def make(kind: str, form: str, part: str | None = None) -> Any:
        if (kind, form, part) not in kept:
            place = tmp_path_factory.mktemp("quantized")
            plain = tiny_models.checkpoint(kind, place / "plain")
            values = write_quantized(plain, place / "quantized", form, part)
            kept[kind, form, part] = plain, place / "quantized", values
        return kept[kind, form, part]

    return make


CASES = [
    *(("llama", form, None) for form in FORMS),
    *(("qwen2.5-vl", form, None) for form in ("awq", "gptq-act-order")),
]
CASES += [
    ("qwen2.5-vl", "w4a16", "text_config"),
    ("qwen2.5-vl", "fp8-dynamic", "text_config"),
    ("llama-tied", "gptq", None),
]


@pytest.mark.parametrize(("kind", "form", "part"), CASES)
def test_a_quantized_checkpoint_is_the_model_of_its_values(
    kind: str, form: str, part: str | None, folder: Callable[..., Any]
) -> None:
    plain, path, values = folder(kind, form, part)
    checkpoint = open_checkpoint(path)
    tensors = checkpoint.tensors
    assert set(tensors) == set(TensorFiles(plain)) and len(values) == 14
    assert set(tensors.quantized) == (set() if form in FLOATS else set(values))
    for name, value in values.items():
        assert tensors.shape(name) == tuple(value.shape) and torch.equal(tensors.read(name), value)
    assert checkpoint.names.unread == () and not hasattr(checkpoint.config, "quantization_config")
    family_for(checkpoint)
    with torch.no_grad():
        want = load_whole(open_checkpoint(plain))(input_ids=IDS).logits
        whole = load_whole(checkpoint)
        assert torch.equal(whole(input_ids=IDS).logits, want)
        streamed = load_reference(checkpoint, streamed=True)
        eager = load_reference(checkpoint, streamed=False)
        assert torch.equal(streamed(input_ids=IDS).logits, eager(input_ids=IDS).logits)
        assert torch.equal(
            load_reference(open_checkpoint(plain), streamed=False)(input_ids=IDS).logits,
            eager(input_ids=IDS).logits,
        )
    own = json.loads((path / "generation_config.json").read_text("utf-8"))
    assert whole.generation_config.max_new_tokens == own["max_new_tokens"]
    assert not whole.training
    head = whole.get_output_embeddings().weight
    assert (head is whole.get_input_embeddings().weight) == (kind == "llama-tied")


def test_what_the_checkpoint_asks_for_beside_its_weights_is_told(folder: Callable[..., Any]) -> None:
    _, path, _ = folder("llama", "fp8-dynamic")
    assert any("round activations to floats of 8 bits" in line for line in open_checkpoint(path).notices)
    _, path, _ = folder("llama", "w4a16")
    assert open_checkpoint(path).notices == []


def test_scales_of_a_cache_are_told_and_left_out(folder: Callable[..., Any], tmp_path: Path) -> None:
    _, path, _ = folder("llama", "w4a16")
    path = Path(shutil.copytree(path, tmp_path / "model"))
    extra = {
        f"model.layers.{n}.self_attn.{end}": torch.ones(1) for n in (0, 1) for end in ("k_scale", "v_scale")
    }
    save_file(load_file(path / "model.safetensors") | extra, path / "model.safetensors")
    document = json.loads((path / "config.json").read_text("utf-8"))
    document["quantization_config"]["kv_cache_scheme"] = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
    }
    (path / "config.json").write_text(json.dumps(document))
    checkpoint = open_checkpoint(path)
    assert [line for line in checkpoint.notices if "cache of 8 bits" in line] == checkpoint.notices
    assert not any(name in checkpoint.tensors for name in extra)


def test_the_fingerprint_is_of_what_is_stored_and_of_what_it_means(
    folder: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path, _ = folder("llama", "gptq")
    path = Path(shutil.copytree(path, tmp_path / "model"))
    monkeypatch.setattr(IntegerTensors, "read", lambda self, name: pytest.fail(f"{name} is dequantized"))
    own = fingerprint(open_checkpoint(path))
    assert own == fingerprint(open_checkpoint(path)) != fingerprint(TensorFiles(path))
    config = json.loads((path / "config.json").read_text("utf-8"))
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (path / "config.json").write_text(json.dumps(config))
    assert fingerprint(open_checkpoint(path)) != own
    del config["quantization_config"]["checkpoint_format"]
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.qzeros"][0, 0] ^= 1
    save_file(tensors, path / "model.safetensors")
    assert fingerprint(open_checkpoint(path)) != own


@pytest.mark.parametrize("form", ["gptq-act-order", "awq", "w8a16", "fp8"])
def test_headers_alone_are_enough_to_open_it(
    form: str, folder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a hub model whose weights are not here: shapes, types and integers are the same, and nothing is read."""
    _, path, _ = folder("llama", form)

    class Described(TensorFiles):
        readable = False

    whole = open_checkpoint(path)
    monkeypatch.setattr(load_module, "described", lambda name: (path, Described(path)))
    monkeypatch.setattr(TensorFiles, "read", lambda self, name: pytest.fail(f"{name} is read"))
    checkpoint = open_checkpoint("org/model", weights=False)
    tensors = checkpoint.tensors
    assert not tensors.readable and set(tensors) == set(whole.tensors)
    assert dict(tensors.quantized) == dict(whole.tensors.quantized)
    assert all(
        tensors.shape(n) == whole.tensors.shape(n) and tensors.dtype(n) == whole.tensors.dtype(n)
        for n in tensors
    )
    assert tensors.memory == whole.tensors.memory
    family_for(checkpoint)


def test_a_model_that_was_trained_further_is_of_floats(folder: Callable[..., Any], tmp_path: Path) -> None:
    for part in (None, "text_config"):
        plain, path, _ = folder("qwen2.5-vl", "w4a16", part)
        checkpoint = open_checkpoint(path)
        tensors = ChangedTensors(checkpoint, {})
        write_changed(tmp_path / str(part), checkpoint, tensors, Origin("model", fingerprint(checkpoint)))
        again = open_checkpoint(tmp_path / str(part))
        assert again.layout is None and fingerprint(again) == fingerprint(tensors)
        assert all(
            torch.equal(again.tensors.read(n), open_checkpoint(plain).tensors.read(n)) for n in again.tensors
        )


def test_memory_counts_what_is_stored_and_what_reading_takes(folder: Callable[..., Any]) -> None:
    plain, path, _ = folder("llama", "w4a16")
    memory, floats = open_checkpoint(path).tensors.memory, open_checkpoint(plain).tensors.memory
    assert (memory.float32, memory.largest, memory.widened) == (
        floats.float32,
        floats.largest,
        floats.widened,
    )
    assert memory.stored < floats.stored
    assert memory.stored == sum(t.nbytes for t in load_file(path / "model.safetensors").values())


def test_an_adapter_is_merged_into_floats(folder: Callable[..., Any], tmp_path: Path) -> None:
    """What it changes is no integer matrix any more; the rest stays one."""
    plain, path, values = folder("llama", "gptq-act-order")
    config = LoraConfig(r=2, target_modules=["q_proj"])
    tiny_adapters.train(config, plain, tmp_path)
    checkpoint, want = open_checkpoint(path, adapter=tmp_path), open_checkpoint(plain, adapter=tmp_path)
    queries = {name for name in values if "q_proj" in name}
    assert len(queries) == 2 and set(checkpoint.tensors.quantized) == set(values) - queries
    for name in values:
        assert torch.equal(checkpoint.tensors.read(name), want.tensors.read(name).float())
    other = next(iter(set(values) - queries))
    assert checkpoint.tensors.shape(other + INTEGERS) == tuple(
        checkpoint.tensors.read(other + INTEGERS).shape
    )
    with torch.no_grad():
        assert torch.equal(
            load_whole(checkpoint)(input_ids=IDS).logits, load_whole(want)(input_ids=IDS).logits
        )
    bases = [fingerprint(open_checkpoint(place)) for place in (plain, path)]
    assert len({fingerprint(checkpoint), fingerprint(want), *bases}) == 4


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_what_is_no_description_is_one_line(key: str, tmp_path: Path) -> None:
    path = tiny_models.checkpoint("qwen2.5-vl", tmp_path / "model")
    plain = json.loads((path / "config.json").read_text("utf-8"))
    for part in (None, "text_config"):
        for value in (
            "x",
            3,
            True,
            [1],
            {"a": 1},
            {"quant_method": [1]},
            {"quant_method": "gptq", "bits": "4"},
        ):
            document = json.loads(json.dumps(plain))
            (document if part is None else document[part])[key] = value
            (path / "config.json").write_text(json.dumps(document))
            with pytest.raises(UnsupportedModelError) as caught:
                open_checkpoint(path)
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_missing_matrix_is_named(folder: Callable[..., Any], tmp_path: Path) -> None:
    _, path, _ = folder("llama", "awq")
    path = Path(shutil.copytree(path, tmp_path / "model"))
    tensors = load_file(path / "model.safetensors")
    for end in ("qweight", "qzeros", "scales"):
        del tensors[f"model.layers.1.mlp.up_proj.{end}"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ExportError, match=r"no tensor .model\.layers\.1\.mlp\.up_proj\.weight"):
        load_whole(open_checkpoint(path))
