"""A client of Triton's, run in an environment that has `tritonclient`: asks what standard input says, tells what comes.

A line of standard input is a JSON object: `{"number": N, "model": NAME, "inputs": {NAME: VALUE or [VALUE, …]}, "headers": {}}`
asks, on a stream of its own, and `{"cancel": N}` cancels that. `image` is base64. A line of standard output is one response.
"""

from __future__ import annotations

import base64
import functools
import json
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpc  # pyright: ignore[reportMissingImports]

TYPES = {
    "max_new_tokens": ("INT32", np.int32),
    "temperature": ("FP32", np.float32),
    "seed": ("UINT64", np.uint64),
    "stream": ("BOOL", np.bool_),
}


def tensor(name: str, value: Any) -> Any:
    """An input of one or several elements; text, unless `TYPES` says otherwise."""
    kind, dtype = TYPES.get(name, ("BYTES", np.object_))
    values = value if isinstance(value, list) else [value]
    if name == "image":
        values = [base64.b64decode(each) for each in values]
    elif kind == "BYTES":
        values = [each.encode() for each in values]
    found = grpc.InferInput(name, [len(values)], kind)
    found.set_data_from_numpy(np.array(values, dtype))
    return found


def tell(number: int, result: Any, error: Any) -> None:
    """Write a response, or an error with its gRPC status, as one line."""
    if error is None:
        values = {name: result.as_numpy(name)[0] for name in ("text", "finish_reason", "tokens", "accepted")}
        told = {
            name: value.decode() if isinstance(value, bytes) else int(value) for name, value in values.items()
        }
    else:
        told = {"error": error.message(), "status": error.status()}
    sys.stdout.write(
        json.dumps({"number": number, **told}) + "\n"
    )  # one call: lines of several threads stay whole
    sys.stdout.flush()


def main(address: str) -> None:
    streams: dict[int, Any] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if "cancel" in command:
            streams.pop(command["cancel"]).stop_stream(cancel_requests=True)
            continue
        number = command["number"]
        streams[number] = client = grpc.InferenceServerClient(address)
        client.start_stream(functools.partial(tell, number), headers=command["headers"])
        client.async_stream_infer(
            command["model"], [tensor(name, value) for name, value in command["inputs"].items()]
        )
    for client in streams.values():
        client.stop_stream()


if __name__ == "__main__":
    main(sys.argv[1])
