"""Measured costs, acceptance and plans in a manifest, and reports that are merged: each field is checked, and named."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.bundle.manifest_changes import store_costs
from vlmexport.runtime.bundle.stored_acceptance import stored_acceptance
from vlmexport.runtime.bundle.stored_costs import every_costs
from vlmexport.runtime.bundle.stored_entries import check_report
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import BundleError

from tests.integration.fuzz.mutate import mutate_json
from tests.support import handmade_bundle

CHOICE = {
    "draft": "imitation@1",
    "draft_length": 3,
    "draft_nodes": None,
    "speedup": 1.4,
    "interval": [1.2, 1.6],
}
COSTS = {
    "machine": "m", "threads": 1, "date": "2026-01-01", "cache": 64, "plain": {"1": 0.01, "4": 0.02}, "host": 0.001,
    "drafts": {"imitation@1": {"tail": {"1": 0.005}, "once": 0.001}}, "choice": CHOICE,
}  # fmt: skip
ACCEPTANCE = {
    "draft": "imitation@1", "nodes": 3, "depth": 3, "shapes": [[3, 3, 9]], "accepted": [7, 4, 2], "discarded": 0,
    "ranks": [], "requests": 2, "data": "d", "date": "2026-01-01",
}  # fmt: skip
FILE = {"bytes": 9, "sha256": "0"}


def plan(graph: str) -> dict[str, Any]:
    rows = [{"name": "rows", "mode": "input", "dtype": "float32", "shape": ["width", 8]}]
    rows += [{"name": "out", "mode": "output", "dtype": "float32", "shape": ["width", 8], "alias_of": "rows"}]
    return {
        "graph": graph, "file": f"plans/tensorrt/sm87/{graph}.plan", "target": "sm87", "backend": "tensorrt",
        "version": "10.16", "precision": "float32", "bytes": 9, "bindings": rows,
    }  # fmt: skip


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    data = handmade_bundle.read(handmade_bundle.write_bundle(tmp_path_factory.mktemp("entries") / "bundle"))
    plans = [plan(name) for name in ("embed", "head")]
    files = {each["file"]: FILE for each in plans}
    data |= {"costs": [COSTS], "acceptance": [ACCEPTANCE], "plans": plans, "files": data["files"] | files}
    return data


def changed(data: dict[str, Any], way: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with one field replaced, or removed for `...`."""
    out = copy.deepcopy(data)
    place: Any = out
    for name in way[:-1]:
        place = place[name]
    if value is ...:
        del place[way[-1]]
    else:
        place[way[-1]] = value
    return out


MEASURED: list[tuple[tuple[Any, ...], Any, str]] = [
    (("costs", 0), 5, r"'costs\[0\]': 5 is not an object"),
    (("costs", 0, "threads"), -1, r"'costs\[0\]\.threads': -1 is not an integer in 1\.\.4096"),
    (("costs", 0, "threads"), ..., r"'costs\[0\]\.threads' is missing"),
    (("costs", 0, "machine"), ["m"], r"'costs\[0\]\.machine': \['m'\] is not a string"),
    (("costs", 0, "plain"), {"1": -0.5}, r"'costs\[0\]\.plain\.1': -0\.5"),
    (("costs", 0, "plain"), {"one": 1.0}, r"'costs\[0\]\.plain': .* is not an object of seconds by pass width"),
    (("costs", 0, "drafts"), {"a": 5}, r"'costs\[0\]\.drafts\.a': 5 is not an object"),
    (("costs", 0, "choice"), 5, r"'costs\[0\]\.choice': 5 is not an object"),
    (("costs", 0, "choice", "interval"), [1], r"'costs\[0\]\.choice\.interval': \[1\] is not a list of 2"),
    (("acceptance", 0), {}, r"'acceptance\[0\]\.draft' is missing"),
    (("acceptance", 0, "accepted"), "abc", r"'acceptance\[0\]\.accepted': 'abc' is not a list"),
    (("acceptance", 0, "shapes"), [[1, 2]], r"'acceptance\[0\]\.shapes\[0\]': \[1, 2\] is not a list of 3"),
    (("acceptance", 0, "shapes"), [[0, 0, 9]], r"'acceptance\[0\]\.accepted\[0\]': 7 is not at most the 0 that were judged"),
    (("acceptance", 0, "accepted"), [4, 5], r"'acceptance\[0\]\.accepted\[1\]': 5 is not at most the 4"),
]  # fmt: skip

PLANS: list[tuple[tuple[Any, ...], Any, str]] = [
    (("plans", 0), "plan", r"'plans\[0\]': 'plan' is not an object"),
    (("plans", 0, "file"), "weights.bin", r"'plans\[0\]\.file': 'weights\.bin' is not a file below plans/"),
    (("plans", 0, "file"), "plans/other.plan", r"'plans\[0\]\.file': .* is not a file listed under 'files'"),
    (("plans", 0, "graph"), "tail", r"'plans\[0\]\.graph': 'tail' is not a graph of this bundle"),
    (("plans", 0, "bytes"), -1, r"'plans\[0\]\.bytes': -1"),
    (("plans", 0, "bytes"), 1 << 60, r"'plans\[0\]\.bytes': 1152921504606846976"),
    (("plans", 0, "bytes"), 8, r"'plans\[0\]\.bytes': 8 is not the size under 'files' \(9\)"),
    (("plans", 0, "bindings"), [], r"'plans\[0\]\.bindings': \[\] is not a list with an output"),
    (("plans", 0, "bindings", 1, "alias_of"), "nothing", r"'plans\[0\]\.bindings\[1\]\.alias_of': 'nothing'"),
    (("plans", 0, "bindings", 1, "alias_of"), "out", r"'plans\[0\]\.bindings\[1\]\.alias_of': 'out'"),
    (("plans", 0, "bindings", 0, "alias_of"), "rows", r"'plans\[0\]\.bindings\[0\]\.alias_of': 'rows'"),
    (("plans", 0, "bindings", 0, "name"), "out", r"'plans\[0\]\.bindings\[1\]\.name': 'out' is not unique"),
    (("plans", 1), plan("embed"), r"'plans\[1\]': .*embed\.plan' is not unique: plans\[0\]"),
    (("plans", 1, "graph"), "embed", r"'plans\[1\]': .*'embed'\) is not unique: plans\[0\]"),
    (("plans", 0, "lowering"), "other", r"'plans\[0\]\.lowering': 'other' is not one of native, portable"),
]  # fmt: skip


@pytest.mark.parametrize(("way", "value", "said"), [*MEASURED, *PLANS])
def test_a_manifest_with_a_bad_entry_is_refused(
    valid: dict[str, Any], way: tuple[Any, ...], value: Any, said: str
) -> None:
    Manifest.from_dict(valid)
    with pytest.raises(BundleError, match=said) as caught:
        Manifest.from_dict(changed(valid, way, value))
    assert "\n" not in str(caught.value)


def test_entry_without_pass_times_is_ignored(valid: dict[str, Any]) -> None:
    manifest = Manifest.from_dict(changed(valid, ("costs",), [{"machine": "m", "threads": 1}, COSTS]))
    assert [entry.plain for entry in every_costs(manifest)] == [{1: 0.01, 4: 0.02}]
    for one in ({"costs": {"machine": "m", "threads": 1}}, {"costs": {**COSTS, "plain": {}}}, {}):
        with pytest.raises(BundleError, match="field 'costs"):
            check_report(one)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return handmade_bundle.write_bundle(tmp_path / "bundle")


@pytest.fixture
def merged(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[[bytes], tuple[int, str]]:
    """`tune BUNDLE --merge FILE` of a file with this content: (status, stderr)."""

    def merge(content: bytes) -> tuple[int, str]:
        (tmp_path / "report.json").write_bytes(content)
        status = main(["tune", str(bundle), "--merge", str(tmp_path / "report.json")])
        return status, capfd.readouterr().err

    return merge


def report(bundle: Path, **fields: Any) -> dict[str, Any]:
    mark = handmade_bundle.read(bundle)["model"]["fingerprint"]
    return {"schema_version": 1, "fingerprint": mark, "costs": [COSTS], "acceptance": [ACCEPTANCE], **fields}


def test_a_report_is_merged(bundle: Path, merged: Callable[[bytes], tuple[int, str]]) -> None:
    assert merged(json.dumps(report(bundle)).encode()) == (0, "")
    assert merged(json.dumps(report(bundle, costs={**COSTS, "machine": "other"})).encode()) == (0, "")
    manifest = Bundle.open(bundle).manifest
    assert [entry.machine for entry in every_costs(manifest)] == ["m", "other"]
    assert [entry.accepted for entry in stored_acceptance(manifest)] == [[7, 4, 2]]


@pytest.mark.parametrize(
    ("way", "value", "said"),
    [
        *MEASURED,
        (("costs",), None, r"'costs': None is not an object, or a list of them"),
        (("costs",), "abc", r"'costs': 'abc' is not an object"),
        (("acceptance",), None, r"'acceptance': None is not a list"),
        (("acceptance",), {}, r"'acceptance': \{\} is not a list"),
        (("costs", 0, "machine"), "\ud800", r"'costs\[0\]\.machine': '\\ud800' is not Unicode text"),
        (("costs", 0, "later"), {"\udfff": 1}, r"'costs\[0\]\.later \(a name\)': '\\udfff' is not Unicode text"),
    ],
)  # fmt: skip
def test_invalid_report_is_one_line_and_changes_nothing(
    bundle: Path, merged: Callable[[bytes], tuple[int, str]], way: tuple[Any, ...], value: Any, said: str
) -> None:
    before = (bundle / "manifest.json").read_bytes()
    status, error = merged(json.dumps(changed(report(bundle), way, value)).encode())
    assert status == 2 and error.count("\n") == 1 and "report.json" in error
    with pytest.raises(BundleError, match=said):
        raise BundleError(error)
    assert (bundle / "manifest.json").read_bytes() == before


def test_numbers_that_no_float_holds_are_refused(
    bundle: Path, merged: Callable[[bytes], tuple[int, str]]
) -> None:
    for digits in (b"1e999", b"-1e999", b"NaN", b"1" * 400):
        text = json.dumps(report(bundle, later=7)).encode().replace(b'"later": 7', b'"later": ' + digits)
        status, error = merged(text)
        assert status == 2 and error.count("\n") == 1, digits


def test_any_json_in_any_field_is_refused_or_merged(
    bundle: Path, merged: Callable[[bytes], tuple[int, str]]
) -> None:
    whole, served = report(bundle), 0
    for seed in range(120):
        document = mutate_json(whole, random.Random(seed))
        before = (bundle / "manifest.json").read_bytes()
        status, error = merged(json.dumps(document).encode())
        if status:
            assert status == 2 and error.count("\n") == 1 and "report.json" in error, (seed, error)
            assert (bundle / "manifest.json").read_bytes() == before
        else:
            served += 1
            Bundle.open(bundle)
    assert 20 < served < 100


def test_unserializable_entries_are_not_written(bundle: Path) -> None:
    before = (bundle / "manifest.json").read_bytes()
    deep: Any = "end"
    for _ in range(5000):
        deep = [deep]
    for later in ("\ud800", float("inf"), deep):
        with pytest.raises(BundleError, match=r"manifest\.json") as caught:
            store_costs(bundle, [{**COSTS, "later": later}])
        assert "\n" not in str(caught.value)
    assert (bundle / "manifest.json").read_bytes() == before
