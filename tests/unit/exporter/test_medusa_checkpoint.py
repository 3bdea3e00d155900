"""Medusa checkpoints as their authors publish them become drafts; those that do not fit are named in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.drafts.medusa.medusa import MedusaDraft
from vlmexport.exporter.drafts.selection import select_drafts
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.common.errors import ExportError
from vlmexport.runtime.session.session import Session

from tests.support import tiny_models

WIDTH, VOCABULARY = 96, 266


def published(
    folder: Path,
    *,
    prefix: str = "",
    layers: int = 1,
    heads: int = 2,
    projection: bool = True,
    suffix: str = ".pt",
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint and returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for k in range(heads):
        linear = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        for j in range(layers):  # tied, as their code makes them
            tensors[f"{prefix}{k}.{j}.linear.weight"] = linear.clone()
            tensors[f"{prefix}{k}.{j}.linear.bias"] = torch.zeros(WIDTH)
        if projection:
            tensors[f"{prefix}{k}.{layers}.weight"] = torch.randn(
                VOCABULARY, WIDTH, generator=generator
            ).half()
    save = save_file if suffix == ".safetensors" else torch.save
    save(tensors, folder / f"medusa_lm_head{suffix}")
    config = {
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "base_model_name_or_path": "lmsys/vicuna-7b",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose sizes the checkpoints have."""
    folder = tiny_models.checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["vocab_size"]) == (WIDTH, VOCABULARY)
    return folder


@pytest.mark.parametrize(
    "form",
    [
        {}, {"suffix": ".safetensors", "prefix": "medusa_head."}, {"layers": 2, "heads": 3},
        {"projection": False}, {"projection": False, "prefix": "medusa_head.", "layers": 2},
    ],
)  # fmt: skip
def test_a_published_checkpoint_becomes_a_draft(llama: Path, tmp_path: Path, form: dict[str, Any]) -> None:
    tensors = published(tmp_path / "heads", **form)
    draft = open_draft(tmp_path / "heads")
    assert isinstance(draft, MedusaDraft) and draft.tree is None and draft.target["name"] == "lmsys/vicuna-7b"
    state = draft.network.state_dict()
    prefix = form.get("prefix", "")
    assert {f"{prefix}{name}" for name in state} == set(tensors)
    assert all(torch.equal(value, tensors[f"{prefix}{name}"].float()) for name, value in state.items())
    assert draft.network.config.head == ("own" if form.get("projection", True) else "shared")
    bundle = tmp_path / "bundle"
    build_bundle(
        BuildRequest(model=str(llama), output=bundle, drafts=[str(tmp_path / "heads")], max_length=64)
    )
    with Session.load(bundle) as session:  # parity compared the heads with PyTorch
        assert session.bundle.manifest.policy.draft == "medusa"
        plain = session.generate_tokens([3, 4, 5], max_new_tokens=20, draft="none")
        for options in ({"draft_length": 2}, {"draft_nodes": 9}):
            found = session.generate_tokens([3, 4, 5], max_new_tokens=20, draft="medusa", **options)
            assert found.tokens == plain.tokens and found.stats.proposed > 0


def _change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _tensors(folder: Path, change: dict[str, Any]) -> None:
    found = torch.load(folder / "medusa_lm_head.pt") | change
    torch.save({k: v for k, v in found.items() if v is not None}, folder / "medusa_lm_head.pt")


TOLD: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"medusa_num_heads": "3"}, []),
    ({"medusa_num_heads": None, "medusa_num_layers": None}, []),
    ({"medusa_num_heads": 2}, ["says medusa_num_heads 2, medusa_lm_head.pt holds 3"]),
    (
        {"medusa_num_heads": 5, "medusa_num_layers": 10**9},
        ["medusa_num_heads 5", "medusa_num_layers 1000000000"],
    ),
    ({"medusa_num_heads": [3]}, ["medusa_num_heads [3]"]),
]


@pytest.mark.parametrize(("told", "lines"), TOLD)
@pytest.mark.parametrize("layers", [1, 2])
def test_heads_are_counted_in_the_tensors(
    tmp_path: Path, told: dict[str, Any], lines: list[str], layers: int
) -> None:
    """The first published heads say 2 of 5; Medusa-2's config.json is the target's."""
    published(tmp_path, heads=3, layers=layers)
    _change(tmp_path, **told)
    draft = open_draft(tmp_path)
    assert isinstance(draft, MedusaDraft)
    assert (draft.network.config.heads, draft.network.config.layers) == (3, layers)
    assert len(draft.notices) == len(lines) and all(map(str.count, draft.notices, lines))
    assert all(line in select_drafts("x", None, [str(tmp_path)], None, 4).notices for line in draft.notices)


class Harm:
    """Unpickling it would run code."""

    def __reduce__(self):
        return (Path.touch, (Path("harmed"),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: _tensors(f, {"1.0.linear.bias": None}), "misses the tensor 1.0.linear.bias"),
        (lambda f: _tensors(f, {"4.0.linear.weight": torch.ones(WIDTH, WIDTH)}), "misses the tensor 2.0.linear.bias"),
        (lambda f: _tensors(f, {"0.9.linear.weight": torch.ones(WIDTH, WIDTH)}), "layers 10 is not in 1..8"),
        (lambda f: _tensors(f, {"1.scale": torch.ones(1)}), "holds, beside 2 heads of 1 layers, the tensor 1.scale"),
        (lambda f: (f / "config.json").write_text("[1]"), "is not a JSON object"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "medusa_lm_head.pt").write_bytes(b"zip?"), "cannot be read"),
        (lambda f: torch.save({"0.0.linear.weight": Harm()}, f / "medusa_lm_head.pt"), "cannot be read"),
        (lambda f: torch.save([1], f / "medusa_lm_head.pt"), "not a mapping of names to tensors"),
        (lambda f: torch.save({"x": torch.ones(1)}, f / "medusa_lm_head.pt"), "no matrix 0.0.linear.weight"),
    ],
)  # fmt: skip
def test_unsuitable_values_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    published(tmp_path / "heads")
    change(tmp_path / "heads")
    with pytest.raises(ExportError, match=message) as caught:
        open_draft(tmp_path / "heads")
    assert "\n" not in str(caught.value) and not Path("harmed").exists()


def test_heads_of_another_width_or_vocabulary_are_refused(llama: Path, tmp_path: Path) -> None:
    other = tiny_models.checkpoint("llama", tmp_path / "wide", hidden_size=64, num_attention_heads=2)
    published(tmp_path / "heads")
    with pytest.raises(ExportError, match=r"width 96\) does not fit .*width 64"):
        build_bundle(BuildRequest(model=str(other), output=tmp_path / "b", drafts=[str(tmp_path / "heads")]))
    tensors = {k: v[:200] if v.shape[0] == VOCABULARY else v for k, v in published(tmp_path / "few").items()}
    torch.save(tensors, tmp_path / "few" / "medusa_lm_head.pt")
    with pytest.raises(ExportError, match="made for 200 tokens, the model has 266"):
        build_bundle(BuildRequest(model=str(llama), output=tmp_path / "b", drafts=[str(tmp_path / "few")]))
