"""Chat templates and conversations that nobody would write: sources from a grammar of Jinja, and mutants of real ones."""

from __future__ import annotations

import random
import re
from typing import Any

from tests.integration.fuzz.mutate import mutate_json

GRAMMAR: dict[str, tuple[str, ...]] = {
    "text": (
        "''", "'a'", "' b\\n'", "'%s-%5d'", "'{}{:>9}{0!r}'", "'Ünï 漢字'", "'<|im_end|>'", "'&<\"\\''", "'a,b, c'", "bos_token",
        "message.role | string", "message['content'] | string", "ns.s", "t", "'x' * 3000",
        "<text> | <text-filter>", "<text> ~ <any>", "<text> + <text>", "<text>[<number>:<number>]", "<text>.<text-method>",
        "<many> | join(<text>)", "<any> | string", "<any> | tojson(<json>)", "<text> % <any>", "<text> | format(<any>, <any>)",
        "(<text> if <truth> else <text>)", "m(<any>)", "m(<any>, b=<text>)", "<many> | map(<text>) | join", "<text> * <number>",
        "<any> | default(<text>)", "<pick>", "strftime_now('%Y')", "cy.next()", "j()",
    ),
    "text-filter": (
        "upper", "lower", "title", "capitalize", "trim", "trim(<text>)", "replace(<text>, <text>)", "replace(<text>, <text>, <number>)",
        "indent", "indent(<number>, true)", "indent(<text>)", "center(<number>)", "truncate(<number>)", "truncate(<number>, true, <text>)",
        "escape", "forceescape", "safe", "first", "last", "reverse", "urlencode", "wordcount", "filesizeformat", "string",
    ),
    "text-method": (
        "upper()", "lower()", "title()", "swapcase()", "strip()", "lstrip(<text>)", "rstrip(<text>)", "removeprefix(<text>)",
        "split(<text>) | join(<text>)", "rsplit(<text>, <number>)[0]", "partition(<text>)[<number>]", "replace(<text>, <text>)",
        "center(<number>)", "ljust(<number>, <text>)", "zfill(<number>)", "join(<many>)", "format(<any>)", "format(<any>, x=<any>)",
        "format_map(<map>)", "encode()", "casefold()", "splitlines()[0]", "translate(<map>)", "expandtabs(<number>)",
    ),
    "number": (
        "0", "1", "-1", "2", "7", "100", "3", "20", "ns.i", "messages | length",
        "<any> | length", "<number> + <number>", "<number> * <number>", "<number> // 3", "<number> % 7", "-<number>", "<odd-number>", "<number> / 2",
        "<number> // <number>", "<number> % <number>", "<number> - <number>", "<number> ** <number>", "<text> | int", "<any> | int(<number>)", "<any> | float",
        "<number> | abs", "<number> | round(<number>)", "<many> | sum", "<many> | count", "<text>.find(<text>)", "<text>.count(<text>)",
        "<many>.index(<any>)", "<many> | min", "<lazy> | max", "<pick>", "<many> | map('length') | sum",
    ),
    "odd-number": (
        "1e999", "10 ** 400", "0x10", "1_000", "99999999999999999999", "2 ** 64", "1e300", "0.5", "-0.0", "loop.index", "loop.revindex0",
        "loop.length", "loop.depth", "true", "none", "0b11 ** 2", "1e-400", "-1 ** 0.5",
    ),
    "truth": (
        "true", "false", "none", "loop is defined", "add_generation_prompt", "tools", "undefined_name",
        "<any> is <test>", "<any> is not <test>", "<any> == <any>", "<number> < <number> <= <number>", "<any> != <any>", "not <truth>",
        "<any> in <many>", "<any> in <map>", "<text> in <text>", "<any> not in <lazy>", "<truth> and <any>", "<any> or <truth>",
        "loop.changed(<any>)", "<text>.startswith(<text>)", "<text>.isdigit()", "<any>", "'role' in message", "<text> > <text>",
    ),
    "test": (
        "defined", "undefined", "none", "string", "number", "mapping", "iterable", "sequence", "true", "boolean", "integer", "float",
        "callable", "escaped", "filter", "test", "lower", "upper", "odd", "even", "divisibleby(<number>)", "eq(<any>)", "ne(<any>)",
        "sameas(<any>)", "in(<many>)", "gt(<number>)", "lt <number>",
    ),
    "many": (
        "[]", "()", "[1, 2, 3]", "['b', 'a', 'B']", "(1, 'a', none)", "range(5)", "messages", "ns.l", "'abc'", "[[1, 'x'], [0, 'y']]", "[(1,)] * 100", "[{'k': 1}, {'k': 0}]",
        "[<any>, <any>]", "(<any>,)", "<many>[<number>:<number>]", "<many>[::<number>]", "<many> + <many>", "<many> * <number>",
        "<lazy> | list", "<many> | list", "<many> | sort", "<many> | sort(<truth>, <truth>, <attribute>)", "<many> | unique | list",
        "<many> | reverse | list", "<map> | dictsort", "<map>.items() | list", "<map> | items | list", "<text>.split(<text>)",
        "<many> | groupby(<attribute>)", "<many> | batch(<number>, <any>) | list", "<many> | slice(<number>) | list",
        "range(<number>, <number>)", "<map>.keys() | list", "<text> | list", "<pick>", "<map>.values() | list",
    ),
    "lazy": (
        "messages | map(attribute='role')", "range(9) | select('odd')",
        "<many> | map('upper')", "<many> | map(<text>)", "<many> | map('replace', <text>, <text>)", "<many> | select",
        "<many> | selectattr(<attribute>)", "<many> | selectattr(<attribute>, 'equalto', <any>)", "<many> | rejectattr(<attribute>)",
        "<many> | map(attribute=<attribute>)", "<many> | map(attribute=<attribute>, default=<any>)", "<lazy> | map('string')",
        "<many> | unique", "<many> | reject('in', <many>)", "<map>.items()", "<map> | items", "<many> | reverse", "<lazy> | reject",
        "<many> | unique(true, <attribute>)", "<many> | batch(<number>)", "<many> | select(<text>)",
    ),
    "attribute": ("'role'", "'content'", "'k'", "0", "1", "'0.type'", "'content.0.text'", "'__class__'", "'a.' * 40", "'items'", "none"),
    "map": (
        "{}", "{'a': 1}", "message", "{'role': 'x', 'content': []}", "dict(a=1)", "{1: 2, '1': 3, 1.0: 4}",
        "{<any>: <any>}", "{<any>: 1, <any>: 2}", "dict(a=<any>, b=<any>)", "dict([[<any>, <any>]])", "dict(<map>, x=<any>)", "dict(<lazy>)",
        "{'t': {'u': <any>}}", "<many> | groupby(<attribute>) | map('list')", "namespace(a=<any>)",
    ),
    "any": (
        "a", "t", "ns", "message", "messages", "none", "a", "t", "1", "'z'",
        "<text>", "<text>", "<text>", "<number>", "<number>", "<many>", "<map>", "<truth>", "<pick>", "<odd-name>", "<odd-name>", "namespace(x=<any>)", "(<many>, <map>)",
        "<map>.get(<any>, <any>)", "<any> | default(<any>, true)", "<map>[<any>]", "<any> | attr(<text>)", "ns", "cycler(<any>, 1)",
    ),
    "odd-name": (
        "loop", "m", "undefined_name", "_step", "environment", "self", "caller", "varargs", "kwargs", "context", "loop.nextitem", "super", "cy", "j",
        "<dunder>", "<pick>", "<text>", "<odd-number>",
    ),
    "pick": (
        "<many> | first", "<many> | last", "<many>[<number>]", "<map>.a", "<map>['a']", "<lazy> | first", "<many>[-1]", "a.b.c", "ns.x",
        "loop.previtem", "loop.nextitem", "loop.cycle(<any>, <any>)", "<map> | attr('a')", "messages[-1].content[0].text",
    ),
    "dunder": (
        "''.__class__", "().__class__.__bases__", "m.__globals__", "loop._iterator", "ns.__class__", "''['__class__']",
        "ns['_Namespace__attrs']", "'{0.__class__}'.format(ns)", "messages.append(1)", "message.update(a=1)", "self._TemplateReference__context",
        "m.name", "m.arguments", "environment.step", "namespace(__html__=m)", "namespace(__len__=m)", "'' | attr('__class__')",
        "dict.mro()", "range.__init__", "cycler.__init__.__globals__", "raise_exception.__globals__", "message.__class__",
    ),
    "json": ("", "", "indent=2", "ensure_ascii=true", "indent=<number>", "sort_keys=true", "separators=(',', ':')"),
    "print": (
        "{{ <text> }}", "{{ <any> }}", "{{- <number> -}}", "{{ <many> }}", "{{ <map> | tojson }}", "{{ <truth> }}", "{{ <many> | tojson(<json>) }}",
        "{{ '%s|%r' % (<any>, <any>) }}", "{{ <any> ~ <any> ~ <any> }}",
    ),
    "statement": (
        "word\n", "  \n", "<|im_start|>", "{# note #}", "{% raw %}{{ a }}{% endraw %}",
        "<print>", "<print>", "<print>\n", "{% set a = <any> %}", "{% set t = <text> %}\n", "{% set ns.i = <number> %}", "{% set ns.s = ns.s ~ <text> %}",
        "{% set ns.l = ns.l + [<any>] %}", "{% set ns.x = <any> %}", "{% set a, b = <any>, <any> %}", "{% set b %}<body>{% endset %}",
        "{% set b | upper %}<body>{% endset %}", "{% if <truth> %}<body>{% elif <truth> %}<body>{% else %}<body>{% endif %}",
        "{%- if <truth> -%}<body>{%- endif -%}", "{% for x in <many> %}{{ loop.index }}<body>{% endfor %}", "{% for x in <lazy> %}<body>{% else %}<body>{% endfor %}",
        "{% for x in <many> if <truth> %}<body>{% break %}{% endfor %}", "{% for k, v in <map>.items() %}{{ k }}<body>{% if <truth> %}{% continue %}{% endif %}{% endfor %}",
        "{% for x in <many> recursive %}<body>{{ loop.depth }}{{ loop(<many>) if loop.depth < 3 }}{% endfor %}", "{% for x in <many> recursive %}{{ loop(<many>) if loop.depth < 2 }}{% endfor %}",
        "{% macro m(x, b=<any>) %}<body>{{ x }}{{ caller(1) if caller }}{{ varargs }}{% endmacro %}", "{% call(y) m(<any>) %}<body>{{ y }}{% endcall %}", "{% filter <text-filter> %}<body>{% endfilter %}", "{% with a = <any>, c = <text> %}<body>{% endwith %}",
        "{% autoescape true %}<body>{% endautoescape %}", "{% generation %}<body>{% endgeneration %}",
        "{% macro m<digit>(x) %}{{ m(x) }}{% endmacro %}",
    ),
    "body": ("", "<statement>", "<statement><statement>", "<print>"),
    "digit": ("1", "2", "3"),
    "rare": (
        "{% include 'a' %}", "{% include <any> ignore missing %}", "{% import 'a' as b %}", "{% extends <text> %}", "{% from 'a' import b %}", "{% do 1 %}",
        "{% block q1 %}<body>{% endblock %}", "{% block q2 scoped %}<body>{{ self.q2 }}{% endblock %}{{ self.q2() }}", "{% block q3 required %}{% endblock %}",
        "{% if <truth> %}{{ raise_exception(<text>) }}{% endif %}", "{% for x in range(10 ** 9) %}<print>{% endfor %}", "{{ <dunder> }}", "{% for x in loop %}{% endfor %}", "{{ loop(<any>) }}",
        "{% call m() %}{% endcall %}", "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, z=<any>) }}",
        "{% if %}", "{% endfor %}", "{{ 1 +", "{{ a | nothing }}", "{{ a is nothing }}", "{{ '\\x' }}", "{% set loop = 1 %}", "{% set self = 1 %}", "{{ lipsum() }}",
        "{{ <lazy> }}", "{{ <lazy> | string }}", "{{ <lazy> ~ 1 }}", "{% set a = <lazy> %}", "{{ <any> | pprint }}", "{{ <many> | random }}", "{{ <any> | xmlattr }}", "{{ <text> | urlize }}",
        "{% set n2 = namespace(s=(1,)) %}{% for i in range(40) %}{% set n2.s = (n2.s, n2.s) %}{% endfor %}{{ <shared> }}",
        "{% set ns.s = 'ab' %}{% for i in range(30) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% set ns.x = [] %}{% for i in range(300) %}{% set ns.x = [ns.x] %}{% endfor %}<print>{{ ns.x }}", "{% set ns.i = 3 %}{% for i in range(30) %}{% set ns.i = ns.i * ns.i %}{% endfor %}{{ ns.i }}",
        "{% set ns.x = ns %}{{ ns }}{{ ns.x.x.x.i }}", "{% macro r() %}{{ r() }}{% endmacro %}{{ r() }}", "{{ 'x' | center(10 ** 9) }}", "{{ '%1000000000d' % 1 }}", "{{ '{:>{}}'.format(1, 10 ** 9) }}",
        "{{ <text> }}{% break %}", "{{ ('a' * 99999) | replace('a', 'b' * 9999) }}", "{{ 10 ** 5000 }}", "{{ ('9' * 5000) | int }}", "{{ 2 ** 2 ** 2 ** 2 ** 2 ** 2 }}",
        "{{ raise_exception('a\\nb\\r\\x00\\u2028c') }}", "{{ strftime_now('%999999999d') }}", "{{ strftime_now(<any>) }}", "{{ <any> | tojson(indent=10 ** 9) }}", "{{ [1] | sum(start=<any>) }}",
    ),
    "shared": ("{n2.s: 1}", "n2.s == n2.s", "[1][n2.s]", "{1: 1}[n2.s]", "n2.s | length", "n2.s in [n2.s]", "n2.s | tojson", "dict(a=1).get(n2.s)", "n2.s | string", "[n2.s] | unique | list", "n2.s[0][0] is string"),
}  # fmt: skip
"""Symbol → what may stand for it. What a symbol begins with has no symbols: it ends an expansion."""

_SYMBOL = re.compile("<(" + "|".join(map(re.escape, GRAMMAR)) + ")>")
BEGINNING = (
    "{% set message = messages[0] %}{% set ns = namespace(i=1, s='', l=[], x=none) %}{% set a = <any> %}{% set t = <text> %}{% set cy = cycler('p', 'q') %}"
    "{% set j = joiner(', ') %}{% macro m(x, b=1) %}[{{ x }}{{ b }}{{ caller(x) if caller }}]{% endmacro %}\n"
)


class _Expansion:
    """Symbols replaced until none is left. Behind `most` replacements only what has no symbols is chosen."""

    def __init__(self, rng: random.Random, most: int):
        self._rng, self._left = rng, most

    def of(self, source: str, depth: int = 0) -> str:
        return _SYMBOL.sub(lambda found: self._chosen(found[1], depth), source)

    def _chosen(self, symbol: str, depth: int) -> str:
        choices = GRAMMAR[symbol]
        self._left -= 1
        plain = [choice for choice in choices if not _SYMBOL.search(choice)]
        if plain and symbol not in ("statement", "body") and self._rng.random() < 0.35:
            choices = plain
        if self._left < 0 or depth > 7:
            choices = tuple(plain or choices)
        found = self.of(self._rng.choice(choices), depth + 1)
        bare = symbol in (
            "statement",
            "body",
            "print",
            "rare",
            "test",
            "digit",
            "json",
            "attribute",
        ) or symbol.endswith(("-filter", "-method"))
        return found if bare or " " not in found else f"({found})"


def written(rng: random.Random) -> str:
    """A template of the grammar."""
    expand = _Expansion(rng, rng.choice((10, 40, 120)))
    parts = ["<statement>"] * rng.randint(1, 6)
    if rng.random() < 0.25:
        parts.insert(rng.randrange(len(parts) + 1), "<rare>")
    middle = "".join(parts)
    if rng.random() < 0.7:
        middle = "{% for message in messages %}" + middle + "{% endfor %}"
    return expand.of((BEGINNING if rng.random() < 0.95 else "") + middle + "{{ ns.s }}{{ ns.i }}")


def mutant(template: str, rng: random.Random) -> str:
    """A real template with some parts removed, doubled, moved, or replaced by those of the grammar."""
    expand = _Expansion(rng, 30)
    parts = re.findall(r"\{%.*?%\}|\{\{.*?\}\}|(?:(?!\{[%{]).)+", template, re.S)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(parts))
        kind = rng.randrange(8)
        if kind == 0 and len(parts) > 1:
            del parts[at]
        elif kind == 1:
            parts.insert(at, rng.choice(parts))
        elif kind in (2, 3):
            parts.insert(at, expand.of(rng.choice(("<statement>", "<statement>", "<print>", "<rare>"))))
        elif kind == 4:  # another expression in an output or a condition
            parts[at] = re.sub(
                r"(\{\{-?|\{%-? (?:el)?if).*?(-?[%}]\})",
                lambda m: f"{m[1]} {expand.of('<any>')} {m[2]}",
                parts[at],
                flags=re.S,
            )
        elif kind == 5:  # another word in it
            words = re.findall(r"\w+|'[^']*'", parts[at]) or [""]
            parts[at] = parts[at].replace(
                rng.choice(words), expand.of(rng.choice(("<text>", "<any>", "<number>"))), 1
            )
        elif kind == 6:
            parts[at] = parts[at].replace("-%}", "%}").replace("{%-", "{%")
        else:
            cut = rng.randrange(len(parts[at]) + 1)
            parts[at] = (
                parts[at][:cut] + rng.choice(("", "|", "'", "}}", "{%", "(", "\0", "é")) + parts[at][cut:]
            )
    return "".join(parts if rng.random() < 0.5 else [expand.of(BEGINNING), *parts])


TEXTS = (
    "hi",
    "",
    " a\n b ",
    "<|im_end|>\n<|im_start|>system",
    "{{ 7 * 7 }}",
    "x" * 5000,
    "漢字 \U0001f600",
    "\ud800",
    "&<'\"",
    "a,b",
    "7",
    "\0",
)


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """One to six messages: mostly those of a conversation, now and then any JSON."""

    def content() -> Any:
        if rng.random() < 0.5:
            return rng.choice(TEXTS)
        kinds = (
            {"type": "text", "text": rng.choice(TEXTS)},
            {"type": "image"},
            {"type": "video"},
            {"image": "a.png", "type": "image"},
        )
        return [rng.choice(kinds) for _ in range(rng.randint(0, 3))]

    found = [
        {"role": ("user", "assistant")[at % 2] if rng.random() < 0.9 else rng.choice(("system", "tool", "", "x")), "content": content()}
        for at in range(rng.randint(1, 6))
    ]  # fmt: skip
    if rng.random() < 0.3:
        found.insert(0, {"role": "system", "content": content()})
    for message in found:
        if rng.random() < 0.1:
            message[rng.choice(("name", "tool_calls", "items", "__class__", "k", "reasoning_content"))] = (
                rng.choice(
                    (
                        "n",
                        7,
                        None,
                        [{"function": {"name": "f", "arguments": {"x": [1.5, None]}}}],
                        {1: {(2, 3): "t"}},
                        float("nan"),
                        10**40,
                    )
                )
            )
    if rng.random() < 0.15:
        changed = mutate_json(found, rng)
        found = (
            [message for message in changed if isinstance(message, dict)] if isinstance(changed, list) else []
        )
    return found or [{}]
