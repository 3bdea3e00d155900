"""What the options of a request mean for one bundle: `Settings`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..bundle.combined_drafts import SIGN, before, kinds_of_requests
from ..common.errors import OptionError
from ..policy.base import DraftPolicy, FixedLength
from ..policy.confidence import FIRST, FIRST_SAMPLED, LONGEST, AdaptiveThreshold
from ..sampling.sampler import Sampling
from ..sampling.typical import Typical
from .request_options import RequestOptions

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo, Manifest
    from ..drafts.memory.answers import Memory
    from ..grammars.matcher import GrammarMatcher
    from ..sampling.logprobs import Logprobs


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
    """One of `options.DRAFT_SAMPLING`; at temperature 0 always match."""
    draft: DraftInfo | None = None
    draft_length: int | None = 0
    """Tokens of a proposal; None where the controller or a policy of the caller's decides."""
    policy: DraftPolicy | None = None
    reuse_prompt: bool = False
    """Whether slots of the request before may serve this one, and this one's the next."""
    memory: Memory | None = None
    """Where the answer is remembered."""
    grammar: GrammarMatcher | None = None
    """What the answer must be; of this one request."""
    logprobs: Logprobs | None = None
    """Where the log-probabilities of its tokens are noted; of this one request."""


def chosen_draft(
    options: RequestOptions, manifest: Manifest, needs: Mapping[str, object | None]
) -> DraftInfo | None:
    """The draft of a request. `needs`: by draft of requests, what it proposes from; those that have it come before the
    others. None: the request decodes plainly. Raises `OptionError`."""
    chosen = manifest.choose_draft(options.draft)
    asked = [] if chosen is None else [name for name in chosen.name.split(SIGN) if name in needs]
    for name in asked:
        if needs[name] is None:
            raise OptionError(f"draft: {options.draft} proposes from the request's `{name}`; give that too")
    if asked or options.draft == "none":
        return chosen
    given = [name for name in needs if needs[name] is not None]
    if chosen is not None and chosen.layer is not None:  # nothing can be asked before it
        if "memory" not in given:
            return chosen  # masks fit what it drafts to a grammar
        chosen = None if options.draft is None else chosen
    for name in reversed(given):
        chosen = before(manifest.drafts, name, chosen)
    return chosen


def resolve(
    options: RequestOptions,
    manifest: Manifest,
    controller: Callable[[str, float | None], DraftPolicy],
    memory: Memory | None = None,
    grammar: GrammarMatcher | None = None,
) -> Settings:
    """Fill in what the manifest decides; `controller(learn, threshold)` gives the policy of a request that neither
    fixes a length nor brings a policy; `memory` is the one that it named, `grammar` the one that it gave. Raises `OptionError` for a draft or a length that
    the bundle has not."""
    widest = manifest.widest_tree
    for name in ("draft_length", "draft_nodes"):
        value = getattr(options, name)
        if value is not None and value >= widest:
            limit = "bundle's max_width" if manifest.verify_width is None else "session's verify_width"
            raise OptionError(f"{name}: {value} is above {widest - 1} (the {limit} is {widest})")
    if options.draft_nodes is not None and not manifest.exact_trees:
        reason = (
            "a target of integer weights verifies with other bits than plain decoding"
            if manifest.decoder.linear_attention is None
            else "layers with linear attention cannot verify, since their state has no branches"
        )
        raise OptionError(
            f"draft_nodes: {options.draft_nodes} asks for trees, which {reason}; give draft_length alone"
        )
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
        "forced": options.forced_acceptance,
        "repetition_penalty": options.repetition_penalty,
        "reuse_prompt": options.reuse_prompt,
        "memory": memory,
        "grammar": grammar,
        "logprobs": options.logprobs,
    }
    needs = {name: request[name] for name in kinds_of_requests()}
    chosen = chosen_draft(options, manifest, needs) if options.speculative else None
    if chosen is None or widest < 2:  # a pass of width 1 has none for a drafted token
        return Settings(**request)
    # At temperature 0 typical acceptance is greedy decoding.
    if options.lossy is not None and not sampling.greedy:
        request["typical"] = options.lossy
    if options.lossy is None and options.forced_acceptance is None and not sampling.greedy:
        # Without a seed nobody can tell one draw from another: then whatever accepts more.
        request["draft_sampling"] = options.draft_sampling or ("auto" if options.seed is None else "match")
    defaults, length, threshold = manifest.policy, options.draft_length, options.confidence_threshold
    nodes = options.draft_nodes
    if threshold is None:
        threshold = defaults.confidence_threshold
    learn = options.adaptive or ("off" if options.forced_acceptance is not None else defaults.adaptive)
    if learn == "logistic":  # of a manifest that an older release wrote
        learn = "session"
    if options.policy is not None:
        return Settings(**request, draft=chosen, draft_length=None, policy=options.policy)
    if options.adaptive == "confidence" and nodes is not None:
        raise OptionError(
            f'draft_nodes: {nodes} asks for trees, adaptive "confidence" ends chains; choose one'
        )
    if learn == "confidence" and nodes is None and (length is None or options.adaptive is not None):
        longest = min(LONGEST if length is None else length, widest - 1)
        first = FIRST if sampling.greedy else FIRST_SAMPLED
        policy = AdaptiveThreshold(longest, first if threshold is None else threshold)
        return Settings(**request, draft=chosen, draft_length=None, policy=policy)
    if length is None and nodes is None and learn not in ("off", "confidence"):
        return Settings(**request, draft=chosen, draft_length=None, policy=controller(learn, threshold))
    if length is None and nodes is None and chosen.name == defaults.draft:
        trees = defaults.draft_nodes is not None and manifest.exact_trees
        nodes = min(defaults.draft_nodes or 0, widest - 1) if trees else None
    if length is None:
        length = min(chosen.options.most_tokens or defaults.draft_length, widest - 1)
    policy = FixedLength(length, threshold, nodes)
    return Settings(**request, draft=chosen, draft_length=length, policy=policy)
