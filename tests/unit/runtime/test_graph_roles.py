"""Roles of graphs: every kind of draft declares its own, and a kind from elsewhere needs no other line."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vlmexport.runtime.bundle.draft_kind import DraftKind, draft_with
from vlmexport.runtime.bundle.draft_options import DraftOptions, DraftPasses, DraftShares
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import DraftInfo, Manifest
from vlmexport.runtime.bundle.schema import checked, failure, integer
from vlmexport.runtime.bundle.stored_costs import default_costs
from vlmexport.runtime.common.errors import BundleError
from vlmexport.runtime.drafts import KINDS, create
from vlmexport.runtime.graphs import registry
from vlmexport.runtime.graphs.role import PASSES, REQUEST, GraphRole, Values
from vlmexport.runtime.graphs.values import hidden_states
from vlmexport.runtime.measure.pass_costs import passes
from vlmexport.runtime.measure.profile.points import list_points
from vlmexport.runtime.speculative.proposer import Proposer

from tests.support import handmade_bundle


def plan_profiles(role: str) -> list[str]:
    """Names of the profiles that TensorRT plans of a role get."""
    pytest.importorskip("onnx", reason="TensorRT's profiles need [export]")
    from vlmexport.exporter.tensorrt.profiles import Sizes, profiles_for

    return [profile.name for profile in profiles_for(role, Sizes(64, 2, 8))]


# --- a kind as somebody else would write it ---


@dataclass(kw_only=True)
class GuessOptions(DraftOptions):
    """`guesses` behind each row."""

    guesses: int = checked(integer(1, 8))

    @property
    def most_tokens(self) -> int | None:
        return self.guesses

    def check(self, where: str, draft: DraftInfo, manifest: Manifest) -> None:
        if self.guesses > manifest.limits.max_width:
            raise failure(f"{where}.guesses", self.guesses, "at most limits.max_width")

    def passes(self, draft: DraftInfo, first: Sequence[str]) -> DraftPasses:
        return DraftPasses(once=list(draft.graphs.values()))

    def usual_shares(self, manifest: Manifest, head: float) -> DraftShares | None:
        return DraftShares(once=0.25)


class Guess(Proposer):
    """Proposes nothing that these tests look at."""

    def __init__(self, draft: DraftInfo, decoder: Any) -> None:
        self.name = draft.name


def _guess(manifest: Manifest, name: str, layers: Sequence[int] | None) -> tuple[Values, Values]:
    draft = draft_with(manifest, "guess")
    assert draft is not None and isinstance(draft.options, GuessOptions)
    return {"hidden": hidden_states(manifest)}, {"ids": ("int64", ("batch", "width", draft.options.guesses))}


KIND = DraftKind("guess", Guess, (GraphRole("guess", _guess, PASSES, timed=("token",)),), GuessOptions)


@pytest.fixture
def kind() -> Iterator[DraftKind]:
    registry.register(KIND)
    yield KIND
    registry.unregister(KIND.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return handmade_bundle.write_bundle(tmp_path_factory.mktemp("roles") / "bundle")


@pytest.fixture
def data(folder: Path) -> dict[str, Any]:
    """A manifest with such a draft: its graph in the file of another one."""
    found = copy.deepcopy(handmade_bundle.read(folder))
    width = found["decoder"]["hidden_size"]
    rows = {"name": "hidden", "dtype": "float32", "shape": ["batch", "width", width]}
    ids = {"name": "ids", "dtype": "int64", "shape": ["batch", "width", 3]}
    found["graphs"]["guess"] = {
        "file": found["graphs"]["head"]["file"], "role": "guess", "inputs": [rows], "outputs": [ids],
    }  # fmt: skip
    found["drafts"].append({"name": "guess", "kind": "guess", "graphs": {"guess": "guess"}, "guesses": 3})
    return found


# --- the kinds of the package ---


def test_every_kind_declares_itself_under_its_name() -> None:
    assert {name: kind.name for name, kind in registry.draft_kinds().items()} == {
        name: name for name in KINDS
    }


def test_no_two_kinds_declare_one_role() -> None:
    declared = [role.name for kind in registry.draft_kinds().values() for role in kind.roles]
    assert len(declared) == len(set(declared)) and set(declared) <= set(registry.graph_roles())


@pytest.mark.parametrize("name", registry.graph_roles())
def test_every_role_says_what_it_takes_and_when_it_runs(name: str) -> None:
    role = registry.graph_role(name)
    assert role.name == name and role.phases
    assert role.per_request or set(role.phases) <= set(PASSES)
    assert set(role.timed or role.phases) <= set(role.phases)
    assert role.interface is not None or role.name == "vision"
    assert plan_profiles(name) == [phase for phase in (REQUEST, *PASSES) if phase in role.phases]


def test_an_unknown_role_has_neither_an_interface_nor_captures() -> None:
    role = registry.graph_role("later")
    assert role is registry.UNKNOWN and not role.captures and role.interface is None


def test_a_name_or_a_role_that_is_taken_is_refused() -> None:
    for taken in (DraftKind("eagle", Guess), DraftKind("new", Guess, (GraphRole("head", None, PASSES),))):
        with pytest.raises(ValueError, match="is taken"):
            registry.register(taken)
        assert "new" not in registry.draft_kinds()


# --- a kind from elsewhere ---


def test_a_registered_kind_is_read_checked_and_written(kind: DraftKind, data: dict[str, Any]) -> None:
    manifest = Manifest.from_dict(data)
    draft = manifest.draft("guess")
    assert draft is not None and draft.options == GuessOptions(guesses=3)
    assert draft.to_dict()["guesses"] == 3 and "queries" in draft.to_dict()
    assert Manifest.from_dict(manifest.to_dict()).to_dict() == manifest.to_dict()
    assert isinstance(create(draft, type("Decoder", (), {"manifest": manifest})), Guess)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("guesses", "shape", "named"),
    [
        (9, 9, r"drafts\[\d\].guesses"),
        ("x", 3, r"drafts\[\d\].guesses"),
        (2, 3, r"graphs.guess.outputs\[0\]"),
        (None, 3, r"drafts\[\d\].guesses': None"),
    ],
)
def test_a_registered_kind_refuses_what_does_not_fit(
    kind: DraftKind, data: dict[str, Any], guesses: Any, shape: int, named: str
) -> None:
    data["drafts"][-1]["guesses"] = guesses
    data["graphs"]["guess"]["outputs"][0]["shape"][-1] = shape
    with pytest.raises(BundleError, match=named):
        Manifest.from_dict(data)


def test_a_registered_kind_is_timed_planned_and_costed(
    kind: DraftKind, data: dict[str, Any], folder: Path
) -> None:
    bundle = copy.copy(Bundle.open(folder))
    bundle.manifest = Manifest.from_dict(data)
    timed = [point for point in list_points(bundle, [3]) if point.graph == "guess"]
    assert [(point.profile, point.width) for point in timed] == [("token", 1)]
    assert plan_profiles("guess") == list(PASSES)
    made_of = passes(bundle.manifest, bundle.manifest.drafts, [1], embed=True)
    assert made_of["once", "guess", 1] == ["guess"]
    assert default_costs(bundle.manifest).drafts["guess"].once == pytest.approx(
        0.25 * default_costs(bundle.manifest).plain(1)
    )


def test_options_of_a_kind_that_is_not_known_are_kept(data: dict[str, Any]) -> None:
    data["drafts"][-1] |= {"heads": 3, "later": None}
    manifest = Manifest.from_dict(data)
    draft = manifest.draft("guess")
    assert draft is not None and draft.options.most_tokens is None
    written = draft.to_dict()
    assert (written["guesses"], written["heads"], written["later"], written["taps"]) == (3, 3, None, None)


def test_former_attributes_of_a_draft_are_read_with_a_warning() -> None:
    draft = DraftInfo.parse({"name": "heads", "kind": "medusa", "heads": 3}, "draft")
    with pytest.warns(DeprecationWarning, match=r"DraftInfo\.options\.heads"):
        assert draft.heads == 3
    with pytest.warns(DeprecationWarning):
        assert draft.taps is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hasattr(draft, "guesses") and copy.deepcopy(draft) == draft
