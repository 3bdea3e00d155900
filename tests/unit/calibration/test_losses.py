"""Every loss against a formula written out in numpy, float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vlmexport.calibration.objectives import losses

ROWS, VOCABULARY, WIDTH = 7, 11, 6


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.randn(ROWS, VOCABULARY, generator=generator) * 2 for _ in range(2))  # type: ignore[return-value]


def softmax(logits: torch.Tensor) -> np.ndarray:
    values = np.exp(logits.double().numpy())
    return values / values.sum(1, keepdims=True)


def test_cross_entropy(logits):
    tokens = torch.arange(ROWS)
    expected = -np.mean([np.log(softmax(logits[0])[i, i]) for i in range(ROWS)])
    assert losses.cross_entropy(logits[0], tokens).item() == pytest.approx(expected, rel=1e-5)


def test_forward_and_reverse_kl(logits):
    q, p = map(softmax, logits)
    forward = np.mean(
        [sum(p[i, v] * np.log(p[i, v] / q[i, v]) for v in range(VOCABULARY)) for i in range(ROWS)]
    )
    reverse = np.mean(
        [sum(q[i, v] * np.log(q[i, v] / p[i, v]) for v in range(VOCABULARY)) for i in range(ROWS)]
    )
    assert losses.forward_kl(*logits).item() == pytest.approx(forward, rel=1e-5)
    assert losses.reverse_kl(*logits).item() == pytest.approx(reverse, rel=1e-5)
    assert abs(forward - reverse) > 1e-2
    assert losses.distillation(*logits, "forward").item() == pytest.approx(forward, rel=1e-5)
    assert losses.distillation(*logits, "reverse").item() == pytest.approx(reverse, rel=1e-5)


def test_total_variation_is_one_minus_overlap(logits):
    q, p = map(softmax, logits)
    expected = np.minimum(p, q).sum(1)
    np.testing.assert_allclose(losses.overlap(*logits).numpy(), expected, rtol=1e-5)
    assert losses.total_variation(*logits).item() == pytest.approx(1 - expected.mean(), rel=1e-5)
    assert losses.distillation(*logits, "tv").item() == pytest.approx(1 - expected.mean(), rel=1e-5)


def test_distances_vanish_only_at_equality(logits):
    for distance in losses.DISTANCES:
        assert losses.distillation(logits[0], logits[0] + 3.0, distance).item() == pytest.approx(0, abs=1e-6)
        assert losses.distillation(*logits, distance).item() > 0.05


def test_cosine_and_average():
    generator = torch.Generator().manual_seed(5)
    rows, residuals = (
        torch.randn(ROWS, WIDTH, generator=generator),
        torch.randn(ROWS, 4, WIDTH, generator=generator),
    )
    fused = residuals.double().numpy().sum(1) / 4
    np.testing.assert_allclose(losses.average_fusion(residuals).numpy(), fused, rtol=1e-5, atol=1e-6)
    x = rows.double().numpy()
    cosines = [x[i] @ fused[i] / np.sqrt((x[i] @ x[i]) * (fused[i] @ fused[i])) for i in range(ROWS)]
    found = losses.cosine_distance(rows, losses.average_fusion(residuals))
    assert found.item() == pytest.approx(1 - np.mean(cosines), rel=1e-5)


def test_concatenation():
    generator = torch.Generator().manual_seed(6)
    residuals, weight = (
        torch.randn(ROWS, 4, WIDTH, generator=generator),
        torch.randn(WIDTH, 4 * WIDTH, generator=generator),
    )
    blocks = weight.double().numpy().reshape(WIDTH, 4, WIDTH)
    expected = sum(residuals[:, k].double().numpy() @ blocks[:, k].T for k in range(4))
    np.testing.assert_allclose(
        losses.concatenation_fusion(residuals, weight).numpy(), expected, rtol=1e-4, atol=1e-5
    )


def test_attention():
    """Against a loop over rows and residuals."""
    generator = torch.Generator().manual_seed(7)
    residuals, query, key = (
        torch.randn(*shape, generator=generator)
        for shape in ((ROWS, 4, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH))
    )
    x, q, k = (value.double().numpy() for value in (residuals, query, key))
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True))
    for row in range(ROWS):
        scores = np.array([(q @ normed[row, -1]) @ (k @ normed[row, i]) for i in range(4)]) / np.sqrt(WIDTH)
        weights = np.exp(scores - scores.max())
        expected = weights @ x[row] / weights.sum()
        found = losses.attention_fusion(residuals, query, key)[row].numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_agreement_breaks_ties_to_the_lowest_id():
    draft, target = (
        torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 1.0]]),
        torch.tensor([[5.0, 1.0, 2.0], [0.0, 1.0, 9.0]]),
    )
    assert losses.agreement(draft, target).tolist() == [True, False]


def test_smooth_l1():
    rows, wanted = torch.tensor([[0.0, 2.0], [1.0, -3.0]]), torch.tensor([[0.5, 0.0], [1.0, 1.0]])
    # |x| = .5, 2, 0, 4 with beta 1: .125, 1.5, 0, 3.5
    assert losses.smooth_l1(rows, wanted).item() == pytest.approx(5.125 / 4)
    assert losses.smooth_l1(rows, wanted, beta=4.0).item() == pytest.approx((0.25 + 4 + 16) / 8 / 4)


def test_soft_cross_entropy_over_a_trimmed_vocabulary(logits):
    kept = torch.tensor([7, 2, 9])
    p = softmax(logits[1])[:, kept.numpy()]
    p /= p.sum(1, keepdims=True)
    q = softmax(logits[0][:, :3])
    found = losses.soft_cross_entropy(logits[0][:, :3], logits[1], kept)
    assert found.item() == pytest.approx(-(p * np.log(q)).sum(1).mean(), rel=1e-5)
    best = losses.soft_cross_entropy(logits[1][:, kept], logits[1], kept)
    assert best.item() == pytest.approx(-(p * np.log(p)).sum(1).mean(), rel=1e-5)
    whole = losses.soft_cross_entropy(logits[0], logits[1]) - losses.soft_cross_entropy(logits[1], logits[1])
    assert whole.item() == pytest.approx(losses.forward_kl(*logits).item(), rel=1e-4)


def test_list_mle(logits):
    ranked = logits[1].topk(4).indices
    q = softmax(logits[0])
    expected = 0.0
    for i in range(ROWS):
        left = 1.0
        for word in ranked[i].tolist():
            expected -= np.log(q[i, word] / left) / ROWS
            left -= q[i, word]
    assert losses.list_mle(logits[0], ranked).item() == pytest.approx(expected, rel=1e-4)
    one = losses.list_mle(logits[0], ranked[:, :1])
    assert one.item() == pytest.approx(losses.cross_entropy(logits[0], ranked[:, 0]).item(), rel=1e-5)
    every = losses.list_mle(logits[0], logits[0].argsort(1, descending=True))
    assert every < losses.list_mle(logits[0], logits[0].argsort(1)), "the draft's own order is the likeliest"


def test_noise_is_uniform_and_repeatable():
    rows = torch.full((400, 50), 3.0)
    noisy = losses.with_noise(rows, 0.2, torch.Generator().manual_seed(1))
    assert torch.equal(noisy, losses.with_noise(rows, 0.2, torch.Generator().manual_seed(1)))
    offset = noisy - rows
    assert offset.abs().max() <= 0.1 and offset.mean().abs() < 1e-3
    assert offset.std().item() == pytest.approx(0.2 / 12**0.5, rel=0.02)
    assert torch.equal(losses.with_noise(rows, 0.0), rows)
