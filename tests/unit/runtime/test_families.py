"""Families lay out requests as transformers' processors do, and refuse what the bundle cannot take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tokenizers.processors import TemplateProcessing
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import BundleError, ImageError, PromptError
from vlmexport.runtime.families import FAMILIES, RawPrompt, get_family

from tests.support import handmade_bundle

IMAGE = Image.new("RGB", (40, 30), (200, 30, 90))
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def blip2(tmp_path: Path) -> Bundle:
    return Bundle.open(handmade_bundle.write_bundle(tmp_path / "blip2"))


@pytest.fixture
def llama(tmp_path: Path) -> Bundle:
    return Bundle.open(handmade_bundle.write_bundle(tmp_path / "llama", "llama", chat_template=TEMPLATE))


@pytest.fixture
def plain_llama(tmp_path: Path) -> Bundle:
    return Bundle.open(handmade_bundle.write_bundle(tmp_path / "plain", "llama"))


def test_every_family_can_be_loaded_and_unknown_ones_are_named() -> None:
    assert [get_family(name).name for name in FAMILIES] == list(FAMILIES)
    with pytest.raises(BundleError, match=r"'model\.family': 'qwen9' is unknown"):
        get_family("qwen9")


def test_a_chat_template_writes_every_special_token_itself(llama: Bundle) -> None:
    start = llama.tokenizer.id("<|im_start|>")
    llama.tokenizer.backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    assert llama.tokenizer.encode("a").tolist()[0] == start
    ids = get_family("llama").prepare(llama, None, "a").token_ids.tolist()
    assert ids.count(start) == 2, "before the user's turn and before the answer"


def test_blip2_image_rows_come_first(blip2: Bundle) -> None:
    prepared = get_family("blip2").prepare(blip2, IMAGE, "the red cup")
    image_id = blip2.manifest.text.image_token_id
    words = blip2.tokenizer.encode("the red cup").tolist()
    assert prepared.token_ids.tolist() == [image_id] * 4 + words
    assert prepared.token_ids.dtype == np.int64
    assert words[-1] == 1  # </s> of the tokenizer
    (pixels,) = (run["pixel_values"] for run in prepared.vision)
    assert pixels.shape == (1, 3, 16, 24) and pixels.dtype == np.float32


def test_blip2_equals_the_transformers_processor(blip2: Bundle) -> None:
    transformers = pytest.importorskip("transformers")
    pil = pytest.importorskip("transformers.models.blip.image_processing_pil_blip")
    settings = blip2.manifest.image
    assert settings is not None
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(blip2.path / "tokenizer.json"),
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    processor = transformers.Blip2Processor(
        pil.BlipImageProcessorPil(
            size={"height": settings.height, "width": settings.width},
            image_mean=settings.mean, image_std=settings.std,
        ),
        tokenizer,
        num_query_tokens=4,
    )  # fmt: skip
    for prompt in ("describe the scene", "the cup is left.", ""):
        expected = processor(images=IMAGE, text=prompt, return_tensors="np")
        prepared = get_family("blip2").prepare(blip2, IMAGE, prompt)
        np.testing.assert_array_equal(prepared.token_ids[None], expected["input_ids"])
        np.testing.assert_allclose(prepared.vision[0]["pixel_values"], expected["pixel_values"], atol=1e-5)


def test_blip2_default_prompt_is_used_without_one(blip2: Bundle) -> None:
    family = get_family("blip2")
    default = family.prepare(blip2, IMAGE, None).token_ids
    assert default.tolist() == family.prepare(blip2, IMAGE, "describe the scene").token_ids.tolist()
    assert default.tolist() != family.prepare(blip2, IMAGE, "").token_ids.tolist()


def test_blip2_limit_is_exact(blip2: Bundle) -> None:
    family = get_family("blip2")
    assert (
        len(family.prepare(blip2, IMAGE, " ".join(["cup"] * 15)).token_ids) == 20
    )  # 4 rows, 15 words, </s>: max_source
    with pytest.raises(PromptError, match=r"17 tokens; max_source \(20\) less 4 image rows allows 16"):
        family.prepare(blip2, IMAGE, " ".join(["cup"] * 16))


@pytest.mark.parametrize(
    ("image", "prompt", "error", "message"),
    [
        (None, "cup", ImageError, "give one"),
        (IMAGE, "cup <image> cup", PromptError, "'<image>', which stands for an image row"),
        (IMAGE, [{"role": "user", "content": "cup"}], PromptError, "no chat template"),
        (IMAGE, b"\xff", PromptError, "not UTF-8"),
        (IMAGE, "\ud800", PromptError, "surrogate"),
        (IMAGE, 5, PromptError, "not int"),
    ],
)
def test_blip2_refuses(
    blip2: Bundle, image: object, prompt: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        get_family("blip2").prepare(blip2, image, prompt)  # type: ignore[arg-type]


def test_blip2_says_which_rows_are_of_the_image_and_what_the_decoder_starts_with(blip2: Bundle) -> None:
    prepared = get_family("blip2").prepare(blip2, IMAGE, "the red cup")
    assert prepared.image_positions is not None and prepared.decoder_ids is not None
    assert prepared.image_positions.tolist() == [0, 1, 2, 3] and prepared.decoder_ids.tolist() == [0]
    assert prepared.positions is None
    assert [list(run) for run in prepared.vision] == [["pixel_values"]]


def test_blip2_with_a_decoder_only_model_keeps_one_position_for_the_first_token(blip2: Bundle) -> None:
    blip2.manifest.decoder.cross_attention = False
    blip2.manifest.limits.max_source = None
    family = get_family("blip2")
    longest = family.prepare(
        blip2, IMAGE, " ".join(["cup"] * 58)
    )  # 4 rows, 58 words, </s>: max_length less one
    assert len(longest.token_ids) == 63 and longest.decoder_ids is None
    with pytest.raises(
        PromptError, match=r"60 tokens; max_length \(64\) less one less 4 image rows allows 59"
    ):
        family.prepare(blip2, IMAGE, " ".join(["cup"] * 59))


@pytest.fixture
def captioner(blip2: Bundle) -> Bundle:
    manifest = blip2.manifest
    manifest.text.image_token_id, manifest.text.default_prompt, manifest.encoder = None, None, None
    manifest.text.decoder_start_token_id, manifest.limits.max_source = 1, 4
    return blip2


def test_vit_gpt2_reads_image_rows_only_and_continues_the_prompt(captioner: Bundle) -> None:
    family = get_family("vit-gpt2")
    prepared = family.prepare(captioner, IMAGE, "the red cup")
    words = captioner.tokenizer.encode("the red cup", add_special_tokens=False).tolist()
    assert prepared.decoder_ids is not None and prepared.image_positions is not None
    assert prepared.decoder_ids.tolist() == [1, *words] and 1 not in words
    assert prepared.image_positions.tolist() == list(range(4)) and prepared.token_ids.tolist() == [0] * 4
    assert prepared.vision[0]["pixel_values"].shape == (1, 3, 16, 24)
    for nothing in (None, ""):
        found = family.prepare(captioner, IMAGE, nothing).decoder_ids
        assert found is not None and found.tolist() == [1]


def test_vit_gpt2_limit_leaves_room_for_start_and_one_token(captioner: Bundle) -> None:
    family = get_family("vit-gpt2")
    found = family.prepare(captioner, IMAGE, " ".join(["cup"] * 62)).decoder_ids
    assert found is not None and len(found) == 63
    with pytest.raises(PromptError, match=r"63 tokens; max_length \(64\) less two allows 62"):
        family.prepare(captioner, IMAGE, " ".join(["cup"] * 63))


@pytest.mark.parametrize(
    ("image", "prompt", "error", "message"),
    [
        (None, "cup", ImageError, "give one"),
        (IMAGE, [{"role": "user", "content": "cup"}], PromptError, "no chat template"),
        (IMAGE, 5, PromptError, "not int"),
    ],
)
def test_vit_gpt2_refuses(
    captioner: Bundle, image: object, prompt: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        get_family("vit-gpt2").prepare(captioner, image, prompt)  # type: ignore[arg-type]


def test_t5_reads_the_prompt_with_its_encoder(blip2: Bundle) -> None:
    family = get_family("t5")
    prepared = family.prepare(blip2, None, "the red cup")
    assert prepared.token_ids.tolist() == blip2.tokenizer.encode("the red cup").tolist()
    assert prepared.decoder_ids is not None and prepared.decoder_ids.tolist() == [0]
    assert prepared.vision == () and prepared.image_positions is None
    assert (
        family.prepare(blip2, None, None).token_ids.tolist()
        == blip2.tokenizer.encode("describe the scene").tolist()
    )
    assert len(family.prepare(blip2, None, " ".join(["cup"] * 19)).token_ids) == 20
    with pytest.raises(PromptError, match=r"21 tokens; max_source \(20\) allows 20"):
        family.prepare(blip2, None, " ".join(["cup"] * 20))


@pytest.mark.parametrize(
    ("image", "prompt", "error", "message"),
    [
        (IMAGE, "cup", ImageError, "text only"),
        (None, [{"role": "user", "content": "cup"}], PromptError, "no chat template"),
        (None, b"\xff", PromptError, "not UTF-8"),
    ],
)
def test_t5_refuses(
    blip2: Bundle, image: object, prompt: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        get_family("t5").prepare(blip2, image, prompt)  # type: ignore[arg-type]


def test_t5_needs_a_prompt(blip2: Bundle) -> None:
    blip2.manifest.text.default_prompt = None
    with pytest.raises(PromptError, match="needs a prompt"):
        get_family("t5").prepare(blip2, None, None)


def test_llama_text_becomes_one_user_message(llama: Bundle) -> None:
    family = get_family("llama")
    prepared = family.prepare(llama, None, "Where is the cup?")
    assert prepared.vision == () and prepared.image_positions is None
    text = llama.tokenizer.decode(prepared.token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nWhere is the cup?<|im_end|>\n<|im_start|>assistant\n"
    assert prepared.token_ids[0] == llama.tokenizer.id("<|im_start|>")
    messages = [{"role": "user", "content": "Where is the cup?"}]
    assert family.prepare(llama, None, messages).token_ids.tolist() == prepared.token_ids.tolist()


def test_llama_equals_apply_chat_template(llama: Bundle) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(llama.path / "tokenizer.json"))
    tokenizer.chat_template = TEMPLATE
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "größer?"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert get_family("llama").prepare(llama, None, messages).token_ids.tolist() == expected


def test_raw_prompt_and_a_bundle_without_template(llama: Bundle, plain_llama: Bundle) -> None:
    family = get_family("llama")
    plain = family.prepare(plain_llama, None, "the cup").token_ids.tolist()
    assert plain == plain_llama.tokenizer.encode("the cup").tolist()
    assert family.prepare(llama, None, RawPrompt("the cup")).token_ids.tolist() == plain
    assert family.prepare(llama, None, "the cup").token_ids.tolist() != plain


def test_llama_limit_leaves_room_for_one_token(plain_llama: Bundle) -> None:
    family = get_family("llama")
    assert len(family.prepare(plain_llama, None, "x" * 63).token_ids) == 63
    with pytest.raises(PromptError, match=r"64 tokens; max_length \(64\) less one allows 63"):
        family.prepare(plain_llama, None, "x" * 64)


@pytest.mark.parametrize(
    ("image", "prompt", "error", "message"),
    [
        (IMAGE, "x", ImageError, "text only"),
        (None, None, PromptError, "needs a prompt"),
        (None, "", PromptError, "is empty"),
        (None, " \n", PromptError, "is empty"),
        (None, [], PromptError, "list of messages is empty"),
        (None, [{"role": "user"}], PromptError, "message 0"),
        (None, ["hi"], PromptError, "message 0"),
        (None, [{"role": "user", "content": "\udc80"}], PromptError, "surrogate"),
    ],
)
def test_llama_refuses(
    llama: Bundle, image: object, prompt: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        get_family("llama").prepare(llama, image, prompt)  # type: ignore[arg-type]
