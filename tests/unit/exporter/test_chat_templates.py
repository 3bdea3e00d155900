"""Chat templates: prompts of one turn and of three are transformers' own, with the tokenizer's own special tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Tokenizers
from tokenizers.processors import TemplateProcessing
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.common.sample_inputs import CONVERSATIONS
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.parity import preparation
from vlmexport.exporter.pipeline import prepare as prepare_module
from vlmexport.exporter.pipeline.checks import Sample
from vlmexport.exporter.pipeline.request import BuildRequest
from vlmexport.exporter.pipeline.text import core_tokenizer
from vlmexport.runtime.common.errors import ExportError
from vlmexport.runtime.families import chat, get_family
from vlmexport.runtime.text.tokenizer import Tokenizer

Checkpoints = Callable[..., Path]

TURNS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% if m['role'] == 'assistant' %}{{ END }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NAMED = "{{ unk_token }}{{ sep_token }}{{ mask_token }}{{ image_token }}{{ 'no cls' if cls_token is not defined }}"
LLAVA = (  # as LLaVA-1.5 publishes it: of text that is no list of parts nothing is written
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}{% for p in m['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\\n' }}{% endfor %}{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def another_end(folder: Path) -> str:
    for name in ("generation_config.json", "config.json"):
        edit(folder / name, eos_token_id=5)
    return TURNS.replace("END", "eos_token")


def no_bos(folder: Path) -> str:
    edit(folder / "tokenizer_config.json", bos_token=None)
    return "{{ bos_token or '' }}" + TURNS.replace("END", "''")


def named(folder: Path) -> str:
    edit(folder / "tokenizer_config.json", unk_token="!", sep_token="%", mask_token="?", extra_special_tokens={"image_token": "#"})  # fmt: skip
    return NAMED + TURNS.replace("END", "sep_token")


def prepared(folder: Path) -> prepare_module.Prepared:
    request = BuildRequest(model=str(folder), output=Path("x"), draft_layer=1, max_length=64)
    return prepare_module.prepare(request, write=False)


@pytest.mark.parametrize("change", [another_end, no_bos, named])
def test_prompts_of_conversations_are_transformers_own(
    change: Callable[[Path], str],
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(change(folder))
    found = prepared(folder)
    tokenizer = found.checkpoint.tokenizer
    assert found.manifest.text.special_tokens == tokenizer.special_tokens_map
    sample = Sample(found.manifest, Tokenizer(core_tokenizer(found.checkpoint)))
    for messages in CONVERSATIONS:
        wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert chat.chat_ids(sample, found.manifest.text.chat_template or "", messages).tolist() == wanted
    # The build itself sees a prompt of three turns that is another: with the special tokens of the model's ids, say.
    monkeypatch.setattr(chat, "special_tokens", lambda bundle: {"bos_token": "?", "eos_token": "!"})
    with pytest.raises(
        ExportError, match=r"parity failed: the runtime's prompt of .*model/chat_template\.jinja"
    ):
        prepared(folder)


def test_a_picture_stands_in_conversations_and_text_becomes_a_part(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_checkpoint("llava"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(LLAVA)
    compared: list[Any] = []
    compare = preparation._compare
    monkeypatch.setattr(preparation, "_compare", lambda *each: compared.append(each[3]) or compare(*each))
    found = prepared(folder)
    assert [len(prompt) for prompt in compared if isinstance(prompt, list)] == [1, 2, 3, 6]
    sample = Sample(found.manifest, Tokenizer(core_tokenizer(found.checkpoint)))
    ids = get_family("llava").prepare(sample, None, [{"role": "user", "content": "the red cup"}]).token_ids
    assert sample.tokenizer.decode(ids).split() == ["USER:", "the", "red", "cup", "ASSISTANT:"]


@pytest.mark.parametrize("begun", ["", "{{ bos_token }}"])
def test_a_processor_puts_its_tokenizers_first_token_before_a_text_without_it(
    begun: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_checkpoint("llava"), tmp_path / "model")
    core = Tokenizers.from_file(str(folder / "tokenizer.json"))
    first = core.token_to_id("<|im_start|>")
    core.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)]
    )
    core.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(begun + LLAVA)
    found = prepared(folder)
    sample = Sample(found.manifest, Tokenizer(core_tokenizer(found.checkpoint)))
    messages = [{"role": "user", "content": [{"type": "text", "text": "the red cup"}]}]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    wanted = found.checkpoint.processor.apply_chat_template(messages, **options)["input_ids"]
    ids = get_family("llava").prepare(sample, None, messages).token_ids.tolist()
    assert [ids] == wanted
    assert ids[0] == first and first not in ids[1:]


@pytest.mark.parametrize("holder", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_that_drops_the_users_words_is_refused_with_its_file(
    holder: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    if holder == "chat_template.jinja":
        (folder / holder).write_text(template)
    else:
        edit(folder / holder, chat_template=template)
    with pytest.raises(
        ExportError, match=rf"model/{holder} cannot be used: .* does not write message 0"
    ) as caught:
        prepared(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llama", "llava", "qwen2.5-vl"])
def test_the_reference_is_given_the_form_that_the_template_writes(
    name: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """transformers alone would drop the words, and the runtime's prompt would be called wrong."""
    folder = shutil.copytree(tiny_checkpoint(name), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(LLAVA)
    family = family_for(open_checkpoint(str(folder), weights=False))
    found = family.reference_prompt(None, [{"role": "user", "content": "the red cup"}])
    assert "the red cup" in family.checkpoint.tokenizer.decode(found.input_ids)
