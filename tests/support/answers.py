"""Answers about pictures, beside those of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlmexport.runtime import Session

if TYPE_CHECKING:
    from tests.support.tiny_bundles import TinyBundle


def check_answer(tiny: TinyBundle, model: Any, inputs: Any, pictures: list[Any], messages: list[Any]) -> None:
    """Asserts that a bundle answers as `model` of transformers answers `inputs`, with every kind of draft."""
    # `generate` computes no gradients.
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    expected = output[0, inputs["input_ids"].shape[1] :].tolist()
    with Session.load(tiny.path) as session:
        requests: tuple[dict[str, Any], ...] = (
            {"draft": "none"},
            {"draft": "medusa", "draft_nodes": 8},
            {"draft": "imitation"},
        )
        for options in requests:
            result = session.generate(image=pictures, prompt=messages, max_new_tokens=24, **options)
            assert result.tokens == expected
