"""Which requests one `generate` of transformers may take together."""

from __future__ import annotations

from collections.abc import Sequence

from ...exporter.checkpoint import Checkpoint
from ...exporter.families.common.parts import ReferencePrompt
from ...exporter.families.common.reference import decoder_prefix
from ...exporter.pipeline.generation import describe_generation


def generated_together(checkpoint: Checkpoint, prompts: Sequence[ReferencePrompt]) -> list[list[int]]:
    """Indices of `prompts` by group: a decoder of its own must start with equally many tokens, and a model that counts
    tokens (a repetition penalty, say) must not count those that fill short prompts."""
    counts_tokens = set(describe_generation(checkpoint)) != {"ignored"}
    alike = counts_tokens or any(prompt.decoder_ids is not None for prompt in prompts)
    groups: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(len(decoder_prefix(prompt)) if alike else 0, []).append(index)
    return list(groups.values())
