"""Tensors are found under the names that transformers itself writes, and image settings in the file that it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.parity.reference import load_reference
from vlmexport.runtime.common.errors import ExportError, UnsupportedModelError

from tests.support import tiny_models

TEXT = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def llava() -> Any:
    """A model that no family exports yet: its modules have other names than its tensors."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=7
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_index=119
    )
    return transformers.LlavaForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llava": llava,
    **{name: (lambda name=name: tiny_models.BUILDERS[name]()[0]) for name in tiny_models.BUILDERS},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_its_tensor(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for parameter, value in parameters.items():
        assert torch.equal(checkpoint.tensors.read(checkpoint.stored(parameter)), value), parameter
    if name in ("llava", "vit-gpt2"):
        assert any(checkpoint.stored(parameter) != parameter for parameter in parameters)


@pytest.mark.parametrize("name", ["llava", "vit-gpt2"])
def test_the_streamed_reference_reads_renamed_tensors(name: str, tmp_path: Path) -> None:
    MODELS[name]().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    ids = torch.arange(3, 9)[None]
    inputs: dict[str, Any] = {"input_ids": ids}
    if name == "vit-gpt2":
        inputs = {"decoder_input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32)}
    whole, streamed = (load_reference(checkpoint, streamed=s) for s in (False, True))
    with torch.no_grad():
        torch.testing.assert_close(streamed(**inputs).logits, whole(**inputs).logits)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    MODELS["vit-gpt2"]().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names.find("decoder.lm_head.weight") is None, "tied: stored once"
    assert checkpoint.stored("decoder.lm_head.weight").endswith("wte.weight")
    with pytest.raises(ExportError, match=r"has no tensor 'decoder.transformer.h.9.ln_1.weight'"):
        checkpoint.stored("decoder.transformer.h.9.ln_1.weight")


def test_a_tensor_that_transformers_converts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.core_model_loading import Chunk, WeightConverter
    from vlmexport.exporter.checkpoint import names

    MODELS["llama"]().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.0.mlp."
    parts = [tensors.pop(f"{prefix}{part}_proj.weight") for part in ("gate", "up")]
    save_file({**tensors, f"{prefix}both.weight": torch.cat(parts)}, tmp_path / "model.safetensors")
    targets = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    converter = WeightConverter("mlp.both.weight", targets, operations=[Chunk(dim=0)])
    monkeypatch.setattr(names, "get_model_conversion_mapping", lambda model: [converter])
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"gate_proj.weight is made of other tensors"):
        checkpoint.stored(f"{prefix}gate_proj.weight")


@pytest.mark.parametrize("name", ["blip2-t5", "vit-gpt2"])
def test_image_settings_are_of_the_file_that_transformers_reads(name: str, tmp_path: Path) -> None:
    """A folder with both files: the second is a relic of an older release."""
    tiny_models.checkpoint(name, tmp_path)
    whole = tmp_path / "processor_config.json"
    own = json.loads(whole.read_text())["image_processor"] if whole.is_file() else None
    relic = tmp_path / "preprocessor_config.json"
    if own is None:
        own = json.loads(relic.read_text())
        whole.write_text(json.dumps({"image_processor": own}))
    relic.write_text(json.dumps({**own, "image_mean": [0.0, 0.0, 0.0]}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.image_settings["image_mean"] == own["image_mean"]
    assert list(checkpoint.image_processor.image_mean) == own["image_mean"]
