"""Which sublayers to leave out of a target that drafts for itself (Zhang et al., Draft & Verify, arXiv 2309.08168,
section 3.3).

The paper searches by tokens per second, measured; here the speed is predicted from what is counted, so that a search gives
the same on every machine: a cycle reads the target's weights once to verify, and what the draft keeps of them for every
drafted token. How many are drafted and accepted is what decoding would do, chain by chain (`evaluation/skipped.py`), with
the paper's threshold. optuna's tree-structured Parzen estimator stands for its Gaussian process: there is one yes or no
per sublayer, where the published code rounds numbers between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...exporter.drafts.layer_skip import DraftAndVerify
from ...exporter.families.common.layer_skip import Sublayers
from ...runtime.common.errors import InputError, OptionError
from ...runtime.policy.confidence import FIRST, KEPT, LONGEST, STEP, AdaptiveThreshold
from ...runtime.speedup.stats import Stats
from ..common.provenance import provenance
from ..data.reading.records import RecordSet
from ..evaluation.skipped import Known, chains, known, replay, side_by_side
from ..targets.layer_weights import Weights
from ..targets.target import Target

SHORTEST_ANSWER = 2
"""Tokens: prefill gives the first, a draft may propose from the second on."""

MARGIN = 1e-6
"""Of rounding."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class SearchOptions:
    """`trials` sets are looked at, drawn with `seed`; `draft_length` is the longest chain, `confidence_threshold` the
    threshold of a request's first cycle. OptionError for values out of range."""

    trials: int = 200
    seed: int = 0
    draft_length: int = LONGEST
    confidence_threshold: float = FIRST

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("seed", 0), ("draft_length", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise OptionError(f"--{name.replace('_', '-')} {value!r:.40} is not an integer ≥ {least}")
        AdaptiveThreshold(self.draft_length, self.confidence_threshold)

    def policy(self) -> AdaptiveThreshold:
        """That of one request."""
        return AdaptiveThreshold(self.draft_length, self.confidence_threshold)


@dataclass(frozen=True)
class Measured:
    """Counts over answers of the target without `skip`, and what they are worth by weights."""

    skip: Sublayers
    stats: Stats
    share: float
    """Of the weights of a token, what a drafted token reads."""

    @property
    def speedup(self) -> float:
        """Tokens per weights read, over plain decoding; tokens behind an answer's end are none."""
        gained = self.stats.accepted + self.stats.cycles - self.stats.discarded
        read = self.stats.cycles + self.share * self.stats.proposed
        return gained / read if read else 1.0

    def to_dict(self) -> dict[str, Any]:
        """For a draft's folder."""
        stats = self.stats
        return {
            "answers": stats.requests, "tokens": stats.tokens, "cycles": stats.cycles, "proposed": stats.proposed,
            "evaluated": stats.evaluated, "accepted": stats.accepted, "alpha": stats.alpha, "tau": stats.tau,
            "share": self.share, "speedup_by_weights": self.speedup,
        }  # fmt: skip


class Answers:
    """The target's own answers, and what it made of them: what every set is measured on."""

    def __init__(self, target: Target, records: RecordSet) -> None:
        """InputError where no answer has a second token."""
        self.target, self.weights, self._together = target, Weights.of(target), side_by_side()
        self.texts: list[Known] = [
            known(target, record) for record in records if len(target.answer(record)) >= SHORTEST_ANSWER
        ]
        if not self.texts:
            raise InputError(f"{records.name}: no answer has two tokens, so there is nothing to draft")

    def measure(self, skip: Sublayers, options: SearchOptions) -> Measured:
        """What decoding these answers would do without `skip`."""
        eos, stats = self.target.eos_token_ids, []
        for text in self.texts:
            # What no threshold lets pass in so many cycles need not be followed: each moves it by a thousandth at most.
            least = options.confidence_threshold - len(text.tokens) * STEP * (1 - KEPT) - MARGIN
            drafted = chains(self.target, text, skip, options.draft_length, least, together=self._together)
            stats.append(replay(drafted, options.policy(), eos))
        return Measured(skip, Stats.total(stats), self.weights.share(skip))


def starts(num_layers: int) -> list[Sublayers]:
    """Sets to begin with, as the published code gives its search some: nothing, attention of every other layer and of the
    second half, whole layers of the second half, and every other layer but the first and last."""
    half = tuple(range(num_layers // 2, num_layers))
    other = tuple(range(1, num_layers - 1, 2))
    return [
        Sublayers(),
        Sublayers(other, ()),
        Sublayers(half, ()),
        Sublayers(half, half),
        Sublayers(other, other),
    ]


def best_set(
    measure: Callable[[Sublayers], float],
    num_layers: int,
    trials: int,
    seed: int,
    known_sets: Sequence[Sublayers] = (),
    report: Report = lambda line: None,
) -> Sublayers:
    """The set with the largest `measure` of those that `trials` trials look at, the first one of equals; `known_sets` are
    looked at first. No set without all attention is measured, nor one twice, nor is the empty one chosen."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    for start in known_sets:
        study.enqueue_trial(
            {
                f"{kind}.{i}": i in getattr(start, kind)
                for kind in ("attention", "mlp")
                for i in range(num_layers)
            }
        )
    values: dict[Sublayers, float] = {}

    def objective(trial: optuna.Trial) -> float:
        chosen = {
            kind: tuple(
                i for i in range(num_layers) if trial.suggest_categorical(f"{kind}.{i}", [False, True])
            )
            for kind in ("attention", "mlp")
        }
        skip = Sublayers(**chosen)
        if len(skip.attention) == num_layers:
            return 0.0
        if skip not in values:
            values[skip] = measure(skip)
        if (trial.number + 1) % 20 == 0:
            report(
                f"{trial.number + 1}/{trials} sets, {max(values.values()):.3f} times plain decoding at best"
            )
        return values[skip]

    study.optimize(objective, n_trials=trials)
    usable = {skip: value for skip, value in values.items() if skip != Sublayers()}
    if not usable:
        raise OptionError(f"--trials {trials} looked at no set that leaves something out; give more")
    return max(usable, key=lambda skip: usable[skip])


def search(
    target: Target,
    records: RecordSet,
    held: RecordSet | None,
    options: SearchOptions,
    out: Path,
    report: Report = lambda line: None,
) -> DraftAndVerify:
    """Searches on `records`, measures what was found on `held` (the last quarter of `records` without), and writes the
    draft's folder `out`.

    Raises InputError where records have no text, or none that is long enough, and OptionError for a target that cannot be
    drafted for so.
    """
    DraftAndVerify(skip=Sublayers()).check_family(target.family)
    if held is None:
        records, held = records.split(0.25)
    answers = Answers(target, records)
    report(f"{len(answers.texts)} answers, {2 * target.num_layers} sublayers")
    best = best_set(
        lambda skip: answers.measure(skip, options).speedup,
        target.num_layers,
        options.trials,
        options.seed,
        starts(target.num_layers),
        report,
    )
    draft = DraftAndVerify(
        skip=best,
        target={"name": target.name, "fingerprint": target.fingerprint, "num_layers": target.num_layers},
        provenance=provenance() | {"search": asdict(options), "records": records.identity()},
        evaluation={
            "searched": answers.measure(best, options).to_dict(),
            "held_out": Answers(target, held).measure(best, options).to_dict(),
        },
    )
    draft.save(out)
    return draft
