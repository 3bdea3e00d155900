"""Every loss against a formula written out in numpy, float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vlmexport.calibration.training import losses

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


def test_agreement_breaks_ties_to_the_lowest_id():
    draft, target = (
        torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 1.0]]),
        torch.tensor([[5.0, 1.0, 2.0], [0.0, 1.0, 9.0]]),
    )
    assert losses.agreement(draft, target).tolist() == [True, False]
