"""What a folder's files mean where they contradict each other, or are older than transformers 5: as transformers decides."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.checkpoint.tensors import TensorFiles
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.pipeline.checks import check_requests
from vlmexport.exporter.pipeline.prepare import prepare
from vlmexport.exporter.pipeline.request import BuildRequest
from vlmexport.runtime.common.errors import ExportError, UnsupportedModelError, VlmexportError

from tests.support import tiny_models

VLMS = ("llava", "llava-next", "qwen2.5-vl", "internvl")
WITH_TORCHVISION = ("qwen2.5-vl", "internvl")
"""Those of them whose processor needs it."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of a kind, made once: copy it before you change it."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny_models.checkpoint(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


@pytest.fixture
def folder(original: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint."""

    def get(kind: str, name: str = "model") -> Path:
        return Path(shutil.copytree(original(kind), tmp_path / name))

    return get


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text("utf-8"))
    edit(document)
    path.write_text(json.dumps(document), "utf-8")


def change_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = path / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


# --- which file holds the weights ---

FORMS = {
    "model.safetensors": 1.0,
    "model.safetensors.index.json": 2.0,
    "pytorch_model.bin": 3.0,
    "pytorch_model.bin.index.json": 4.0,
}


def write_form(folder: Path, name: str) -> None:
    tensors = {"weight": torch.full((2, 2), FORMS[name])}
    kind = "safetensors" if "safetensors" in name else "bin"
    file = name.replace(".index.json", "").replace(
        f".{kind}", f"-00001-of-00001.{kind}" if "index" in name else f".{kind}"
    )
    if kind == "bin":
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if "index" in name:
        (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": {"weight": file}}))


@pytest.mark.parametrize("present", [c for n in (1, 2, 3, 4) for c in itertools.combinations(FORMS, n)])
def test_weights_are_in_the_file_that_transformers_reads(present: tuple[str, ...], tmp_path: Path) -> None:
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    for name in present:
        write_form(tmp_path, name)
    expected, _ = _get_resolved_checkpoint_files(
        str(tmp_path), None, None, None, None, False, None, {"local_files_only": True}
    )
    files = TensorFiles(tmp_path)
    assert [str(file) for file in files.shards] == list(expected or [])
    assert float(files.read("weight")[0, 0]) == min(FORMS[name] for name in present)
    same = {n for n in present if ("safetensors" in n) == ("safetensors" in files.shards[0].name)}
    assert bool(files.unread) == (len(same) > 1), "an older save of the same format is told"


def test_the_file_that_the_configuration_names_is_read(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    shutil.move(path / "model.safetensors", path / "tuned.safetensors")
    shutil.copy(folder("llama-tied", "other") / "model.safetensors", path / "model.safetensors")
    change(path / "config.json", lambda d: d.update(transformers_weights="tuned.safetensors"))
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.tensors.read("lm_head.weight"), model.lm_head.weight)
    for named, reason in (("../x.safetensors", "no safetensors file"), ("none.safetensors", "misses")):
        change(path / "config.json", lambda d, named=named: d.update(transformers_weights=named))
        with pytest.raises(ExportError, match=reason):
            open_checkpoint(path)


def test_a_stale_index_is_not_read_and_is_told(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-1.safetensors"}})
    )
    (notice,) = open_checkpoint(path).notices
    assert "from model.safetensors" in notice and "not from model.safetensors.index.json" in notice


# --- which flag ties embedding and head ---

FLAGS = (True, False, None)


def set_flag(document: dict[str, Any], value: bool | None) -> None:
    document.pop("tie_word_embeddings", None)
    if value is not None:
        document["tie_word_embeddings"] = value


@pytest.mark.parametrize("kind", ["llava", "qwen2.5-vl"])
@pytest.mark.parametrize("outer", FLAGS)
@pytest.mark.parametrize("inner", FLAGS)
@pytest.mark.parametrize("stored", [True, False])
def test_tables_are_tied_as_transformers_ties_them(
    kind: str, outer: bool | None, inner: bool | None, stored: bool, folder: Callable[[str], Path]
) -> None:
    path = folder(kind)

    def edit(document: dict[str, Any]) -> None:
        set_flag(document, outer)
        set_flag(document["text_config"], inner)

    change(path / "config.json", edit)
    if not stored:
        change_tensors(path, lambda t: {n: v for n, v in t.items() if "lm_head" not in n})
    checkpoint = open_checkpoint(path)
    model, loading = checkpoint.model_class.from_pretrained(path, output_loading_info=True)
    if loading["missing_keys"]:
        with pytest.raises(ExportError, match=r"has no tensor .*lm_head\.weight"):
            _ = family_for(checkpoint).language.head
        return
    language = family_for(checkpoint).language
    assert torch.equal(checkpoint.tensors.read(language.head.names[0]), model.lm_head.weight)
    embedding = model.get_input_embeddings().weight
    assert torch.equal(checkpoint.tensors.read(language.embedding.names[0]), embedding)
    assert (language.head.names == language.embedding.names) == (model.lm_head.weight is embedding)


def flat(document: dict[str, Any]) -> None:
    """As the authors of Qwen2.5-VL published it (transformers 4.41): the language model's fields stand at the top."""
    text = document.pop("text_config")
    rope = text.pop("rope_parameters")
    for name in (
        "model_type",
        "architectures",
        "layer_types",
        "dtype",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ):
        text.pop(name, None)
    for name, value in text.items():
        document.setdefault(name, value)
    document.pop("dtype", None)
    document |= {
        "rope_theta": rope["rope_theta"], "torch_dtype": "float32", "transformers_version": "4.41.2",
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 70,
    }  # fmt: skip


def test_a_flat_configuration_is_prepared(folder: Callable[[str], Path]) -> None:
    """Parity of such a folder is compared by the library of published layouts."""
    path = folder("qwen2.5-vl")
    change(path / "config.json", flat)
    assert "text_config" not in json.loads((path / "config.json").read_text("utf-8"))
    found = prepare(BuildRequest(model=str(path), output=path / "never", draft_layer=1), write=False)
    model = found.checkpoint.model_class.from_pretrained(path)
    head = found.checkpoint.tensors.read(found.family.language.head.names[0])
    assert torch.equal(head, model.lm_head.weight)


# --- what is a weight ---


def quantised(change_weight: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> Callable:
    """Every matrix of the language model becomes what `change_weight` makes of it, by suffix of its name."""

    def edit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, value in tensors.items():
            matrix = ".layers." in name and name.endswith("q_proj.weight") and "vis" not in name
            stem = name.removesuffix(".weight")
            if matrix:
                found |= {f"{stem}.{end}": part.clone() for end, part in change_weight(value).items()}
            else:
                found[name] = value
        return found

    return edit


INT = torch.zeros(4, 4, dtype=torch.int32)
LAYOUTS: dict[str, tuple[Callable, str]] = {
    "fp8": (
        lambda w: {"weight": w.to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)},
        "float8_e4m3fn, which is no weight",
    ),
    "fp8-beside": (lambda w: {"weight": w, "weight_scale": torch.ones(1)}, "q_proj.weight_scale stands beside"),
    "bnb-int8": (lambda w: {"weight": w.to(torch.int8), "SCB": torch.ones(len(w))}, "int8, which is no weight"),
    "bnb-nf4": (
        lambda w: {"weight": w, "weight.absmax": torch.ones(3), "weight.quant_map": torch.ones(16)},
        "weight.absmax stands beside",
    ),
    "awq": (lambda w: {"qweight": INT, "qzeros": INT, "scales": torch.ones(4, 4)}, "q_proj.qweight stands beside"),
    "gptq": (lambda w: {"qweight": INT, "g_idx": INT[0], "scales": torch.ones(4, 4)}, "q_proj.g_idx stands beside"),
    "lora": (
        lambda w: {"weight": w, "lora_A.default.weight": w[:2], "lora_B.default.weight": w[:, :2]},
        "q_proj.lora_A.default.weight stands beside .* merge it",
    ),
    "uint8": (lambda w: {"weight": w.to(torch.uint8)}, "uint8, which is no weight"),
    "float16-scaled": (lambda w: {"weight": w.half(), "input_scale": torch.ones(1)}, "q_proj.input_scale stands"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "llava", "qwen2.5-vl"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_non_weight_tensors_are_refused(kind: str, layout: str, folder: Callable[[str], Path]) -> None:
    """Whatever the configuration says: a stripped one must not make weights of integers."""
    edit, reason = LAYOUTS[layout]
    path = folder(kind)
    change_tensors(path, quantised(edit))
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        prepare(BuildRequest(model=str(path), output=path / "never", draft_layer=1), write=False)
    assert "layers.0.self_attn.q_proj" in str(caught.value) and "\n" not in str(caught.value)


METHODS = ("awq", "gptq", "fp8", "compressed-tensors", "bitsandbytes")


@pytest.mark.parametrize("kind", ["llama", "blip2-opt", *VLMS])
@pytest.mark.parametrize("where", ["top", "text_config"])
def test_a_quantised_configuration_is_refused_by_its_method(
    kind: str, where: str, folder: Callable[[str], Path]
) -> None:
    path = folder(kind)
    for method in METHODS:

        def edit(document: dict[str, Any], method: str = method) -> None:
            part = document if where == "top" else document.get("text_config", document)
            part["quantization_config"] = {"quant_method": method, "bits": 4, "load_in_8bit": True}

        change(path / "config.json", edit)
        with pytest.raises(UnsupportedModelError, match=f"quantized by '{method}'"):
            family_for(open_checkpoint(path))


LEFTOVERS = {
    "llama": "model.layers.0.self_attn.rotary_emb.inv_freq",
    "vit-gpt2": "decoder.transformer.h.0.attn.masked_bias",
    "llava": "vision_tower.vision_model.embeddings.position_ids",
}


@pytest.mark.parametrize("kind", LEFTOVERS)
def test_leftovers_of_older_releases_are_no_weights_and_are_let_pass(
    kind: str, folder: Callable[[str], Path]
) -> None:
    path = folder(kind)
    change_tensors(path, lambda t: {**t, LEFTOVERS[kind]: torch.arange(4)})
    assert open_checkpoint(path).names.shapes


@pytest.mark.parametrize("name", ["value_head.summary.weight", "model.layers.0.self_attn.o_proj.bias"])
def test_tensors_that_nothing_reads_are_told(name: str, folder: Callable[[str], Path]) -> None:
    """As transformers, which warns of them; a further bias is of another form of the model, and no quantisation's."""
    path = folder("llama")
    change_tensors(path, lambda t: {**t, name: torch.ones(96)})
    (notice,) = open_checkpoint(path).notices
    assert "1 tensor of the checkpoint belongs to no parameter" in notice and name in notice


# --- which template, and which processor files ---

TEXT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLACES = ("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json")


@pytest.mark.parametrize("kind", VLMS)
@pytest.mark.parametrize("present", [c for n in (1, 2, 3) for c in itertools.combinations(PLACES, n)])
def test_the_template_is_the_one_that_the_processor_takes(
    kind: str, present: tuple[str, ...], folder: Callable[[str], Path]
) -> None:
    path = folder(kind)
    (path / "chat_template.jinja").unlink()
    marked = {place: f"{tiny_models.LLAVA_TEMPLATE}{{# {place} #}}" for place in present}
    for place, template in marked.items():
        file = path / place
        if place.endswith(".jinja"):
            file.write_text(template, "utf-8")
        elif file.is_file():
            change(file, lambda d, template=template: d.update(chat_template=template))
        else:
            file.write_text(json.dumps({"chat_template": template}), "utf-8")
    checkpoint = open_checkpoint(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    expected = tokenizer.chat_template
    if kind not in WITH_TORCHVISION or present != ("tokenizer_config.json",):
        processor = transformers.ProcessorMixin.get_processor_dict(path)[0].get("chat_template")
        expected = processor or expected
    if kind not in WITH_TORCHVISION:
        own = transformers.AutoProcessor.from_pretrained(path, backend="pil").chat_template
        assert own is None or own == expected
    assert family_for(checkpoint).chat_template == expected


@pytest.mark.parametrize("kind", ["llava", "llava-next"])
@pytest.mark.parametrize(
    "gone", [("num_additional_image_tokens",), ("num_additional_image_tokens", "patch_size"), ()]
)
def test_processor_files_of_older_releases_count_the_same_rows(
    kind: str, gone: tuple[str, ...], folder: Callable[[str], Path]
) -> None:
    path = folder(kind)
    change(path / "processor_config.json", lambda d: [d.pop(name, None) for name in gone])
    found = prepare(BuildRequest(model=str(path), output=path / "never", draft_layer=1), write=False)
    check_requests(found)  # the prompt of the runtime is that of the processor


def test_non_object_image_size_is_refused(folder: Callable[[str], Path]) -> None:
    path = folder("qwen2.5-vl")
    file = next(f for f in (path / "processor_config.json", path / "preprocessor_config.json") if f.is_file())
    change(file, lambda d: d.get("image_processor", d).update(size=28))
    with pytest.raises(UnsupportedModelError, match="size 28 is no object"):
        prepare(BuildRequest(model=str(path), output=path / "never", draft_layer=1), write=False)


def test_special_tokens_that_are_read_as_text_are_refused(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    change(path / "tokenizer_config.json", lambda d: d.update(split_special_tokens=True))
    with pytest.raises(ExportError, match=r"tokenizer_config\.json: split_special_tokens=true"):
        prepare(BuildRequest(model=str(path), output=path / "never", draft_layer=1), write=False)


@pytest.mark.parametrize("name", ["bos_token_id", "pad_token_id", "decoder_start_token_id"])
def test_a_special_token_that_is_no_id_is_refused(name: str, folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    change(path / "generation_config.json", lambda d: d.update({name: "<s>"}))
    with pytest.raises(
        VlmexportError, match=f"{name} '<s>' is not a token id|generation_config.json: transformers"
    ):
        prepare(BuildRequest(model=str(path), output=path / "never", draft_layer=1), write=False)


# --- which folder ---


@pytest.mark.parametrize(
    ("model_type", "name", "converted"),
    [
        ("llava", "LlavaLlamaForCausalLM", "llava-hf/llava-1.5-7b-hf"),
        ("llava_llama", "LlavaLlamaForCausalLM", "llava-hf/llava-1.5-7b-hf"),
        ("internvl_chat", "InternVLChatModel", "OpenGVLab/InternVL3-1B-hf"),
    ],
)
def test_a_folder_in_the_authors_format_names_the_converted_one(
    model_type: str, name: str, converted: str, folder: Callable[[str], Path]
) -> None:
    path = folder("llama")
    change(path / "config.json", lambda d: d.update(architectures=[name], model_type=model_type))
    with pytest.raises(UnsupportedModelError, match=rf"{name} .*\({converted}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            {"model_type": "moondream1", "architectures": ["HfMoondream"]},
            "Moondream: its class comes as code",
        ),
        (
            {"model_type": "moondream3", "architectures": ["Moondream3ForCausalLM"]},
            "Moondream: its class comes as code",
        ),
        (
            {"model_type": "openvla", "architectures": ["OpenVLAForActionPrediction"]},
            "OpenVLA: its class comes as code",
        ),
        (
            {"model_type": "pi0", "architectures": ["PI0ForConditionalGeneration"]},
            "pi0: it makes actions by flow matching",
        ),
        ({"type": "pi05"}, "pi0.5: it makes actions by flow matching"),
        ({"type": "smolvla"}, "SmolVLA: it makes actions by flow matching"),
    ],
)
def test_a_model_that_cannot_be_exported_is_refused_with_the_reason(
    content: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModelError, match=f"is not supported: {reason}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "kind", ["qwen3_vl_moe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_5_moe"]
)
def test_a_mixture_of_experts_is_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"experts=\d+ makes it a mixture of experts"):
        open_checkpoint(tmp_path)


def test_a_refusal_is_one_line_whatever_transformers_warns_of(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    for name in ("config.json", "generation_config.json"):
        change(path / name, lambda d: d.update(eos_token_id=99_999))
    words = [
        sys.executable,
        "-m",
        "vlmexport",
        "build",
        "--model",
        str(path),
        "--draft-layer",
        "1",
        "--dry-run",
        "-o",
        "x",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "generation_config.json: eos_token_id 99999" in line
