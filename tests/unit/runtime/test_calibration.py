"""What a calibration decodes, chooses and promises, on decodings that are written down."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import vlmexport.runtime
from vlmexport.runtime.bundle.manifest import DraftInfo
from vlmexport.runtime.bundle.stored_acceptance import StoredAcceptance
from vlmexport.runtime.bundle.stored_costs import StoredCosts
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.speedup.cost_model import FREE, CostTable, Curve, DraftCosts
from vlmexport.runtime.speedup.predict import AcceptanceCounts, predict
from vlmexport.runtime.speedup.stats import Stats
from vlmexport.runtime.tuning import survey as calibration
from vlmexport.runtime.tuning.ab_runs import WARM, Arm, decode
from vlmexport.runtime.tuning.bootstrap import interval
from vlmexport.runtime.tuning.in_context_costs import within_decoding
from vlmexport.runtime.tuning.survey import Calibration, calibrate

CYCLES = 8
Seconds = Callable[[str | None, Budget | None, int], float]
"""Of a cycle, by draft, budget and number of the request."""


def steady(draft: str | None, budget: Budget | None, number: int) -> float:
    """Heads by which a cycle takes twice a plain token, a tree's five times; a slow second draft."""
    if draft is None or budget is None:
        return 1.0
    return 9.0 if draft == "slow" else 2.0 if budget.nodes == budget.depth else 5.0


class Script:
    """In place of `decode`: cycles that accept 3, 2, 2, 2 tokens of as many as are drafted, in the seconds of `seconds`."""

    def __init__(self, seconds: Seconds):
        self.seconds, self.calls = seconds, list[tuple[int, str | None, int | None, int | None]]()
        self.clock = 0.0

    def __call__(
        self, session: Any, request: Mapping[str, Any], options: Mapping[str, Any], *more: Any
    ) -> Any:
        number, draft, length = request["number"], options.get("draft"), options.get("draft_length")
        nodes = options.get("draft_nodes") or length
        self.calls.append((number, draft, nodes, length))
        stats, budget = Stats(prompt_tokens=5), None if nodes is None else Budget(nodes, length)
        for at in range(CYCLES):
            accepted = 0 if budget is None else min(budget.depth, 2 + (at % 4 == 0))
            if budget is None:
                stats.count(0, 0, 0)
            else:
                stats.count(budget.nodes, accepted, min(accepted + 1, budget.depth), budget.depth)
                if budget.nodes > budget.depth:
                    stats.count_ranks([(2, at % 2)] * accepted)
        stats.tokens = 1 + stats.accepted + stats.cycles
        stats.total_seconds = CYCLES * self.seconds(draft, budget, number)
        self.clock += stats.total_seconds
        return SimpleNamespace(stats=stats)


def draft(name: str, **fields: Any) -> Any:
    return DraftInfo.parse({"name": name, "kind": "medusa", "heads": 3, "ranks": 4, **fields}, "draft")


HEADS, SLOW = draft("heads"), draft("slow", kind="imitation", heads=None, ranks=None, layer=2)
SESSION: Any = SimpleNamespace(
    bundle=SimpleNamespace(
        manifest=SimpleNamespace(
            drafts=[HEADS, SLOW],
            widest_tree=10,
            exact_trees=True,
            decoder=SimpleNamespace(num_layers=4),
            model=SimpleNamespace(source="model", fingerprint="f"),
            acceptance=[],
        )
    ),
    decoder=SimpleNamespace(engine=SimpleNamespace(machine="m", graphs={})),
    threads=1,
    least_width=None,
)
REQUESTS = [{"number": number} for number in range(12)]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Script]:
    flat = CostTable(
        Curve({1: 1.0, 20: 1.0}), {"heads": DraftCosts(once=0.1), "slow": DraftCosts(propose=1.0)}
    )

    def use(seconds: Seconds, table: CostTable = flat) -> Script:
        made = Script(seconds)
        monkeypatch.setattr(calibration, "decode", made)
        monkeypatch.setattr(calibration, "time_passes", lambda *arguments: (table, 10))
        monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: made.clock))
        return made

    return use


def looked_at(report: dict[str, Any]) -> dict[int, tuple[float, list[float] | None]]:
    """By chain length, what was measured of the heads beside plain decoding."""
    return {
        row["depth"]: (row["measured"], row["interval"])
        for row in report["predictions"]
        if row["measured"] is not None
    }


def test_candidate_for_best_is_decoded(script: Callable[..., Script]) -> None:
    """Chains of 2 keep 3 tokens a cycle, those of 3 keep 3.25: within a tenth. Neither short chains, nor trees, nor a draft
    that is told to be slow are looked at."""
    made = script(steady)
    whole = Calibration(SESSION, "data")
    assert whole.survey(REQUESTS[:3]) == 3
    surveyed = {call[1:] for call in made.calls}
    assert surveyed == {(None, None, None), ("heads", 3, 3), ("heads", 8, 3), ("slow", 9, 9)}
    made.calls.clear()
    assert whole.look(REQUESTS[:4]) == 4
    plain, others = made.calls[::2], made.calls[1::2]
    assert {call[1] for call in plain} == {None}
    assert [call[0] for call in plain] == [call[0] for call in others], "each beside plain decoding"
    assert sorted(others) == [(n, "heads", d, d) for n in range(4) for d in (2, 3)]
    report = whole.report()
    schema = Path(vlmexport.runtime.__file__).parent / "schemas" / "calibrate-1.json"
    jsonschema.Draft202012Validator(json.loads(schema.read_text(encoding="utf-8"))).validate(report)
    assert set(looked_at(report)) == {2, 3} and report["requests"] == {"survey": 3, "look": 4}
    stored = {(entry["draft"], entry["nodes"], entry["depth"]): entry for entry in report["acceptance"]}
    assert stored["heads", 2, 2]["accepted"] == [4 * CYCLES] * 2 and stored["heads", 2, 2]["requests"] == 4


def combined_session() -> Any:
    """`SESSION` with heads and prompt lookup in place of its drafts."""
    lookup = draft("prompt-lookup", kind="prompt-lookup", heads=None, ranks=None)
    manifest = SimpleNamespace(**{**vars(SESSION.bundle.manifest), "drafts": [HEADS, lookup]})
    return SimpleNamespace(**{**vars(SESSION), "bundle": SimpleNamespace(manifest=manifest)})


def test_a_combination_of_two_drafts_may_be_the_best(script: Callable[..., Script]) -> None:
    """It copies further than its second draft has heads, and costs what its cycles took: no pass of its own is stored."""

    def seconds(name: str | None, budget: Budget | None, number: int) -> float:
        if name == "prompt-lookup+heads":
            return 0.6
        return 20.0 if name == "prompt-lookup" else steady(name, budget, number)

    table = CostTable(
        Curve({1: 1.0, 20: 1.0}), {"heads": DraftCosts(once=0.8), "prompt-lookup": DraftCosts()}
    )
    made, session = script(seconds, table), combined_session()
    whole = Calibration(session, "data")
    whole.survey(REQUESTS[:3])
    surveyed = {call[1:] for call in made.calls}
    assert ("prompt-lookup+heads", 9, 9) in surveyed and ("heads", 3, 3) in surveyed
    assert {call[0] for call in surveyed} == {None, "heads", "prompt-lookup", "prompt-lookup+heads"}
    whole.look(REQUESTS)
    report = whole.report()
    choice = StoredCosts.parse(report["costs"], "costs").choice
    assert choice is not None and choice.draft == "prompt-lookup+heads"
    assert choice.speedup == pytest.approx(1 / 0.6)
    assert set(report["costs"]["drafts"]) == {"heads", "prompt-lookup"}
    assert "prompt-lookup+heads" in {entry["draft"] for entry in report["acceptance"]}
    row = next(
        row for row in report["predictions"] if (row["draft"], row["depth"]) == ("prompt-lookup+heads", 9)
    )
    assert row["break_even"] == pytest.approx(1.0)


def test_a_tree_that_was_never_decoded_may_be_the_best(script: Callable[..., Script]) -> None:
    """Trees of 8 and their second ranks tell of smaller ones, which cost as much less as their passes are narrower."""
    wide = CostTable(Curve({1: 0.5, 4: 0.6, 6: 0.7, 9: 3.0}), {"heads": DraftCosts(once=0.1)})
    made = script(lambda name, budget, number: 0.6 * steady(name, budget, number), wide)
    whole = Calibration(SESSION, "data")
    whole.survey(REQUESTS)
    made.calls.clear()
    whole.look(REQUESTS[:2])
    report, looked = whole.report(), {call[1:] for call in made.calls if call[1]}
    assert {(nodes, depth) for _, nodes, depth in looked if nodes > depth} == {(5, 2)}
    assert {(row["nodes"], row["depth"]) for row in report["predictions"] if row["measured"]} == {
        (nodes, depth) for _, nodes, depth in looked
    }


def test_best_choice_is_predicted_on_held_out_requests(
    script: Callable[..., Script],
) -> None:
    def lucky(name: str | None, budget: Budget | None, number: int) -> float:
        if budget == Budget(2, 2):
            return 0.5 if number % 2 == 0 else 0.8
        if budget == Budget(3, 3):
            return 0.6
        return steady(name, budget, number)

    script(lucky)
    whole = Calibration(SESSION, "data")
    whole.survey(REQUESTS)
    for first in range(0, 12, 4):
        whole.look(REQUESTS[first : first + 4])
    report = whole.report()
    choice = report["costs"]["choice"]
    assert (choice["draft"], choice["draft_length"]) == ("heads", 2)
    assert choice["speedup"] == pytest.approx(1 / 0.8)
    assert choice["tokens_per_cycle"] / choice["break_even"] == pytest.approx(choice["speedup"])
    assert looked_at(report)[3][0] == pytest.approx(1 / 0.6)
    assert StoredCosts.parse(report["costs"], "costs").choice.interval == choice["interval"]  # type: ignore[union-attr]


@pytest.mark.parametrize(("spread", "uncertain"), [(0.002, False), (0.05, True)])
def test_confidence_interval_is_reported(
    script: Callable[..., Script], spread: float, uncertain: bool
) -> None:
    """By requests: those that are looked at a second time add nothing to it."""

    def varied(name: str | None, budget: Budget | None, number: int) -> float:
        return steady(name, budget, number) * (1.0 if name is None else 0.3 + spread * (number % 5))

    script(varied)
    reports = []
    for looks in (1, 3):
        whole = Calibration(SESSION, "data")
        whole.survey(REQUESTS)
        for _ in range(looks):
            whole.look(REQUESTS)
        reports.append(whole.report())
    once, thrice = (report["costs"]["choice"] for report in reports)
    low, high = once["interval"]
    assert low < once["speedup"] < high and thrice["interval"] == pytest.approx(once["interval"])
    assert [report["uncertain"] for report in reports] == [uncertain] * 2
    few = Calibration(SESSION, "data")
    few.survey(REQUESTS)
    few.look(REQUESTS[:8])
    assert few.report()["costs"]["choice"]["interval"] is None and few.report()["uncertain"] is True


def test_choice_must_pay_on_held_out_requests(
    script: Callable[..., Script],
) -> None:
    def half(name: str | None, budget: Budget | None, number: int) -> float:
        return steady(name, budget, number) * (1.0 if name is None else 0.3 if number % 2 == 0 else 0.48)

    script(half)
    for least, chosen in ((1.05, None), (1.0, "heads")):
        whole = Calibration(SESSION, "data", least=least)
        whole.survey(REQUESTS)
        whole.look(REQUESTS)
        assert whole.report()["costs"]["choice"]["draft"] == chosen


def test_hopeless_candidates_are_skipped(script: Callable[..., Script]) -> None:
    made = script(lambda name, budget, number: 1.0 if name is None else 20.0)
    whole = Calibration(SESSION, "data")
    whole.survey(REQUESTS)
    made.calls.clear()
    assert whole.look(REQUESTS) == 0 and not made.calls and not whole.contenders
    report = whole.report()
    assert report["costs"]["choice"]["draft"] is None and report["uncertain"] is None


def test_a_large_model_decodes_fewer_requests_and_new_ones_first(script: Callable[..., Script]) -> None:
    """A tenth of a minute: not even two requests with every draft, and not one look."""
    made = script(lambda *what: 0.3 * steady(*what))
    report = calibrate(SESSION, REQUESTS, "data", minutes=0.1)
    assert report["requests"] == {"survey": 2, "look": 2}
    numbers = [number for number, _ in itertools.groupby(call[0] for call in made.calls)]
    assert numbers == [0, 1, 2, 3]
    script(lambda *what: 0.003 * steady(*what))
    assert calibrate(SESSION, REQUESTS, "data")["requests"] == {"survey": 12, "look": 12}


def test_requests_that_only_time_the_host_are_decoded_for_a_while(script: Callable[..., Script]) -> None:
    """Without data the choice is by what the bundle knows: there is nothing to look at."""
    seen = AcceptanceCounts("heads", Budget(3, 3), {(3, 3): 10}, [9, 8, 7])
    known = SimpleNamespace(**vars(SESSION.bundle.manifest))
    known.acceptance, known.draft = [StoredAcceptance.of(seen, 2, "d", "t").to_dict()], lambda name: HEADS
    made = script(lambda *what: 0.05 * steady(*what))
    session: Any = SimpleNamespace(**{**vars(SESSION), "bundle": SimpleNamespace(manifest=known)})
    report = calibrate(session, REQUESTS[:1], None)
    assert report["requests"]["survey"] > 1 and made.clock == pytest.approx(calibration.SECONDS, rel=0.5)
    assert report["requests"]["look"] == 0 and report["acceptance"] == [] and report["uncertain"] is None
    assert report["costs"]["choice"]["draft"] == "heads" and report["costs"]["choice"]["interval"] is None


def test_long_request_needs_no_warm_up() -> None:
    asked: list[float] = []

    def session(seconds: float) -> Any:
        def generate(**options: Any) -> Any:
            asked.append(seconds)
            return SimpleNamespace(stats=Stats(total_seconds=seconds))

        return SimpleNamespace(generate=generate)

    decode(session(WARM / 2), {}, {}, 8)
    decode(session(2 * WARM), {}, {}, 8)
    assert asked == [WARM / 2, WARM / 2, 2 * WARM]


def test_one_token_requests_cannot_be_calibrated(script: Callable[..., Script]) -> None:
    script(steady)
    with pytest.raises(OptionError, match="raise --max-new-tokens"):
        Calibration(SESSION, "data").survey([])


def test_confidence_interval_has_its_coverage() -> None:
    """Of means of 30 draws from a known distribution, about 95 % of the intervals hold the true one."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    rng, held = random.Random(1), 0
    for _ in range(60):
        found = interval(mean, [rng.gauss(5, 2) for _ in range(30)])
        held += found is not None and found[0] < 5 < found[1]
    assert 52 <= held <= 59
    assert interval(mean, [1.0] * 4) is None and interval(mean, [1.0] * 5) == (1.0, 1.0)


@pytest.mark.parametrize(("seconds", "once"), [(10.0, 0.0), (12.0, 2.0), (14.0, 4.0), (15.0, 4.0)])
def test_combined_draft_includes_a_share_of_the_second(seconds: float, once: float) -> None:
    """By what its cycles took, between nothing and all of it; another draft never takes less than its passes."""

    def arm(name: str | None, took: float) -> Arm:
        stats = Stats(
            cycles=10, accepted_by_depth=[5, 2, 1], total_seconds=10 * took, engine_seconds=10 * took
        )
        stats.shapes[(0, 0) if name is None else (3, 3)] = 10
        return Arm(name, None if name is None else Budget(3, 3), [stats])

    timed = CostTable(Curve({1: 10.0, 4: 10.0}), {name: DraftCosts(once=4.0) for name in ("medusa", "both")})
    arms = [arm("medusa", 12.0), arm("both", seconds)]
    table = within_decoding(timed, arm(None, 10.0), arms, {"both"})
    assert table.drafts["both"].once == pytest.approx(once)
    assert table.drafts["medusa"].once == 4.0
    assert predict(table, arms[1].observed).break_even == pytest.approx(max(seconds, 10.0) / 10)


def test_host_of_a_draft_is_that_of_the_cycles_in_which_it_found_something() -> None:
    plain, lookup = Stats(cycles=10, total_seconds=110.0, engine_seconds=100.0), Stats()
    plain.shapes[0, 0] = 10
    lookup.shapes.update({(0, 0): 8, (3, 3): 2})
    lookup.cycles, lookup.accepted_by_depth = 10, [1, 1, 0]
    lookup.total_seconds, lookup.engine_seconds = 8 * 11.0 + 2 * 17.0, 8 * 10.0 + 2 * 12.0
    arms = [Arm(), Arm("lookup", Budget(3, 3), [lookup])]
    arms[0].decoded.append(plain)
    table = within_decoding(CostTable(Curve({1: 10.0, 4: 12.0}), {"lookup": FREE}), arms[0], arms[1:])
    assert table.host == pytest.approx(1.0) and table.drafts["lookup"].host == pytest.approx(5.0)
    assert predict(table, arms[1].observed).break_even == pytest.approx(12.2 / 11)
    lookup.shapes = Counter({(0, 0): 10})
    assert within_decoding(table, arms[0], arms[1:]).drafts["lookup"].host == 0.0


def test_tree_prediction_uses_measured_cycle_times() -> None:
    """A pass over a tree may cost more within decoding than timed alone, and its host more than a chain's."""

    def arm(budget: Budget | None, cycles: int, seconds: float, engine: float, accepted: list[int]) -> Arm:
        stats = Stats()
        shape = (0, 0) if budget is None else (budget.nodes, budget.depth)
        stats.shapes[shape], stats.cycles, stats.accepted_by_depth = cycles, cycles, accepted
        stats.total_seconds, stats.engine_seconds = cycles * seconds, cycles * engine
        return Arm(None if budget is None else "medusa", budget, [stats])

    timed = CostTable(Curve({1: 10.0, 4: 12.0, 9: 16.0, 16: 20.0}), {"medusa": DraftCosts(once=1.0)})
    plain = arm(None, 10, 12.5, 11.0, [])
    chain = arm(Budget(3, 3), 10, 15.0, 14.0, [5, 2, 1])
    trees = [arm(Budget(8, 3), 10, 26.0, 21.0, [7, 4, 2]), arm(Budget(15, 3), 10, 30.0, 23.0, [8, 5, 3])]
    table = within_decoding(timed, plain, [chain, *trees])
    assert table.plain(4) == pytest.approx(1.1 * 12) and table.host == pytest.approx(1.5)
    for each, seconds in ((chain, 15.0), (trees[0], 26.0), (trees[1], 30.0)):
        found = predict(table, each.observed)
        assert found.break_even == pytest.approx(seconds / 12.5)
    between = table.cycle_seconds("medusa", 3, 11)
    assert 26 < between < 30 and table.cycle_seconds("medusa", 1) < 15
    again = StoredCosts.parse(StoredCosts.of(table, "m", 1, "d", 0).to_json(), "costs").table
    assert again.cycle_seconds("medusa", 3, 8) == pytest.approx(26.0)
