"""Adapters: what a build merges is the model that peft runs with the adapter active, and none is left out unasked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from vlmexport.exporter.checkpoint import fingerprint, open_checkpoint
from vlmexport.exporter.checkpoint.adapter import CONFIG, KINDS, NONE, adapter_for
from vlmexport.exporter.checkpoint.whole import load_whole
from vlmexport.exporter.families.common.reference import collate
from vlmexport.exporter.families.common.sample_inputs import odd_picture
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.parity.verify import verify_bundle
from vlmexport.exporter.pipeline.build import build_bundle
from vlmexport.exporter.pipeline.dry_run import dry_run
from vlmexport.exporter.pipeline.request import BuildRequest
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import ExportError, OptionError, UnsupportedModelError
from vlmexport.runtime.session.session import Session

from tests.support import tiny_adapters
from tests.support.own_generation import difference
from tests.support.tiny_adapters import TARGETS

FILE = "adapter_model.safetensors"
Q = TARGETS["llama"]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4}),
    "dora": ("LoraConfig", {"r": 4, "use_dora": True, "use_rslora": True, "lora_alpha": 3}),
    "patterns": ("LoraConfig", {"r": 4, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.mlp.down_proj": 9}}),
    "all-linear": ("LoraConfig", {"target_modules": "all-linear"}),
    "head": ("LoraConfig", {"target_modules": [*Q, "lm_head"]}),
    "table": ("LoraConfig", {"target_modules": [*Q, "embed_tokens"]}),
    "saved head": ("LoraConfig", {"modules_to_save": ["lm_head", "norm"]}),
    "tokens": ("LoraConfig", {"trainable_token_indices": [*range(40)]}),
    "ADALORA": ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 9, "tinit": 1, "tfinal": 2}),
    "VERA": ("VeraConfig", {"r": 2, "target_modules": ["q_proj"]}),
    "LOHA": ("LoHaConfig", {"r": 2}),
    "LOKR": ("LoKrConfig", {"r": 2}),
    "IA3": ("IA3Config", {"feedforward_modules": ["down_proj"]}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 4}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "HRA": ("HRAConfig", {"r": 2}),
    "MISS": ("MissConfig", {"r": 2}),
    "FOURIERFT": ("FourierFTConfig", {"n_frequency": 200}),
    "LN_TUNING": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}),
    "TRAINABLE_TOKENS": ("TrainableTokensConfig", {"token_indices": [*range(40)], "target_modules": ["embed_tokens"]}),
    "SHIRA": ("ShiraConfig", {"r": 2}),
    "C3A": ("C3AConfig", {"block_size": 16}),
    "RANDLORA": ("RandLoraConfig", {"r": 2}),
    "ROAD": ("RoadConfig", {"group_size": 16}),
    "VBLORA": ("VBLoRAConfig", {"r": 2, "num_vectors": 16, "vector_length": 4}),
    "DELORA": ("DeloraConfig", {"r": 2}),
    "TINYLORA": ("TinyLoraConfig", {}),
    "WAVEFT": ("WaveFTConfig", {"n_frequency": 200}),
    "HIRA": ("HiraConfig", {"r": 2}),
    "GRALORA": ("GraloraConfig", {"r": 4, "gralora_k": 2}),
    "PVERA": ("PveraConfig", {"r": 2, "target_modules": ["q_proj"]}),
    "GLORA": ("GloraConfig", {"r": 2}),
    "UNILORA": ("UniLoraConfig", {"r": 2}),
}  # fmt: skip
TIED: dict[str, dict[str, Any]] = {
    "table": {"target_modules": [*Q, "embed_tokens"]},
    "head": {"target_modules": [*Q, "lm_head"]},
    "saved table": {"modules_to_save": ["embed_tokens"]},
    "saved both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "saved as one": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [*range(40)]},
    "biases": {"bias": "all"},
    "biases of its modules": {"bias": "lora_only"},
}


@pytest.fixture(scope="module")
def lora(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of the tiny Llama. Copy it before you change it."""
    folder = tmp_path_factory.mktemp("lora")
    tiny_adapters.train(LoraConfig(r=2, target_modules=Q), tiny_checkpoint("llama"), folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 30)[None]).logits


def check_merged(tuned: Any, base: Path, adapter: Path) -> None:
    """Both ways of merging give the model that peft runs, and one gives the other's bits."""
    opened = open_checkpoint(base, adapter=adapter)
    whole = load_whole(opened).eval()
    want, found, without = logits(tuned), logits(whole), logits(load_whole(open_checkpoint(base)))
    assert (want - without).abs().max() > 0.05
    assert (want - found).abs().max() < 2e-3 * (want - without).abs().max()
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        assert torch.equal(opened.tensors.read(opened.stored(name)).float(), parameter), name
    again = open_checkpoint(base, adapter=adapter)
    assert fingerprint(again) == fingerprint(opened) != fingerprint(open_checkpoint(base))


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_is_merged_as_peft_runs_it(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, form: str
) -> None:
    kind, options = FORMS[form]
    base = tiny_checkpoint("llama")
    config = getattr(peft, kind)(**{"target_modules": Q} | options)
    check_merged(tiny_adapters.train(config, base, tmp_path), base, tmp_path)


def test_every_adapter_kind_is_covered() -> None:
    assert {getattr(peft, kind)(**{"target_modules": Q} | o).peft_type.value for kind, o in FORMS.values()} == set(KINDS)  # fmt: skip


def test_pruned_adapter_ranks(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny_checkpoint("llama")
    config = peft.AdaLoraConfig(**{"target_modules": Q} | FORMS["ADALORA"][1])
    tiny_adapters.train(config, base, tmp_path)
    left = {"lora_A": lambda t: t[:2], "lora_B": lambda t: t[:, :2], "lora_E": lambda t: t[:2]}
    tensors = {k: left[k.rpartition("lora_")[1] + k.rpartition("lora_")[2][0]](v).contiguous()
               for k, v in load_file(tmp_path / FILE).items()}  # fmt: skip
    save_file(tensors, tmp_path / FILE)
    names = [k.removeprefix("base_model.model.") for k in tensors if "lora_E" in k]
    change(tmp_path, rank_pattern={name: [True, True, False, False] for name in names})
    model = open_checkpoint(base).model_class.from_pretrained(base, dtype=torch.float32)
    check_merged(peft.PeftModel.from_pretrained(model, str(tmp_path)).eval(), base, tmp_path)


@pytest.mark.parametrize("form", TIED)
def test_a_table_that_two_layers_share_is_changed_for_one(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, form: str
) -> None:
    base = tiny_checkpoint("qwen2")
    config = LoraConfig(**{"r": 2, "target_modules": Q} | TIED[form])
    check_merged(tiny_adapters.train(config, base, tmp_path), base, tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if turn else ()) for turn, name in enumerate(TARGETS)]
)
def test_a_bundle_answers_as_the_model_with_its_adapter(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    base, adapter, bundle = tiny_checkpoint(name), tmp_path / "adapter", tmp_path / "bundle"
    tuned = tiny_adapters.train(LoraConfig(r=4, target_modules=TARGETS[name]), base, adapter)
    build_bundle(
        BuildRequest(model=str(base), adapter=str(adapter), output=bundle, draft_layer=1, parity=False)
    )
    family = family_for(open_checkpoint(base))
    picture = None if family.vision is None else odd_picture(0)
    inputs = collate(family, [family.reference_prompt(picture, "a small robot")], left=True)
    with Session.load(bundle) as session:
        found = session.generate(picture, "a small robot", max_new_tokens=24).tokens
    assert difference(tuned, inputs, found, 24) is None
    with tuned.disable_adapter():
        assert difference(tuned, inputs, found, 24) is not None


@pytest.mark.parametrize(
    ("name", "new", "old", "targets"),
    [
        ("llava", "model.language_model.", "language_model.model.", r"language_model\.model\.layers\.\d+\.self_attn\.q_proj"),
        ("qwen2.5-vl", "model.language_model.", "model.", r"model\.layers\.\d+\.self_attn\.q_proj"),
    ],
)  # fmt: skip
def test_names_of_older_releases(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, name: str, new: str, old: str, targets: str
) -> None:
    base = tiny_checkpoint(name)
    tuned = tiny_adapters.train(LoraConfig(r=2, target_modules=r".*language_model.*q_proj"), base, tmp_path)
    tensors = load_file(tmp_path / FILE)
    save_file({k.replace(new, old): v for k, v in tensors.items()}, tmp_path / FILE)
    change(tmp_path, target_modules=targets)
    check_merged(tuned, base, tmp_path)


def test_weights_of_half_precision_are_rounded_once(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, lora: Path
) -> None:
    base = tiny_checkpoint("llama", dtype=torch.float16)
    opened = open_checkpoint(base, adapter=lora)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert opened.tensors.dtype(name) == "float32" == str(opened.tensors.read(name).dtype)[6:]
    assert not torch.equal(opened.tensors.read(name), opened.tensors.read(name).half().float())
    assert opened.tensors.dtype("model.norm.weight") == "float16"
    request = {"model": str(base), "adapter": str(lora), "draft_layer": 1}
    build_bundle(BuildRequest(**request, output=tmp_path / "bundle", precision="fp16", link_weights=True))
    build_bundle(BuildRequest(**request, output=tmp_path / "streamed", parity_memory=1))


def change(folder: Path, **fields: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def zero(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({k: torch.zeros_like(v) for k, v in tensors.items() if "lora_B" in k})


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WRONG: dict[str, tuple[dict[str, Any], Callable[[dict], Any], str]] = {
    "prompt tuning": ({"peft_type": "PROMPT_TUNING"}, len, "peft_type PROMPT_TUNING is not merged"),
    "decomposes": ({"peft_type": "OSF"}, len, "peft_type OSF is not merged"),
    "no kind": ({"peft_type": None}, len, "has no peft_type"),
    "newer kind": ({"peft_type": "LORA_9"}, len, "peft_type LORA_9 is not merged"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, len, "path_initial_model_for_weight_conversion"),
    "replicated": ({"layer_replication": [[0, 2], [1, 2]]}, len, "layer_replication"),
    "alora": ({"alora_invocation_tokens": [1, 2]}, len, "alora_invocation_tokens"),
    "no effect": ({}, zero, "changes no weight"),
    "not finite": ({}, lambda t: t[FIRST].fill_(float("nan")), "not finite"),
    "no module": ({}, lambda t: t.update({FIRST.replace("q_proj", "query"): t.pop(FIRST)}), "which no module takes; was"),
    "no layer": ({}, lambda t: t.update({FIRST.replace("s.0", "s.7"): t.pop(FIRST)}), "which no module takes; was"),
    "no matrix": ({}, lambda t: t.update({FIRST.replace("_A.w", "_C.w"): t.pop(FIRST)}), "lora_C"),
    "half": ({}, lambda t: t.pop(FIRST), "misses the tensor base_model.model.model.layers.0.self_attn.q_proj.lora_A"),
    "rank": ({"r": 5}, len, "size mismatch"),
    "width": ({}, lambda t: t.update({FIRST: t[FIRST][:, :-1].clone()}), "size mismatch"),
    "pattern": ({"alpha_pattern": {"k_proj": 9}}, len, "alpha_pattern names k_proj"),
    "vocabulary": ({}, lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(999, 96)}), "vocabulary"),
    "saved": ({"modules_to_save": ["lm_head"]}, len, "lm_head"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_merged_is_refused_before_weights_are_read(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    lora: Path,
    case: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields, spoil, words = WRONG[case]
    folder = Path(shutil.copytree(lora, tmp_path / "adapter"))
    tensors = load_file(folder / FILE)
    spoil(tensors)
    save_file(tensors, folder / FILE)
    change(folder, **fields)
    monkeypatch.setattr("vlmexport.exporter.checkpoint.tensors.TensorFiles.read", None)
    request = BuildRequest(model=str(tiny_checkpoint("llama")), adapter=str(folder), output=tmp_path / "b")
    with pytest.raises((ExportError, UnsupportedModelError), match=words) as caught:
        dry_run(request)
    assert "\n" not in str(caught.value)


def test_an_initialisation_that_takes_weights_away_is_seen_without_its_name(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_checkpoint("llama")
    tiny_adapters.train(LoraConfig(r=2, target_modules=Q, init_lora_weights="pissa"), base, tmp_path)
    monkeypatch.setattr("vlmexport.exporter.checkpoint.adapter.RESIDUAL", ("nothing",))
    with pytest.raises(UnsupportedModelError, match="change the weights of"):
        open_checkpoint(base, adapter=tmp_path)


def test_pickled_tensors_are_read(tiny_checkpoint: Callable[..., Path], tmp_path: Path, lora: Path) -> None:
    folder = Path(shutil.copytree(lora, tmp_path / "adapter"))
    torch.save(load_file(folder / FILE), folder / "adapter_model.bin")
    (folder / FILE).unlink()
    base = tiny_checkpoint("llama")
    assert fingerprint(open_checkpoint(base, adapter=folder)) == fingerprint(
        open_checkpoint(base, adapter=lora)
    )
    (folder / "adapter_model.bin").write_bytes(b"nothing")
    with pytest.raises(ExportError, match=r"adapter_model.bin cannot be read"):
        open_checkpoint(base, adapter=folder)


def test_adapter_identity_covers_weights_and_options(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, lora: Path
) -> None:
    base, found = tiny_checkpoint("llama"), {}
    for name, fields in (
        ("same", {}),
        ("moved", {"base_model_name_or_path": "x/y", "peft_version": "0.20"}),
        ("order", {"target_modules": Q[::-1]}),
        ("scaled", {"lora_alpha": 17}),
    ):
        folder = Path(shutil.copytree(lora, tmp_path / name))
        change(folder, **fields)
        found[name] = fingerprint(open_checkpoint(base, adapter=folder))
    assert found["same"] == found["moved"] == found["order"] != found["scaled"]


def test_ignored_adapters_are_reported(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, lora: Path
) -> None:
    base = tiny_checkpoint("llama")
    both = Path(shutil.copytree(base, tmp_path / "both"))
    shutil.copytree(lora, both, dirs_exist_ok=True)
    left = Path(shutil.copytree(lora, tmp_path / "left"))
    change(left, base_model_name_or_path=str(left))
    several = tmp_path / "several"
    shutil.copytree(lora, several / "checkpoint-20")
    for model, adapter, words in (
        (both, None, f"merge it with --adapter {both} and leave it out with --adapter none"),
        (both, lora, "beside the model's weights"),
        (lora, None, f"--model {base} --adapter {lora}"),
        (left, None, f"--model BASE --adapter {left}"),
        (lora, lora, f"--model {base} --adapter {lora}"),
        (base, several, "checkpoint-20"),
        (base, base, "give it as --model"),
        (base, tmp_path / "no/where/here", "no such folder"),
        (base, lora / FILE, "is a file"),
    ):
        with pytest.raises(OptionError) as caught:
            open_checkpoint(model, adapter=adapter)
        assert words in str(caught.value), (model, adapter)
    assert fingerprint(open_checkpoint(both, adapter=both)) == fingerprint(
        open_checkpoint(base, adapter=lora)
    )
    # Of a model on the hub only the description is here when this is asked.
    described = tmp_path / "described"
    described.mkdir()
    for name in ("config.json", CONFIG, FILE):
        shutil.copy(both / name, described)
    with pytest.raises(OptionError, match="is an adapter, not a model"):
        adapter_for(described, "org/model", NONE)
    assert adapter_for(described, "org/model", NONE, described=True) is None
    plain = open_checkpoint(both, adapter=NONE)
    assert fingerprint(plain) == fingerprint(open_checkpoint(base))
    # transformers would apply what lies beside the weights.
    assert torch.equal(logits(load_whole(plain)), logits(load_whole(open_checkpoint(base))))


def test_a_bundle_names_its_adapter(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, lora: Path, capsys: pytest.CaptureFixture
) -> None:
    base, bundle = str(tiny_checkpoint("llama")), tmp_path / "bundle"
    other = Path(shutil.copytree(lora, tmp_path / "mine"))
    change(other, base_model_name_or_path="somebody/other-model-bnb-4bit")
    report = build_bundle(BuildRequest(model=base, adapter=str(other), output=bundle))
    assert any("mine was trained on somebody/other-model-bnb-4bit" in n for n in report.notices)
    opened = open_checkpoint(base, adapter=str(other))
    assert opened.adapter is not None
    merged = Bundle.open(bundle).manifest.model
    assert merged.fingerprint == fingerprint(opened)
    assert merged.adapter is not None and merged.adapter.to_dict() == {
        "name": "mine", "fingerprint": opened.adapter.fingerprint,
    }  # fmt: skip
    assert main(["inspect", str(bundle)]) == 0
    assert "mine (sha256:" in capsys.readouterr().out
    with pytest.raises(OptionError, match="built with the adapter mine; add --adapter"):
        verify_bundle(bundle, base)
    assert main(["verify", str(bundle), "--model", base, "--adapter", str(other), "--prompts", "1"]) == 0
    shifted = Path(shutil.copytree(other, tmp_path / "shifted"))
    change(shifted, lora_alpha=99)
    assert not verify_bundle(bundle, base, adapter=str(shifted)).ok


def test_without_peft_the_extra_is_named(
    tiny_checkpoint: Callable[..., Path], lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "peft" else find(name, *a)
    )
    with pytest.raises(OptionError, match=r"needs the extra \[adapter\] \(peft is missing\): pip install"):
        open_checkpoint(tiny_checkpoint("llama"), adapter=lora)
