"""The graph that the runtime puts behind a head on a GPU: `runtime/engines/argmax.onnx`.

    python -m vlmexport.exporter.graphs.argmax runtime/engines/argmax.onnx

It keeps to operators that ONNX Runtime's CUDA provider has without cuDNN. Which of several equal values TopK takes differs
between its versions, so that it is asked twice: for the largest value, and for the first place that has it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17


def build_answers() -> onnx.ModelProto:
    """`logits` float32 [rows, vocabulary] and `places` float32 [vocabulary], falling from place to place → `best` int64
    [rows], the first of the highest logits, and `finite` bool [rows], whether that one is a number.

    What is not a number counts as infinity, wherever it stands.
    """
    constants = {
        "infinity": np.array(np.inf, np.float32),
        "hidden": np.array(-np.inf, np.float32),
        "largest": np.array(np.finfo(np.float32).max, np.float32),
        "one": np.array([1], np.int64),
        "last": np.array([-1], np.int64),
    }
    nodes = [
        helper.make_node(kind, inputs.split(), outputs.split(), name=outputs.split()[-1])
        for kind, inputs, outputs in (
            ("Equal", "logits logits", "numbers"),  # NaN equals nothing
            ("Where", "numbers logits infinity", "seen"),
            ("TopK", "seen one", "highest any"),
            ("Equal", "seen highest", "there"),
            ("Where", "there places hidden", "candidates"),
            ("TopK", "candidates one", "place first"),
            ("Squeeze", "first last", "best"),
            ("Squeeze", "highest last", "value"),
            ("Abs", "value", "size"),
            ("LessOrEqual", "size largest", "finite"),
        )
    ]
    graph = helper.make_graph(
        nodes,
        "answers",
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", "vocabulary"]),
            helper.make_tensor_value_info("places", TensorProto.FLOAT, ["vocabulary"]),
        ],
        [
            helper.make_tensor_value_info("best", TensorProto.INT64, ["rows"]),
            helper.make_tensor_value_info("finite", TensorProto.BOOL, ["rows"]),
        ],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    model.producer_name = "vlmexport"
    onnx.checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(build_answers().SerializeToString())
