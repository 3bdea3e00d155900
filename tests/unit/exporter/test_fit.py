"""`vlmexport fit`: bytes that a device needs, and the bound that its bandwidth sets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from vlmexport.exporter.cli.fit import rough
from vlmexport.exporter.common.aliases import ALIASES
from vlmexport.exporter.common.published_shapes import (
    Shapes,
    cut,
    planned,
    published,
    read_documents,
    with_integers,
)
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.quantization.choice import parse_weights
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.bundle.target_weights import TargetWeights
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import BundleError, OptionError
from vlmexport.runtime.hardware.devices import DEVICES, devices_named, lowerings, nearest_devices
from vlmexport.runtime.measure.fit import CONTEXT_BYTES, SYSTEM_BYTES, fit, roofline
from vlmexport.runtime.measure.inspection import kv_bytes_per_sequence, state_bytes

SEEN = (("int8", "llama-tied"), ("int4", "blip2-t5"), ("float,head=int8", "llama"))
"""Weights and models that every run plans; others are slow."""


@pytest.mark.parametrize("name", ["llama", "blip2-t5", "vit-gpt2"])
def test_bytes_are_those_of_files_and_buffers(tiny_bundle: Callable, name: str) -> None:
    folder, _ = tiny_bundle(name)
    manifest = Bundle.open(folder).manifest
    for graph in manifest.graphs.values():
        stored = onnx.load(str(folder / graph.file), load_external_data=False).graph.initializer
        assert graph.parameters == sum(
            int(entry.value) // 4
            for tensor in stored
            for entry in tensor.external_data
            if entry.key == "length"
        )
    device = replace(DEVICES["jetson-agx-orin-64gb"], memory=1 << 40)
    found = fit(manifest, device, length=100, batch=3, acceptance=0.8)
    decoder, limits = manifest.decoder, manifest.limits
    row = 2 * decoder.num_layers * decoder.head_dim * 2
    needed = found["needed"]
    assert needed["weights"] == manifest.weights.bytes // 2
    assert needed["kv_cache"] == 3 * (100 + limits.max_width) * row * decoder.num_kv_heads
    crossing = 3 * limits.max_source * row * decoder.num_heads if decoder.cross_attention else 0
    assert needed["cross_kv"] == crossing
    assert (needed["context"], needed["system"]) == (CONTEXT_BYTES, SYSTEM_BYTES)
    assert needed["total"] == sum(count for part, count in needed.items() if part != "total")
    assert found["fits"] and found["left"] == device.memory - needed["total"]
    assert not fit(
        manifest, replace(device, memory=needed["total"] - 1), length=100, batch=3, acceptance=0.8
    )["fits"]


def test_the_bound_is_bytes_by_bandwidth(tiny_bundle: Callable) -> None:
    manifest = Bundle.open(tiny_bundle("llama")[0]).manifest
    graphs = manifest.graphs
    counted = {name: graphs[name].parameters or 0 for name in ("segment.0", "segment.1", "head")}
    rows = 40 * 2 * manifest.decoder.num_kv_heads * manifest.decoder.head_dim * 2
    table = roofline(manifest, 1e9, 40)
    expected = (2 * sum(counted.values()) + manifest.decoder.num_layers * rows) / 1e9
    assert table.token_seconds() == pytest.approx(expected)
    assert table.plain(manifest.limits.max_width) == pytest.approx(expected), (
        "a wider pass reads the same bytes"
    )
    layers = graphs["segment.0"].layers
    assert layers is not None
    trunk = (2 * counted["segment.0"] + (layers[1] - layers[0]) * rows) / 1e9
    assert table.drafts["early-exit@1"].trunk == pytest.approx(trunk)
    assert table.drafts["early-exit@1"].propose == pytest.approx(2 * counted["head"] / 1e9)
    assert roofline(manifest, 2e9, 40).token_seconds() == pytest.approx(expected / 2)


def test_half_the_bytes_are_stored_in_float16_and_the_plans_are_the_same(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    found = []
    for precision in ("float32", "float16"):
        output = tmp_path / precision
        request = BuildRequest(
            model=str(tiny_checkpoint("llama")),
            output=output,
            draft_layer=1,
            parity=False,
            precision=precision,
        )
        build_bundle(request)
        manifest = Bundle.open(output).manifest
        found.append(fit(manifest, DEVICES["h100"], length=64, batch=1, acceptance=0.5))
    wide, narrow = (each["needed"] for each in found)
    assert wide["kv_cache"] == narrow["kv_cache"]
    assert abs(wide["weights"] - narrow["weights"]) < 64 * 200, "alignment"
    assert found[0]["tokens_per_second"] == pytest.approx(found[1]["tokens_per_second"])


def test_a_model_is_planned_as_its_bundle_is(
    tiny_bundle: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, model = tiny_bundle("blip2-t5")
    monkeypatch.chdir(tmp_path)
    assert main(["fit", str(bundle), "--target", "rtx-4090", "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert main(["fit", str(model), "--draft-layer", "1", "--target", "rtx-4090", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    longest = [each["devices"][0].pop("longest") for each in (built, planned)]
    assert longest[0] <= longest[1], "a bundle has the length that it was built with"
    assert planned == built and not any(tmp_path.iterdir())
    assert main(["fit", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "arithmetic, not measured" in shown and "peak bandwidth were all" in shown


def test_every_device_says_what_runs_there() -> None:
    from vlmexport.exporter.tensorrt import TARGETS
    from vlmexport.runtime.hardware.devices import RTX_TARGETS
    from vlmexport.runtime.measure.fit import runs_with

    assert set(RTX_TARGETS) == set(TARGETS)
    for device in DEVICES.values():
        said = runs_with(device)
        assert ("JetPack" in said) == device.shared == (device.capability in ("sm87", "sm110"))
        assert ("tensorrt-rtx" in said) == (device.capability in TARGETS)
        assert "native" in said and "portable" in said
        if device.capability in ("sm75", "sm80", "sm86", "sm89", "sm90"):
            assert "portable ones from 10.3 on" in said


def test_the_lowering_follows_from_the_jetpack() -> None:
    """JetPack 6.2 has no Thor, 7.0 and 7.1 no Orin."""
    said = {name: lowerings(device) for name, device in DEVICES.items()}
    assert said["jetson-orin-nx-16gb"] == {"native": "JetPack 7.2", "portable": "JetPack 6.2"}
    assert said["jetson-thor"] == {"native": "JetPack 7.2", "portable": "JetPack 7.0"}
    assert said["h100"] == {"native": "TensorRT 10.15", "portable": "TensorRT 10.3"}
    assert said["rtx-4090"]["native"] == "TensorRT-RTX or TensorRT 10.15"


@pytest.mark.parametrize("short", ["orin-nano-8gb", "orin-nx-16gb", "agx-orin-64gb", "thor"])
def test_a_jetson_is_known_by_its_board(
    tiny_bundle: Callable, capsys: pytest.CaptureFixture[str], short: str
) -> None:
    line = ["fit", str(tiny_bundle("llama")[0]), "--target"]
    assert main([*line, short, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["devices"]
    assert found["device"] == f"jetson-{short}" and found["lowering"] == lowerings(DEVICES[found["device"]])
    assert main([*line, short]) == 0
    assert found["lowering"]["portable"].split()[-1] in capsys.readouterr().out


def test_unsuitable_values_are_named(
    tiny_bundle: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, _ = tiny_bundle("llama")
    for options, message in (
        (["--target", "gtx"], "--target 'gtx' is unknown"),
        (["--max-length", "100000"], "the bundle has 1 to"),
        (["--batch", "100"], "the bundle has 1 to"),
        (["--draft-layer", "1"], "a bundle has its drafts already"),
    ):
        assert main(["fit", str(bundle), *options]) == 2
        assert message in capsys.readouterr().err
    manifest = Bundle.open(bundle).manifest
    manifest.graphs["head"].parameters = None
    with pytest.raises(BundleError, match="build the bundle again"):
        roofline(manifest, 1e9, 1)


PUBLISHED = [alias for alias in ALIASES if alias.hub_id]


@pytest.mark.parametrize("alias", PUBLISHED, ids=lambda alias: alias.name)
def test_published_models_are_known_without_their_files(
    alias: object, capsys: pytest.CaptureFixture[str]
) -> None:
    name = alias.name  # type: ignore[attr-defined]
    shapes = published(name)
    assert shapes is not None
    manifest = shapes.manifest
    assert manifest.model.source == name and manifest.model.family == alias.family  # type: ignore[attr-defined]
    numbers = {graph.role: 0 for graph in manifest.graphs.values()}
    for graph in manifest.graphs.values():
        numbers[graph.role] += graph.parameters or 0
    assert manifest.model.parameters == pytest.approx(sum(numbers.values()), rel=1e-3)
    assert manifest.weights.bytes == pytest.approx(4 * (manifest.model.parameters or 0), rel=0.001)
    assert main(["fit", name, "--target", "h200", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["devices"]
    assert found["fits"] and found["needed"]["weights"] == manifest.weights.bytes // 2


def test_states_are_counted_once_a_sequence_and_no_plan_is_promised(
    tiny_bundle: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = tiny_bundle("qwen3.5")
    manifest = Bundle.open(folder).manifest
    with Session.load(folder, max_batch=1) as session:
        decoder = session.decoder
        held = decoder.arena.nbytes + decoder.states.nbytes
        assert decoder.states.nbytes > 0 and held == kv_bytes_per_sequence(manifest)
    needs = [
        fit(manifest, DEVICES["h100"], length=length, batch=batch, acceptance=0.5)["needed"]["kv_cache"]
        for length, batch in ((100, 1), (200, 1), (200, 3))
    ]
    states = state_bytes(replace(manifest, cache_dtype="float16"), range(manifest.decoder.num_layers))
    row = (
        2 * manifest.decoder.num_kv_heads * manifest.decoder.head_dim * 2
    )  # one layer of three has keys and values
    assert needs[1] - needs[0] == 100 * row and needs[2] == 3 * needs[1]
    assert needs[0] == (100 + manifest.limits.max_width) * row + states
    assert main(["fit", "qwen3.5-0.8b", "--target", "orin-nano-8gb", "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert (device["plans"], device["lowering"]) == ([], {}) and "device='cpu'" in device["runs_with"]
    assert main(["fit", "qwen3.5-0.8b"]) == 0
    assert "no plan holds" in capsys.readouterr().out
    assert main(["fit", "qwen3.5-0.8b", "--target", "orin-nano-8gb", "--json", "--weights", "float"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == [device]
    assert main(["fit", "qwen3.5-0.8b", "--weights", "int8"]) == 2
    assert "linear attention" in capsys.readouterr().err


def test_other_names_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert published("tiny-vit-gpt2") is None and published("../tiny-vit-gpt2") is None
    assert read_documents().keys() == {alias.name for alias in PUBLISHED}


def test_a_cut_is_that_of_a_build(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    from vlmexport.exporter.pipeline.export import export
    from vlmexport.exporter.pipeline.prepare import prepare

    made = []
    for layer in (1, 3):
        request = BuildRequest(
            model=str(tiny_checkpoint("llama", num_hidden_layers=4)),
            output=tmp_path,
            force=True,
            draft_layer=layer,
        )
        prepared = prepare(request, write=False)
        export(prepared)
        made.append(prepared.manifest)
    moved, wanted = cut(made[0], 3), made[1]
    numbers = [{name: graph.parameters for name, graph in each.graphs.items()} for each in (moved, wanted)]
    assert numbers[0] == numbers[1]
    assert moved.decoder == wanted.decoder and moved.drafts == wanted.drafts
    assert [moved.graphs[name].layers for name in moved.segments] == [[0, 3], [3, 4]] or [
        tuple(moved.graphs[name].layers or ()) for name in moved.segments
    ] == [(0, 3), (3, 4)]


def test_options_of_a_published_model() -> None:
    shapes = published("llava-1.5-7b")
    assert shapes is not None
    manifest = planned(shapes, 16, 1088, 64)
    assert manifest.decoder.cuts == [0, 16, 32]
    assert (manifest.limits.max_length, manifest.limits.max_batch) == (1088, 64)
    assert "early-exit@16" in {draft.name for draft in manifest.drafts}
    for layer, length, message in (
        (None, 4097, "beyond the model's 4096 positions"), (None, 577, "give at least 578"), (0, None, "choose 1..31"),
        (32, None, "choose 1..31"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            planned(shapes, layer, length, 1)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_longest_length_is_the_last_that_fits(tiny_bundle: Callable, batch: int) -> None:
    manifest = Bundle.open(tiny_bundle("llama")[0]).manifest
    device = replace(DEVICES["t4"], memory=CONTEXT_BYTES + manifest.weights.bytes // 2 + 1_000_000)

    def found(length: int, most: int | None = None) -> dict:
        return fit(manifest, device, length=length, batch=batch, acceptance=0.8, most=most)

    longest = found(8)["longest"]
    assert longest > 100 and found(longest)["fits"] and not found(longest + 1)["fits"]
    assert found(longest + 1)["longest"] == longest and found(8, 100)["longest"] == 100
    assert fit(manifest, replace(device, memory=1000), length=8, batch=batch, acceptance=0.8)["longest"] == 0


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("orin nano", ["jetson-orin-nano-8gb"]), ("Orin Nano 8 GB", ["jetson-orin-nano-8gb"]),
        ("orin-nano", ["jetson-orin-nano-8gb"]), ("AGX Orin", ["jetson-agx-orin-32gb", "jetson-agx-orin-64gb"]),
        ("4090", ["rtx-4090"]), ("a10", ["a10"]), ("A100", ["a100-80gb"]), ("agx thor", ["jetson-thor"]), ("gtx", []),
        ("", []), ("nano orin", []),
    ],
)  # fmt: skip
def test_a_device_is_known_by_the_beginning_of_its_words(text: str, names: list[str]) -> None:
    assert [device.name for device in devices_named(text)] == names


def test_every_device_is_known_by_its_name_and_title() -> None:
    for name, device in DEVICES.items():
        assert devices_named(name) == [device] and device in devices_named(device.title)
    assert nearest_devices("orin nono")[0] == "orin-nano-8gb" and nearest_devices("rtx-4091")[0] == "rtx-4090"


def test_an_unknown_device_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "smollm2-135m", "--target", "orin-nono"]) == 2
    assert "--target 'orin-nono' is unknown; did you mean orin-nano-8gb" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("figure", "shown"), [(15930.0, "16,000"), (7496.0, "7,500"), (132.4, "130"), (15.2, "15"), (9.96, "10"), (4.73, "4.7"), (0.5, "0.5")]
)  # fmt: skip
def test_bounds_have_two_digits(figure: float, shown: str) -> None:
    assert rough(figure) == shown


def test_a_device_is_a_line_and_software_a_footnote(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "qwen2.5-vl-3b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines[2 : 2 + len(DEVICES)]]
    assert names == [name.removeprefix("jetson-") for name in DEVICES]
    assert (
        "orin-nano-8gb, orin-nx-16gb, agx-orin-32gb, agx-orin-64gb: native plans from JetPack 7.2 on"
        in "\n".join(lines)
    )
    assert len(lines) < len(DEVICES) + 10


def _row(capsys: pytest.CaptureFixture[str], *line: str) -> list[dict]:
    assert main(["fit", *line, "--target", "h100", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["devices"]


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "blip2-t5"])
def test_integers_are_those_of_the_file(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    kind: str,
) -> None:
    """In float16, as plans are. Published models are counted from shapes, others are traced."""
    model = tiny_checkpoint(name)
    request = BuildRequest(
        model=str(model),
        output=tmp_path / "b",
        draft_layer=1,
        parity=False,
        precision="float16",
        weights=kind,
    )
    build_bundle(request)
    stored = (tmp_path / "b/weights.bin").stat().st_size
    (own,) = _row(capsys, str(tmp_path / "b"))
    floats, planned = _row(capsys, str(model), "--draft-layer", "1", "--weights", "float", "--weights", kind)
    assert (floats["weights"], planned["weights"], own["weights"]) == ("float", kind, kind)
    assert own["needed"]["weights"] == stored
    # Alignment aside: a float32 file is aligned like one of float16.
    assert planned["needed"]["weights"] == pytest.approx(stored, rel=0.1)
    assert planned["tokens_per_second"] == pytest.approx(own["tokens_per_second"])
    assert floats["tokens_per_second"] < own["tokens_per_second"]


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        pytest.param(weights, name, marks=() if (weights, name) in SEEN else pytest.mark.slow)
        for weights in ("int8", "int4", "float,head=int8")
        for name in ("llama", "llama-tied", "blip2-t5", "vit-gpt2")
    ],
)
def test_shapes_tell_what_a_build_traces(
    tiny_checkpoint: Callable[..., Path], name: str, weights: str
) -> None:
    """`with_integers` of a model's floats is what the model with integers is traced to."""
    from vlmexport.exporter.pipeline.export import export
    from vlmexport.exporter.pipeline.prepare import prepare

    def traced(kind: str) -> Manifest:
        request = BuildRequest(
            model=str(tiny_checkpoint(name)), output=Path("-"), force=True, draft_layer=1, weights=kind
        )
        prepared = prepare(request, write=False)
        export(prepared)
        return prepared.manifest

    wanted = traced(weights)
    integers = {graph: info.integers for graph, info in traced("int8").graphs.items() if info.integers}
    choice = parse_weights(weights)
    shapes = Shapes(traced("float"), None, 0, integers)
    assert shapes.tied == (name in ("llama-tied", "vit-gpt2"))
    made = with_integers(shapes, choice.dtype_of(""), choice.dtype_of("head"), weights).manifest
    for graph, info in wanted.graphs.items():
        got = made.graphs[graph]
        assert (got.parameters, got.integers, got.integer_bytes) == (
            info.parameters,
            info.integers,
            info.integer_bytes,
        ), graph
    assert made.target_weights == wanted.target_weights
    assert made.weights.bytes == pytest.approx(wanted.weights.bytes, abs=4096 * 40), "alignment"


def test_every_kind_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _row(capsys, "llava-1.5-7b", "--weights", "all", "--weights", "int4", "--draft-layer", "16")
    assert [row["weights"] for row in rows] == ["float", "int8", "int4"]
    needed = [row["needed"]["weights"] for row in rows]
    assert needed[0] > 1.6 * needed[1] > 2.4 * needed[2]
    speeds = [row["tokens_per_second"] for row in rows]
    assert speeds == sorted(speeds) and speeds[2] > 3 * speeds[0]
    assert main(["fit", "llava-1.5-7b", "--target", "4090", "--weights", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["device", "weights"]
    assert [line.split()[1] for line in lines[2:5]] == ["float", "int8", "int4"]


def test_weights_that_cannot_be_are_refused(
    tiny_bundle: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, _ = tiny_bundle("llama")
    for what, kind, message in (
        (str(bundle), "int4", "--weights int4 is for a model; a bundle has its weights already"),
        ("llava-1.5-7b", "int5", "'int5' is no kind of weights"),
        ("llava-1.5-7b", "int4,down_proj=int8", "not of down_proj"),
        ("smollm2-135m", "int4,head=int4", "give head=int8"),
    ):
        assert main(["fit", what, "--weights", kind]) == 2
        assert message in capsys.readouterr().err


def test_the_scales_of_integers_are_read_too(tiny_bundle: Callable) -> None:
    manifest = Bundle.open(tiny_bundle("llama")[0]).manifest
    graphs = manifest.graphs
    plain = roofline(manifest, 1e9, 0).token_seconds()
    numbers = graphs["head"].parameters or 0
    integers = numbers // 64 * 64
    head = replace(graphs["head"], integers=integers, integer_bytes=integers // 2)
    for block in (32, 64):
        target = TargetWeights(dtype="int4", block=block, head="int4")
        light = replace(manifest, graphs={**graphs, "head": head}, target_weights=target)
        saved = 2 * integers - integers // 2 - 2 * (integers // block)
        assert roofline(light, 1e9, 0).token_seconds() == pytest.approx(plain - saved / 1e9)
