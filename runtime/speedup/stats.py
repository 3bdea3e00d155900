"""What one request did: counters with identities that hold on every run, and seconds per phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seconds:
    """Wall-clock seconds by phase; phases do not overlap. `head` is the target's head and the choice of tokens."""

    vision: float = 0.0
    encoder: float = 0.0
    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    head: float = 0.0

    def add(self, draft: float, verify: float, head: float) -> None:
        """Add one cycle."""
        self.draft += draft
        self.verify += verify
        self.head += head

    def to_dict(self) -> dict[str, float]:
        return dict(vars(self))


_SUMMED = (
    "prompt_tokens", "reused_tokens", "reused_pictures", "similar_pictures", "tokens", "cycles", "proposed", "evaluated", "accepted", "discarded",
    "time_to_first_token", "total_seconds",
)  # fmt: skip


def lossy_ways(ways: Iterable[str]) -> str | None:
    """Lossy ways in one string, each once; None where there is none."""
    return ", ".join(sorted({*ways})) or None


@dataclass
class Stats:
    """Counters of a request. `emitted tokens = 1 + accepted + cycles − discarded`: the first token comes from
    prefill, `discarded` were cut by an end token, the limit or a stop string."""

    requests: int = 1
    """More in a `total`."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Of the prompt's, those whose keys and values an earlier request had left."""
    reused_pictures: int = 0
    """Pictures and videos of the prompt for which the vision tower did not run: encoded before, or within what was reused."""
    similar_pictures: int = 0
    """Of the prompt's, those that an earlier picture stands for, which is not quite the same."""
    tokens: int = 0
    cycles: int = 0
    proposed: int = 0
    evaluated: int = 0
    accepted: int = 0
    discarded: int = 0
    draft: str | None = None
    draft_length: int | None = 0
    """Tokens of a proposal; None where a controller, or a policy of the caller's, decided from cycle to cycle."""
    forced: bool = False
    """True when acceptance was forced for a measurement: the output is not text."""
    lossy: str | None = None
    """What made the output another than the model's: "typical" (how drafts were accepted), "similar" (a picture stands for
    another), or both with a comma between; None: nothing did."""
    evaluated_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    shapes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Cycles by (drafted nodes, depth) of what was verified; (0, 0) decoded one token plainly."""
    ranks: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """Of trees, not of chains: judged nodes by (depth, children, which of them was right), see `acceptance.ranks`."""
    seconds: Seconds = field(default_factory=Seconds)
    engine_seconds: float | None = None
    """Of the cycles' seconds, those inside the engine's calls; 0 on an engine that does not count them, None where no cycle
    ran: a request of one token has it from prefill, whose seconds are under `seconds`."""
    time_to_first_token: float = 0.0
    total_seconds: float = 0.0

    @property
    def tau(self) -> float:
        """Mean tokens per cycle, bonus included; plain decoding is 1.0."""
        return (self.accepted + self.cycles) / self.cycles if self.cycles else 1.0

    @property
    def alpha(self) -> float | None:
        """Accepted share of the drafted tokens that were judged; None when none was."""
        return self.accepted / self.evaluated if self.evaluated else None

    @property
    def alpha_by_depth(self) -> list[float | None]:
        """`alpha` of the first drafted token of a cycle, of the second, and so on."""
        pairs = zip(self.accepted_by_depth, self.evaluated_by_depth, strict=True)
        return [accepted / evaluated if evaluated else None for accepted, evaluated in pairs]

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self.total_seconds - self.time_to_first_token

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens per second, without the first token, which belongs to prefill."""
        return (
            (self.tokens - self.requests) / self.decode_seconds
            if self.tokens > self.requests and self.decode_seconds > 0
            else None
        )

    def count_inside(self, seconds: float) -> None:
        """Add a cycle's seconds inside the engine's calls."""
        self.engine_seconds = (self.engine_seconds or 0.0) + seconds

    def count(self, proposed: int, accepted: int, evaluated: int, depth: int | None = None) -> None:
        """Add one cycle; `depth` of the verified tree, by default a chain's."""
        self.cycles += 1
        self.shapes[proposed, proposed if depth is None else depth] += 1
        self.accepted += accepted
        if not proposed and not evaluated:
            return
        self.proposed += proposed
        self.evaluated += evaluated
        judged, right = self.evaluated_by_depth, self.accepted_by_depth
        while len(judged) < evaluated:
            judged.append(0)
            right.append(0)
        for at in range(evaluated):
            judged[at] += 1
        for at in range(accepted):
            right[at] += 1

    def count_ranks(self, judged: Iterable[tuple[int, int]]) -> None:
        """Add what `acceptance.ranks` says of a tree."""
        for depth, (children, right) in enumerate(judged):
            self.ranks[depth, children, right] += 1

    @classmethod
    def total(cls, requests: Iterable[Stats]) -> Stats:
        """Counters and seconds of several requests together; `tau`, `alpha` and `tokens_per_second` are then theirs.

        `draft`, `draft_length` and `forced` are kept where all requests agree, `lossy` where any was. The first tokens of the requests,
        which prefill gives, are counted in `requests`.
        """
        entries = list(requests)
        out = cls(requests=0)
        for name in ("requests", *_SUMMED):
            setattr(out, name, sum(getattr(entry, name) for entry in entries))
        for entry in entries:
            if entry.engine_seconds is not None:
                out.count_inside(entry.engine_seconds)
        for name in ("draft", "draft_length", "forced"):
            values = {getattr(entry, name) for entry in entries}
            if len(values) == 1:
                setattr(out, name, values.pop())
        out.lossy = lossy_ways(way for entry in entries if entry.lossy for way in entry.lossy.split(", "))
        for name in ("evaluated_by_depth", "accepted_by_depth"):
            lists = [getattr(entry, name) for entry in entries]
            longest = max(map(len, lists), default=0)
            setattr(out, name, [sum(v[at] for v in lists if at < len(v)) for at in range(longest)])
        for entry in entries:
            out.shapes.update(entry.shapes)
            out.ranks.update(entry.ranks)
            for phase, seconds in vars(entry.seconds).items():
                setattr(out.seconds, phase, getattr(out.seconds, phase) + seconds)
        return out

    def check(self) -> None:
        """Assert the identities."""
        assert self.tokens == self.requests + self.accepted + self.cycles - self.discarded, (
            f"token identity broken: {self}"
        )
        assert 0 <= self.accepted <= self.evaluated <= self.proposed, f"counter order broken: {self}"
        assert sum(self.accepted_by_depth) == self.accepted, f"depth counters broken: {self}"
        assert sum(self.evaluated_by_depth) == self.evaluated, f"depth counters broken: {self}"
        assert sum(self.shapes.values()) == self.cycles, f"shape counters broken: {self}"
        right = sum(count for (_, children, rank), count in self.ranks.items() if rank < children)
        assert right <= self.accepted, f"rank counters broken: {self}"
        nodes = sum(count * nodes for (nodes, _), count in self.shapes.items())
        assert nodes == self.proposed, f"shape counters broken: {self}"

    def to_dict(self) -> dict[str, Any]:
        """JSON object: counters, ratios, seconds."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "reused_pictures": self.reused_pictures,
            "similar_pictures": self.similar_pictures,
            "tokens": self.tokens,
            "cycles": self.cycles,
            "proposed": self.proposed,
            "evaluated": self.evaluated,
            "accepted": self.accepted,
            "discarded": self.discarded,
            "draft": self.draft,
            "draft_length": self.draft_length,
            "forced": self.forced,
            "tau": self.tau,
            "alpha": self.alpha,
            "alpha_by_depth": self.alpha_by_depth,
            "engine_seconds": self.engine_seconds,
            "time_to_first_token": self.time_to_first_token,
            "decode_seconds": self.decode_seconds,
            "total_seconds": self.total_seconds,
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds.to_dict(),
        }
