"""The hooks refuse what they cannot do, and layers that trace differently never share a template."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_utils import AttentionInterface
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.pytorch_utils import Conv1D
from vlmexport.exporter.graphs.hooks import ATTENTION, OPSET, attend, export_hooks
from vlmexport.exporter.graphs.meta_model import hollow_model, signature
from vlmexport.runtime.common.errors import UnsupportedModelError

from tests.support import tiny_models
from tests.support.as_library import as_library
from tests.support.onnx_session import onnx_session

ROWS = torch.randn(1, 2, 3, 4)


@pytest.mark.parametrize("option", ["s_aux", "sliding_window", "cu_seq_lens_q"])
def test_an_option_that_changes_attention_is_refused_by_name(option: str) -> None:
    attend(nn.Identity(), ROWS, ROWS, ROWS, None, **{option: None, "use_cache": True})
    with pytest.raises(UnsupportedModelError, match=f"Identity passes {option} to attention"):
        attend(nn.Identity(), ROWS, ROWS, ROWS, None, **{option: 30})


@pytest.mark.parametrize("masked", ["bool", "float", "all seen"])
def test_a_soft_cap_bounds_scores_before_the_mask(masked: str) -> None:
    """As transformers' Gemma 2 computes it; the operator as ONNX Runtime computes it, too."""
    cap, scale = 0.7, 0.6
    layer = SimpleNamespace(num_key_value_groups=2, training=False)
    query, key, value = (torch.randn(2, heads, 3, 8) for heads in (4, 2, 2))
    seen = torch.rand(2, 1, 3, 3) < 0.6
    seen[..., 0] = True
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    mask = {"bool": seen, "float": added, "all seen": None}[masked]
    want, _ = eager_attention_forward(
        layer, query, key, value, None if mask is None else added, scaling=scale, softcap=cap
    )
    found, _ = attend(nn.Identity(), query, key, value, mask, scaling=scale, softcap=cap)
    assert torch.allclose(found, want, atol=1e-6)
    uncapped, _ = attend(nn.Identity(), query, key, value, mask, scaling=scale)
    assert not torch.allclose(uncapped, want, atol=1e-2)
    inputs = {"q": query, "k": key, "v": value} | ({} if mask is None else {"m": mask})
    kinds = {torch.float32: TensorProto.FLOAT, torch.bool: TensorProto.BOOL}
    node = helper.make_node("Attention", [*inputs], ["y"], scale=scale, softcap=cap)
    graph = helper.make_graph(
        [node],
        "capped",
        [helper.make_tensor_value_info(n, kinds[v.dtype], v.shape) for n, v in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, query.shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11)
    session = onnx_session(model.SerializeToString())
    (got,) = session.run(None, {name: array.numpy() for name, array in inputs.items()})
    assert np.abs(got.transpose(0, 2, 1, 3) - want.numpy()).max() < 1e-6


def test_a_soft_cap_that_is_not_positive_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Identity: a softcap of 0\.0 is not positive"):
        attend(nn.Identity(), ROWS, ROWS, ROWS, None, softcap=0.0)


def test_a_family_brings_its_own_attention_and_all_is_restored() -> None:
    def own(*_: Any, **__: Any) -> tuple[None, None]:
        return None, None

    before = Conv1D.forward
    with export_hooks():
        assert AttentionInterface._global_mapping[ATTENTION] is attend
        with export_hooks(attention=own):
            assert AttentionInterface._global_mapping[ATTENTION] is own
        assert AttentionInterface._global_mapping[ATTENTION] is attend
        assert Conv1D.forward is not before
    assert ATTENTION not in AttentionInterface._global_mapping and Conv1D.forward is before


def test_a_linear_stored_in_out_computes_the_same() -> None:
    layer, rows = Conv1D(5, 4), torch.randn(2, 3, 4)
    nn.init.normal_(layer.bias)
    expected = layer(rows)
    with export_hooks():
        torch.testing.assert_close(layer(rows), expected)


def small(**changes: Any) -> GPT2Config:
    return GPT2Config(n_embd=8, n_head=2, n_layer=3, vocab_size=20, attn_implementation=ATTENTION, **changes)


def test_a_hollow_model_needs_no_hooks() -> None:
    model = hollow_model(lambda: GPT2LMHeadModel(small()))
    assert all(p.untyped_storage().nbytes() <= 8 for p in model.parameters())
    with pytest.raises(UnsupportedModelError, match=r"cannot be built .* correct config\.json"):
        hollow_model(
            as_library("transformers")(lambda: GPT2LMHeadModel(small(activation_function="none of them")))
        )


def test_layers_share_a_template_only_when_they_compute_the_same() -> None:
    same = hollow_model(lambda: GPT2LMHeadModel(small())).transformer.h
    assert signature(same[0]) == signature(same[1])
    scaled = hollow_model(lambda: GPT2LMHeadModel(small(scale_attn_by_inverse_layer_idx=True))).transformer.h
    assert len({signature(layer) for layer in scaled}) == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [1, 3]), ({"a": 1}, {"a": 2}), ({"a": [1]}, {"b": [1]}), ((1,), [1]), (1, True),
        (torch.tensor([1.0]), torch.tensor([2.0])), (torch.tensor([1]), torch.tensor([1.0])),
        ([torch.zeros(2)], [torch.zeros(3)]),
    ],
    ids=str,
)  # fmt: skip
def test_a_signature_sees_lists_dicts_and_tensors(one: Any, other: Any) -> None:
    layers = [nn.Identity() for _ in range(3)]
    for layer, value in zip(layers, (one, one, other), strict=True):
        layer.setting = value  # type: ignore[assignment]
    assert signature(layers[0]) == signature(layers[1]) != signature(layers[2])


def test_a_signature_sees_buffers() -> None:
    layers = [nn.Identity() for _ in range(3)]
    for layer, value in zip(layers, (1.0, 1.0, 2.0), strict=True):
        layer.register_buffer("table", torch.tensor([value]))
    assert signature(layers[0]) == signature(layers[1]) != signature(layers[2])


def test_an_attention_option_of_a_real_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is ours, not one of torch's export."""
    from transformers.models.llama import modeling_llama
    from vlmexport.exporter.families.languages.llama import LlamaLanguage

    original = modeling_llama.LlamaAttention.forward

    def capped(self: Any, *args: Any, **options: Any) -> Any:
        return original(self, *args, s_aux=30.0, **options)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", capped)

    class Checkpoint:
        stored = staticmethod(str)

    model, _ = tiny_models.llama()
    language = LlamaLanguage(Checkpoint(), model.config, "")  # type: ignore[arg-type]
    language.embedding = language.head = None  # type: ignore[assignment]
    with language.hooks(), pytest.raises(UnsupportedModelError, match="s_aux"):
        from vlmexport.exporter.families.common.decoder_graphs import layer_inputs
        from vlmexport.exporter.graphs.traced_module import trace

        inputs = layer_inputs(language.decoder, 0)
        names = [item.name for item in inputs]
        layer = language.model.model.layers[0]
        trace(
            layer,
            lambda module, *rows: language.run_layer(module, dict(zip(names, rows, strict=True))),
            inputs,
            ("hidden_out", "keys", "values"),
        )
