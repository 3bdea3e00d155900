"""Chat templates of bundles from anywhere: whatever Python does with a value is paid for before, and an error is one line.

Unpaid work would be served, or be refused otherwise, within a second or two: no case here can hang a test.
"""

from __future__ import annotations

import signal
import threading
import tracemalloc
from typing import Any

import pytest
from vlmexport.runtime.common.errors import BundleError, PromptError
from vlmexport.runtime.text.chat import _compile, render_chat
from vlmexport.runtime.text.errors import one_line
from vlmexport.runtime.text.meter import METER, MOST_EQUAL_HASHES, Meter, TooMuch

TURNS = [{"role": "user", "content": "x"}]
DOUBLED = (
    "{% set n = namespace(s=(1,), t=(1,), unsafe_callable=1) %}{% for i in range(21) %}"
    "{% set n.s = (n.s, n.s) %}{% set n.t = (n.t, n.t) %}{% endfor %}"
)
"""`n.s` is two million things to whoever goes through it, and a few to whoever looks at it."""
LARGE = DOUBLED.replace("21", "15")
LONG = "{% set b = 'x' * 4000000 %}"

PAID: dict[str, str] = {
    "key of a dict literal": DOUBLED + "{{ {n.s: 1} | length }}",
    "a later key": DOUBLED + "{{ {1: 2, n.s: 1} | length }}",
    "subscript of a dict": DOUBLED + "{{ {1: 1}[n.s] }}",
    "subscript of a message": DOUBLED + "{{ messages[0][n.s] }}",
    "subscript in an error": DOUBLED + "{{ [1][n.s].x }}",
    "method of a dict": DOUBLED + "{{ {1: 1}.get(n.s) }}",
    "dict of pairs": DOUBLED + "{{ dict([(n.s, 1)]) | length }}",
    "dict of lazy pairs": DOUBLED + "{{ dict([[n.s, 1]] | map('list')) | length }}",
    "dict of one lazy pair": DOUBLED + "{{ dict([[n.s, 1] | select]) | length }}",
    "namespace of pairs": DOUBLED + "{% set q = namespace([[n.s, 1] | select]) %}",
    "unique": DOUBLED + "{{ [n.s] | unique | list | length }}",
    "unique of lazy elements": DOUBLED + "{{ [n.s] | select | unique | list | length }}",
    "sorted lazy elements": DOUBLED + "{{ [n.s, n.t] | select | sort | length }}",
    "grouped lazy elements": DOUBLED + "{{ [n.s, n.t] | select | groupby(0) | length }}",
    "least of lazy elements": DOUBLED + "{{ [n.s, n.t] | select | min | length }}",
    "unique of what is shared": LARGE + "{{ range(99) | map(attribute='z', default=n.t) | unique | list | length }}",
    "among what is shared": LARGE + "{{ n.s in (range(99) | map(attribute='z', default=n.t)) }}",
    "cycle": DOUBLED + "{% for i in [1] %}{{ loop.cycle(n.s) | length }}{% endfor %}",
    "changed": DOUBLED + "{% for i in [1, 2] %}{{ loop.changed(n.s if i == 1 else n.t) }}{% endfor %}",
    "equal": DOUBLED + "{{ n.s == n.t }}",
    "among": DOUBLED + "{{ n.s in [n.t] }}",
    "among lazy elements": LARGE + "{{ n.s in ([n.t] * 99) | select }}",
    "test of lazy elements": LARGE + "{{ n.s is in(([n.t] * 99) | select) }}",
    "counted": LARGE + "{{ ([n.t] * 99).count(n.s) }}",
    "found": LARGE + "{{ ([n.t] * 99 + [n.s]).index(n.s) }}",
    "name of a filter": DOUBLED + "{{ [1] | map(n.s) | list }}",
    "printed because it cannot be called": DOUBLED + "{{ n() }}",
    "printed with a macro's error": DOUBLED + "{{ raise_exception(n.s) }}",
    "printed": DOUBLED + "{{ n.s }}",
    "as text": DOUBLED + "{{ n.s | string | length }}",
    "joined": DOUBLED + "{{ (n.s ~ 1) | length }}",
    "formatted": DOUBLED + "{{ ('%s' % (n.s,)) | length }}",
    "formatted by a method": DOUBLED + "{{ '{}'.format(n.s) | length }}",
    "name of an attribute": DOUBLED + "{{ 1 | attr(n.s) }}",
    "as deep as C goes": "{% set n = namespace(s=(1,)) %}{% for i in range(200) %}{% set n.s = (n.s,) %}{% endfor %}"
    "{{ {n.s: 1} | length }}",
    "equal hashes": "{% set n = namespace(l=[]) %}{% for i in range(99) %}{% set n.l = n.l + [(i * (2 ** 61 - 1), 1)] %}"
    "{% endfor %}{{ dict(n.l) | length }}",
    "unique of equal hashes": "{% set n = namespace(l=[]) %}{% for i in range(99) %}{% set n.l = n.l + [i * (2 ** 61 - 1)] %}"
    "{% endfor %}{{ n.l | unique | list | length }}",
    "text between characters": "{{ ('x' * 10000) | join('y' * 1000) | length }}",
    "replaced by name": "{{ ('a' * 10000) | replace(new='b' * 1000, old='a') | length }}",
    "replaced in a list": "{{ ([1] * 10000) | replace(1, 'x' * 1000) | length }}",
    "replaced in escaped text": "{% autoescape true %}{{ ('&' * 10000) | replace('a' | safe, 'b' * 1000) | length }}"
    "{% endautoescape %}",
    "format that is a list": LONG + "{{ (['%s'] * 3) | format(b, b, b) | length }}",
    "format with texts": LONG + "{{ ('%s%s' % (b, b)) | length }}",
    "texts of a list": LONG + "{{ ([b] * 3) | string | length }}",
    "texts of a list as JSON": LONG + "{{ ([b] * 3) | tojson | length }}",
    "captured": LONG + "{% set x %}{% for i in range(3) %}{{ b }}{% endfor %}{% endset %}{{ x | length }}",
    "text of a macro": LONG + "{% macro m() %}{% for i in range(3) %}{{ b }}{% endfor %}{% endmacro %}{{ m() | length }}",
    "blocks with many variables": "".join(f"{{% set a{i} = 1 %}}" for i in range(3000))
    + "{% for i in range(700) %}{% block b scoped %}{% endblock %}{% endfor %}",
}  # fmt: skip

MADE = {
    "format": LONG + "{{ ('{0}' * 100).format(b) | length }}",
    "replace by name": "{{ ('a' * 100000) | replace(new='b' * 1000, old='a') | length }}",
    "replace in a list": "{{ ([1] * 60000) | replace(1, 'x' * 2000) | length }}",
    "join": "{{ ('x' * 100000) | join('y' * 1000) | length }}",
    "capture": LONG + "{% set x %}{% for i in range(40) %}{{ b }}{% endfor %}{% endset %}",
    "looking from the end": "{% set h = 'a' * 400000 %}{{ h.rfind('a' * 100000 ~ 'b' ~ 'a' * 100000) }}",
    "cutting from the end": "{% set h = 'a' * 400000 %}{{ h.rsplit('a' * 100000 ~ 'b' ~ 'a' * 100000) | length }}",
    "condition of a loop": "{% for i in range(60000) if not [" + "messages," * 100 + "] %}x{% endfor %}",
    "defaults of a macro": "{% macro f(a=[" + "messages," * 100 + "]) %}{% endmacro %}"
    "{% for i in range(30000) %}{{ f() }}{% endfor %}",
    "JSON": LONG + "{{ [[[[[[[[[[[[1]]]]]]]]]]]] | tojson(indent=b) | length }}",
}

WIDE = "{% set b = '\U0001f600 ' * 20000 %}"
"""A text of four bytes a character."""

KEPT = {
    "cut": "b[i:]",
    "split": "b.split()",
    "characters": "b | list",
    "tuples": "b.split() | batch(1) | list",
    "other case": "b.swapcase()",
    "captured": "x",
    "joined": "[b, 'x' * 40000] | join",
    "added": "b + 'x'",
}
"""What a template may keep of every turn of a loop."""

REFUSED: dict[str, str] = {
    "what pays, by name": "{{ (-10 ** 9) | step }}",
    "what pays, by its own name": "{{ [-10 ** 9] | map('environment.step') | list }}",
    "keys that are subtracted": "{{ {1: 1}.keys() - [1] }}",
    "attribute of many parts": "{{ messages | map(attribute='a.' * 1000) | list | length }}",
    "attributes to sort by": "{{ messages | sort(attribute='a,' * 100) | list | length }}",
    "attribute that is a list": "{{ messages | map(attribute=[1]) | list | length }}",
    "format of a list": "{{ ['%99999d'] | format(1) | length }}",
    "width": "{{ '%5000d' | format(1) | length }}",
    "width behind a name": "{{ '%(a%b)5000d' | format(**{'a%b': 1}) | length }}",
    "width behind a key": "{{ '{0[}]:5000}'.format({'}': 1}) | length }}",
    "width of the caller's": "{{ '{:{}}'.format(1, 5000) | length }}",
    "name that markupsafe calls": "{% set q = namespace(**{'__html_format__': ('y' * 100).join}) %}x",
    "the same, set later": "{% set q = namespace() %}{% set q.__html__ = 3 %}x",
    "indent of JSON": "{{ [[1]] | tojson(indent='x' * 1000) | length }}",
    "number beyond all": "{{ 1e999 }}",
    "in a list": "{{ [-1e999] | length }}",
    "number of many digits": "{{ " + "9" * 5000 + " }}",
    "nothing to cycle": "{{ cycler() }}",
    "deep parentheses": "{{ " + "(" * 3000 + " }}",
}  # fmt: skip


@pytest.mark.parametrize("kind", PAID)
def test_operations_over_values_cost_budget(kind: str) -> None:
    with pytest.raises(TooMuch):
        render_chat(PAID[kind], TURNS)


@pytest.mark.parametrize("kind", MADE)
def test_large_values_are_budgeted_before_creation(kind: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PromptError):
            render_chat(MADE[kind], TURNS)
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", KEPT)
def test_template_memory_is_within_its_budget(kind: str) -> None:
    template = (
        WIDE
        + "{% set a = 'x' * 40000 %}{% set n = namespace(s=()) %}{% for i in range(1000) %}"
        + ("{% set x %}{{ a }}\U0001f600{% endset %}" if kind == "captured" else "")
        + f"{{% set n.s = (n.s, {KEPT[kind]}) %}}{{% endfor %}}"
    )
    units, ready = 40_000, _compile(template)
    token = METER.set(Meter(units))
    tracemalloc.start()
    try:
        with pytest.raises(TooMuch):
            "".join(ready.generate(messages=TURNS))
        assert tracemalloc.get_traced_memory()[1] < 1.3 * 256 * units
    finally:
        tracemalloc.stop()
        METER.reset(token)


@pytest.mark.parametrize("kind", REFUSED)
def test_unbounded_template_operations_are_refused(kind: str) -> None:
    with pytest.raises((BundleError, PromptError)) as caught:
        render_chat(REFUSED[kind], TURNS)
    assert not isinstance(caught.value, TooMuch) and "\n" not in str(caught.value)


SERVED = {
    "{{ {n: 1, 'b': 2}[n] }}{{ {n: 1} }}": "1{'k': 1}",
    "{{ dict([('a', 1)], b=2) }}{{ dict({'a': 1}) }}{{ dict() }}": "{'a': 1, 'b': 2}{'a': 1}{}",
    "{% set s = namespace([('a', 1)], b=2) %}{{ s.a + s.b }}": "3",
    "{{ [3, 1, 3, 'A', 'a'] | unique | list }}{{ messages | unique(attribute='role') | list | length }}": "[3, 1, 'A']1",
    "{{ 'A' | list | unique(true) | list }}{{ [2, 1] | reverse | list }}": "['A'][1, 2]",
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ 1 in [1, 2] | select }}{{ -1.5e300 < 0 }}": "a1TrueTrue",
    "{% autoescape true %}{{ '<' ~ ('<' | safe) }}{% endautoescape %}{{ '<' ~ 1 }}": "&lt;<<1",
    "{{ 'abc' | tojson(indent=([] | min)) }}": '"abc"',
    "{{ '2024-%s' % 5 }}{{ '2024 {}'.format(1) }}{{ '%03d, 1000' | format(7) }}": "2024-52024 1007, 1000",
    "{{ 'abc' | join('-') }}{{ '-'.join(['a', 'b']) }}{{ 'aXa' | replace('a', 'bb') }}{{ 7 | center(3) }}": "a-b-ca-bbbXbb 7 ",
    "{{ '%s %s' | format('a', 1) }}{{ '{0[a]}'.format({'a': 5}) }}{{ messages | map(attribute='role') | first }}": "a 15user",
}


@pytest.mark.parametrize("template", SERVED)
def test_other_operations_equal_jinja(template: str) -> None:
    assert render_chat("{% set n = 'k' %}" + template, TURNS) == SERVED[template]


def test_values_are_counted_as_often_as_they_appear() -> None:
    meter = Meter()
    text = "x" * 512
    assert meter.things([text, text], {"key": text}, range(10)) == 3 * 512 + 3
    assert Meter().left - meter.left == 3 + 10 + 2 + 2 + (2 + 2 * 2) + (2 + 2)  # elements, then what each is
    with pytest.raises(TooMuch, match=f"more than {MOST_EQUAL_HASHES} keys of one hash"):
        meter.keys([i * (2**61 - 1) for i in range(MOST_EQUAL_HASHES + 1)])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('first\nsecond \x1b[31m\u202e end') }}", r"first second \\x1b\[31m\\u202e end$"),
        ("{{ raise_exception([1, 'a\n']) }}", r"\[1, 'a\\n'\]$"),
        ("{{ messages['a\x1b\n'].c }}", r"no attribute 'a\\x1b\\n'$"),
        ("{{ [1] | map('no\nfilter') | list }}", r"'no\\nfilter'"),
        ("{{ raise_exception('x' * 100000) }}", "x…$"),
        ("{{ [-1e999] }}", "line 1: a number is beyond the largest float; write a smaller one$"),
        ("{{ '\\N{nothing}' }}", "line 1: unknown Unicode character name$"),
    ],
)
def test_an_error_of_a_template_is_one_short_line(template: str, message: str) -> None:
    with pytest.raises((BundleError, PromptError), match=message) as caught:
        render_chat(template, TURNS)
    said = str(caught.value)
    assert said.isprintable() and len(said) < 500


def test_error_text_is_shortened_to_one_line() -> None:
    assert one_line("a\tb\r\n c\u2028d") == "a b c d"
    assert one_line(ValueError()) == "ValueError"
    assert one_line("\x00\x85\ud800") == "\\x00 \\ud800"


class _Late(ValueError):
    """What a program's own handler raises; templates fail with ValueError, too."""


@pytest.mark.parametrize(
    "template", ["{% for i in range(90000) %}{{ i }}{{ i|string|upper }}{% endfor %}", None]
)
def test_signal_handler_exception_is_not_translated(
    template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: Any) -> None:
        raise _Late("your time is over")

    def strike(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, late)
    assert threading.current_thread() is threading.main_thread()
    try:
        if template is None:  # while Jinja reads a string, whose errors it takes for its own
            monkeypatch.setattr("jinja2.lexer.Lexer._normalize_newlines", strike)
            _compile.cache_clear()
            template = "{{ 'a string' }}"
        else:
            monkeypatch.setattr(Meter, "elements", lambda self, values: (strike() or each for each in values))
        with pytest.raises(_Late, match="your time is over"):
            render_chat(template, TURNS)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert METER.get(None) is None
