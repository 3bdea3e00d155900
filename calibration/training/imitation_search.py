"""Which shape an imitation network should have: a search over two objectives, agreement with the target and FLOPs.

(FastVLM, arXiv 2510.22641, appendix B.) Every trial is a short training of one shape on the target's cached hidden states. optuna's
tree-structured Parzen estimator proposes shapes; what a trial proposes is a function of the seed, its number and the trials
before it alone, so that a search that was killed goes on as if it had not been, and more trials can be asked for later. Nothing
is weighed: the result is the front of the shapes that no other one beats in both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from ...exporter.common.write_errors import explain_write_errors
from ...exporter.drafts.imitation.imitation_network import ImitationConfig
from ...runtime.common.atomic_files import atomic_write
from ...runtime.common.errors import OptionError
from ..common.provenance import provenance
from ..data.reading.records import RecordSet
from ..features.features import FeatureSource, in_batches
from ..objectives import losses
from ..objectives.imitation_options import ImitationOptions
from ..objectives.training_options import LoopOptions
from ..targets.target import Target
from .run import FeatureCache, Schedule, feature_source, train_draft, usable_records
from .search_space import SPACE, Trial, folder_name, front, propose, searched, told

FILE = "search.json"


def search_shapes(
    target: Target,
    records: RecordSet,
    own: ImitationOptions,
    loop: LoopOptions,
    fixed: Mapping[str, Any],
    trials: int,
    out: Path,
    validation: RecordSet | None = None,
    cache: FeatureCache | None = None,
    schedule: Schedule | None = None,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Runs, or continues, a search of `trials` trials, and returns the document that `out/search.json` holds.

    Args:
        target: frozen. own: layer and losses; its shape is not looked at. loop: of each trial.
        fixed: options of `SPACE` that every shape has.
        trials: in all, those of a search that is continued among them; fewer where there are no more shapes.
        cache: of the target's hidden states (default: in `out`). The rest as `train_draft`, which trains each shape in
            `out/trials/SHAPE`.

    Raises:
        OptionError: the options let the target learn, nothing is left to search, or `out` holds another search.
        InputError: as `train_draft`.
    """
    if own.changes_target:
        raise OptionError(
            "--search compares networks for a target that stays: leave --joint and --fine-tune out"
        )
    heads = SPACE["attention_heads"][-1]
    if "attention_heads" not in fixed and target.hidden_size % (2 * heads):
        raise OptionError(
            f"--search tries attention of {heads} heads, which do not divide the width {target.hidden_size} into pairs; give "
            "--attention-heads N with an N that does, or 0"
        )
    if set(fixed) >= set(searched(fixed, {})):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
        raise OptionError(f"--search has nothing to choose: leave out one of {flags}")
    schedule, cache = schedule or Schedule(), cache or FeatureCache()
    cache = replace(cache, folder=cache.folder or out / "features")
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        identity = _identity(target, records, validation, own, loop, fixed)
        results = [] if schedule.restart else _stored(out, identity)
        exit_ = _early_exit(target, records, validation, own.layer, cache)
        report(f"the early exit agrees with the target in {exit_:.4f} of {target.name}'s validation tokens")
        while True:
            document = _document(target, identity, exit_, results)
            if PartialState().is_main_process:
                with atomic_write(out / FILE) as file:
                    file.write((json.dumps(document, indent=1) + "\n").encode())
            shape = propose(results, fixed, loop.seed) if len(results) < trials else None
            if shape is None:
                return document
            folder = out / "trials" / folder_name(shape)
            network = replace(own, **shape)
            draft = train_draft(target, records, network, loop, folder, validation, cache, schedule)
            last = _trial(target.hidden_size, shape, draft)
            results.append(last)
            report(
                f"trial {len(results)}/{trials}: {told(shape)}: agreement {last.agreement:.4f}, {last.flops:,} FLOPs"
            )


def table(document: Mapping[str, Any]) -> list[str]:
    """The front as lines of Markdown."""
    lines = ["| agreement | FLOPs per row | shape |", "|---|---|---|"]
    lines.append(f"| {document['early_exit']:.4f} | 0 | early exit, no network |")
    lines += [f"| {t['agreement']:.4f} | {t['flops']:,} | `{told(t['shape'])}` |" for t in document["front"]]
    return lines


def _trial(width: int, shape: Mapping[str, Any], draft: Any) -> Trial:
    shape = {name: shape[name] for name in SPACE}
    config = ImitationConfig(width, **shape)
    return Trial(shape, draft.evaluation["validation"]["agreement"], config.flops)


@torch.no_grad()
def _early_exit(
    target: Target,
    records: RecordSet,
    validation: RecordSet | None,
    layer: int,
    cache: FeatureCache,
) -> float:
    """Its agreement on the validation's rows."""
    target.check_layer(layer)
    held = usable_records(target, records.split(0.05)[1] if validation is None else validation)
    source: FeatureSource = feature_source(target, held, layer, cache.folder, cache.dtype)
    right = total = 0
    for batch in in_batches(source, 64):
        matches = losses.agreement(target.head(batch.trunk), target.head(batch.residuals[:, -1]))
        right, total = right + int(matches.sum()), total + len(batch)
    return right / max(1, total)


def _identity(
    target: Target,
    records: RecordSet,
    validation: RecordSet | None,
    own: ImitationOptions,
    loop: LoopOptions,
    fixed: Mapping[str, Any],
) -> dict[str, Any]:
    """What a search that is continued must have in common."""
    options = {k: v for k, v in own.to_dict().items() if k not in SPACE}
    data = records.identity() + ("" if validation is None else validation.identity())
    return {
        **{**options, **loop.to_dict()},
        "target": target.fingerprint,
        "data": data,
        "given": dict(fixed),
    }


def _stored(out: Path, identity: Mapping[str, Any]) -> list[Trial]:
    """The trials of the search in `out`."""
    path = out / FILE
    if not path.exists():
        return []
    try:
        document = json.loads(path.read_text("utf-8"))
        held = dict(document["search"])
        trials = [
            Trial(_shape_of(t["shape"]), float(t["agreement"]), int(t["flops"])) for t in document["trials"]
        ]
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise OptionError(
            f"{path} cannot be read ({type(error).__name__}); delete it or use --restart"
        ) from error
    for name, value in identity.items():
        if held.get(name) != value:
            raise OptionError(
                f"{out} holds a search with {name} = {held.get(name)!r}, this one has {value!r}; give another -o, or "
                "--restart to begin anew"
            )
    return trials


def _shape_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A shape as it was stored, perhaps before there was an attention."""
    return {name: {"attention_heads": 0, **stored}[name] for name in SPACE}


def _document(
    target: Target, identity: Mapping[str, Any], early_exit: float, trials: Sequence[Trial]
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "status": "searched",
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "layer": identity["layer"],
        "early_exit": early_exit,
        "front": [asdict(trial) for trial in front(trials)],
        "trials": [asdict(trial) for trial in trials],
        "search": dict(identity),
        "provenance": provenance(),
    }
