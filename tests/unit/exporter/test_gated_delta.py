"""The gated delta rule over windows, against transformers' two implementations."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    l2norm,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from vlmexport.exporter.graphs.gated_delta import gated_delta_rule, l2_normed, unit_lower_inverse

BATCH, HEADS, KEYS, VALUES = 2, 3, 16, 8
Rows = dict[str, torch.Tensor]


def _rows(length: int, seed: int, dtype: torch.dtype = torch.float64, decay: float = 1.0) -> Rows:
    """Queries (scaled), keys (both normed), values, g and β of so many rows, by heads; g reaches from 0 to −16 times `decay`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> torch.Tensor:
        return torch.randn(BATCH, HEADS, length, size, generator=generator, dtype=torch.float64)

    query, key = l2norm(normal(KEYS)) * KEYS**-0.5, l2norm(normal(KEYS))
    uniform = torch.rand(2, BATCH, HEADS, length, generator=generator, dtype=torch.float64)
    g = -decay * 16 * uniform[0] ** 6
    made = {"query": query, "key": key, "value": normal(VALUES), "decay": g, "beta": uniform[1]}
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def _one_by_one(rows: Rows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule row by row, in the type of the rows: what transformers' recurrent function says in float32."""
    out = []
    for t in range(rows["key"].shape[2]):
        k, v, q = rows["key"][:, :, t], rows["value"][:, :, t], rows["query"][:, :, t]
        state = state * rows["decay"][:, :, t].exp()[..., None, None]
        u = rows["beta"][:, :, t, None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., None] * u[..., None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q))
    return torch.stack(out, 2), state


def _window(
    rows: Rows, state: torch.Tensor, own: int, folded: int, most: int = 272
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_delta_rule` of all rows, of which the last `own` are read and the first `folded` kept."""
    kept = torch.arange(rows["key"].shape[2]).expand(BATCH, -1) < folded
    query = rows["query"][:, :, rows["key"].shape[2] - own :]
    return gated_delta_rule(query, rows["key"], rows["value"], rows["decay"], rows["beta"], state, kept, most)


def _state(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, HEADS, KEYS, VALUES, generator=generator, dtype=torch.float64).to(dtype)


def _by_transformers(rows: Rows, state: torch.Tensor, function: object) -> tuple[torch.Tensor, torch.Tensor]:
    given = {name: tensor.transpose(1, 2) for name, tensor in rows.items()}
    query = given["query"] * KEYS**0.5  # it scales itself
    out, after = function(  # type: ignore[operator]
        query, given["key"], given["value"], g=given["decay"], beta=given["beta"], initial_state=state,
        output_final_state=True,
    )  # fmt: skip
    return out.transpose(1, 2), after


@pytest.mark.parametrize("decay", [0.01, 1.0, 40.0])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 16, 17, 33, 64, 65, 127, 200, 256, 271, 272])
def test_a_window_is_the_recurrence(length: int, decay: float) -> None:
    rows, state = _rows(length, length, decay=decay), _state(7)
    out, after = _window(rows, state, length, length)
    expected, last = _one_by_one(rows, state)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(after, last, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("function", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
@pytest.mark.parametrize("decay", [0.01, 1.0, 40.0])
@pytest.mark.parametrize("length", [1, 5, 64, 100, 272])
def test_in_float32_it_errs_no_more_than_transformers(length: int, decay: float, function: object) -> None:
    exact, state = _rows(length, length, decay=decay), _state(7)
    expected, last = _one_by_one(exact, state)
    rows = {name: tensor.float() for name, tensor in exact.items()}
    theirs, their_state = _by_transformers(rows, state.float(), function)
    ours, our_state = _window(rows, state.float(), length, length)
    for mine, other, true in ((ours, theirs, expected), (our_state, their_state, last)):
        unit = torch.finfo(torch.float32).eps * true.abs().max()
        assert (mine - true).abs().max() <= 2 * (other - true).abs().max() + 4 * unit


def test_keys_and_queries_are_normed_as_in_transformers() -> None:
    states = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(1)) * 0.01
    torch.testing.assert_close(l2_normed(states), l2norm(states), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(l2_normed(states, 0.125), l2norm(states) * 0.125, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("length", [1, 2, 5, 16, 31, 80, 272])
def test_the_inverse_is_that_of_forward_substitution(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    system = torch.randn(2, length, length, generator=generator, dtype=torch.float64).tril(-1) / 4
    eye = torch.eye(length, dtype=torch.float64)
    found = unit_lower_inverse(system, torch.arange(length), 272)
    expected = torch.linalg.solve_triangular(eye + system, eye.expand_as(system), upper=False)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


def test_a_window_beyond_its_bound_is_an_error() -> None:
    with pytest.raises(IndexError):
        unit_lower_inverse(torch.ones(5, 5).tril(-1), torch.arange(5), 4)


@pytest.mark.parametrize("seed", range(8))
def test_rejected_rows_leave_nothing(seed: int) -> None:
    """Cycles of 1 + d rows of which some are accepted: the next window replays those, and what was rejected is overwritten."""
    chance, most = random.Random(seed), 8
    length = 60
    rows, start = _rows(length, seed), _state(seed)
    expected, _ = _one_by_one(rows, start)
    wrong = itertools.count(1000 + 100 * seed)
    state, held, done = start, 0, 0
    while done < length:
        width = chance.randint(1, most)
        accepted = min(chance.randint(1, width), length - done)
        tail = _rows(width - accepted, next(wrong))
        window = {
            name: torch.cat((tensor[:, :, held : done + accepted], tail[name]), 2)
            for name, tensor in rows.items()
        }
        out, state = _window(window, state, width, done - held, 2 * most)
        torch.testing.assert_close(
            out[:, :, :accepted], expected[:, :, done : done + accepted], rtol=1e-9, atol=1e-9
        )
        held, done = done, done + accepted
    torch.testing.assert_close(state, _one_by_one({n: t[:, :, :held] for n, t in rows.items()}, start)[1])


def test_rows_that_are_none_change_nothing() -> None:
    rows, state = _rows(12, 3), _state(4)
    padded = {name: torch.cat((_rows(5, 9)[name], tensor), 2) for name, tensor in rows.items()}
    padded["decay"][:, :, :5] = 0
    padded["beta"][:, :, :5] = 0
    out, after = _window(padded, state, 12, 5 + 7)
    torch.testing.assert_close(out, _window(rows, state, 12, 7)[0])
    torch.testing.assert_close(after, _window(rows, state, 12, 7)[1])
