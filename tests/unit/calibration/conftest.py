"""Targets that are built once per session."""

from __future__ import annotations

import pytest
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.targets.target import Target

from tests.support import kept_traces
from tests.support.training_targets import make_records, make_target

kept_traces.install()


@pytest.fixture(scope="session", params=["llama", "blip2-t5"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="session")
def records(target: Target, tmp_path_factory: pytest.TempPathFactory) -> RecordSet:
    kind = "llama" if target.family.vision is None else "blip2-t5"
    return make_records(tmp_path_factory.mktemp("records"), kind)
