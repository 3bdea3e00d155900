"""Stands in for `triton_python_backend_utils`, which exists in Triton's processes alone; and for its requests."""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vlmexport.runtime.serving.triton.config import INPUTS, OUTPUTS

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
DTYPES = {
    "TYPE_STRING": object,
    "TYPE_INT32": np.int32,
    "TYPE_FP32": np.float32,
    "TYPE_UINT64": np.uint64,
    "TYPE_BOOL": np.bool_,
}
WAIT = 120.0
"""Seconds after which a test that hangs fails."""
faults: list[str] = []
"""What Triton does not allow, and was done: an exception there would be one of a client's."""


class TritonModelException(Exception):
    """Fails the loading of a model."""


class TritonError:
    """What a response holds in place of outputs."""

    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "internal", "invalid argument", "unavailable", "cancelled"

    def __init__(self, message: str, code: str = INTERNAL):
        self.message, self.code = message, code


class Tensor:
    """An array with a name; of one of the declared types, and of as many elements."""

    def __init__(self, name: str, values: np.ndarray):
        self.name, self._values = name, values
        (spec,) = [each for each in (*INPUTS, *OUTPUTS) if each.name == name]
        assert values.dtype == DTYPES[spec.data_type] and values.ndim == 1
        assert values.dtype != object or all(isinstance(value, bytes) for value in values)

    def as_numpy(self) -> np.ndarray:
        return self._values


class InferenceResponse:
    """Outputs, or an error."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None):
        self.error = error
        self.values = {tensor.name: tensor.as_numpy()[0] for tensor in output_tensors}
        assert error is not None or list(self.values) == [each.name for each in OUTPUTS]


class Request:
    """A request with these inputs, which sends its responses to itself. `on_send` is called for each, and may raise."""

    def __init__(self, on_send: Callable[[], object] = lambda: None, **inputs: Any):
        self.tensors = {name: Tensor(name, _array(name, value)) for name, value in inputs.items()}
        self.responses: list[InferenceResponse] = []
        self.cancelled = False
        self.looks = 0
        """How often it was asked whether it is cancelled."""
        self._on_send, self._ended = on_send, threading.Event()

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        self._check_open("asked whether it is cancelled")
        self.looks += 1
        return self.cancelled

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        self._check_open("a response")
        self._on_send()
        self.responses.append(response)
        if flags:
            self._ended.set()

    def _check_open(self, what: str) -> None:
        if self._ended.is_set():
            faults.append(f"{what} behind the last response")

    def wait(self) -> list[InferenceResponse]:
        """Its responses, once the last one is there."""
        assert self._ended.wait(WAIT)
        return self.responses

    def text(self) -> str:
        """That of all responses."""
        return b"".join(response.values["text"] for response in self.wait()).decode()

    def error(self) -> tuple[str, str]:
        """(code, message) of the one response, which is an error."""
        (response,) = self.wait()
        assert response.error is not None and not response.values
        return response.error.code, response.error.message


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    """None for an optional input that was not given."""
    return request.tensors.get(name)


def model_config(model: Path) -> str:
    """What Triton makes of the config.pbtxt of a model: of its JSON, the parameters."""
    pattern = r'parameters \{ key: "(\w+)" value \{ string_value: "((?:[^"\\]|\\.)*)" \} \}'
    found = re.findall(pattern, (model / "config.pbtxt").read_text("ascii"))
    values = {
        key: {"string_value": codecs.escape_decode(value.encode())[0].decode()}  # type: ignore[attr-defined]
        for key, value in found
    }
    return json.dumps({"name": model.name, "parameters": values})


def _array(name: str, value: Any) -> np.ndarray:
    (spec,) = [each for each in INPUTS if each.name == name]
    values = value if isinstance(value, list) else [value]
    array = np.empty(len(values), DTYPES[spec.data_type])
    array[:] = [each.encode() if isinstance(each, str) else each for each in values]
    return array
