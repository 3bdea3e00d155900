"""Reports of `tune` from several devices, for one bundle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..bundle.stored_entries import check_report
from ..common.errors import BundleError, OptionError


def merge_reports(
    documents: Mapping[str, Mapping[str, Any]], fingerprint: str
) -> tuple[list[Any], list[Any]]:
    """(costs, acceptance) of several reports of `tune` of the same model, or of manifests, each under its name.

    Raises `OptionError`, naming document, field and value, for one of another model and for what is no report.
    """
    costs: list[Any] = []
    acceptance: list[Any] = []
    for name, document in documents.items():
        model = document.get("model")
        actual = model.get("fingerprint") if isinstance(model, Mapping) else document.get("fingerprint")
        if actual != fingerprint:
            raise OptionError(
                f"--merge {name}: {actual!r:.80} is the fingerprint of another model than this bundle's"
            )
        try:
            more_costs, more_acceptance = check_report(document)
        except BundleError as error:
            reason = str(error).removeprefix("manifest ").removesuffix("; build the bundle again")
            raise OptionError(f"--merge {name}: {reason}; give a report of `vlmexport tune --json`") from None
        costs += more_costs
        acceptance += more_acceptance
    return costs, acceptance
