"""What acceptance is worth in speed: a bound by arithmetic, and a prediction by a machine's pass times."""

from __future__ import annotations

from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.stored_costs import every_costs
from ...runtime.common.errors import OptionError
from ...runtime.speedup.budget import Budget
from ...runtime.speedup.predict import AcceptanceCounts, predict
from ...runtime.speedup.stats import Stats


def bound(tau: float, drafted: float, share: float) -> float:
    """Most that decoding can gain where a pass takes as long as reading its weights: a cycle of `drafted` tokens reads
    `share` of the layers for each, and all of them once to verify; heads and everything else are taken as free."""
    return tau / (1 + share * drafted)


class Machine:
    """Pass times that `vlmexport tune` or `bench --save` stored in a bundle, the latest ones.

    Raises:
        OptionError: the bundle has none. BundleError: an entry that is not one.
    """

    def __init__(self, bundle: Bundle) -> None:
        entries = every_costs(bundle.manifest)
        if not entries:
            raise OptionError(
                f"--bundle {bundle.path} holds no pass times; measure some with vlmexport tune, or bench --save"
            )
        self.bundle, self.name, self.table = bundle, entries[-1].machine, entries[-1].table

    def speedup(self, draft: str, draft_length: int, cycles: Stats) -> float | None:
        """Decode speed over plain decoding, predicted of these cycles; None for a draft that was not timed."""
        if draft not in self.table.drafts or not cycles.cycles:
            return None
        return predict(self.table, AcceptanceCounts.of(draft, Budget.chain(draft_length), cycles)).speedup
