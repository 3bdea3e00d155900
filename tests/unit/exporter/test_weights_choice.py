"""`--weights`: which kind each matrix gets, and what is refused."""

from __future__ import annotations

import pytest
from vlmexport.exporter.quantization.choice import parse_weights
from vlmexport.runtime.common.errors import OptionError


def test_the_head_keeps_eight_bits_unless_something_is_said():
    choice = parse_weights("int4")

    assert choice.dtype_of("model.layers.3.mlp.down_proj") == "int4"
    assert choice.dtype_of("head") == choice.dtype_of("language_model.lm_head") == "int8"
    assert parse_weights("int4,head=int4").dtype_of("lm_head") == "int4"
    assert parse_weights("int4,lm_head=float").dtype_of("head") is None
    assert parse_weights("float").dtype_of("lm_head") is None


def test_parts_decide_for_the_modules_that_hold_them():
    choice = parse_weights("int4, down_proj=int8, layers.3=float, layers.3.mlp.up_proj=int4")

    kinds = {
        "model.layers.0.mlp.up_proj": "int4",
        "model.layers.0.mlp.down_proj": "int8",
        "model.layers.3.mlp.down_proj": None,  # two names against one
        "model.layers.3.mlp.up_proj": "int4",
        "model.layers.31.mlp.up_proj": "int4",
    }
    assert {name: choice.dtype_of(name) for name in kinds} == kinds


@pytest.mark.parametrize("parts", ["q_proj=int8,attn=float", "attn=float,q_proj=int8"])
def test_of_equally_long_parts_the_last_decides(parts: str):
    last = {"q_proj=int8,attn=float": None, "attn=float,q_proj=int8": "int8"}

    assert parse_weights(f"int4,{parts}").dtype_of("layers.0.attn.q_proj") == last[parts]


def test_a_choice_is_written_as_it_was_read():
    text = "int4,head=float,layers.3.mlp=int8"

    assert str(parse_weights(text)) == text
    assert parse_weights(str(parse_weights(text))) == parse_weights(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "'' is no kind of weights; choose int4, int8 or float"),
        ("int3", "'int3' is no kind of weights"),
        ("int4,head", "'head' is not PART=KIND"),
        ("int4,=int8", "'=int8' is not PART=KIND"),
        ("int4,a..b=int8", "'a..b=int8' is not PART=KIND"),
        ("int4,head=fp8", "'fp8' is no kind of weights"),
        ("int4,head=int8,lm_head=int4", "names 'head' twice"),
    ],
)
def test_anything_else_is_refused_by_name(text: str, told: str):
    with pytest.raises(OptionError) as error:
        parse_weights(text)

    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_part_that_no_module_has_is_refused():
    names = ["model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj", "lm_head"]
    parse_weights("int4,head=int8,down_proj=int8,layers.0=float").check_parts(names)

    with pytest.raises(OptionError, match=r"'dwn_proj' in its name .*they end in down_proj, up_proj$"):
        parse_weights("int4,dwn_proj=int8").check_parts(names)
