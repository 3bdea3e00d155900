"""What a training of any draft kind must show."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.objectives import objective_for, options_of
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.training.run import source_for
from vlmexport.calibration.training.trainer import Trainer
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.runtime.session.session import Session

from tests.support.training_targets import TRAINED


def counted_by_the_runtime(
    session: Session, records: RecordSet, draft: str, length: int, tokens: int, **options: Any
) -> dict[str, list[int]]:
    """Cycles, evaluated and accepted tokens of chains and of trees, over records whose answers are the target's own."""
    counted = {"chain": [0, 0, 0], "tree": [0, 0, 0]}
    shapes: dict[str, dict[str, Any]] = {"chain": {}, "tree": {"draft_nodes": 12}}
    for record in records:
        image = None if record.image is None else record.image.load()
        asked = {"image": image, "prompt": record.prompt, "max_new_tokens": tokens, **options}
        for name, shape in shapes.items():
            result = session.generate(**asked, draft=draft, draft_length=length, **shape)
            assert tuple(result.tokens) == record.tokens
            stats = result.stats
            for at, value in enumerate((stats.cycles, stats.evaluated, stats.accepted)):
                counted[name][at] += value
    return counted


def learns_and_resumes(target: Target, records: RecordSet, folder: Path, kind: str, **options: Any) -> None:
    """With the options of the table, or these beside them, it learns, and a run that was killed and resumed ends with the
    same weights."""
    own, loop = (
        options_of(kind)(**{**TRAINED[kind], **options}),
        LoopOptions(steps=8, batch_size=6, lr=3e-3, warmup=1),
    )
    source = source_for(target, records, own)

    def run(name: str, stop: int | None = None):
        made = Trainer(
            partial(objective_for, own), loop, target, source, source, "data", folder / name,
            eval_every=4, save_every=2, report=lambda line: None,
        )  # fmt: skip
        return made, made.train(stop_after=stop)

    untrained = objective_for(own, target)
    assert untrained.kind == kind
    groups = untrained.groups()
    inside = [id(p) for group in groups for p in group["params"]]
    assert len(set(inside)) == len(inside) == sum(p.requires_grad for p in untrained.parameters())
    whole, draft = run("whole")
    run("killed", 3)
    resumed, again = run("killed")
    for a, b in zip(
        whole.objective.state_dict().values(), resumed.objective.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)
    assert draft.kind == kind and draft.fingerprint == again.fingerprint is not None
    assert draft.fingerprint == open_draft(folder / "whole").fingerprint
    draft.check_target(target.name, target.fingerprint, target.num_layers, target.hidden_size)
    log = [json.loads(line) for line in (folder / "whole" / "log.jsonl").read_text().splitlines()]
    checked = [line for line in log if line["kind"] == "validation"]
    assert checked[-1]["loss"] < checked[0]["loss"]
    assert set(untrained.shown.values()) <= set(checked[0])
