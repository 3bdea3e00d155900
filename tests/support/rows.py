"""The rows of the contract table: what a decoder must get right, each compared with transformers on the full prefix.

A row takes `rig_for(name)`, which gives a `Rig` on the engine of the column, and the family. A new row is a function
with the decorator.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import pytest
import torch
from vlmexport.runtime import drafts as proposers
from vlmexport.runtime.common.errors import CapacityError, OptionError, PromptError
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.drafts.layer_skip_options import skipped_by
from vlmexport.runtime.drafts.medusa.static_tree import grow, within
from vlmexport.runtime.sampling.verify import Verdict
from vlmexport.runtime.speculative.sequence import Sequence, SequenceLimits
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.speedup.stats import Stats

from tests.support import attending_rows
from tests.support.eagle_oracle import EagleOracle, Growing, WideOracle, paths_of
from tests.support.oracle import Request
from tests.support.rig import Rig, close
from tests.support.skipped_oracle import drafted
from tests.support.tiny_bundles import BUNDLES
from tests.support.toy_heads import without_tree
from tests.support.vispec_oracle import behind

RigFor = Callable[[str], Rig]
ROWS: dict[str, Callable[[RigFor, str], None]] = {}


def row(function: Callable[[RigFor, str], None]) -> Callable[[RigFor, str], None]:
    """Adds a row under the function's name."""
    ROWS[function.__name__] = function
    return function


def other(rig: Rig, token: int, step: int = 1) -> int:
    """A token that is not `token` and ends nothing."""
    return 3 + (token - 3 + 17 * step) % (rig.manifest.text.vocab_size - 8)


def node_logits(rig: Rig, request: Request, before: Items[int], tree: TokenTree) -> np.ndarray:
    """The oracle's logits after every node, one causal forward over the path from the root to each leaf."""
    parents = list(map(int, tree.parents))
    want: dict[int, np.ndarray] = {}
    for leaf in range(len(tree)):
        if leaf in parents:
            continue
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = parents[node]
        path.reverse()
        logits = rig.oracle.logits(request, (*before, *(int(tree.tokens[n]) for n in path)))[-len(path) :]
        want.update(zip(path, logits, strict=True))
    return np.stack([want[node] for node in range(len(tree))])


def branching(rig: Rig, request: Request, before: Items[int], pending: int) -> tuple[TokenTree, list[int]]:
    """A tree around the true continuation, never the first child; returns it with the true path (4 nodes)."""
    true = rig.oracle.greedy(request, len(before) + 5)[len(before) + 1 :][:4]
    tokens, parents, path, node = [pending], [-1], [], 0
    for step, token in enumerate(true):
        for branch in range(2 if step < 3 else 1):
            tokens.append(other(rig, token, branch + 1))
            parents.append(node)
        wrong = len(tokens) - 1
        tokens.append(token)
        parents.append(node)
        node = len(tokens) - 1
        path.append(node)
        if step in (0, 2):  # a wrong branch that goes on: its depth differs from its place
            tokens += [other(rig, token, 3), other(rig, token, 4)]
            parents += [wrong, len(tokens) - 2]
    return TokenTree(tokens, parents), path


def verified(
    rig: Rig, requests: Items[Request], want: Items[Items[int]], sequences: Items[Sequence], keep: int
) -> tuple[list[TokenTree], list[list[int]]]:
    """One pass over a branching tree of every sequence: the trees, and the paths that are accepted, `keep` nodes of the first
    sequence and one less of each that follows."""
    trees, paths = [], []
    for i, (request, sequence) in enumerate(zip(requests, sequences, strict=True)):
        done = len(sequence.tokens) - 1
        nodes, path = branching(rig, request, want[i][:done], want[i][done])
        trees.append(nodes)
        paths.append(path[: max(0, keep - i)])
    rig.full(*trees)
    return trees, paths


@row
def prefill(rig_for: RigFor, family: str) -> None:
    """One to many rows, also more than one pass takes."""
    rig = rig_for(family)
    for seed, length, extra in ((1, 1, 0), (2, 7, 1), (3, 12, 2), (4, 16, 18), (5, 20, 47)):
        request = rig.request(seed, length)
        tokens = rig.oracle.greedy(request, extra) if extra else ()
        close(
            rig.start(request, tokens), rig.oracle.logits(request, tokens)[-1:], f"prefill {length} + {extra}"
        )
    if rig.manifest.image is not None:
        images = [run for seed in (1, 2) for run in rig.vision(rig.request(seed))]
        alone = [rig.decoder.image_embeds([image]) for image in images]
        assert np.array_equal(rig.decoder.image_embeds(images), np.concatenate(alone))


@row
def one_token(rig_for: RigFor, family: str) -> None:
    """Plain decoding, width 1, equals `generate`; the output must be worth comparing."""
    rig = rig_for(family)
    for seed in (6, 7):
        request = rig.request(seed)
        want = rig.oracle.greedy(request, 48)
        assert len(set(want)) >= 20, f"only {len(set(want))} distinct tokens: the row would prove little"
        logits, tokens = rig.start(request), []
        for step in range(48):
            close(logits, rig.oracle.logits(request, want)[step : step + 1], f"token {step}")
            assert logits.std() >= 3
            tokens.append(int(logits[0].argmax()))
            logits = rig.chain(tokens[-1:])
            rig.accept(TokenTree.chain(tokens[-1:]), [])
        assert tuple(tokens) == want


@row
def chain(rig_for: RigFor, family: str) -> None:
    """Several tokens in one pass through all segments."""
    rig = rig_for(family)
    request = rig.request(8)
    want = rig.oracle.greedy(request, 48)
    rig.start(request)
    done = 0
    for width in (2, 5, 16, 1, 20):
        close(
            rig.chain(want[done : done + width]),
            rig.oracle.logits(request, want)[done + 1 :][:width],
            f"width {width}",
        )
        rig.accept(TokenTree.chain(want[done : done + width]), range(1, width))
        done += width


@row
def trunk_and_tail(rig_for: RigFor, family: str) -> None:
    """Self-speculation: the trunk token by token, its exit rows, the tail over all of them at once."""
    rig = rig_for(family)
    request = rig.request(9)
    want = rig.oracle.greedy(request, 48)
    rig.start(request)
    done = 0
    for width in (1, 3, 6, 17, 2):
        part = want[done : done + width]
        close(rig.speculate(1, part), rig.oracle.logits(request, want)[done + 1 :][:width], f"width {width}")
        rig.accept(TokenTree.chain(part), range(1, width))
        done += width


@row
def drafts(rig_for: RigFor, family: str) -> None:
    """What early exit and the imitation network propose equals the checkpoint's own layers, norm and head."""
    rig = rig_for(family)
    request = rig.request(10)
    tokens = rig.oracle.greedy(request, 6)
    rig.start(request)
    rig.decoder.begin_cycle(5)
    network = rig.tiny.networks()["imitation.1"]
    drafts: dict[str, Any] = {
        draft.kind: proposers.create(draft, rig.decoder) for draft in rig.manifest.drafts if draft.layer
    }
    for index, token in enumerate(tokens[:5]):
        rig.decoder.trunk(1, [token])
        hidden = rig.oracle.hidden(request, tokens[: index + 1], 1)
        for kind, rows in (("early-exit", hidden), ("imitation", network(hidden))):
            with torch.inference_mode():
                want = rig.oracle.judge(rows)
            close(drafts[kind].step_logits(index).logits(0)[None], want, f"draft {kind} at {index}")


def heads_say(rig: Rig, request: Request, tokens: Items[int]) -> tuple[np.ndarray, np.ndarray]:
    """Best ids and log-probabilities [heads, ranks] of the checkpoint's Medusa heads, where `tokens` were decoded and
    the last one is pending."""
    network = rig.tiny.networks()["medusa"]
    normed, table = rig.oracle.final_row(request, tokens[:-1])
    with torch.inference_mode():
        values, ids = network(normed, table).log_softmax(-1).topk(10)
    d2t = getattr(network, "d2t", None)
    return (ids if d2t is None else d2t[ids])[0].numpy(), values[0].numpy()


@row
def medusa(rig_for: RigFor, family: str) -> None:
    """The heads read the row that the pending token was chosen from: of the prompt, of a chain, of a tree's leaf."""
    rig = rig_for(family)
    asked = next(draft for draft in rig.manifest.drafts if draft.kind == "medusa")
    proposer = proposers.create(asked, rig.decoder)
    requests = [rig.request(seed, length) for seed, length in ((50, 5), (51, 9))]
    want = [rig.oracle.greedy(request, 30) for request in requests]
    sequences = [
        Sequence(rig.first_ids(request), SequenceLimits(40), Stats(), proposer=proposer)
        for request in requests
    ]
    rig.decoder.reset(0)
    for request, sequence in zip(requests, sequences, strict=True):
        rig.join(request, sequence)
        proposer.begin(sequence)
        sequence.tokens.append(want[sequences.index(sequence)][0])
    for keep in (0, 3, 4, 1):
        proposed = proposer.propose(sequences, [Budget.chain(3)] * 2)
        trees, paths = [], []
        for i, (request, sequence) in enumerate(zip(requests, sequences, strict=True)):
            done = len(sequence.tokens) - 1
            ids, _ = heads_say(rig, request, want[i][: done + 1])
            assert proposed[i].tokens == [want[i][done], *ids[:, 0]], f"sequence {i} after {done} tokens"
            nodes, path = branching(rig, request, want[i][:done], want[i][done])
            trees.append(nodes)
            paths.append(path[: keep - i] if keep > i else [])
        rig.full(*trees)
        for i, sequence in enumerate(sequences):
            token = want[i][len(sequence.tokens) + len(paths[i])]
            rows = rig.decoder.verified_hidden(i, len(trees[i]))
            proposer.advance(sequence, trees[i], Verdict(paths[i], token, len(paths[i])), rows)
            sequence.tokens += [*(trees[i].tokens[node] for node in paths[i]), token]
        rig.decoder.accept_all(trees, paths)
    ids, values = heads_say(rig, requests[0], want[0][: len(sequences[0].tokens)])
    (found,) = proposer.propose(sequences[:1], [Budget(7, 2)])
    assert asked.options.static_tree is not None
    parents, depths, ranks = within(asked.options.static_tree, Budget(7, 2))
    assert found.tokens[1:] == ids[depths, ranks].tolist() and len(found) == 8
    likeliest = proposers.create(without_tree(asked), rig.decoder)
    rig.join(
        requests[0],
        alone := Sequence(rig.first_ids(requests[0]), SequenceLimits(9), Stats(), proposer=likeliest),
    )
    alone.tokens.append(want[0][0])
    ids, values = heads_say(rig, requests[0], want[0][:1])
    parents, depths, ranks = within(grow(values.tolist(), 6), Budget(6, 3))
    (found,) = likeliest.propose([alone], [Budget(6, 3)])
    assert found.tokens[1:] == ids[depths, ranks].tolist()
    assert found.parents[1:] == [parent + 1 for parent in parents]


@row
def draft_and_verify(rig_for: RigFor, family: str) -> None:
    """Without its sublayers the target drafts what transformers' own layers do, behind the exact rows of what was accepted
    and its own rows of what it drafted; of a batch each sequence, also where others are not asked."""
    rig = rig_for(family)
    asked = next(draft for draft in rig.manifest.drafts if draft.kind == "draft-and-verify")
    if rig.column.startswith("tensorrt"):
        with pytest.raises(OptionError, match="TensorRT plans share none"):
            proposers.create(asked, rig.decoder)
        return
    proposer = proposers.create(asked, rig.decoder)
    requests = [rig.request(seed, length) for seed, length in ((56, 5), (57, 11), (58, 8))]
    want = [rig.oracle.greedy(request, 30) for request in requests]
    sequences = [
        Sequence(rig.first_ids(request), SequenceLimits(40), Stats(), proposer=proposer)
        for request in requests
    ]
    rig.decoder.reset(0)
    for row, (request, sequence) in enumerate(zip(requests, sequences, strict=True)):
        rig.join(request, sequence)
        sequence.batch_index = row
        sequence.tokens.append(want[row][0])
    for keep, lengths in ((0, (3, 4, 2)), (3, (0, 5, 1)), (4, (6, 0, 0)), (1, (2, 3, 4))):
        drafting = [(sequence, length) for sequence, length in zip(sequences, lengths, strict=True) if length]
        rig.decoder.begin_cycle(9)
        proposed = proposer.propose(
            *zip(*((one, Budget.chain(length)) for one, length in drafting), strict=True)
        )
        for (sequence, length), tree in zip(drafting, proposed, strict=True):
            behind = drafted(
                rig.oracle,
                skipped_by(rig.manifest),
                requests[sequence.batch_index],
                want[sequence.batch_index][: len(sequence.tokens)],
                length,
            )
            assert tree.tokens == [sequence.tokens[-1], *behind], f"sequence {sequence.batch_index}"
        trees, paths = verified(rig, requests, want, sequences, keep)
        for i, sequence in enumerate(sequences):
            sequence.tokens += want[i][len(sequence.tokens) :][: len(paths[i]) + 1]
        rig.decoder.accept_all(trees, paths)


@row
def eagle(rig_for: RigFor, family: str) -> None:
    """The layer goes on from the target's features of everything that was accepted, whatever it had drafted; its tree is
    that of its own probabilities, with nothing in sight of a node but its path."""
    goes_on(rig_for(family), "eagle", EagleOracle)


@row
def eagle3(rig_for: RigFor, family: str) -> None:
    """The same out of rows after three layers, which lie where a pass left them, also when a trunk was ahead of it."""
    rig = rig_for(f"{family}-two-cuts")
    taps = BUNDLES[f"{family}-two-cuts"].taps
    if taps is None:
        assert rig.manifest.draft("eagle3") is None
        return
    goes_on(rig, "eagle3", WideOracle)
    request = rig.request(55)
    want = rig.oracle.greedy(request, 8)
    found = []
    for cut in (0, 1, 2):
        rig.start(request)
        if cut:
            rig.speculate(cut, want[:5])
        else:
            rig.chain(want[:5])
        views = [rig.decoder.hidden_after(tap) for tap in (1, 2)]
        found.append([np.array(rig.decoder.engine.read(view)) for view in views])
    for rows in found[1:]:
        for got, all_at_once in zip(rows, found[0], strict=True):
            close(got[0], all_at_once[0], "rows after a cut")


@row
def vispec(rig_for: RigFor, family: str) -> None:
    """The same with a picture's tokens in place of its rows, at their positions, and its global feature in every text
    behind them."""
    rig = rig_for(family)
    if rig.manifest.draft("vispec") is None:
        assert not BUNDLES[family].sees
        return  # its decoder sees no pictures among its rows
    goes_on(rig, "vispec", behind)


def goes_on(rig: Rig, kind: str, oracle: Callable[..., Growing]) -> None:
    """A draft of `kind` with a layer of its own against `oracle(rig, network, request, tokens)`, over cycles of a batch
    whose sequences accept other counts, wait, and leave."""
    asked = next(draft for draft in rig.manifest.drafts if draft.kind == kind)
    proposer = proposers.create(asked, rig.decoder)
    network = rig.tiny.networks()[kind]
    ranks = asked.to_dict()["ranks"]
    assert ranks == 10
    requests = [rig.request(seed, length) for seed, length in ((52, 5), (53, 11), (54, 8))]
    want = [rig.oracle.greedy(request, 48) for request in requests]
    sequences = [
        Sequence(rig.first_ids(request), SequenceLimits(48), Stats(), proposer=proposer)
        for request in requests
    ]
    rig.decoder.reset(0)
    for request, sequence, tokens in zip(requests, sequences, want, strict=True):
        rig.join(request, sequence)
        proposer.begin(sequence)
        sequence.tokens.append(tokens[0])
    # The third sequence is not asked for a while, and one that was asked leaves.
    for keep, budgets in (
        (0, (Budget.chain(3), Budget(7, 3))),
        (3, (Budget(9, 4), Budget.chain(2), Budget.chain(4))),
        (4, (Budget(6, 2), Budget(8, 3))),
        (1, (Budget.chain(1), Budget(5, 3))),
        (2, (Budget(7, 3), Budget.chain(3), Budget(9, 4))),
    ):
        proposed = proposer.propose(sequences[: len(budgets)], budgets)
        for i, (tree, budget) in enumerate(zip(proposed, budgets, strict=True)):
            layer = oracle(rig, network, requests[i], sequences[i].tokens)
            assert tree.tokens[0] == sequences[i].tokens[-1]
            assert paths_of(tree) == layer.paths(budget, ranks), f"sequence {i}, {budget}"
        trees, paths = verified(rig, requests, want, sequences, keep)
        for i, sequence in enumerate(sequences):
            token = want[i][len(sequence.tokens) + len(paths[i])]
            rows = rig.decoder.verified_hidden(i, len(trees[i]))
            proposer.advance(sequence, trees[i], Verdict(paths[i], token, len(paths[i])), rows)
            sequence.tokens += [*(trees[i].tokens[node] for node in paths[i]), token]
        rig.decoder.accept_all(trees, paths)
    for _ in range(3):  # more rows wait than have room, and nobody asks for a tree
        trees = [
            TokenTree.chain(tokens[len(sequence.tokens) - 1 :][:8])
            for sequence, tokens in zip(sequences, want, strict=True)
        ]
        rig.full(*trees)
        path = list(range(1, 8))
        for i, sequence in enumerate(sequences):
            done = len(sequence.tokens)
            rows = rig.decoder.verified_hidden(i, 8)
            proposer.advance(sequence, trees[i], Verdict(path, want[i][done + 7], 7), rows)
            sequence.tokens += want[i][done : done + 8]
        rig.decoder.accept_all(trees, [path] * 3)
    proposer.end(sequences[0])
    (found,) = proposer.propose(sequences[2:], [Budget(7, 3)])
    layer = oracle(rig, network, requests[2], sequences[2].tokens)
    assert paths_of(found) == layer.paths(Budget(7, 3), ranks), "in the place of one that left"


@row
def imitation_attends(rig_for: RigFor, family: str) -> None:
    """With attention an imitation network says, wherever it drafts, what it says over all exit rows of the text at once."""
    attending_rows.alone(rig_for(f"{family}-two-cuts"))
    attending_rows.together(rig_for(f"{family}-two-cuts"))


@row
def tree(rig_for: RigFor, family: str) -> None:
    """Every node sees the prefix and its ancestors only, at its depth, whatever its slot."""
    rig = rig_for(family)
    for seed, before in ((11, 0), (12, 9)):
        request = rig.request(seed)
        want = rig.oracle.greedy(request, before + 6)
        rig.start(request, want[:before])
        nodes, _ = branching(rig, request, want[:before], want[before])
        got = rig.full(nodes)[0]
        close(got, node_logits(rig, request, want[:before], nodes), f"tree after {before}")


@row
def ragged_batch(rig_for: RigFor, family: str) -> None:
    """Three sequences of other lengths and other sources, advanced by other counts, with widths that come back."""
    rig = rig_for(family)
    requests = [rig.request(seed, length) for seed, length in ((13, 4), (14, 11), (15, 7))]
    want = [rig.oracle.greedy(request, 24) for request in requests]
    rig.start_batch(requests)
    done = [0, 0, 0]
    trees = [TokenTree.chain(rig.batch_ids(request)) for request in requests]
    for index, logits in enumerate(rig.full(*trees)):
        close(logits[-1:], rig.oracle.logits(requests[index], ())[-1:], f"first pass, sequence {index}")
        rig.accept(trees[index], range(1, len(trees[index])), index)
    for widths in ((4, 1, 2), (1, 1, 1), (2, 4, 4), (1, 6, 3), (4, 2, 1)):
        trees = [TokenTree.chain(want[i][done[i] : done[i] + width]) for i, width in enumerate(widths)]
        for i, logits in enumerate(rig.full(*trees)):
            wanted = rig.oracle.logits(requests[i], want[i])[done[i] + 1 :][: widths[i]]
            close(logits, wanted, f"widths {widths}, sequence {i} at {done[i]}")
        for i, width in enumerate(widths):
            keep = max(1, width - i)  # the others reject a part of it
            rig.accept(trees[i], range(1, keep), i)
            done[i] += keep


@row
def ragged_trees(rig_for: RigFor, family: str) -> None:
    """Trees and chains side by side; a path of each is committed, the others stay as they are."""
    rig = rig_for(family)
    requests = [rig.request(seed, length) for seed, length in ((16, 9), (17, 4), (18, 6))]
    want = [rig.oracle.greedy(request, 24) for request in requests]
    rig.start_batch(requests)
    trees = [TokenTree.chain(rig.batch_ids(request)) for request in requests]
    rig.full(*trees)
    for i, first in enumerate(trees):
        rig.accept(first, range(1, len(first)), i)
    first, path = branching(rig, requests[0], (), want[0][0])
    third, other_path = branching(rig, requests[2], (), want[2][0])
    nodes = [first, TokenTree.chain(want[1][:3]), third]
    for i, logits in enumerate(rig.full(*nodes)):
        close(logits, node_logits(rig, requests[i], (), nodes[i]), f"tree of sequence {i}")
    rig.accept(nodes[0], path, 0)
    rig.accept(nodes[1], [1, 2], 1)
    rig.accept(nodes[2], other_path, 2)
    done = [5, 3, 5]
    for width in (1, 3):
        nodes = [TokenTree.chain(want[i][done[i] : done[i] + width]) for i in range(3)]
        for i, logits in enumerate(rig.full(*nodes)):
            close(
                logits,
                rig.oracle.logits(requests[i], want[i])[done[i] + 1 :][:width],
                f"after commit, sequence {i}",
            )
            rig.accept(nodes[i], range(1, width), i)
            done[i] += width


@row
def crop_after_rejection(rig_for: RigFor, family: str) -> None:
    """Rejected rows leave nothing behind: by one pass, and by trunk and tail."""
    rig = rig_for(family)
    request = rig.request(19)
    want = rig.oracle.greedy(request, 48)
    rig.start(request)
    done = 0
    for right, wrong in ((0, 3), (2, 2), (1, 5), (3, 1), (0, 1), (4, 9)):
        for run in (lambda part: rig.speculate(1, part), rig.chain):
            part = list(want[done : done + right + 1])
            part += [other(rig, want[done + right + 1 + k]) for k in range(wrong)]
            got = run(part)
            truth = rig.oracle.logits(request, (*want[:done], *part))[done + 1 :]
            close(got, truth, f"{right} right, {wrong} wrong at {done}")
            rig.accept(TokenTree.chain(part), range(1, right + 1))
            done += right + 1
        assert rig.decoder.arena.lengths[0] == len(rig.first_ids(request)) + done


@row
def commit_of_a_tree_path(rig_for: RigFor, family: str) -> None:
    """The accepted rows become contiguous in every layer; what follows cannot tell that there was a tree."""
    rig = rig_for(family)
    request = rig.request(20)
    want = rig.oracle.greedy(request, 40)
    rig.start(request)
    done = 0
    for keep in (4, 2, 1, 0):
        nodes, path = branching(rig, request, want[:done], want[done])
        close(rig.full(nodes)[0], node_logits(rig, request, want[:done], nodes), f"tree at {done}")
        rig.accept(nodes, path[:keep])
        done += keep + 1
        got = rig.speculate(1, want[done : done + 2])
        close(got, rig.oracle.logits(request, want)[done + 1 :][:2], f"after {keep} nodes, at {done}")
        rig.accept(TokenTree.chain(want[done : done + 2]), [1])
        done += 2


@row
def last_positions(rig_for: RigFor, family: str) -> None:
    """The last rows of the buffer are as good as the first, and one more is refused before anything is written."""
    rig = rig_for(family)
    limits = rig.limits
    request = rig.request(21)
    prompt = len(rig.first_ids(request))
    rng = np.random.default_rng(21)
    room = limits.max_length - prompt
    tokens = tuple(rng.integers(3, rig.manifest.text.vocab_size - 4, room + limits.max_width).tolist())
    truth = rig.oracle.logits(request, tokens)
    grown = 126 - prompt
    close(rig.start(request, tokens[:grown]), truth[grown : grown + 1], "before the view grows")
    close(rig.speculate(1, tokens[grown : grown + 5]), truth[grown + 1 :][:5], "while the view grows")
    rig.accept(TokenTree.chain(tokens[grown : grown + 5]), range(1, 5))
    done = grown + 5
    while done < room:
        width = min(limits.max_width, room - done)
        close(rig.chain(tokens[done : done + width]), truth[done + 1 :][:width], f"rows from {prompt + done}")
        rig.accept(TokenTree.chain(tokens[done : done + width]), range(1, width))
        done += width
    assert rig.decoder.arena.lengths[0] == limits.max_length
    rest = tokens[done : done + limits.max_width]
    close(rig.chain(rest), truth[done + 1 :][: len(rest)], "the last rows, one pass")
    close(rig.speculate(1, rest), truth[done + 1 :][: len(rest)], "the last rows, trunk and tail")
    rig.accept(TokenTree.chain(rest), [])
    with pytest.raises(CapacityError):
        rig.chain(rest)
    rig.decoder.reset()
    with pytest.raises(CapacityError):
        rig.decoder.begin_cycle(limits.max_width + 1)
    with pytest.raises(PromptError):
        rig.decoder.prefill(np.zeros((limits.max_length + 1, rig.manifest.decoder.hidden_size), np.float32))


@row
def padded_width(rig_for: RigFor, family: str) -> None:
    """Rows that only fill up a pass change nothing, neither in it nor later."""
    rig = rig_for(family)
    requests = [rig.request(seed, 5) for seed in (22, 23)]
    want = [rig.oracle.greedy(request, 30) for request in requests]
    rig.start_batch(requests)
    trees = [TokenTree.chain(rig.batch_ids(request)) for request in requests]
    rig.full(*trees)
    for i, first in enumerate(trees):
        rig.accept(first, range(1, len(first)), i)
    done = [0, 0]
    for widths in ((1, 12), (9, 2), (1, 1), (12, 1)):
        trees = [TokenTree.chain(want[i][done[i] : done[i] + width]) for i, width in enumerate(widths)]
        for i, logits in enumerate(rig.full(*trees)):
            close(
                logits,
                rig.oracle.logits(requests[i], want[i])[done[i] + 1 :][: widths[i]],
                f"{widths}, sequence {i}",
            )
            rig.accept(trees[i], range(1, widths[i]), i)
            done[i] += widths[i]


@row
def two_cut_points(rig_for: RigFor, family: str) -> None:
    """Three segments: any cut may draft, in any order, over the same cache."""
    rig = rig_for(f"{family}-two-cuts")
    assert rig.manifest.decoder.cuts[:-1] == [0, 1, 2]
    request = rig.request(24)
    want = rig.oracle.greedy(request, 40)
    rig.start(request)
    done = 0
    for cut, right, wrong in ((1, 3, 1), (2, 2, 2), (2, 0, 3), (1, 1, 1), (2, 5, 0)):
        part = list(want[done : done + right + 1])
        part += [other(rig, want[done + right + 1 + k]) for k in range(wrong)]
        truth = rig.oracle.logits(request, (*want[:done], *part))[done + 1 :]
        close(rig.speculate(cut, part), truth, f"cut {cut} at {done}")
        rig.accept(TokenTree.chain(part), range(1, right + 1))
        done += right + 1
    close(
        rig.chain(want[done : done + 3]),
        rig.oracle.logits(request, want)[done + 1 :][:3],
        "all segments at last",
    )


@row
def next_request(rig_for: RigFor, family: str) -> None:
    """What an earlier, longer request left in the buffers is not seen by the next one."""
    rig = rig_for(family)
    longer, request = rig.request(25, 19), rig.request(26, 3)
    filler = np.random.default_rng(25).integers(3, rig.manifest.text.vocab_size - 4, 130).tolist()
    rig.start(longer, filler[:120])
    rig.speculate(1, filler[120:128])  # the passes that come again below, over a view that has grown
    want = rig.oracle.greedy(request, 10)
    close(rig.start(request), rig.oracle.logits(request, ()), "prefill after another request")
    close(
        rig.speculate(1, want[:8]), rig.oracle.logits(request, want)[1:9], "speculation after another request"
    )
    for lengths in ((3, 9), (9, 3)):  # batches of one shape whose padding lies elsewhere
        requests = [rig.request(27 + i, length) for i, length in enumerate(lengths)]
        rig.start_batch(requests)
        trees = [TokenTree.chain(rig.batch_ids(one)) for one in requests]
        for i, logits in enumerate(rig.full(*trees)):
            close(logits[-1:], rig.oracle.logits(requests[i], ())[-1:], f"batch {lengths}, sequence {i}")


@row
def batch_on_the_trunk(rig_for: RigFor, family: str) -> None:
    """Self-speculation of a batch: chains and a tree in step, one tail, rows moved by one commit."""
    rig = rig_for(family)
    requests = [rig.request(seed, length) for seed, length in ((31, 4), (32, 11), (33, 7))]
    want = [rig.oracle.greedy(request, 30) for request in requests]
    rig.start_batch(requests)
    prompts = [TokenTree.chain(rig.batch_ids(request)) for request in requests]
    rig.full(*prompts)
    rig.decoder.accept_all(prompts, [range(1, len(tree)) for tree in prompts])
    done = [0, 0, 0]
    for widths, at in (((3, 1, 5), None), ((2, 4, 1), 1), ((1, 1, 1), None), ((5, 2, 3), 2), ((4, 1, 2), 0)):
        trees = [TokenTree.chain(want[i][done[i] : done[i] + width]) for i, width in enumerate(widths)]
        paths = [list(range(1, max(1, width - i))) for i, width in enumerate(widths)]
        if at is not None:
            trees[at], paths[at] = branching(rig, requests[at], want[at][: done[at]], want[at][done[at]])
        for i, logits in enumerate(rig.speculate_batch(1, trees)):
            truth = node_logits(rig, requests[i], want[i][: done[i]], trees[i])
            close(logits, truth, f"widths {widths}, sequence {i} at {done[i]}")
        rig.decoder.accept_all(trees, paths)
        done = [count + 1 + len(path) for count, path in zip(done, paths, strict=True)]


@row
def join_and_leave(rig_for: RigFor, family: str) -> None:
    """Sequences leave from any place and others join: nobody notices, nothing is left of those who went."""
    rig = rig_for(family)
    requests = [rig.request(seed, length) for seed, length in ((34, 5), (35, 13), (36, 3), (37, 9))]
    want = [rig.oracle.greedy(request, 40) for request in requests]
    decoder = rig.decoder
    decoder.reset(0)
    members: list[int] = []
    done = [0] * len(requests)

    def join(index: int) -> None:
        logits = rig.join(requests[index]).logits(0)[None]
        close(logits, rig.oracle.logits(requests[index], ())[-1:], f"prefill of {index}")
        members.append(index)
        done[index] = 0

    def leave(row: int) -> None:
        decoder.remove(row)
        members[row] = members[-1]
        members.pop()

    def step(*widths: int) -> None:
        trees = [
            TokenTree.chain(want[i][done[i] : done[i] + width])
            for i, width in zip(members, widths, strict=True)
        ]
        for run in (rig.full, lambda *given: rig.speculate_batch(1, given)):
            for index, logits in zip(members, run(*trees), strict=True):
                truth = rig.oracle.logits(requests[index], want[index])[done[index] + 1 :][: len(logits)]
                close(logits, truth, f"{index} of {members} at {done[index]}")
        decoder.accept_all(trees, [range(1, len(tree)) for tree in trees])
        for index, tree in zip(members, trees, strict=True):
            done[index] += len(tree)

    join(0)
    step(3)
    join(1)
    step(1, 4)
    join(2)
    step(2, 1, 3)
    leave(0)  # the last takes its place
    step(1, 2)
    join(3)
    step(4, 1, 1)
    leave(1)
    join(0)
    step(1, 3, 2)
    leave(2)
    leave(0)
    step(2)
