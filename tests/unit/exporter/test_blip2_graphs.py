"""BLIP-2's graphs in front of the decoder against PyTorch, and the whole chain from pixels to logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Blip2ForConditionalGeneration

from tests.support.graph_runner import GraphRunner, close

Bundles = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def pair(tiny_bundle: Bundles) -> tuple[Path, Blip2ForConditionalGeneration]:
    bundle, source = tiny_bundle("blip2-t5", 1, num_decoder_layers=3, qformer_layers=3, dtype=torch.float16)
    model = Blip2ForConditionalGeneration.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    )
    return bundle, model.eval()


def pixels(batch: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(batch, 3, 32, 32)).astype(np.float32)


@pytest.mark.parametrize("batch", [1, 3])
def test_vision(pair: tuple[Path, Blip2ForConditionalGeneration], batch: int) -> None:
    bundle, model = pair
    with torch.no_grad():
        expected = model.get_image_features(torch.from_numpy(pixels(batch))).pooler_output.numpy()
    rows = GraphRunner(bundle).run("vision", pixel_values=pixels(batch))["image_rows"]
    assert expected.std() > 0.1
    close(rows, expected)


def test_encoder_with_padding_and_cross_kv(pair: tuple[Path, Blip2ForConditionalGeneration]) -> None:
    bundle, model = pair
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(2, 9, model.config.text_config.d_model)).astype(np.float32)
    lengths = np.array([9, 5])
    runner = GraphRunner(bundle)
    states = runner.encode(rows, lengths)
    encoder = model.language_model.get_encoder()
    mask = torch.arange(9)[None] < torch.from_numpy(lengths)[:, None]
    with torch.no_grad():
        expected = encoder(inputs_embeds=torch.from_numpy(rows), attention_mask=mask.long()).last_hidden_state
        for i, block in enumerate(model.language_model.decoder.block):
            cross = block.layer[1].EncDecAttention
            key = cross.k(expected).view(2, 9, cross.n_heads, -1).transpose(1, 2).numpy()
            value = cross.v(expected).view(2, 9, cross.n_heads, -1).transpose(1, 2).numpy()
            for row, n in enumerate(lengths):
                close(runner.cross[f"cross_key.{i}"][row, :, :n], key[row, :, :n])
                close(runner.cross[f"cross_value.{i}"][row, :, :n], value[row, :, :n])
    for row, n in enumerate(lengths):
        close(states[row, :n], expected.numpy()[row, :n])


def test_pixels_to_logits(pair: tuple[Path, Blip2ForConditionalGeneration]) -> None:
    bundle, model = pair
    image, prompt, tokens = model.config.image_token_id, [7, 12, 9], [0, 8, 30, 22, 17]
    ids = [image] * model.config.num_query_tokens + prompt
    with torch.no_grad():
        expected = (
            model(
                pixel_values=torch.from_numpy(pixels(1)),
                input_ids=torch.tensor([ids]),
                decoder_input_ids=torch.tensor([tokens]),
            )
            .logits[0]
            .numpy()
        )
    runner = GraphRunner(bundle)
    rows = runner.run("vision", pixel_values=pixels(1))["image_rows"]
    runner.encode(np.concatenate([rows, runner.embed(np.array([prompt]))], 1))
    slots = np.arange(runner.size)[None]
    query = np.arange(len(tokens))[None]
    visible = slots[:, None, :] <= query[:, :, None]
    hidden = runner.forward(runner.embed(np.array([tokens])), np.array([0]), query, slots, visible)
    assert len(hidden) == 2
    close(runner.head(hidden[-1], np.arange(len(tokens))), expected)


def test_gelu_is_exported_as_one_node(pair: tuple[Path, Blip2ForConditionalGeneration]) -> None:
    import onnx

    model = onnx.load(pair[0] / "segment.0.onnx", load_external_data=False)
    operators = {n.op_type for n in model.graph.node}
    assert "Gelu" in operators and not operators & {"Pow", "Tanh", "Shape", "Expand", "Cast"}
