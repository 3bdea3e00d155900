"""What a caller may ask of one request, checked; and what that means for one bundle."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..common.errors import OptionError
from ..common.validation import ADAPTIVE, check_colour_order, integer, number
from ..policy.base import DraftPolicy, FixedLength, LogisticLength, check_policy
from ..policy.confidence import FIRST, FIRST_SAMPLED, LONGEST, AdaptiveThreshold
from ..sampling.draft_sampling import METHODS
from ..sampling.sampler import Sampling
from ..sampling.typical import Typical
from ..text.stop import LONGEST as LONGEST_STOP

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo, Manifest


LOSSY = ("typical",)
"""Ways of accepting drafts that do not keep the target's distribution; only a request that names one gets it."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The options of `Session.generate`, in the same words. Raises `OptionError` for a wrong type or value."""

    max_new_tokens: int = 128
    draft: str | None = None
    speculative: bool = True
    draft_length: int | None = None
    draft_nodes: int | None = None
    confidence_threshold: float | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Sequence[str] | str = ()
    deadline: float | None = None
    ignore_eos: bool = False
    adaptive: str | None = None
    policy: DraftPolicy | None = None
    force_acceptance: float | None = None
    lossy: str | None = None
    typical_epsilon: float = Typical.epsilon
    typical_delta: float = Typical.delta
    draft_sampling: str | None = None
    channels: str = "rgb"
    reuse_prompt: bool = False
    plain_text: bool = False

    def __post_init__(self) -> None:
        # Plain Python numbers from here on: a numpy float32 deadline would round the clock.
        found: dict[str, Any] = {"max_new_tokens": integer("max_new_tokens", self.max_new_tokens, 1)}
        if self.deadline is not None:
            found["deadline"] = number("deadline", self.deadline, 0, above=True)
        if self.force_acceptance is not None:
            found["force_acceptance"] = number("force_acceptance", self.force_acceptance, 0, 1)
        if self.repetition_penalty is not None:
            found["repetition_penalty"] = number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        if self.lossy not in (None, *LOSSY):
            raise OptionError(f"lossy: {self.lossy!r:.80} is not one of {', '.join(LOSSY)}")
        if self.draft_sampling not in (None, *METHODS):
            raise OptionError(
                f"draft_sampling: {self.draft_sampling!r:.80} is not one of {', '.join(METHODS)}"
            )
        if self.draft_sampling in ("drawn", "auto") and (self.lossy or self.force_acceptance is not None):
            raise OptionError(
                f"draft_sampling: {self.draft_sampling} keeps the distribution, lossy and force_acceptance do not; choose one"
            )
        Typical(self.typical_epsilon, self.typical_delta)
        if self.lossy is not None and self.force_acceptance is not None:
            raise OptionError("lossy and force_acceptance are two ways to accept; choose one")
        if self.confidence_threshold is not None:
            found["confidence_threshold"] = number("confidence_threshold", self.confidence_threshold, 0, 1)
        for name in ("speculative", "ignore_eos", "reuse_prompt", "plain_text"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}: {getattr(self, name)!r:.80} is not True or False")
        if self.draft is not None and not isinstance(self.draft, str):
            raise OptionError(f"draft: {self.draft!r:.80} is not the name or kind of a draft")
        for name in ("draft_length", "draft_nodes"):
            if getattr(self, name) is not None:
                found[name] = integer(name, getattr(self, name), 0)
        if self.adaptive not in (None, *ADAPTIVE):
            raise OptionError(f"adaptive: {self.adaptive!r:.80} is not one of {', '.join(ADAPTIVE)}")
        check_colour_order("channels", self.channels)
        if self.policy is not None:
            check_policy(self.policy)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
            raise OptionError(f"stop: {self.stop!r:.80} is not text or a list of texts")
        if (size := sum(map(len, stop))) > LONGEST_STOP:
            raise OptionError(
                f"stop: {len(stop)} texts of {size:,} characters; all of them may have {LONGEST_STOP:,}: give fewer"
            )
        for name, value in {**found, "stop": tuple(stop)}.items():
            object.__setattr__(self, name, value)


def request_options(options: Mapping[str, Any]) -> RequestOptions:
    """Options by name. Raises `OptionError` for a name that no option has, too."""
    known = [field.name for field in fields(RequestOptions)]
    unknown = sorted(str(name) for name in options if name not in known)
    if unknown:
        raise OptionError(f"no option {', '.join(unknown):.200}; there are {', '.join(known)}")
    return RequestOptions(**options)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`RequestOptions` with a bundle's defaults filled in."""

    max_new_tokens: int
    deadline: float | None
    """Seconds from the call."""
    stop: tuple[str, ...]
    eos: frozenset[int]
    sampling: Sampling
    forced: float | None
    repetition_penalty: float | None = None
    """In place of the model's; None keeps that."""
    typical: Typical | None = None
    """Lossy acceptance, where the request asked for it and there is something to accept."""
    draft_sampling: str = "match"
    """One of `draft_sampling.METHODS`; at temperature 0 always match."""
    draft: DraftInfo | None = None
    draft_length: int | None = 0
    """Tokens of a proposal; None where the controller or a policy of the caller's decides."""
    policy: DraftPolicy | None = None
    reuse_prompt: bool = False
    """Whether rows of the request before may serve this one, and this one's the next."""


def resolve(
    options: RequestOptions, manifest: Manifest, controller: Callable[[str, float | None], DraftPolicy]
) -> Settings:
    """Fill in what the manifest decides; `controller(learn, threshold)` gives the policy of a request that neither
    fixes a length nor brings a policy. Raises `OptionError` for a draft or a length that the bundle has not."""
    widest = manifest.widest_tree
    for name in ("draft_length", "draft_nodes"):
        given = getattr(options, name)
        if given is not None and given >= widest:
            limit = "bundle's max_width" if manifest.verify_width is None else "session's verify_width"
            raise OptionError(f"{name}: {given} is above {widest - 1} (the {limit} is {widest})")
    seed = 0 if options.seed is None else options.seed
    sampling = Sampling(options.temperature, options.top_k, options.top_p, seed, options.min_p)
    if options.seed is None and not sampling.greedy:
        sampling = replace(sampling, seed=secrets.randbits(63))
    request: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "deadline": options.deadline,
        "stop": options.stop,
        "eos": frozenset() if options.ignore_eos else frozenset(manifest.text.eos_token_ids),
        "sampling": sampling,
        "forced": options.force_acceptance,
        "repetition_penalty": options.repetition_penalty,
        "reuse_prompt": options.reuse_prompt,
    }
    chosen = manifest.choose_draft(options.draft) if options.speculative else None
    if chosen is None or widest < 2:  # a pass of one row has none for a drafted token
        return Settings(**request)
    # At temperature 0 typical acceptance is greedy decoding.
    if options.lossy is not None and not sampling.greedy:
        request["typical"] = Typical(options.typical_epsilon, options.typical_delta)
    if options.lossy is None and options.force_acceptance is None and not sampling.greedy:
        # Without a seed nobody can tell one draw from another: then whatever accepts more.
        request["draft_sampling"] = options.draft_sampling or ("auto" if options.seed is None else "match")
    defaults, length, threshold = manifest.policy, options.draft_length, options.confidence_threshold
    nodes = options.draft_nodes
    if threshold is None:
        threshold = defaults.confidence_threshold
    learn = options.adaptive or ("off" if options.force_acceptance is not None else defaults.adaptive)
    if options.policy is not None:
        return Settings(**request, draft=chosen, draft_length=None, policy=options.policy)
    if options.adaptive == "confidence" and nodes is not None:
        raise OptionError(
            f'draft_nodes: {nodes} asks for trees, adaptive "confidence" ends chains; choose one'
        )
    if length is None and nodes is None and learn == "logistic":
        by_place = LogisticLength.of(options.max_new_tokens, widest - 1, threshold)
        return Settings(**request, draft=chosen, draft_length=None, policy=by_place)
    if learn == "confidence" and nodes is None and (length is None or options.adaptive is not None):
        longest = min(LONGEST if length is None else length, widest - 1)
        first = FIRST if sampling.greedy else FIRST_SAMPLED
        policy = AdaptiveThreshold(longest, first if threshold is None else threshold)
        return Settings(**request, draft=chosen, draft_length=None, policy=policy)
    if length is None and nodes is None and learn not in ("off", "confidence"):
        return Settings(**request, draft=chosen, draft_length=None, policy=controller(learn, threshold))
    if length is None and nodes is None and chosen.name == defaults.draft:
        nodes = None if defaults.draft_nodes is None else min(defaults.draft_nodes, widest - 1)
    if length is None:
        length = min(chosen.options.most_tokens or defaults.draft_length, widest - 1)
    policy = FixedLength(length, threshold, nodes)
    return Settings(**request, draft=chosen, draft_length=length, policy=policy)
