"""The search for a network's shape: what it proposes, what it keeps, and that it goes on where it was killed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from vlmexport.calibration import cli as training_cli
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.features.features import LiveFeatures
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.training import imitation_search
from vlmexport.calibration.training.imitation_search import search_shapes
from vlmexport.calibration.training.run import FeatureCache, Schedule
from vlmexport.calibration.training.search_space import (
    SPACE,
    Trial,
    folder_name,
    front,
    propose,
    shapes,
    told,
)
from vlmexport.exporter.drafts.imitation.imitation import ImitationConfig, ImitationDraft, ImitationNetwork
from vlmexport.exporter.drafts.imitation.imitation_network import SEEN
from vlmexport.runtime import cli
from vlmexport.runtime.common.errors import OptionError

from tests.support.training_targets import make_records, make_target

LAYER = 2
LOOP = LoopOptions(steps=3, batch_size=6, lr=3e-3, warmup=1)
OWN = ImitationOptions(LAYER)
SCHEMA = Path(training_cli.__file__).parent / "schemas" / "train-search-1.json"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, RecordSet, Path]:
    folder = tmp_path_factory.mktemp("search")
    return make_target("llama", folder / "model"), make_records(folder, "llama"), folder


def run(place: tuple[Target, RecordSet, Path], out: Path, trials: int, **values: Any) -> dict[str, Any]:
    given = {"own": OWN, "loop": LOOP, "fixed": {}, "report": lambda line: None, **values}
    return search_shapes(place[0], place[1], trials=trials, out=out, validation=place[1], **given)


def trial(number: int, agreement: float, flops: int) -> Trial:
    shapes = [
        {"num_linear": n, "norm": norm, "residual": True, "activation": "none"} for norm in SPACE["norm"] for n in (1, 2)
    ]  # fmt: skip
    return Trial(shapes[number], agreement, flops)


def test_pareto_front_holds_undominated_trials():
    trials = [trial(0, 0.5, 10), trial(1, 0.7, 20), trial(2, 0.6, 20), trial(3, 0.7, 30), trial(4, 0.4, 10)]
    assert front(trials) == [trials[0], trials[1]]
    equal = replace(trials[1], shape=trials[5 - 1].shape)
    assert front([trials[1], equal]) == [trials[1], equal]
    assert front([]) == []


def test_a_proposal_follows_from_the_seed_and_the_trials_before_it():
    past: list[Trial] = []
    seen = []
    for number in range(16):
        shape = propose(past, {}, seed=3)
        assert shape is not None and shape == propose(list(past), {}, seed=3)
        assert list(shape) == list(SPACE) and all(shape[name] in SPACE[name] for name in SPACE)
        assert shape["num_linear"] == 2 or shape["activation"] == "none"
        seen.append(shape)
        past.append(Trial(shape, 0.01 * number, ImitationConfig(16, **shape).flops))
    assert len({json.dumps(s) for s in seen}) == 16, "none is tried twice"
    assert [propose(past[:n], {}, seed=4) for n in range(16)] != seen
    # From the eleventh on it is no chance, but what the trials showed.
    other = [replace(t, agreement=float(t.shape["residual"])) for t in past]
    changed = [propose(other[:n], {}, seed=3) for n in range(16)]
    assert changed[:10] == seen[:10]
    fixed = {"num_linear": 1, "residual": False}
    firsts = [propose([], fixed, seed) for seed in range(8)]
    assert all(s is not None and s == {**s, **fixed} and s["activation"] == "none" for s in firsts)
    assert {s["norm"] for s in firsts if s} == set(SPACE["norm"])
    assert len(shapes({})) == 2 * 2 * 3 * (1 + 4) and len(shapes(fixed)) == 2 * 3
    assert len(shapes({"attention_heads": 0})) == 30
    assert {shape["attention_heads"] for shape in seen} == {0, 4}
    assert propose([Trial(s, 0.5, 1) for s in shapes(fixed)], fixed, 0) is None


def test_later_proposals_learn_from_the_trials_before_them():
    """Where only networks without a residual agree, they are proposed more often than by chance."""
    past: list[Trial] = []
    for _ in range(20):
        shape = propose(past, {}, seed=0)
        assert shape is not None
        past.append(Trial(shape, 0.1 + 0.8 * (not shape["residual"]), 100))
    assert sum(not t.shape["residual"] for t in past[10:]) >= 7


def test_flops_are_those_of_the_products_and_of_what_is_done_singly():
    for linear in (1, 2):
        network = ImitationNetwork(16, num_linear=linear)
        with FlopCounterMode(display=False) as counter:
            network(torch.zeros(1, 16))
        products = 2 * 16 * 16 * linear
        assert counter.get_total_flops() == products
        singly = 7 + linear + 5 * (linear - 1) + 1  # norm, bias, gelu, residual
        assert network.config.flops == products + 16 * singly
    plain = ImitationConfig(16, num_linear=2, activation="none", norm="none", residual=False)
    assert plain.flops == 2 * 2 * 16 * 16 + 2 * 16
    for linear in (1, 2):
        network = ImitationNetwork(16, num_linear=linear, attention_heads=4)
        with FlopCounterMode(display=False) as counter:
            network(torch.zeros(1, SEEN, 16))
        products = counter.get_total_flops() // SEEN
        assert products == 2 * 16 * 16 * (linear + 4)
        seen = 2 * 2 * 16 * SEEN  # what the counter leaves out: queries by keys, and weights by values
        without = ImitationConfig(16, num_linear=linear).flops - 2 * 16 * 16 * linear
        singly = 16 * (7 + 1 + 3 * 2) + 5 * 4 * SEEN  # norm, residual, angles of queries and keys, softmax
        assert network.config.flops == products + seen + without + singly


def test_resumed_search_equals_an_uninterrupted_one(
    llama: tuple[Target, RecordSet, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(llama, tmp_path / "whole", 5)
    jsonschema.validate(whole, json.loads(SCHEMA.read_text()))
    trained, trains = [], imitation_search.train_draft

    def killed(*given: Any) -> Any:
        trained.append(given[2])
        if len(trained) == 3:
            raise KeyboardInterrupt
        return trains(*given)

    monkeypatch.setattr(imitation_search, "train_draft", killed)
    with pytest.raises(KeyboardInterrupt):
        run(llama, tmp_path / "killed", 5)
    held = json.loads((tmp_path / "killed" / "search.json").read_text())
    assert held["trials"] == whole["trials"][: len(held["trials"])] and len(held["trials"]) < 5
    again = run(llama, tmp_path / "killed", 5)
    assert again["trials"] == whole["trials"] and again["front"] == whole["front"]
    assert again == json.loads((tmp_path / "killed" / "search.json").read_text())
    assert len(trained) == 5 + 1, "one was killed"
    assert run(llama, tmp_path / "killed", 3)["trials"] == whole["trials"], "it has these trials already"


def test_a_trial_is_a_training_of_its_shape_and_the_exit_is_measured(
    llama: tuple[Target, RecordSet, Path], tmp_path: Path
) -> None:
    target, records, _ = llama
    found = run(
        llama, tmp_path, 9, fixed={"num_linear": 1, "residual": False}, cache=FeatureCache(dtype="float32")
    )
    assert len(found["trials"]) == 6, "there are no more"
    assert sorted(one["shape"]["attention_heads"] for one in found["trials"]) == [0, 0, 0, 4, 4, 4]
    rows = LiveFeatures(target, records, LAYER).rows(range(len(records)))
    agreed = target.head(rows.trunk).argmax(-1) == target.head(rows.residuals[:, -1]).argmax(-1)
    assert found["early_exit"] == pytest.approx(agreed.float().mean().item())
    for one in found["trials"]:
        folder = tmp_path / "trials" / folder_name(one["shape"])
        draft = ImitationDraft.load(folder)
        assert draft.network.config == ImitationConfig(target.hidden_size, **one["shape"])
        assert draft.evaluation["validation"]["agreement"] == one["agreement"]
        assert one["flops"] == draft.network.config.flops and one["shape"]["num_linear"] == 1


def test_a_search_from_before_there_was_an_attention_goes_on(
    llama: tuple[Target, RecordSet, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trials had none, and lie where a shape without one is trained."""
    fixed = {"num_linear": 1, "residual": False}
    run(llama, tmp_path, 6, fixed={**fixed, "attention_heads": 0})
    document = json.loads((tmp_path / "search.json").read_text())
    for one in (*document["trials"], *document["front"]):
        del one["shape"]["attention_heads"]
    document["search"]["given"] = fixed
    (tmp_path / "search.json").write_text(json.dumps(document))
    assert sorted(path.name for path in (tmp_path / "trials").iterdir()) == [
        "1-layer_norm-false-none", "1-none-false-none", "1-rms_norm-false-none",
    ]  # fmt: skip
    found = run(llama, tmp_path, 6, fixed=fixed)
    assert [one["shape"]["attention_heads"] for one in found["trials"]] == [0, 0, 0, 4, 4, 4]
    monkeypatch.setattr(type(llama[0]), "hidden_size", 12)
    with pytest.raises(
        OptionError, match="--search tries attention of 4 heads, which do not divide the width 12"
    ):
        run(llama, tmp_path / "b", 1)


def test_unsuitable_search_options_are_refused(llama: tuple[Target, RecordSet, Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="leave --joint and --fine-tune out"):
        run(llama, tmp_path / "a", 1, own=replace(OWN, fine_tune=1))
    for fixed in (
        {name: values[0] for name, values in SPACE.items()},
        {"num_linear": 1, "norm": "none", "residual": True, "attention_heads": 0},
    ):
        with pytest.raises(OptionError, match="nothing to choose: leave out one of --num-linear, --norm, "):
            run(llama, tmp_path / "b", 1, fixed=fixed)
    run(llama, tmp_path / "c", 1)
    with pytest.raises(OptionError, match="holds a search with steps = 3, this one has 4"):
        run(llama, tmp_path / "c", 1, loop=replace(LOOP, steps=4))
    with pytest.raises(OptionError, match=r"holds a search with given = \{\}"):
        run(llama, tmp_path / "c", 1, fixed={"num_linear": 1})
    for text, error in (
        ("[]", "TypeError"), ("{", "JSONDecodeError"), ('{"search": 7, "trials": []}', "TypeError"),
        ('{"search": {}, "trials": [{"shape": {}, "agreement": 1, "flops": 1}]}', "KeyError"),
    ):  # fmt: skip
        (tmp_path / "c" / "search.json").write_text(text)
        with pytest.raises(OptionError, match=rf"search\.json cannot be read \({error}\)"):
            run(llama, tmp_path / "c", 1)
    assert len(run(llama, tmp_path / "c", 1, schedule=Schedule(restart=True))["trials"]) == 1


def test_the_command_prints_the_front(
    llama: tuple[Target, RecordSet, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = llama[2]
    command = [
        "train", "--model", str(folder / "model"), "--draft-layer", str(LAYER), "--data", str(folder / "data.jsonl"),
        "--validation", str(folder / "data.jsonl"), "--steps", "2", "--batch-size", "4", "--threads", "1", "--no-residual",
        "--search", "2", "-o", str(tmp_path / "out"),
    ]  # fmt: skip
    assert cli.main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert all(one["shape"]["residual"] is False for one in document["trials"])
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "early exit, no network" in printed and told(document["front"][0]["shape"]) in printed
    assert "--no-residual" in printed and str(tmp_path / "out" / "search.json") in printed
    assert cli.main([*command, "--draft", "medusa"]) == 2
    assert "not of --draft medusa" in capsys.readouterr().err
