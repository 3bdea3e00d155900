"""benchmarks/gpu_operators.py: forms that are compared compute the same. Speed needs a GPU."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from vlmexport.runtime.engines.onnxruntime import session_options

from benchmarks import gpu_operators as operators

SHAPE = operators.Shape(64, 96, 4, 2, 16, (1024,))


def first_output(graph: operators.Graph) -> np.ndarray:
    session = ort.InferenceSession(
        graph.model(), session_options(pooled=False), providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(graph.outputs[:1], graph.inputs)[0], np.float32).reshape(-1)


def test_attention_of_one_row_is_equal_with_a_mask_and_with_a_length() -> None:
    masked, counted, folded = (
        first_output(operators.attention(form, 1, 1024, SHAPE))
        for form in ("mask", "nonpad_kv_seqlen", "folded, mask")
    )
    np.testing.assert_allclose(counted, masked, atol=2e-3)
    np.testing.assert_allclose(folded, masked, atol=2e-3)
    assert np.abs(masked - first_output(operators.attention("full buffer", 1, 1024, SHAPE))).max() > 2e-3


@pytest.mark.parametrize(
    "pair",
    [
        ("Add, RMSNormalization", "SkipSimplifiedLayerNormalization"),
        ("Split, Sigmoid, Mul, Mul", "Split, Swish, Mul"),
    ],
)
def test_fused_forms_compute_the_same(pair: tuple[str, str]) -> None:
    plain, fused = (first_output(operators.elementwise(form, 4, SHAPE)) for form in pair)
    np.testing.assert_allclose(fused, plain, atol=4e-3)


def test_a_form_that_onnx_runtime_lacks_is_a_row_with_its_error() -> None:
    def unknown() -> operators.Graph:
        graph = operators.product("matmul [in, out]", 1, 64, 64)
        graph.nodes[0].op_type = "NoSuchOperator"
        return graph

    arms = iter(
        [
            ({"form": "unknown"}, unknown),
            ({"form": "known"}, lambda: operators.product("gemm [out, in]", 1, 64, 64)),
        ]
    )
    rows = {row["form"]: row for row in operators.measure(arms, "cpu", 1, 1e9)}
    assert "NoSuchOperator" in rows["unknown"]["not_run"]
    assert rows["known"]["us"] > 0 and rows["known"]["of_bandwidth"] > 0
