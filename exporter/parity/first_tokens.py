"""The whole bundle, from pictures and ids to tokens, against the reference: for a model that is too large to generate with.

Each graph is compared with the reference on the reference's own hidden states; here those that a graph gives enter the next one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...runtime.bundle.folder import Bundle
from ...runtime.common.errors import ExportError
from ...runtime.graphs.values import image_width
from ..families.common.base import Family
from .capture import Captured, deepstack_embeds
from .compare import run_embed, run_encoder, run_head, run_layers
from .generation import NEAR_TIE
from .runner import GraphRunner
from .tally import ParityRow


def compare_first_tokens(
    bundle: Bundle, runner: GraphRunner, family: Family, captured: Captured, length: int
) -> ParityRow:
    """The token behind each of the last `length` positions of a captured sequence, as the first of an answer.

    Raises ExportError where one differs without a near-tie.
    """
    logits = chained_logits(bundle, runner, family, captured, length)
    expected = captured.logits[:, -length:].reshape(logits.shape)
    tokens, best = logits.argmax(-1), expected.argmax(-1)
    margins = expected.max(-1) - np.take_along_axis(expected, tokens[:, None], -1)[:, 0]
    for token, other, margin in zip(tokens, best, margins, strict=True):
        if margin >= NEAR_TIE:
            raise ExportError(
                f"parity failed: the bundle's first token is {token}, the model's {other} (margin {margin:.3g}), though every "
                "graph by itself agrees"
            )
    return ParityRow("first tokens", "torch", captured.name, len(tokens), 0.0, 0.0, 0.0)


def chained_logits(
    bundle: Bundle, runner: GraphRunner, family: Family, captured: Captured, length: int
) -> np.ndarray:
    """float32 [B · length, V]: logits of the last `length` positions of each sequence by the bundle's graphs alone."""
    graphs = bundle.manifest.graphs
    by_role = {graph.role: graph for graph in graphs.values()}
    size, width = bundle.manifest.decoder.hidden_size, image_width(bundle.manifest.decoder)
    pictures = [runner.run(by_role["vision"].file, given)["image_rows"] for given in captured.vision]
    image_embeds = np.concatenate([each.reshape(-1, width) for each in pictures]) if pictures else None

    def embed(ids: np.ndarray) -> np.ndarray:
        hidden_states = run_embed(bundle, runner, by_role["embed"], ids)
        marks = ids == family.image_token_id
        if image_embeds is not None and marks.any():  # a decoder behind an encoder reads none
            hidden_states[marks] = image_embeds[:, :size]
        return hidden_states

    chained = replace(
        captured, residuals={}, deepstack=deepstack_embeds(family, captured.token_ids, image_embeds)
    )
    if captured.source_ids is not None:
        chained.encoder_hidden = embed(captured.source_ids)
        chained.encoder_states = run_encoder(bundle, runner, by_role["encoder"], chained)
    elif family.decoder.cross_attention:
        assert image_embeds is not None
        chained.encoder_states = image_embeds.reshape(len(captured.token_ids), -1, width)
    if chained.encoder_states is not None:
        cross = runner.run(by_role["cross_kv"].file, {"encoder_states": chained.encoder_states})
        layers = range(family.decoder.num_layers)
        chained.cross_keys = [cross[f"cross_key.{i}"] for i in layers]
        chained.cross_values = [cross[f"cross_value.{i}"] for i in layers]
    chained.residuals[0] = embed(captured.token_ids)
    for graph in graphs.values():
        if graph.role == "segment":
            assert graph.layers is not None
            first, last = graph.layers
            _, outputs = run_layers(bundle, runner, graph, chained, range(first, last), range(first, last))
            chained.residuals[last] = np.concatenate([each["hidden_out"] for each in outputs], 1)
    hidden = chained.residuals[family.decoder.num_layers]
    count = hidden.shape[1]
    index = np.concatenate([np.arange(count - length, count) + b * count for b in range(len(hidden))])
    return run_head(runner, by_role["head"], hidden, index.astype(np.int64))
