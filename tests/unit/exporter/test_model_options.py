"""Options of configurations that change the mathematics: each exported model must equal the eager one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.parity.reference import load_reference
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.families import RawPrompt

from tests.support import tiny_models
from tests.unit.exporter.test_decoder_graphs import Reference, chain, start

TOKENS, SOURCE = [0, 8, 30, 22, 17, 50, 61, 4, 19], [5, 9, 3]

LLAMA: dict[str, dict[str, Any]] = {
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "all heads own keys": {"num_key_value_heads": 6},
    "one key head": {"num_key_value_heads": 1},
    "other activation": {"hidden_act": "gelu"},
    "other epsilon": {"rms_norm_eps": 1e-2},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    "dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 500_000.0,
        }
    },
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10_000.0,
        }
    },
}  # fmt: skip

T5: dict[str, dict[str, Any]] = {
    "relu, not gated": {"feed_forward_proj": "relu"},
    "gated silu": {"feed_forward_proj": "gated-silu"},
    "buckets": {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 20},
}


def compare(name: str, source: Path, tmp_path: Path) -> Bundle:
    """Builds, and compares a prefill of 7 tokens and two single steps at 1e-5 of the largest logit."""
    build_bundle(BuildRequest(model=str(source), output=tmp_path / "bundle", draft_layer=1, parity=False))
    expected = Reference(name, source).logits(TOKENS, SOURCE)
    runner = start(tmp_path / "bundle", [SOURCE])
    got = [chain(runner, np.array([TOKENS[:7]]), np.array([0]))[0]]
    got += [chain(runner, np.array([[TOKENS[i]]]), np.array([i]))[0] for i in (7, 8)]
    difference = np.abs(np.concatenate(got) - expected).max()
    assert difference <= 1e-5 * max(1.0, float(np.abs(expected).max())), difference
    return runner.bundle


def randomize_biases(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.3, generator=generator)


@pytest.mark.parametrize("option", LLAMA)
def test_llama(option: str, tmp_path: Path) -> None:
    model, tokenizer = tiny_models.llama(**LLAMA[option])
    randomize_biases(model)
    compare("llama", tiny_models.save(model, tokenizer, tmp_path / "model"), tmp_path)


def test_dynamic_rope_scales_nothing_up_to_the_last_position(tmp_path: Path) -> None:
    """transformers changes the angles of all positions from the first token behind `max_position_embeddings` on."""
    most = 256
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    source = tiny_models.checkpoint(
        "llama", tmp_path / "model", max_position_embeddings=most, rope_parameters=rope
    )
    request = BuildRequest(model=str(source), output=tmp_path / "bundle", draft_layer=1, max_length=most)
    with pytest.raises(OptionError, match=f"--max-length {most + 1} is beyond the model's {most} positions"):
        build_bundle(replace(request, max_length=most + 1))
    build_bundle(request)
    prompt = "a red cup"
    with Session.load(tmp_path / "bundle") as session:
        found = session.generate(
            prompt=RawPrompt(prompt), max_new_tokens=400, draft="early-exit", draft_length=3
        )
    assert found.finish_reason == "length"
    checkpoint = open_checkpoint(source)
    ids = checkpoint.tokenizer(prompt, return_tensors="pt")["input_ids"]
    model = load_reference(checkpoint, streamed=False)
    count = len(found.tokens)
    assert count >= most - ids.shape[1]
    with torch.no_grad():
        wanted = model.generate(ids, do_sample=False, max_new_tokens=count)[0, ids.shape[1] :].tolist()
    assert found.tokens == wanted


@pytest.mark.parametrize("option", T5)
def test_t5(option: str, tmp_path: Path) -> None:
    compare("t5", tiny_models.checkpoint("t5", tmp_path / "model", **T5[option]), tmp_path)


def test_t5_whose_configuration_counts_its_decoder_wrongly(tmp_path: Path) -> None:
    """transformers' `save_pretrained` writes `decoder_layers` too, for the size of its cache; who edits the other one
    only leaves a model that `generate` fails with. Parity compares a whole generation."""
    source = tiny_models.checkpoint("t5", tmp_path / "model")
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"decoder_layers": 4}))
    build_bundle(BuildRequest(model=str(source), output=tmp_path / "bundle", draft_layer=1))


def test_t5_with_a_tied_head_scales_its_rows(tmp_path: Path) -> None:
    """The first T5 ties its head and scales rows by 1/sqrt(width); the table is then stored once for both uses."""
    model, tokenizer = tiny_models.t5()
    with torch.no_grad():
        model.shared.weight.mul_(12.0)
    model.lm_head.weight = model.shared.weight
    folder = tiny_models.save(model, tokenizer, tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    bundle = compare("t5", folder, tmp_path)
    numbers = sum({p.data_ptr(): p.numel() for p in model.parameters()}.values())
    assert bundle.manifest.model.parameters == numbers


def test_tied_llama_with_both_names_in_the_file(tmp_path: Path) -> None:
    """A checkpoint may hold the tied table twice: equal copies are stored once, a different head is kept."""
    from safetensors.torch import load_file, save_file

    folder = tiny_models.checkpoint("llama-tied", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    single = sum(t.numel() for t in tensors.values())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "a").mkdir()
    assert compare("llama", folder, tmp_path / "a").manifest.model.parameters == single
    tensors["lm_head.weight"][3] += 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "b").mkdir()
    bundle = compare("llama", folder, tmp_path / "b")
    assert bundle.manifest.model.parameters == single + tensors["lm_head.weight"].numel()
