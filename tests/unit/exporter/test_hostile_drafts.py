"""Published drafts whose tensors are no weights, whose numbers are none, or whose files are damaged: one line each, of every
layout, and no code of theirs runs."""

from __future__ import annotations

import json
import os
import pickle
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vlmexport.exporter.checkpoint.tensors import TensorFiles
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.runtime.common.errors import ExportError

from tests.support.published import drafts, layouts

WEIGHTS = {
    "FasterDecoding--medusa-vicuna-7b-v1.3": "0.0.linear.weight",
    "siyuehuang--Qwen2-7B-Instruct-medusa": "1.0.linear.bias",
    "yuhuili--EAGLE-LLaMA3-Instruct-8B": "fc.weight",
    "yuhuili--EAGLE-Qwen2-7B-Instruct": "layers.0.self_attn.q_proj.bias",
    "yuhuili--EAGLE3-LLaMA3.1-Instruct-8B": "midlayer.hidden_norm.weight",
    "AngelSlim--Qwen2.5-VL-3B-Instruct_eagle3": "lm_head.weight",
    "JLKang--ViSpec-llava-1.5-7b-hf": "imadpt.q",
    "RedHatAI--Llama-3.1-8B-Instruct-speculator.eagle3": "norm.weight",
}
"""A weight of each layout."""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: drafts.write(layouts.read(name), tmp_path / name, 600)


def weights_of(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.suffix != ".json")


def refused(folder: Path) -> str:
    """The line that refuses the draft, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ExportError) as caught:
            open_draft(folder)
    line = str(caught.value)
    assert line.isprintable() and "two options" not in line, line
    return line


def filled_with(number: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full(tensor.shape, number)


IN_BOTH: dict[str, Callable[[Tensor], Any]] = {
    "is int8": lambda t: t.to(torch.int8), "is bool": lambda t: t.bool(), "is int64": lambda t: t.long(),
    "is float8_e4m3fn": lambda t: t.to(torch.float8_e4m3fn), "is float8_e5m2": lambda t: t.to(torch.float8_e5m2),
    "not finite": filled_with(float("nan")), "not finite ": filled_with(float("-inf")),
    "not finite  ": lambda t: torch.full(t.shape, 1e300, dtype=torch.float64),
    "shape|matrix": lambda t: torch.tensor(1.0), "shape|matrix ": lambda t: t[None],
}  # fmt: skip
"""What is said → what both formats hold."""
IN_PICKLES: dict[str, Callable[[Tensor], Any]] = {
    "is complex64": lambda t: t.to(torch.complex64), "is sparse": lambda t: t.float().to_sparse(),
    "device 'meta'": lambda t: t.to("meta"), "is nested": lambda t: torch.nested.nested_tensor([t.float()]),
    "is quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "not a mapping": lambda t: [t], "repeats numbers": lambda t: torch.zeros(1).expand(t.shape),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WEIGHTS)
def test_tensors_that_are_no_weights_are_named(name: str, write: Callable[[str], Path]) -> None:
    folder, weight = write(name), WEIGHTS[name]
    path = weights_of(folder)
    safe = path.suffix == ".safetensors"
    whole = load_file(path) if safe else torch.load(path)
    assert all(
        value.is_floating_point()
        for value in open_draft(folder).network.state_dict().values()
        if value.dim() > 1
    )
    for words, change in (IN_BOTH if safe else IN_BOTH | IN_PICKLES).items():
        tensors = whole | {weight: change(whole[weight])}
        (save_file if safe else torch.save)(tensors, path)
        line = refused(folder)
        assert any(word in line for word in words.strip().split("|")), f"{words}: {line}"
    for kind in (torch.float64, torch.bfloat16):
        (save_file if safe else torch.save)(whole | {weight: whole[weight].to(kind)}, path)
        open_draft(folder)


@pytest.mark.parametrize(
    "number", [10**399, -1, 0, float("nan"), float("inf"), 1e308, 1e-320, True, "1", [], {}], ids=repr
)
@pytest.mark.parametrize("field", ["rope_theta", "rms_norm_eps", "head_dim"])
def test_numbers_of_a_configuration_are_numbers(
    field: str, number: object, write: Callable[[str], Path]
) -> None:
    for name in ("yuhuili--EAGLE-Qwen2-7B-Instruct", "RedHatAI--Llama-3.1-8B-Instruct-speculator.eagle3"):
        path = write(name) / "config.json"
        document = json.loads(path.read_text())
        inner = document.get("transformer_layer_config", document)
        for table in ("rope_parameters", "rope_scaling"):
            inner.pop(table, None)
        inner[field] = number
        path.write_text(json.dumps(document))
        assert "config.json: " in refused(path.parent)


def test_huge_numbers_and_duplicate_keys_are_refused(write: Callable[[str], Path]) -> None:
    folder = write("yuhuili--EAGLE-Qwen2-7B-Instruct")
    path = folder / "config.json"
    text = path.read_text()
    for change, words in (
        (text.replace("{", '{"x": ' + "1" * 10_000 + ",", 1), "digits"),
        (text.replace("{", '{"hidden_size": 7,', 1), "'hidden_size' twice"),
        ("[" * 100_000, "nested too deep"),
        (text.encode("utf-16"), "utf-16"),
    ):
        path.write_bytes(change if isinstance(change, bytes) else change.encode())
        assert words in refused(folder)


class Harm:
    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


@pytest.mark.parametrize(
    "save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))], ids=["zip", "raw"]
)
def test_no_code_of_a_pickle_runs(save: Callable, write: Callable[[str], Path], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name in ("FasterDecoding--medusa-vicuna-7b-v1.3", "yuhuili--EAGLE-LLaMA3-Instruct-8B"):
        path = weights_of(write(name))
        for harm in (
            Harm(os.mkdir, str(mark)),
            Harm(eval, f"open({str(mark)!r}, 'w')"),
            Harm(os.system, f"touch {mark}"),
        ):
            for table in ({"x": harm}, harm):
                save(table, path)
                line = refused(path.parent)
                assert not mark.exists() and ("it holds " in line or "damaged" in line), line


@pytest.mark.parametrize(
    "name", ["FasterDecoding--medusa-vicuna-7b-v1.3", "siyuehuang--Qwen2-7B-Instruct-medusa"]
)
def test_damaged_bytes_cost_one_line(name: str, write: Callable[[str], Path]) -> None:
    folder = write(name)
    path = weights_of(folder)
    whole = bytearray(path.read_bytes())
    said = 0
    for place in [*range(0, 400, 5), *range(len(whole) - 400, len(whole), 5)]:
        changed = whole.copy()
        changed[place] ^= 0x41
        path.write_bytes(changed)
        try:
            open_draft(folder)
        except ExportError as error:
            said += 1
            assert str(error).isprintable()
    assert said > 20


class LateError(Exception):
    pass


def test_host_program_exception_passes_through(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a signal's handler raises while PyTorch reads."""
    folder = write("FasterDecoding--medusa-vicuna-7b-v1.3")

    def late(*_: object) -> None:
        raise LateError

    def slow(*args: object, **options: object) -> object:
        signal.raise_signal(signal.SIGUSR1)
        raise AssertionError

    before = signal.signal(signal.SIGUSR1, late)
    try:
        monkeypatch.setattr(torch._C, "PyTorchFileReader", slow)
        with pytest.raises(LateError):
            open_draft(folder)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", IN_PICKLES)
def test_pickled_checkpoints_obey_the_same_rules(words: str, tmp_path: Path) -> None:
    value = IN_PICKLES[words](torch.ones(4, 4))
    torch.save({"a": torch.ones(4), "b": value}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ExportError, match=words) as caught:
        TensorFiles(tmp_path)
    assert str(caught.value).isprintable()
