"""What a model of Triton's is declared as: its inputs and outputs, its parameters, and the text of its config.pbtxt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ...common.errors import OptionError
from ...common.foreign_errors import raise_if_foreign


class TensorSpec(NamedTuple):
    """One input or output. `several`: any number of elements (Triton's dims -1); else one."""

    name: str
    data_type: str
    several: bool = False


INPUTS = (
    TensorSpec("image", "TYPE_STRING", several=True),
    TensorSpec("prompt", "TYPE_STRING"),
    TensorSpec("messages", "TYPE_STRING"),
    TensorSpec("options", "TYPE_STRING"),
    TensorSpec("max_new_tokens", "TYPE_INT32"),
    TensorSpec("temperature", "TYPE_FP32"),
    TensorSpec("seed", "TYPE_UINT64"),
    TensorSpec("stream", "TYPE_BOOL"),
)
"""All of them are optional. TYPE_STRING is bytes: those of an image file, or text in UTF-8."""

OUTPUTS = (
    TensorSpec("text", "TYPE_STRING"),
    TensorSpec("finish_reason", "TYPE_STRING"),
    TensorSpec("tokens", "TYPE_INT32"),
    TensorSpec("accepted", "TYPE_INT32"),
)


@dataclass(frozen=True)
class Parameters:
    """The `parameters` of a config.pbtxt: how each instance loads the bundle."""

    bundle: str
    device: str = "cpu"
    max_batch: int | None = None
    """None: as many as the bundle allows."""
    max_waiting: int = 64
    threads: int | None = None

    @classmethod
    def read(cls, model_config: str) -> Parameters:
        """Those of the configuration that Triton hands over, a JSON object. Names in capitals are Triton's own.

        Raises `OptionError` without a bundle, for an unknown name, and for what is no integer.
        """
        given = {
            name: value["string_value"]
            for name, value in json.loads(model_config).get("parameters", {}).items()
            if not name.isupper()
        }
        known = cls.__dataclass_fields__
        if unknown := sorted(given.keys() - known.keys()):
            raise OptionError(f"config.pbtxt: no parameter {unknown[0]!r:.80}; there are {', '.join(known)}")
        if not given.get("bundle"):
            raise OptionError('config.pbtxt: the parameter "bundle" is missing; give the path of a bundle')
        return cls(**{name: _read(name, value) for name, value in given.items()})


def _read(name: str, value: str) -> Any:
    if name in ("bundle", "device"):
        return value
    try:
        return int(value)
    except ValueError as error:
        raise_if_foreign(error)
        raise OptionError(f"config.pbtxt: the parameter {name}: {value!r:.80} is not an integer") from None


def config_text(name: str, parameters: Parameters, instances: int = 1) -> str:
    """The config.pbtxt of the model `name`, of which Triton starts so many processes."""
    given = {key: value for key, value in asdict(parameters).items() if value is not None}
    return f"""name: {_quoted(name)}
backend: "python"
# Triton must not batch: the scheduler of each instance does, and requests join it one by one.
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [
{_tensors(INPUTS, " optional: true")}
]
output [
{_tensors(OUTPUTS)}
]
# Inputs lie in the memory of the host; the parameter "device" says where the model runs.
instance_group [ {{ kind: KIND_CPU count: {instances} }} ]
{_parameters(given)}"""


def _tensors(specs: tuple[TensorSpec, ...], more: str = "") -> str:
    return ",\n".join(
        f'  {{ name: "{spec.name}" data_type: {spec.data_type} dims: [ {-1 if spec.several else 1} ]{more} }}'
        for spec in specs
    )


def _parameters(given: Mapping[str, Any]) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: {_quoted(str(value))} }} }}\n'
        for key, value in given.items()
    )


def _quoted(text: str) -> str:
    """A string of protobuf's text format."""
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in text.encode()
    )
    return f'"{"".join(plain)}"'
