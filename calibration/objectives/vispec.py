"""ViSpec in training: an EAGLE layer learns what to look at in pictures (arXiv 2509.15235, section 3.3).

Stage 1 is EAGLE's loss on text, with the order of the likeliest tokens beside the cross entropy. Stage 2, on pictures,
compares distributions only. Both read every text `readings` times: first with the target's features, then with those
that the reading before gave, each one place later, so that what the layer goes on from is what it made itself. The
published code (github.com/KangJialiang/ViSpec) and the paper differ in the loss; `--loss` chooses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...exporter.drafts.eagle.eagle import EagleDraft
from ...exporter.drafts.eagle.eagle_network import EagleConfig
from ...exporter.drafts.eagle.vispec import VispecDraft, check_family
from ...exporter.drafts.eagle.vispec_network import VispecConfig, VispecNetwork
from ...exporter.drafts.folders import open_draft
from ...runtime.common.errors import ExportError, OptionError
from ..features.full_sequences import unrolled
from ..features.vispec_masks import shifted, sight_of
from ..targets.target import Texts
from . import losses
from .base import Counts, LearnedTarget, identity_of
from .layer import LayerObjective, layer_config, noisy
from .vispec_options import VispecOptions

RANKED = 10
"""Likeliest tokens of the target whose order is learned."""

PROBABILITIES, ORDER, TOKENS = 10.0, 0.1, 0.1
"""Published weights: of the L1 of probabilities, of the order, and in stage 1 of distributions beside features."""


class VispecObjective(LayerObjective):
    """The target is frozen. `counts` is asked for where the layer chooses from frequent tokens only."""

    kind, draft_class = VispecDraft.kind, VispecDraft
    shown = {"first": "hit1"}
    network: VispecNetwork

    def __init__(self, options: VispecOptions, target: LearnedTarget, counts: Counts | None = None) -> None:
        super().__init__()
        self.options: VispecOptions = options
        try:
            check_family(target.family)
        except ExportError as error:
            raise OptionError(str(error)) from error
        self.target = identity_of(target)
        config, d2t = layer_config(EagleConfig, options, target, counts)
        self.network = VispecNetwork(VispecConfig(config, config.num_heads, options.compressed_tokens + 1))
        self.network.layer.start_from(target.lm_head.weight.detach(), d2t)
        if options.start_from is not None:
            self._begin_with(options.start_from)
        if not options.global_feature:
            self._leave_out_global_feature()

    def _leave_out_global_feature(self) -> None:
        """What mixes it into features is zero, and stays so: without a gradient no step of the optimizer moves it."""
        weight, width = self.network.img_fc.weight, self.network.config.hidden_size
        with torch.no_grad():
            weight[:, width:] = 0
        keep = torch.ones_like(weight)
        keep[:, width:] = 0
        weight.register_hook(lambda gradient: gradient * keep.to(gradient.device))

    def _begin_with(self, folder: str) -> None:
        """The network of a draft. OptionError where it is another's, or of another shape."""
        try:
            draft = open_draft(Path(folder))
        except ExportError as error:
            raise OptionError(f"--start-from: {error}") from error
        into: Any = self.network.layer if isinstance(draft, EagleDraft) else self.network
        if not isinstance(draft, EagleDraft | VispecDraft):
            raise OptionError(
                f"--start-from {folder}: a draft of kind {draft.kind} is no layer to go on from"
            )
        if draft.target.get("fingerprint") not in (None, self.target["fingerprint"]):
            raise OptionError(
                f"--start-from {folder}: was trained for {draft.target.get('name')!r:.80}, not for this model"
            )
        if draft.network.config != into.config:
            raise OptionError(
                f"--start-from {folder}: {draft.network.config} is another shape than {into.config}; give the same options"
            )
        into.load_state_dict(draft.network.state_dict())

    def loss(self, batch: Texts, target: LearnedTarget) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        """The mean over readings. Parts have the losses that it is made of, of the first reading, and by reading the share
        `hit1`, `hit2`, … of places whose token is right."""
        options, learned, layer = self.options, batch.learned, self.network.layer
        features = target.features(batch.hidden)
        given = noisy(features, options.feature_noise) if self.training else features
        sight = sight_of(self.network, batch)
        expected = shifted(features, 1)[learned]
        with torch.no_grad():
            own = target.logits(expected)
        kept = None if layer.config.trimmed is None else layer.d2t
        total = features.new_zeros(())
        parts: dict[str, Tensor] = {}
        for reading in range(options.readings):
            (draft_features,) = unrolled(self.network, batch.embedded, given, 1, sight.visible, sight.beside)
            logits = self.network.logits(draft_features[learned], target.lm_head.weight)
            weighted_losses = self._compared(draft_features[learned], expected, logits, own, kept)
            weighted = torch.stack([weight * value for weight, value in weighted_losses.values()]).sum()
            total = total + weighted / options.readings
            if reading == 0:
                parts |= {name: value for name, (_, value) in weighted_losses.items()}
            best = logits.argmax(-1) if kept is None else kept[logits.argmax(-1)]
            parts[f"hit{reading + 1}"] = (best == own.argmax(-1)).float().mean()
            given = torch.cat([features[:, :1], draft_features[:, :-1]], 1)
        parts["loss"] = total
        return total, {name: value.detach() for name, value in parts.items()}

    def _compared(
        self, features: Tensor, expected: Tensor, logits: Tensor, own: Tensor, kept: Tensor | None
    ) -> dict[str, tuple[float, Tensor]]:
        """Name → (weight, value) of what a reading is judged by."""
        first, published = self.options.stage == 1, self.options.loss == "published"
        chosen = own if kept is None else own[:, kept]
        weighted_losses: dict[str, tuple[float, Tensor]] = {}
        if first:
            weighted_losses["features"] = 1.0, losses.smooth_l1(features, expected)
        if first or not published:
            weighted_losses["tokens"] = TOKENS if first else 1.0, losses.soft_cross_entropy(logits, own, kept)
        if published:
            ranked = chosen.topk(min(RANKED, chosen.shape[-1])).indices
            weighted_losses["order"] = ORDER * (TOKENS if first else 1.0), losses.list_mle(logits, ranked)
            if not first:
                weighted_losses["probabilities"] = PROBABILITIES, 2 * losses.total_variation(logits, chosen)
        return weighted_losses
