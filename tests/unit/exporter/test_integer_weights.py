"""Matrices of the target as integers: where they come from, how a graph multiplies by them, and what a bundle says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from vlmexport.exporter.checkpoint import fingerprint, open_checkpoint
from vlmexport.exporter.families.common.matrices import quantized_matrices, round_weights
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.graphs.composer import Composer
from vlmexport.exporter.graphs.weights import WeightRef, WeightStore
from vlmexport.exporter.parity.runner import GraphRunner
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.pipeline.checks import SPARE_BYTES, estimated_bytes
from vlmexport.exporter.pipeline.dry_run import dry_run
from vlmexport.exporter.pipeline.prepare import prepare
from vlmexport.exporter.quantization import rounded
from vlmexport.exporter.quantization.blocks import dequantize, packed, quantize, unpacked
from vlmexport.exporter.quantization.choice import parse_weights
from vlmexport.exporter.quantization.matrix import INTEGERS, ORDER, SCALES, ZERO_POINTS, QuantizedMatrix
from vlmexport.exporter.quantization.reading import read_dequantized
from vlmexport.exporter.quantization.rounded import RoundedTensors
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import ExportError, OptionError
from vlmexport.runtime.engines.onnxruntime import OnnxRuntimeCpu, fold_integers, session_options

from tests.support import tiny_models
from tests.support.segment_feeds import segment_feeds

RNG = torch.Generator().manual_seed(5)


class Memory(dict[str, torch.Tensor]):
    """Tensors in memory as a source of a store."""

    quantized: Mapping[str, QuantizedMatrix] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self[name]

    def order(self, name: str) -> tuple[int, int]:
        return 0, 0

    def dtype(self, name: str) -> str:
        return str(self[name].dtype).removeprefix("torch.")

    def place(self, name: str) -> None:
        return None


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_matrix_is_rounded_once(dtype: str, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(5, 64, generator=RNG)
    calls: list[int] = []
    monkeypatch.setattr(rounded, "quantize", lambda *given: calls.append(1) or quantize(*given))
    stored = matrix.t().contiguous() if transposed else matrix
    tensors = RoundedTensors(
        Memory(m=stored, n=torch.ones(3)), {"m": QuantizedMatrix(dtype, 32, transposed=transposed)}
    )
    integers, scales = quantize(matrix, dtype)
    for _ in range(2):
        assert torch.equal(tensors.read("m" + INTEGERS), integers)
        assert torch.equal(tensors.read("m" + SCALES), scales)
    whole = dequantize(integers, scales)
    assert torch.equal(tensors.read("m"), whole.t() if transposed else whole)
    assert calls == [1]
    assert tensors.shape("m") == tuple(stored.shape) and tensors.shape("m" + INTEGERS) == (5, 64)
    assert tensors.shape("m" + SCALES) == (5, 2) and tensors.dtype("m") == "float32"
    assert torch.equal(tensors.read("n"), torch.ones(3)) and list(tensors) == ["m", "n"]
    assert "m" + INTEGERS in tensors and "n" + INTEGERS not in tensors


def test_unpacked_is_the_inverse_of_packed() -> None:
    integers = torch.randint(-8, 8, (7, 9), generator=RNG, dtype=torch.int8)
    assert torch.equal(unpacked(packed(integers), 63).view(7, 9), integers)


def run_product(
    source: Memory, names: tuple[str, ...], shape: tuple[int, int], hidden: np.ndarray
) -> np.ndarray:
    """`hidden` times the matrices of a store, by ONNX Runtime with float weights."""
    manifest = SimpleNamespace(weights_dtype="float32")
    store = WeightStore([source], manifest)  # type: ignore[arg-type, list-item]
    graph = Composer("product", store)
    x = graph.input("x", "float32", list(hidden.shape))
    parts = store.product_of(WeightRef(names, False, shape))
    assert parts is not None
    graph.output(
        "y", graph._products("layer", x, hidden.ndim, parts), "float32", [*hidden.shape[:-1], shape[0]]
    )
    model = graph.model()
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            ref = next(
                r for r in store.slots() if value.name in ("+".join(r.names), "+".join(r.names) + ".T")
            )
            value.const_value = as_tensor(store.materialize(ref), ref)
    options = session_options(pooled=False)  # another test of the process may have made the pool
    fold_integers(options)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    result: Any = session.run(None, {"x": hidden})[0]
    return result


def as_tensor(tensor: torch.Tensor, ref: WeightRef) -> Any:
    if ref.dtype == "int4":
        data = packed(tensor).numpy()
        return (
            ir.PackedTensor(data, ir.DataType.INT4, shape=ir.Shape(ref.shape))
            if hasattr(ir, "PackedTensor")
            else ir.tensor(tensor.numpy(), dtype=ir.DataType.INT4)
        )
    return ir.tensor(tensor.numpy())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("rank", [2, 3])
def test_products_with_zero_points_and_orders(dtype: str, zero_points: bool, order: bool, rank: int) -> None:
    low, high = (-128, 128) if dtype == "int8" else (-8, 8)
    out, width, block = 6, 128, 64
    source = Memory()
    source["m" + INTEGERS] = torch.randint(low, high, (out, width), generator=RNG, dtype=torch.int8)
    source["m" + SCALES] = torch.rand(out, width // block, generator=RNG) + 0.1
    if zero_points:
        source["m" + ZERO_POINTS] = torch.randint(
            low, high, (out, width // block), generator=RNG, dtype=torch.int8
        )
    if order:
        source["m" + ORDER] = torch.randperm(width, generator=RNG).to(torch.int32)
    source.quantized = {"m": QuantizedMatrix(dtype, block, zero_points, order)}
    whole = read_dequantized(source, "m")
    source["m"] = whole
    hidden = np.random.default_rng(2).standard_normal((2, 3, width)[3 - rank :]).astype(np.float32)
    result = run_product(source, ("m",), (out, width), hidden)
    np.testing.assert_allclose(result, hidden @ whole.numpy().T, rtol=2e-5, atol=2e-3)


def test_matrices_of_one_product_may_differ_in_kind() -> None:
    source = Memory(c=torch.randn(4, 64, generator=RNG))
    for name, dtype in (("a", "int4"), ("b", "int8")):
        matrix = torch.randn(4, 64, generator=RNG)
        source[name + INTEGERS], source[name + SCALES] = quantize(matrix, dtype)
        source[name] = dequantize(source[name + INTEGERS], source[name + SCALES])
    source.quantized = {"a": QuantizedMatrix("int4"), "b": QuantizedMatrix("int8")}
    hidden = np.random.default_rng(2).standard_normal((2, 3, 64)).astype(np.float32)
    result = run_product(source, ("a", "b", "c"), (12, 64), hidden)
    whole = torch.cat([source[name] for name in "abc"]).numpy()
    np.testing.assert_allclose(result, hidden @ whole.T, rtol=2e-5, atol=1e-3)


def test_a_choice_names_matrices_of_the_layers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_models.checkpoint("llama", tmp_path / "m")))
    language = family_for(checkpoint).language
    matrices = quantized_matrices(language, parse_weights("int4,down_proj=int8,q_proj=float"), 32)
    kinds = {name.split(".")[-2]: kind.dtype for name, kind in matrices.items()}
    assert kinds["down_proj"] == "int8" and kinds["k_proj"] == "int4" and "q_proj" not in kinds
    assert matrices[language.head.names[0]].dtype == "int8" and language.embedding.names[0] not in matrices
    with pytest.raises(OptionError, match="no_proj"):
        quantized_matrices(language, parse_weights("int4,no_proj=int8"), 32)


def test_a_tied_table_takes_no_four_bits(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_models.checkpoint("llama-tied", tmp_path / "m")))
    with pytest.raises(OptionError, match="head=int8"):
        quantized_matrices(family_for(checkpoint).language, parse_weights("int4,head=int4"), 32)


def request(model: Path, output: Path, **options: Any) -> BuildRequest:
    return BuildRequest(model=str(model), output=output, max_length=64, max_batch=2, max_width=8, **options)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tied Llama and its bundle of 4-bit weights, which parity has compared."""
    place = tmp_path_factory.mktemp("tied")
    model = tiny_models.checkpoint("llama-tied", place / "model")
    build_bundle(request(model, place / "bundle", weights="int4", drafts=["prompt-lookup"]))
    return model, place / "bundle"


def test_a_tied_table_is_stored_once(tied: tuple[Path, Path]) -> None:
    model, folder = tied
    bundle = Bundle.open(folder)
    manifest, config = bundle.manifest, open_checkpoint(str(model)).config
    assert manifest.target_weights is not None
    assert (manifest.target_weights.dtype, manifest.target_weights.head) == ("int4", "int8")
    assert manifest.target_weights.choice == "int4"
    table, scales = bundle.tensor("embedding_table"), bundle.tensor("embedding_scales")
    assert table.dtype == np.int8 and table.shape == (config.hidden_size, config.vocab_size)
    assert manifest.graphs["head"].integers == table.size == manifest.integer_bytes("head")
    with Session.load(folder) as session:
        embedding = session.decoder.embedding
        assert embedding.lookup and embedding.vocabulary == config.vocab_size
        rows = embedding.embeddings(np.array([3, 0, config.vocab_size - 1]))
    blocks = table.T.reshape(config.vocab_size, len(scales), -1).astype(np.float32)
    expected = (blocks * scales.T[..., None]).reshape(config.vocab_size, -1)
    np.testing.assert_array_equal(rows, expected[[3, 0, -1]])


def test_a_dry_run_knows_the_bytes(tied: tuple[Path, Path], tmp_path: Path) -> None:
    model, folder = tied
    report = dry_run(request(model, tmp_path / "new", weights="int4", drafts=["prompt-lookup"]))
    assert report.weight_bytes == (folder / "weights.bin").stat().st_size
    assert not (tmp_path / "new").exists()


def test_drafts_of_the_float_model_fit(tied: tuple[Path, Path]) -> None:
    model, folder = tied
    assert Bundle.open(folder).manifest.model.fingerprint == fingerprint(open_checkpoint(str(model)))


def test_integers_twice_and_links_are_refused(tied: tuple[Path, Path], tmp_path: Path) -> None:
    model, _ = tied
    checkpoint = open_checkpoint(str(model))
    family = family_for(checkpoint)
    round_weights(checkpoint, family, "int8", 32)
    with pytest.raises(OptionError, match="already"):
        round_weights(checkpoint, family, "int8", 32)
    with pytest.raises(OptionError, match="--link-weights"):
        request(model, tmp_path / "b", weights="int8", link_weights=True).check()
    with pytest.raises(OptionError, match="64"):
        request(model, tmp_path / "b", weights="int8", weights_block=48).check()


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_narrow_bundles_have_integers_too(precision: str, tmp_path: Path) -> None:
    model = tiny_models.checkpoint("llama", tmp_path / "m")
    report = build_bundle(request(model, tmp_path / "b", weights="int8", precision=precision))
    assert {row["graph"] for row in report.parity} >= {"segment.0", "head", "generation"}
    with Session.load(tmp_path / "b") as session:
        assert len(session.generate(prompt="a red cup", max_new_tokens=4).tokens) == 4


def test_an_engine_of_floats_gives_other_logits_than_integers(tied: tuple[Path, Path]) -> None:
    """Otherwise `float_weights`, which parity relies on, would do nothing."""
    bundle = Bundle.open(tied[1])
    logits = []
    for floats in (False, True):
        engine = OnnxRuntimeCpu(bundle.path, bundle.manifest, float_weights=floats)
        with Session.on(engine, bundle) as session:
            session.generate(prompt="a red cup", max_new_tokens=1, speculative=False)
            logits.append(session.decoder.heads.last_logits().copy())
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.1 * np.abs(logits[1]).max()


def swapped_nibbles(integers: torch.Tensor) -> torch.Tensor:
    data = packed(integers)
    return (data >> 4) | (data << 4)


def shifted_block(self: WeightStore, ref: WeightRef) -> torch.Tensor:
    tensor = MATERIALIZE(self, ref)
    return tensor.roll(32, 0) if ref.names[0].endswith(INTEGERS) else tensor


def scale_of_the_neighbour(self: WeightStore, ref: WeightRef) -> torch.Tensor:
    tensor = MATERIALIZE(self, ref)
    return tensor.roll(1, 1) if ref.names[0].endswith(SCALES) else tensor


MATERIALIZE = WeightStore.materialize


@pytest.mark.parametrize("planted", ["block", "scale", "nibble"])
def test_parity_finds_planted_errors(
    planted: str, tied: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlmexport.exporter.graphs import weights

    if planted == "nibble":
        monkeypatch.setattr(weights, "packed", swapped_nibbles)
    else:
        wrong = shifted_block if planted == "block" else scale_of_the_neighbour
        monkeypatch.setattr(WeightStore, "materialize", wrong)
    with pytest.raises(ExportError, match="parity failed"):
        build_bundle(request(tied[0], tmp_path / "b", weights="int4"))


def test_a_bundle_tells_what_was_measured(tied: tuple[Path, Path], tmp_path: Path) -> None:
    """`vlmexport quantize` leaves its report beside the weights; nobody else's `quantization.json` is read."""
    from vlmexport.exporter.checkpoint.origin import QUANTIZED, Origin
    from vlmexport.exporter.pipeline.target_weights import REPORT, describe_target_weights

    folder = tmp_path / "m"
    folder.mkdir()
    for path in tied[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / REPORT).write_text(
        json.dumps({"method": "gptq", "quality": {"kl": 0.01234, "agreement": 0.95}})
    )

    def described() -> Any:
        checkpoint = open_checkpoint(str(folder))
        family = family_for(checkpoint)
        round_weights(checkpoint, family, "int4", 32)
        return describe_target_weights(checkpoint, family, "int4")

    assert described().method == "rounding" and described().quality is None
    Origin("float", "sha256:0").write(folder, QUANTIZED)
    assert described().sentence() == (
        "int4 in blocks of 32, head int8, by gptq; KL 0.012, 95.0 % of best tokens as the float model's"
    )
    (folder / REPORT).write_text(json.dumps({"quality": 3}))
    with pytest.raises(ExportError, match="delete it"):
        described()


def test_pieces_of_a_graph_compute_the_same(tied: tuple[Path, Path]) -> None:
    """Layer by layer, integers become the floats that they stand for, too."""
    bundle = tied[1]
    manifest = Bundle.open(bundle).manifest
    graph = manifest.graphs[manifest.segments[0]]
    feeds = segment_feeds(graph, 24, np.random.default_rng(3))
    whole, pieces = (
        GraphRunner(bundle, piecewise=piecewise).run(graph.file, feeds) for piecewise in (False, True)
    )
    assert graph.integers and whole.keys() == pieces.keys()
    for name, values in whole.items():
        assert np.abs(values - pieces[name]).max() <= 1e-5 * max(1.0, float(np.abs(values).max())), name


def test_parity_layer_by_layer_of_integers(tied: tuple[Path, Path], tmp_path: Path) -> None:
    report = build_bundle(
        request(tied[0], tmp_path / "new", weights="int4", drafts=["none"], parity=True, parity_memory=0)
    )
    assert report is not None
    entries = Bundle.open(tmp_path / "new").manifest.parity
    assert entries and any(entry.get("streamed") for entry in entries)


def test_what_waits_on_the_disk_is_asked_for(tied: tuple[Path, Path], tmp_path: Path) -> None:
    """Rounded matrices are written beside the bundle, and then into it."""
    made = [
        prepare(request(tied[0], tmp_path / "new", weights=kind, drafts=["none"]))
        for kind in ("int4", "float")
    ]
    light, floats = (estimated_bytes(each) - SPARE_BYTES for each in made)
    tensors: Any = made[0].checkpoint.tensors
    assert light - tensors.waiting_bytes < floats
    for name in tensors.quantized:
        tensors.read(name + INTEGERS)
    assert tensors._file.seek(0, 2) == tensors.waiting_bytes


def test_parity_takes_the_memory_of_floats(tied: tuple[Path, Path], tmp_path: Path) -> None:
    """Its sessions hold every matrix as float32, whatever is stored: no less than those of a float model."""
    light, floats = (
        dry_run(request(tied[0], tmp_path / "new", weights=kind, drafts=["none"]))
        for kind in ("int4", "float")
    )
    assert light.weight_bytes < 0.5 * floats.weight_bytes
    assert light.peak_memory.build >= floats.peak_memory.build
    assert light.peak_memory.run < floats.peak_memory.run
