"""generation_config: what the manifest takes from it, and that the bundle then decodes as the model's own generate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.common.reference import collate
from vlmexport.exporter.families.common.sample_inputs import odd_picture
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.pipeline.dry_run import dry_run
from vlmexport.exporter.pipeline.generation import (
    DEFAULTS,
    HONOURED,
    WITHOUT_EFFECT,
    describe_generation,
    generation_config,
)
from vlmexport.runtime import cli
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import GenerationInfo
from vlmexport.runtime.common.errors import ExportError
from vlmexport.runtime.session.session import Session

from tests.support.own_generation import asking, difference

Checkpoints = Callable[..., Path]


@pytest.fixture
def changed(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Callable[..., Path]:
    """`changed(name, generation, config)`: a copy whose files have these fields; no generation_config.json for None."""

    def make(name: str, generation: dict[str, Any] | None, config: dict[str, Any] | None = None) -> Path:
        folder = shutil.copytree(tiny_checkpoint(name), tmp_path / f"changed-{name}")
        path = folder / "generation_config.json"
        if generation is None:
            path.unlink()
        else:
            path.write_text(json.dumps({**json.loads(path.read_text()), **generation}))
        if config is not None:
            path = folder / "config.json"
            stored = json.loads(path.read_text())
            for key, value in config.items():
                stored[key] = {**stored[key], **value} if isinstance(value, dict) else value
            path.write_text(json.dumps(stored))
        return folder

    return make


# --- the manifest ---


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, {"ignored": []}),
        ({"repetition_penalty": 1.05, "no_repeat_ngram_size": 3},
         {"repetition_penalty": 1.05, "no_repeat_ngram_size": 3, "ignored": []}),
        ({"repetition_penalty": 1, "top_k": 50, "top_p": 1, "num_beams": 1, "min_length": 0, "suppress_tokens": []},
         {"ignored": []}),
        ({"suppress_tokens": [-1, 4], "begin_suppress_tokens": [5], "bad_words_ids": [[1, 2], [3]]},
         {"suppress_tokens": [4], "begin_suppress_tokens": [5], "bad_words_ids": [[1, 2], [3]], "ignored": []}),
        # transformers replaces min_length by the prompt's length + min_new_tokens, even where that is 0.
        ({"min_length": 30, "min_new_tokens": 4}, {"min_new_tokens": 4, "ignored": []}),
        ({"min_length": 30, "min_new_tokens": 0}, {"ignored": []}),
        ({"min_length": 30}, {"min_length": 30, "ignored": []}),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "num_beams": 4, "length_penalty": -1.0,
          "forced_eos_token_id": 2, "of_a_later_version": 1, "max_new_tokens": 9, "use_cache": False},
         {"ignored": ["do_sample", "forced_eos_token_id", "length_penalty", "num_beams", "of_a_later_version",
                      "temperature", "top_p"]}),
    ],
)  # fmt: skip
def test_generation_config_fields_are_taken_over(
    asked: dict, found: dict, changed: Callable[..., Path]
) -> None:
    described = describe_generation(open_checkpoint(changed("llama", asked)))
    assert described == found
    GenerationInfo.parse(described, "generation")


@pytest.mark.parametrize(
    ("generation", "config"),
    [
        ({"repetition_penalty": 1.5, "num_beams": 2, "temperature": 0.3}, {"no_repeat_ngram_size": 2}),
        (None, {"no_repeat_ngram_size": 2, "num_beams": 3, "text_config": {"repetition_penalty": 1.7}}),
        (None, {}),
    ],
)
@pytest.mark.parametrize("name", ["llama", "t5", "blip2-t5"])
def test_generation_config_equals_the_loaded_models(
    name: str, generation: dict | None, config: dict, changed: Callable[..., Path]
) -> None:
    if name != "blip2-t5":
        config = {key: value for key, value in config.items() if key != "text_config"}
    folder = changed(name, generation, config)
    checkpoint = open_checkpoint(folder)
    model = getattr(transformers, checkpoint.architecture).from_pretrained(folder)
    own = getattr(
        model, "language_model", model
    ).generation_config  # BLIP-2 calls its language model's generate
    effective = generation_config(checkpoint)
    fields = [*DEFAULTS, *HONOURED, "eos_token_id", "pad_token_id", "decoder_start_token_id"]
    assert {f: getattr(effective, f) for f in fields} == {f: getattr(own, f) for f in fields}
    described, asks = describe_generation(checkpoint), (generation or {}) | config
    if name == "blip2-t5":
        wanted = set(
            generation or {"no_repeat_ngram_size", "num_beams", "repetition_penalty"} if asks else {}
        )
        assert described == {"ignored": sorted(wanted)}
    elif generation is not None:
        assert described == {"repetition_penalty": 1.5, "ignored": ["num_beams", "temperature"]}
    elif config:
        assert described == {"no_repeat_ngram_size": 2, "ignored": ["num_beams"]}


def test_defaults_are_those_of_transformers() -> None:
    own = transformers.GenerationConfig._get_default_generation_params()
    known = {**DEFAULTS, "min_new_tokens": None}
    for name, value in own.items():
        if name not in WITHOUT_EFFECT:
            assert known.get(name) == value, name
    fields = {name for name in transformers.GenerationConfig().to_dict() if not name.startswith("_")}
    assert fields >= WITHOUT_EFFECT | HONOURED.keys() | DEFAULTS.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0.0), ("repetition_penalty", "1.1"), ("no_repeat_ngram_size", -1), ("min_length", 1.5),
        ("min_new_tokens", True), ("suppress_tokens", [1.5]), ("begin_suppress_tokens", {"a": 1}),
        ("bad_words_ids", [3]), ("bad_words_ids", [[]]), ("bad_words_ids", [[-1]]),
    ],
)  # fmt: skip
def test_wrong_values_are_named(name: str, value: object, changed: Callable[..., Path]) -> None:
    with pytest.raises(ExportError, match=f"{name} .* is not .*; correct generation_config.json") as caught:
        describe_generation(open_checkpoint(changed("llama", {name: value})))
    assert "\n" not in str(caught.value)


def test_what_transformers_refuses_is_one_line(changed: Callable[..., Path]) -> None:
    folder = changed("llama", {"num_return_sequences": 3, "do_sample": False})
    with pytest.raises(ExportError, match=r"transformers refuses it: .*num_return_sequences") as caught:
        describe_generation(open_checkpoint(folder))
    assert "\n" not in str(caught.value)


def test_build_and_inspect_name_it(
    changed: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(
        "llama", {"repetition_penalty": 1.05, "suppress_tokens": [4, 5], "num_beams": 4, "top_k": 3}
    )
    notice = "Not taken over from the model's generation configuration: num_beams, top_k"
    request = BuildRequest(model=str(folder), output=tmp_path / "bundle", draft_layer=1, parity=False)
    assert notice in dry_run(request).notices
    assert notice in build_bundle(request).notices
    bundle = Bundle.open(tmp_path / "bundle")
    asked = bundle.manifest.generation
    assert (asked.repetition_penalty, asked.suppress_tokens) == (1.05, [4, 5])
    assert cli.main(["inspect", str(tmp_path / "bundle")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Generation repetition penalty 1.05, 2 suppress tokens, not taken over: num_beams, top_k" in shown
    assert cli.main(["inspect", str(tmp_path / "bundle"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["generation"]["ignored"] == ["num_beams", "top_k"]


def test_inspect_says_nothing_where_nothing_is_asked(
    tiny_bundle: Callable[..., tuple[Path, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(tiny_bundle("llama")[0])]) == 0
    assert "Generation" not in capsys.readouterr().out


# --- the output ---


def settings_against(plain: list[list[int]]) -> dict[str, Any]:
    """What changes these outputs, field by field."""
    return {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_length": 26,
        "min_new_tokens": 12,
        "suppress_tokens": [row[2] for row in plain],
        "begin_suppress_tokens": [row[0] for row in plain],
        "bad_words_ids": [row[3:5] for row in plain] + [plain[0][6:7]],
    }


@pytest.mark.parametrize("draft", ["none", "early-exit@1"])
@pytest.mark.parametrize(
    "asks",
    ["repetition_penalty", "no_repeat_ngram_size", "min_length", "min_new_tokens", "suppress_tokens",
     "begin_suppress_tokens", "bad_words_ids", "all"],
)  # fmt: skip
def test_greedy_output_is_that_of_the_models_own_generate(
    asks: str, draft: str, tiny_bundle: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    bundle, checkpoint = tiny_bundle("llama")
    prompts = [np.random.default_rng(i).integers(3, 250, 12).tolist() for i in range(4)]
    with Session.load(bundle) as session:  # what would come, so that the settings hit it
        plain = [
            list(session.generate_tokens(ids, max_new_tokens=24, draft="none").tokens) for ids in prompts
        ]
    settings = settings_against(plain)
    if asks != "all":
        settings = {asks: settings[asks]}
    end = {"eos_token_id": plain[0][5]} if "min_length" in settings or "min_new_tokens" in settings else {}
    source, target = asking(checkpoint, bundle, tmp_path, **settings, **end)
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    outputs = []
    with Session.load(target) as session:
        for ids in prompts:
            outputs.append(list(session.generate_tokens(ids, max_new_tokens=24, draft=draft).tokens))
            assert difference(model, {"input_ids": torch.tensor([ids])}, outputs[-1], 24) is None
    assert outputs != plain  # the settings do change something


@pytest.mark.parametrize("name", ["vit-gpt2", "t5", "blip2-t5", "blip2-opt"])
def test_every_family_follows_its_generation_config(
    name: str, tiny_bundle: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """With an encoder the history is the decoder's alone; BLIP-2 decodes without any wish, as transformers does."""
    bundle, checkpoint = tiny_bundle(name)
    opened = open_checkpoint(checkpoint)
    family = family_for(opened)
    requests = [(None if family.vision is None else odd_picture(i), f"the red cup {i}") for i in range(2)]

    def outputs(folder: Path) -> list[list[int]]:
        with Session.load(folder) as session:
            return [list(session.generate(*request, max_new_tokens=16).tokens) for request in requests]

    plain = outputs(bundle)
    settings = settings_against(plain)
    del settings["min_length"]  # transformers takes min_new_tokens instead
    source, target = asking(checkpoint, bundle, tmp_path, **settings)
    model = getattr(transformers, opened.architecture).from_pretrained(source).eval()
    found = outputs(target)
    for request, output in zip(requests, found, strict=True):
        inputs = collate(family, [family.reference_prompt(*request)], left=True)
        assert difference(model, inputs, output, 16) is None
    assert (found == plain) == name.startswith("blip2")


def test_blip2_follows_its_language_model(
    tiny_bundle: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """transformers' BLIP-2 ignores its generation_config.json, so the bundle does too, and says so."""
    bundle, checkpoint = tiny_bundle("blip2-t5")
    _, target = asking(checkpoint, bundle, tmp_path, repetition_penalty=1.5, eos_token_id=7)
    manifest = Bundle.open(target).manifest
    assert manifest.text.eos_token_ids == [1]
    assert manifest.generation == GenerationInfo(ignored=["repetition_penalty"])


def test_a_build_compares_with_what_the_runtime_does(changed: Callable[..., Path], tmp_path: Path) -> None:
    """Parity's generation follows the model's wishes, and leaves out in both what the runtime ignores."""
    folder = changed(
        "llama",
        {"repetition_penalty": 1.4, "begin_suppress_tokens": list(range(100)), "num_beams": 3, "num_return_sequences": 2,
         "forced_eos_token_id": 9, "guidance_scale": 2.0, "length_penalty": 2.0, "of_a_later_version": 1},
    )  # fmt: skip
    report = build_bundle(BuildRequest(model=str(folder), output=tmp_path / "bundle", draft_layer=1))
    (row,) = (row for row in report.parity if row["graph"] == "generation")
    assert row["values"] > 5
