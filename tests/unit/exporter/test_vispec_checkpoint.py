"""ViSpec checkpoints as their authors publish them become drafts; those that do not fit, and targets that have no pictures to
see, are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vlmexport.exporter.drafts.common.trained import described
from vlmexport.exporter.drafts.eagle.eagle import EagleDraft
from vlmexport.exporter.drafts.eagle.vispec import VispecDraft
from vlmexport.exporter.drafts.eagle.vispec_network import VispecConfig
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.common.errors import ExportError, OptionError

from tests.support import tiny_models
from tests.unit.exporter.test_eagle_checkpoint import HEADS, VOCABULARY, WIDTH
from tests.unit.exporter.test_eagle_checkpoint import published as layer


def published(
    folder: Path,
    *,
    queries: int = 2,
    bias: bool = False,
    safe: bool = False,
    **changes: tuple[int, ...] | None,
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint, tensors of it with other shapes or left out, and returns its tensors."""
    tensors = layer(folder, bias=True, qkv=bias)  # their code asks one field, `qkv_bias`, for both
    shapes: dict[str, Any] = {
        "imadpt.q": (queries, HEADS, WIDTH // HEADS),
        "imadpt.k_proj.weight": (WIDTH, WIDTH),
        "imadpt.v_proj.weight": (WIDTH, WIDTH),
        "imadpt.o_proj.weight": (WIDTH, WIDTH),
        "img_fc.weight": (WIDTH, 2 * WIDTH),
        "img_fc.bias": (WIDTH,),
    } | (dict.fromkeys(("imadpt.k_proj.bias", "imadpt.v_proj.bias"), (WIDTH,)) if bias else {})
    generator = torch.Generator().manual_seed(2)
    for name, shape in (shapes | changes).items():
        if shape is not None:
            tensors[name] = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    (folder / "pytorch_model.bin").unlink()
    if safe:
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    return tensors


@pytest.mark.parametrize("form", [{}, {"queries": 5, "bias": True, "safe": True}])
def test_a_published_vispec_checkpoint_becomes_a_draft(tmp_path: Path, form: dict[str, Any]) -> None:
    tensors = published(tmp_path / "draft", **form)
    draft = open_draft(tmp_path / "draft")
    assert isinstance(draft, VispecDraft)
    config = draft.network.config
    assert (config.queries, config.adaptor_bias) == (form.get("queries", 2), form.get("bias", False))
    assert config.layer.rope_theta == 500000.0 and config.adaptor_heads == HEADS
    assert config.layer.qkv_bias == ("qkv_bias" in described(config)["layer"]) == form.get("bias", False)
    state = draft.network.state_dict()
    assert len(state) == len(tensors) - 1  # the copy of the target's table is left out
    for name, value in tensors.items():
        own = name if name.startswith(("imadpt.", "img_fc.")) else f"layer.{name}"
        assert name == "embed_tokens.weight" or torch.equal(state[own], value.float())
    layer(tmp_path / "eagle")
    assert isinstance(open_draft(tmp_path / "eagle"), EagleDraft)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"img_fc.bias": None}, "misses the tensor img_fc.bias"),
        ({"imadpt.q": (2, HEADS, 7)}, r"imadpt.q has shape \[2, 4, 7\], not \[queries, heads, head_dim\]"),
        ({"imadpt.q": (1, HEADS, WIDTH // HEADS)}, r"1 queries are not in 2\.\.256"),
        ({"img_fc.weight": (WIDTH, WIDTH)}, r"img_fc.weight has shape \[96, 96\], not \[96, 192\]"),
        ({"imadpt.norm": (WIDTH,)}, "holds, beside one layer of ViSpec, the tensor imadpt.norm"),
    ],
)
def test_what_does_not_fit_a_vispec_layer_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    published(tmp_path / "draft", **changes)
    with pytest.raises(ExportError, match=message):
        open_draft(tmp_path / "draft")


@pytest.mark.parametrize(
    ("kind", "message"),
    [("llama", "llama reads text only"), ("blip2-t5", "decoder of blip2 sees pictures by cross-attention")],
)
def test_targets_without_pictures_among_their_rows_are_refused(
    tmp_path: Path, kind: str, message: str
) -> None:
    model = tiny_models.checkpoint(kind, tmp_path / "model")
    published(tmp_path / "draft")
    request = BuildRequest(
        model=str(model), output=tmp_path / "bundle", drafts=[str(tmp_path / "draft")], max_length=64
    )
    with pytest.raises(ExportError, match=f"--draft vispec: .*{message}.* give --draft eagle"):
        build_bundle(request)


def test_options_of_a_vispec_network_are_checked() -> None:
    good = {"hidden_size": 8, "vocab_size": VOCABULARY, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    good["intermediate_size"] = 12
    assert VispecConfig.of({"layer": good, "adaptor_heads": 2}).hidden_size == 8
    for options, message in (
        ({"layer": 3, "adaptor_heads": 2}, "layer 3 is no mapping"),
        ({"layer": good, "adaptor_heads": 3}, "3 heads of the adaptor do not divide the width 8"),
        ({"layer": good, "adaptor_heads": 2, "queries": 1}, r"1 queries are not in 2\.\.256"),
        ({"layer": good, "adaptor_heads": 2, "adaptor_bias": 1}, "adaptor_bias 1 is neither"),
    ):
        with pytest.raises(OptionError, match=message):
            VispecConfig.of(json.loads(json.dumps(options)))
