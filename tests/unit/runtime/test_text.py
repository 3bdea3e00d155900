"""Tokenizer wrapper, prompt checks, chat templates."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from vlmexport.runtime.common.errors import BundleError, PromptError
from vlmexport.runtime.text.chat import render_chat
from vlmexport.runtime.text.prompt import as_text, check_ids, check_length, from_pipe
from vlmexport.runtime.text.tokenizer import Tokenizer

from tests.support import handmade_bundle


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = handmade_bundle.metaspace_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=12)
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = Tokenizer.open(tmp_path / "tokenizer.json").encode("the red cup on the table")
    assert ids.dtype == np.int64
    assert len(ids) == 7  # six words and </s>: nothing cut, nothing padded


def test_special_tokens() -> None:
    tokenizer = Tokenizer(handmade_bundle.metaspace_tokenizer())
    assert tokenizer.encode("cup", add_special_tokens=False).tolist() == [tokenizer.id("▁cup")]
    assert tokenizer.encode("cup").tolist()[-1] == tokenizer.id("</s>") == 1
    assert tokenizer.decode([tokenizer.id("▁cup"), 1]) == "cup"
    assert "</s>" in tokenizer.decode([tokenizer.id("▁cup"), 1], skip_special_tokens=False)
    assert tokenizer.special_ids >= {0, 1, 2}
    assert tokenizer.token(None) is None
    tokenizer.backend.add_tokens(["<row>"])  # an ordinary word, though it was added
    assert tokenizer.id("<row>") not in Tokenizer(tokenizer.backend).special_ids


@pytest.mark.parametrize("data", [b"", b"{}", b"\x80\x04pickle", b'{"model": 1}'])
def test_a_broken_tokenizer_file_is_a_bundle_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(BundleError, match=r"tokenizer\.json: not a readable tokenizer") as caught:
        Tokenizer.open(tmp_path / "tokenizer.json")
    assert "\n" not in str(caught.value)


def without_definition(**part: object) -> str:
    """`tokenizer.json` whose template adds a token that it does not define."""
    data = json.loads(handmade_bundle.metaspace_tokenizer().to_str())
    data["post_processor"]["special_tokens"] = {}
    if part.get("nested"):
        data["post_processor"] = {"type": "Sequence", "processors": [data["post_processor"]]}
    return json.dumps(data)


@pytest.mark.parametrize("nested", [False, True])
def test_a_template_that_adds_an_unknown_token_is_refused_when_it_is_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], nested: bool
) -> None:
    (tmp_path / "tokenizer.json").write_text(without_definition(nested=nested))
    with pytest.raises(
        BundleError, match="its post-processor adds '</s>', which it does not define"
    ) as caught:
        Tokenizer.open(tmp_path / "tokenizer.json")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == "", "Rust code that panics writes a page"


@pytest.mark.skipif(sys.platform != "linux", reason="bounds the address space")
def test_an_id_beyond_all_others_takes_no_memory_and_no_time(tmp_path: Path) -> None:
    layout = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).to_str())
    layout["model"]["vocab"]["b"] = 2**32 - 2
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    code = (
        "import resource, sys; from pathlib import Path; from vlmexport.runtime.text.tokenizer import Tokenizer\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (120, 120)); resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        f"print(Tokenizer.open(Path({str(tmp_path / 'tokenizer.json')!r})).encode('b').tolist())\n"
        # Not ru_maxrss: that begins with what the process that was forked had taken.
        "status = dict(line.split(':', 1) for line in open('/proc/self/status') if line.startswith('Vm'))\n"
        "print(int(status['VmHWM'].split()[0]) >> 10)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    ids, megabytes = done.stdout.splitlines()
    assert ids == str([2**32 - 2]) and int(megabytes) < 1000


def test_tokenizer_panic_is_a_bundle_error() -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(without_definition()))
    with pytest.raises(BundleError, match=r"tokenizer cannot encode \(no entry found for key\)"):
        tokenizer.encode("cup")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    tokenizer.backend = SimpleNamespace(encode=interrupted, decode=interrupted)  # type: ignore[assignment]
    for call in (lambda: tokenizer.encode("cup"), lambda: tokenizer.decode([1]), lambda: tokenizer.alone(1)):
        with pytest.raises(KeyboardInterrupt):
            call()


def test_good_prompts() -> None:
    assert as_text("où est la tasse ? 🙂") == "où est la tasse ? 🙂"
    assert as_text("tasse 🙂".encode()) == "tasse 🙂"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"ab\xff", "byte 0xff at position 2"),
        ("ab\udcff", r"surrogate U\+DCFF at position 2"),
        (3, "not int"),
        ("x" * 1_000_001, "1000001 characters; the limit is 1000000"),
        (b"x" * 4_000_001, "4000001 bytes; the limit"),
    ],
)
def test_bad_prompts_are_refused_with_the_reason(prompt: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        as_text(prompt)


PIPED = "describe größe"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be with a mark", "utf-32"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\r"])
def test_a_piped_prompt_is_its_text(encoding: str, end: str) -> None:
    name, _, mark = encoding.partition(" ")
    data = (("\ufeff" if mark else "") + PIPED + end).encode(name)
    assert from_pipe(data) == PIPED


def test_a_piped_prompt_keeps_the_rest() -> None:
    assert from_pipe(b" a \n\n") == " a \n"
    assert from_pipe(b"a\r\n\r\n") == "a\r\n"
    assert from_pipe(b"") == ""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("cup".encode("utf-16-le"), "a NUL character at position 1: UTF-16 without a byte order mark"),
        (b"\xff\xfea", "is not UTF-16, as its byte order mark says"),
        (b"a\xff", "is not UTF-8: byte 0xff at position 1"),
        (b"x" * 4_000_001, "4000001 bytes; the limit"),
    ],
)
def test_invalid_piped_prompt_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        from_pipe(data)


def test_limits_are_named() -> None:
    check_length(np.zeros(5, np.int64), 5, "max_length (6) less one")
    with pytest.raises(PromptError, match=r"has 6 tokens; max_length \(6\) less one allows 5"):
        check_length(np.zeros(6, np.int64), 5, "max_length (6) less one")
    check_ids(np.array([9]), 10)
    with pytest.raises(PromptError, match="token 10; the model knows 10 tokens"):
        check_ids(np.array([10]), 10)


CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}\n  {% if message.role == 'user' %}\n"
    "[INST] {{ message.content | trim }} [/INST]\n  {% else %}\n{{ message.content + eos_token }}\n"
    "  {% endif %}\n{% endfor %}"
)
BLOCKS = (
    "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}"
    "{%- if m.role == 'x' -%}{%- break -%}{%- endif -%}{{ m | tojson }}"
    "{% generation %}{{ m.content }}{% endgeneration %}{%- endfor -%}{{ ns.n }}"
)
FEATURES = (
    "{%- macro say(m, mark='*') -%}{{ mark }}{{ m.role | upper }}: {{ m['content'] | trim | replace('\n', ' ') }}"
    "{%- if caller is defined %}{{ caller(m.role) }}{% endif -%}{%- endmacro -%}"
    "{%- set ns = namespace(found=[], text='') -%}"
    "{%- for m in messages[::-1] if m.role != 'x' -%}{%- set ns.found = ns.found + [loop.index0] -%}"
    "{%- set ns.text = ns.text ~ m.role ~ loop.length ~ loop.last -%}{%- else -%}none{%- endfor -%}"
    "{% call(r) say(messages[0], mark='#') %}<{{ r }}>{% endcall %}{{ ns.text }}{{ ns.found | tojson(indent=2) }}"
    "{% for k, v in {'a': 1, 'b': [1, 2.5, none]}.items() %}{{ k }}={{ v }};{% endfor %}"
    "{{ messages | map(attribute='role') | unique | list | join(', ') }}{{ messages | length }}"
    "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content[1:5] }}"
    "{% set block %}a{{ 1 + 2 * 3 - 2 ** 3 % 5 }}b{% endset %}{{ block | indent(2) }}{{ 'x' * 3 }}{{ '%s-%d' % ('a', 5) }}"
    "{{ '{}:{:>4}'.format('a', 7) }}{{ messages[0].content.split(' ')[0].strip('W') }}{{ 'er' in messages[0].content }}"
    "{% for i in range(3) recursive %}{{ i }}{% if loop.depth < 3 %}{{ loop([7, 8]) }}{% endif %}{% endfor %}"
    "{{ nothing | default('d') }}{{ messages[0].get('tools', []) }}{{ messages[0] | dictsort }}{{ 3.7 | round | int }}"
    "{% autoescape true %}{{ '<' ~ messages[0].content }}{% endautoescape %}{{ messages is iterable }}{{ [3, 1] | sort }}"
    "{% if messages[0].content is string and messages[0].content.startswith('W') %}W{% endif %}{{ ns.found[0] == 0 }}"
)


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA, BLOCKS, FEATURES], ids=["chatml", "llama", "blocks", "features"]
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_equals_transformers(template: str, add_generation_prompt: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [
        {"role": "user", "content": "Where is <the> \"cup\"?  "},
        {"role": "assistant", "content": "Left & near."},
        {"role": "user", "content": "Größe?"},
    ]  # fmt: skip
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = utils.render_jinja_template(
        conversations=[messages],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        **special,
    )
    assert (
        render_chat(template, messages, special, add_generation_prompt=add_generation_prompt) == expected[0]
    )


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{% for x %}", BundleError, "chat_template': line 1"),
        ("{{ messages.__class__.__mro__ }}", BundleError, "not allowed"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", BundleError, "not allowed"),
        ("{{ messages.append(1) }}", BundleError, "not allowed"),
        ("{{ raise_exception('roles must alternate') }}", PromptError, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", PromptError, "fails on these messages"),
        ("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}", PromptError, "wrote more than"),
        ("{% for i in range(999999999) %}x{% endfor %}", (PromptError, BundleError), "[Rr]ange|wrote more"),
    ],
)
def test_a_bad_template_cannot_do_harm(
    template: str, error: type[Exception] | tuple[type[Exception], ...], message: str
) -> None:
    with pytest.raises(error, match=message):
        render_chat(template, [{"role": "user", "content": "x"}])


GROWING = "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(99) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s }}"
NESTED = (
    "{% set ns = namespace(s='x', t='x') %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] %}"
    "{% set ns.t = [ns.t, ns.t] %}{% endfor %}"
)
RUNAWAY = {
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "loops that filter": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in range(30) recursive %}{{ loop(range(30)) if loop.depth < 20 }}{% endfor %}",
    "macro": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "lazy filters": "{% for i in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
    "multiplied": "{{ 'x' * 10 ** 10 }}",
    "multiplied list": "{{ [1] * 10 ** 10 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "width": "{{ 'x' | center(10 ** 10) }}",
    "method's width": "{{ 'x'.ljust(10 ** 10) }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "computed width": "{{ '{:{}}'.format(1, '999999999') }}",
    "date": "{{ strftime_now('%999999999d') }}",
    "digits": "{{ ('9' * 4000000) | int }}",
    "bytes": "{{ (5).to_bytes(10 ** 9, 'big') }}",
    "indented": "{{ ('\n' * 1000000) | indent('x' * 1000000) }}",
    "slices": "{% set s = 'ab' * 1000000 %}{% for i in range(99999) %}{% set t = s[::-1] %}{% endfor %}",
    "methods": "{% set s = 'ab' * 1000000 %}{% for i in range(99999) %}{% set t = s.upper() %}{% endfor %}",
    "titles": "{% set s = 'a ' * 1000000 %}{% for i in range(99999) %}{% set t = s | title %}{% endfor %}",
    "filters that find nothing": "{% set s = 'a' * 4000000 %}{% for i in range(9999) %}{{ s | reject | list }}{% endfor %}",
    "unique characters": "{% set s = 'a' * 4000000 %}{% for i in range(9999) %}{{ s | unique | list }}{% endfor %}",
    "indented lines": "{% set s = '\\n' * 900000 %}{% for i in range(9999) %}{% set t = s | indent(1) %}{% endfor %}",
    "stripped": "{% set s = 'a' * 1000000 %}{{ s.strip('b' * 1000000 ~ 'a') }}",
    "added": GROWING.replace("STEP", "ns.s + ns.s"),
    "joined": GROWING.replace("STEP", "ns.s ~ ns.s"),
    "replaced": GROWING.replace("STEP", "ns.s.replace('x', ns.s)"),
    "formatted": GROWING.replace("STEP", "'{0}{0}'.format(ns.s)"),
    "formatted as in C": GROWING.replace("STEP", "'%s%s' % (ns.s, ns.s)"),
    "between": GROWING.replace("STEP", "ns.s.join(ns.s)"),
    "numbers": GROWING.replace("'xxxxxxxx'", "3").replace("STEP", "ns.s * ns.s"),
    "nested": NESTED + "{{ ns.s }}",
    "nested as JSON": NESTED + "{{ ns.s | tojson }}",
    "compared": NESTED + "{{ ns.s == ns.t }}",
    "compared by a test": NESTED + "{{ ns.s is eq ns.t }}",
    "captured": "{% for i in range(99999) %}{% set x %}" + "x" * 50_000 + "{% endset %}{% endfor %}",
}


@pytest.mark.parametrize("kind", RUNAWAY)
def test_template_run_time_is_bounded(kind: str) -> None:
    begin = time.process_time()
    with pytest.raises((PromptError, BundleError)) as caught:
        render_chat(RUNAWAY[kind], [{"role": "user", "content": "x"}])
    assert time.process_time() - begin < 15
    assert "\n" not in str(caught.value)
    assert kind == "date" or "fails on these messages" not in str(caught.value)


def test_long_conversations_are_within_the_bound() -> None:
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * 100} for i in range(1000)]
    assert len(render_chat(CHATML, turns)) > 500_000
    assert render_chat(FEATURES, turns).startswith("#USER: 0 word")
    long = [{"role": "user", "content": "word " * 180_000}]
    assert len(render_chat(LLAMA, long, {"eos_token": "</s>"})) > 800_000
    assert len(render_chat(BLOCKS, long)) > 1_800_000


def test_a_template_of_absurd_length_is_not_compiled() -> None:
    with pytest.raises(BundleError, match="chat_template': 100001 characters; the limit is 100000"):
        render_chat("x" * 100_001, [{"role": "user", "content": "x"}])


def test_renderings_in_threads_do_not_share_a_bound() -> None:
    turns = [{"role": "user", "content": "x"}]
    heavy = "{% for a in range(20) %}{% for b in range(5000) %}{{ 'x' if b == 0 }}{% endfor %}{% endfor %}"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: render_chat(heavy, turns), range(8)))
    assert found == ["x" * 20] * 8
