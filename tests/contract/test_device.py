"""What the recording device saw of whole generations, and that it refuses what a device cannot do."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.bundle.combined_drafts import combinations
from vlmexport.runtime.bundle.manifest import GenerationInfo
from vlmexport.runtime.drafts.eagle.layer_role import LayerOptions
from vlmexport.runtime.engines.base import DTYPES, Buffer, View
from vlmexport.runtime.graphs.registry import draft_kinds
from vlmexport.runtime.graphs.text_layout import WORDS, TextLayout
from vlmexport.runtime.graphs.values import MASKS, caches
from vlmexport.runtime.measure.forced_acceptance import forced_acceptance
from vlmexport.runtime.measure.pass_costs import runnable
from vlmexport.runtime.session.session import Session

from tests.support import lossless
from tests.support.device_mutants import changed_logits, layered, not_finite, same_drafts, same_drafts_of
from tests.support.engines.recording_device import RecordingDevice
from tests.support.engines.stream import Context, Counts
from tests.support.engines.torch_reference import TorchReference
from tests.support.pairs import each_value, fast
from tests.support.rig import ENGINES, FAMILIES, Rig
from tests.support.tiny_bundles import LIGHT

# --- generations ---

ENQUEUEING = ("device", "tensorrt", "cuda")
ONE_WAIT = {
    ("t5", "tensorrt"), ("llama", "cuda"), ("vit-gpt2", "device"), ("llava-next", "cuda"), ("qwen2.5-vl", "tensorrt"),
    ("llama-bfloat16", "device"),
}  # fmt: skip
DRAFTING = ("device", "growing-device", "tensorrt", "cuda")
DRAFTED_ONCE = {
    ("t5", "device"),
    ("llama", "growing-device"),
    ("qwen2.5-vl", "cuda"),
    ("vit-gpt2", "tensorrt"),
}
"""What every run looks at."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trunk_runs_once_per_token_and_the_tail_once_per_cycle(rigs: Callable, family: str) -> None:
    rig: Rig = rigs(family, "device")
    request = rig.request(51)
    truth = rig.oracle.greedy(request, 25)
    rig.start(request)
    rig.engine.runs.clear()
    proposer = lossless.DRAFTS["perfect"](rig, truth)
    run = lossless.generate(rig, request, 25, proposer=proposer, length=5)
    runs = rig.engine.runs
    first = next(i for i, call in enumerate(runs) if call.graph == "head")  # prefill ends with the head
    after = runs[first + 1 :]
    trunk = [call.width for call in after if call.graph == "segment.0"]
    tail = [call.width for call in after if call.graph == "segment.1"]
    assert run.stats.cycles == len(tail) == 4 and tail == [6, 6, 6, 6]
    assert trunk == [1] * 24, "a drafted token went through the trunk other than once"
    assert not [call for call in after if call.graph in ("commit", "encoder", "cross_kv", "vision")]


@fast(("family", "engine"), [*product(FAMILIES, ENQUEUEING)], ONE_WAIT)
def test_the_host_waits_once_for_a_cycle(
    rigs: Callable, family: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an end token that may come, alone: one wait, no more than 4 KB to the host, and one launch where more than
    single graphs can be captured."""
    rig: Rig = rigs(family, engine)
    own = layered(rig)
    shapes = [("early-exit", 3), ("imitation", 5), ("early-exit", 8), ("prompt-lookup", 5), (None, 0)]
    kinds = draft_kinds()
    layers = [draft for draft in own if issubclass(kinds[draft].options, LayerOptions)]
    shapes += [*((draft, 3) for draft in own), *((draft, 8) for draft in layers)]
    _waits_once(rig, engine, shapes, monkeypatch, own)


@fast(("family", "engine"), [*product(FAMILIES, DRAFTING)], DRAFTED_ONCE)
def test_attention_over_exit_rows_is_a_part_of_the_cycle(
    rigs: Callable, family: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for an imitation network with attention; what it drafts is what the host would draft."""
    rig: Rig = rigs(f"{family}-two-cuts", engine)
    same_drafts_of(rig, "imitation-attending")
    if engine != "growing-device":  # where every length of the caches is captured anew
        _waits_once(rig, engine, [("imitation-attending", 5)], monkeypatch)


def _waits_once(
    rig: Rig,
    engine: str,
    shapes: Items[tuple[str | None, int]],
    monkeypatch: pytest.MonkeyPatch,
    own: Items[str] = (),
) -> None:
    """Generations with these drafts and lengths."""
    request = rig.request(53)
    truth = rig.oracle.greedy(request, 40)
    end = next(token for token in range(3, 200) if token not in truth)
    waited = _counted(rig, monkeypatch)
    for draft, length in shapes:
        proposer = None if draft is None else lossless.DRAFTS[draft](rig, truth)
        for _ in range(3):
            waited.clear()
            run = lossless.generate(rig, request, 40, proposer=proposer, length=length, eos=(end,))
            assert run.tokens == truth
        # Programs of every length that comes were captured before: what is left is one launch.
        for counts, _ in waited[1:]:
            whole = engine != "cuda"
            assert (counts.synchronisations, counts.launches) == (1, int(whole)), (draft, counts)
            # What cross-attention sees is shown to every width of a pass once.
            enqueues = (2 if rig.manifest.decoder.cross_attention else 0) if whole else 40 * (length + 2)
            # Accepted rows are kept for the next cycle, EAGLE-3's after they were joined.
            enqueues += (draft in own) + (draft == "eagle3")
            # A cycle in which attention drafted nothing, the last one: the rows of its pass are brought to the network.
            enqueues += 4 * (draft == "imitation-attending")
            assert counts.enqueues <= enqueues, (draft, counts)
            most = 8192 if length <= 5 else 16384
            assert counts.bytes_down <= 4096 and counts.bytes_up <= most, (draft, counts)


SOME = ("llama", "t5", "vit-gpt2")
MORE = [
    *(
        (family, engine, 3)
        for family in SOME
        for engine in ("device", "tensorrt", "tensorrt-portable", "cuda")
    ),
    *((family, "device", 1) for family in FAMILIES),
]


@pytest.mark.parametrize(
    ("family", "engine", "every"),
    [
        ("qwen2.5-vl", "device", 3),
        ("t5", "tensorrt", 3),
        ("vit-gpt2", "tensorrt-portable", 3),
        ("t5-float16", "cuda", 3),
        ("llama", "growing-device", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE),
    ],
)
def test_a_device_changes_logits_itself(
    rigs: Callable, family: str, engine: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, tokens, words and n-grams that never come, ends that are held back: what the host would choose, and one wait
    for a cycle, whichever request came before."""
    rig: Rig = rigs(family, engine)
    waited = _counted(rig, monkeypatch)
    made: dict[str, Any] = {}
    for _ in range(2):  # programs of every length are captured in the first
        waited.clear()
        changed_logits(rig, rigs(family, "onnxruntime"), every, made)
    of_device = [counts for counts, _ in waited if counts.synchronisations]  # others are the host's
    assert len(of_device) > 40
    first = 8 * TextLayout.of(rig.manifest.limits).places
    for counts in of_device:
        # The first cycle of a request brings its text, and the words that must not come, beside what every cycle brings.
        whole = counts.bytes_up > first
        assert counts.synchronisations == 1 or whole, counts
        assert counts.bytes_down <= 4096 and counts.bytes_up <= (2 * first if whole else 0) + 8192, counts


def test_forced_acceptance_is_that_of_whole_cycles(rigs: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings of random weights time what real ones would do: the same cycles as on a CPU, and one wait for each."""
    said: dict[str, list[Any]] = {}
    for engine in ("onnxruntime", "device"):
        rig: Rig = rigs("llama", engine)
        waited = _counted(rig, monkeypatch) if engine == "device" else []
        session = Session(rig.tiny.bundle, rig.decoder, None)
        options = {
            "draft_length": 3,
            "adaptive": None,
            "seed": 3,
            "ignore_eos": True,
        }
        with forced_acceptance(session, 0.6):
            results = [
                session.generate(prompt="the red cup", max_new_tokens=40, draft=draft.name, **options)
                for draft in rig.manifest.drafts
            ]
        said[engine] = [
            (result.tokens, result.stats.cycles, result.stats.proposed, result.stats.accepted)
            for result in results
        ]
        assert all(counts.synchronisations == 1 for counts, _ in waited), waited
    assert said["device"] == said["onnxruntime"]
    assert all(0 < accepted < proposed for *_, proposed, accepted in said["device"])


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_oversized_device_work_runs_on_the_host(rigs: Callable, family: str) -> None:
    rig: Rig = rigs(family, "device")
    request = rig.request(54)
    plain = rig.oracle.greedy(request, 12)
    many = [[3 + number, 2] for number in range(WORDS // 2)]
    info = GenerationInfo(bad_words_ids=[list(plain[3:5]), *many])
    truth = lossless.generate(rigs(family, "onnxruntime"), request, 12, asked=info).tokens
    assert truth != plain
    proposer = lossless.DRAFTS["early-exit"](rig, ())
    assert lossless.generate(rig, request, 12, proposer=proposer, length=3, asked=info).tokens == truth


@pytest.mark.parametrize("family", FAMILIES)
def test_host_sampling_waits_for_every_token(
    rigs: Callable, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A threshold needs the probability of a draft before the next one."""
    rig: Rig = rigs(family, "device")
    waited = _counted(rig, monkeypatch)
    proposer = lossless.DRAFTS["early-exit"](rig, ())
    lossless.generate(rig, rig.request(53), 12, proposer=proposer, length=3, threshold=0.0)
    assert max(proposed for _, proposed in waited) == 3
    assert all(
        # Whether a row is finite, and its logits: two reads for every token that the threshold judges.
        counts.synchronisations == 1 + 2 * proposed
        for counts, proposed in waited
    ), waited


@fast(("family", "engine"), [*product(FAMILIES, DRAFTING)], DRAFTED_ONCE)
def test_device_drafts_equal_host_drafts(rigs: Callable, family: str, engine: str) -> None:
    same_drafts(rigs(family, engine))


def _counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Counts, int]]:
    """What every cycle asks of the device from now on, and how many tokens it proposed."""
    cycle = lossless.Cycle.run
    waited: list[tuple[Counts, int]] = []

    def counted(self: Any) -> Any:
        before, stats = rig.engine.counts.copy(), self.sequences[0].stats
        proposed = stats.proposed
        tokens = cycle(self)
        waited.append((rig.engine.counts - before, stats.proposed - proposed))
        return tokens

    monkeypatch.setattr(lossless.Cycle, "run", counted)
    return waited


@pytest.mark.parametrize("family", FAMILIES)
def test_addresses_stay_and_nothing_is_allocated_after_the_first_requests(
    rigs: Callable, family: str
) -> None:
    rig: Rig = rigs(family, "device")
    device: RecordingDevice = rig.engine
    request = rig.request(52, 9)
    proposer = lossless.DRAFTS["often-right"](rig, rig.oracle.greedy(request, 20))
    allocated = 0
    for number in range(4):
        lossless.generate(rig, request, 20, proposer=proposer, length=4)
        if number == 0:
            allocated = device.allocations
            device.runs.clear()
    assert device.allocations == allocated
    seen: dict[str, set[int]] = {}
    for call in device.runs:
        for name, address in call.addresses.items():
            if "_cache." in name:
                seen.setdefault(name.removeprefix("updated_"), set()).add(address)
    assert len(seen) == len(caches(rig.manifest, range(rig.manifest.decoder.num_layers)))
    assert all(len(addresses) == 1 for addresses in seen.values()), seen
    assert len(set.union(*seen.values())) == len(seen), "two caches at one address"


def holds(case: dict[str, Any]) -> bool:
    """Whether an engine of the contract table has a bundle: what is lowered for old TensorRT has no integers."""
    return not (case["engine"] == "tensorrt-portable" and case["family"] in LIGHT)


ON_DEVICES = ("device", "growing-device", "cuda", "tensorrt", "tensorrt-portable")
SESSIONS = [
    (family, engine)
    for family, engine in product((*FAMILIES, *LIGHT), ON_DEVICES)
    if holds({"family": family, "engine": engine})
]
SESSIONS_ONCE = {
    ("t5", "growing-device"),
    ("llama", "tensorrt-portable"),
    ("vit-gpt2", "cuda"),
    ("qwen2.5-vl", "tensorrt"),
    ("blip2-opt-int8", "device"),
}


@fast(("family", "engine"), SESSIONS, SESSIONS_ONCE)
def test_device_sessions_equal_cpu_sessions(rigs: Callable, family: str, engine: str) -> None:
    """From pictures and text to text, with every draft and combination of two, alone and in a ragged batch of five with three
    places, greedy and sampled; some end at a string that comes."""
    stops: dict[int, str] = {}

    def requests(rig: Rig, draft: str) -> list[dict[str, Any]]:
        picture = rig.manifest.image is not None
        return [
            {
                "image": lossless.image_array(seed) if picture else None,
                "prompt": prompt,
                "max_new_tokens": limit,
                "draft": draft,
                "draft_length": 1 + seed,
                "temperature": 1.5 if seed == 3 else 0.0,
                "seed": seed,
                "stop": stops.get(seed, ()),
            }
            for seed, (prompt, limit) in enumerate(
                (("the red cup", 9), ("describe it", 20), ("a", 3), ("what is on the table", 17), ("two", 24))
            )
        ]

    said: dict[str, list[Any]] = {}
    for column in ("onnxruntime", engine):
        rig: Rig = rigs(family, column)
        session = Session(rig.tiny.bundle, rig.decoder, None)
        if not stops:
            texts = [session.generate(**request).text for request in requests(rig, "none")]
            stops = {seed: texts[seed][len(texts[seed]) // 2 :][:3] for seed in (1, 4)}
        drafts = runnable(rig.manifest.drafts, rigs(family, engine).engine.graphs)
        names = ["none", *(draft.name for draft in drafts), *combinations(drafts)]
        results = [result for name in names for result in session.generate_batch(requests(rig, name))]
        results += [session.generate(**requests(rig, names[-1])[seed]) for seed in (1, 2)]
        said[column] = [(result.tokens, result.text, result.finish_reason) for result in results]
        rig.settle()
    assert said[engine] == said["onnxruntime"]
    assert len({tuple(tokens) for tokens, *_ in said[engine]}) == 5, "the requests must differ"
    assert [reason for *_, reason in said[engine]].count("stop") > len(names), "strings must come"
    assert {name.partition("@")[0] for name in names} >= {"imitation", "medusa", "prompt-lookup+eagle"}


@each_value(family=FAMILIES, engine=("onnxruntime", "device", "tensorrt", "cuda"))
def test_logits_that_are_not_finite_end_a_request(rigs: Callable, family: str, engine: str) -> None:
    not_finite(rigs(family, engine))


# --- the device's own checks ---


@pytest.fixture
def device_for(tiny_bundle: Callable, oracle_for: Callable) -> Callable[..., RecordingDevice]:
    """`device_for(family)`: a new device."""
    return lambda family, column="device": ENGINES[column](tiny_bundle(family), oracle_for(family))


class Bench:
    """A device with one segment's buffers, bound by hand; every input but the caches is written."""

    def __init__(self, device: RecordingDevice) -> None:
        self.device = device
        self.width, self.capacity = 2, device.capacity
        # The first segment with attention: in front of it may be one of convolutions alone.
        self.graph, self.layer = next(
            (graph, int(value.name.rpartition(".")[2]))
            for graph in ("segment.0", "segment.1")
            for value in device.interface(graph).inputs
            if value.name.startswith("key_cache.")
        )
        info = device.interface(self.graph)
        self.sizes = {"batch": 1, "width": self.width, "cache": self.capacity, "source": 4}
        self.inputs = {value.name: self.new(value.name, value.shape, value.dtype) for value in info.inputs}
        self.mask = next(name for name in MASKS.values() if name in self.inputs)
        self.outputs = {
            value.name: self.inputs.get(value.name.removeprefix("updated_"))
            or self.new(value.name, value.shape, value.dtype)
            for value in info.outputs
        }
        for name, view in self.inputs.items():
            if "_cache." not in name:
                device.write(view, np.ones(view.shape, DTYPES[view.dtype]))
        self.show(0, 1)
        self.at(0)

    def new(self, name: str, shape: Any, dtype: str) -> View:
        """A buffer of its own; the caches are zeroed, as an arena's are."""
        shape = tuple(self.sizes.get(size, size) for size in shape)
        nbytes = prod(shape) * DTYPES[dtype].itemsize
        return self.device.allocate(name, nbytes, zeroed="_cache." in name).view(shape, dtype)

    def show(self, *slots: int) -> None:
        """Makes these cache slots visible to every row."""
        mask = self.inputs[self.mask]
        boolean = mask.dtype == "bool"
        values = np.zeros(mask.shape, bool) if boolean else np.full(mask.shape, -3e38, np.float32)
        values[..., list(slots)] = True if boolean else 0
        self.device.write(mask, values)

    def at(self, start: int) -> None:
        """Sets the write index."""
        self.device.write(self.inputs["write_indices"], np.array([start], np.int64))

    def bind(self) -> Any:
        """The call."""
        return self.device.bind(self.graph, self.inputs, self.outputs)

    def other_call(self) -> Any:
        """The same graph and shapes, with its output elsewhere."""
        view = self.outputs["hidden_out"]
        elsewhere = self.new("elsewhere", view.shape, view.dtype)
        return self.device.bind(self.graph, self.inputs, self.outputs | {"hidden_out": elsewhere})

    def result(self) -> np.ndarray:
        """What the segment gave."""
        return self.device.read(self.outputs["hidden_out"])


# Bindings.


def updated_cache_elsewhere(bench: Bench) -> None:
    view = bench.outputs[f"updated_key_cache.{bench.layer}"]
    bench.outputs[f"updated_key_cache.{bench.layer}"] = bench.new("other", view.shape, view.dtype)
    bench.bind()


def updated_cache_in_another_shape(bench: Bench) -> None:
    view = bench.outputs[f"updated_key_cache.{bench.layer}"]
    shape = (view.shape[0], view.shape[1], view.shape[2] - 1, view.shape[3])
    bench.outputs[f"updated_key_cache.{bench.layer}"] = view.buffer.view(shape, view.dtype)
    bench.bind()


def caches_share_memory(bench: Bench) -> None:
    bench.inputs[f"value_cache.{bench.layer}"] = bench.outputs[f"updated_value_cache.{bench.layer}"] = (
        bench.inputs[f"key_cache.{bench.layer}"]
    )
    bench.bind()


def output_over_input(bench: Bench) -> None:
    bench.outputs["hidden_out"] = bench.inputs["hidden"]
    bench.bind()


def input_left_out(bench: Bench) -> None:
    del bench.inputs[bench.mask]
    bench.bind()


def shorter_cache(bench: Bench) -> None:
    for name in (f"key_cache.{bench.layer}", f"value_cache.{bench.layer}"):
        cache = bench.inputs[name]
        shape = (*cache.shape[:2], 128, cache.shape[3])
        bench.inputs[name] = bench.outputs["updated_" + name] = cache.buffer.view(shape, cache.dtype)
    mask = bench.inputs[bench.mask]
    bench.inputs[bench.mask] = bench.new("mask", (*mask.shape[:3], 128), mask.dtype)
    bench.bind()


def wrong_dtype(bench: Bench) -> None:
    bench.inputs["write_indices"] = bench.new("indices", (1,), "int32")
    bench.bind()


def wrong_width(bench: Bench) -> None:
    hidden = bench.inputs["hidden"]
    bench.inputs["hidden"] = hidden.buffer.view((1, 1, hidden.shape[2]), hidden.dtype)
    bench.bind()


def host_memory_bound(bench: Bench) -> None:
    hidden = bench.inputs["hidden"]
    array = np.zeros(hidden.nbytes + 256, np.uint8)
    start = -array.ctypes.data % 256
    buffer = Buffer("host", hidden.nbytes, array.ctypes.data + start, array[start:])
    bench.inputs["hidden"] = buffer.view(hidden.shape, hidden.dtype)
    bench.bind()


def memory_of_another_device(bench: Bench) -> None:
    hidden = bench.inputs["hidden"]
    other = bench.device.renewed()
    other.allocate("first", 100)
    bench.inputs["hidden"] = other.allocate("hidden", hidden.nbytes).view(hidden.shape, hidden.dtype)
    bench.bind()


def off_the_alignment(bench: Bench) -> None:
    hidden = bench.inputs["hidden"]
    buffer = bench.device.allocate("row in the middle", hidden.nbytes + 128)
    bench.inputs["hidden"] = buffer.view(hidden.shape, hidden.dtype, 32)
    bench.bind()


def beyond_the_buffer(bench: Bench) -> None:
    hidden = bench.inputs["hidden"]
    small = bench.device.allocate("small", hidden.nbytes - 4)
    bench.inputs["hidden"] = View(small, hidden.shape, hidden.dtype)  # Buffer.view would refuse it
    bench.bind()


# What is in the memory when the queue gets there.


def write_beyond_the_end(bench: Bench) -> None:
    bench.at(bench.capacity - 1)
    bench.bind().run()


def unwritten_row_visible(bench: Bench) -> None:
    bench.show(0, 1, 2)
    bench.bind().run()


def rejected_row_visible(bench: Bench) -> None:
    call = bench.bind()
    call.run()
    for name in (f"key_cache.{bench.layer}", f"value_cache.{bench.layer}"):
        bench.device.spoil(bench.inputs[name], [1])
    bench.at(2)
    bench.show(0, 1, 2, 3)
    call.run()


def input_never_written(bench: Bench) -> None:
    hidden = bench.inputs["hidden"]
    fresh = bench.inputs["hidden"] = bench.new("fresh", hidden.shape, hidden.dtype)
    first = fresh.buffer.view((1, 1, hidden.shape[2]), hidden.dtype)
    bench.device.write(first, np.ones(first.shape, np.float32))  # the second row is missing
    bench.bind().run()


def token_outside_the_table(bench: Bench) -> None:
    info = bench.device.interface("embed")
    views = {v.name: bench.new(v.name, v.shape, v.dtype) for v in (*info.inputs, *info.outputs)}
    table, ids = views["embedding_table"], views["token_ids"]
    bench.device.write(table, np.zeros(table.shape, np.float32))
    bench.device.write(ids, np.full(ids.shape, table.shape[0]))
    inputs = {value.name: views[value.name] for value in info.inputs}
    bench.device.bind("embed", inputs, {"hidden": views["hidden"]}).run()


def staging_memory_used_again(bench: Bench) -> None:
    staging = np.zeros(bench.inputs["hidden"].shape, np.float32)
    bench.device.write(bench.inputs["hidden"], staging)
    bench.bind().run()
    staging[0, 1, 3] = 1


def wrong_shape_written(bench: Bench) -> None:
    bench.device.write(bench.inputs["write_indices"], np.array(0, np.int64))


def wrong_dtype_written(bench: Bench) -> None:
    bench.device.write(bench.inputs["write_indices"], np.array([0], np.int32))


def overlapping_copy(bench: Bench) -> None:
    buffer = bench.inputs["hidden"].buffer
    bench.device.copy(buffer.view((8,), "float32", 4), buffer.view((8,), "float32"))


def copy_beyond_the_buffer(bench: Bench) -> None:
    hidden, indices = bench.inputs["hidden"], bench.inputs["write_indices"]
    bench.device.copy(View(indices.buffer, hidden.shape, hidden.dtype), hidden)


# Captured sequences.


def bound_while_capturing(bench: Bench) -> None:
    with bench.device.capture():
        bench.bind()


def bound_again_while_capturing(bench: Bench) -> None:
    bench.bind()
    with bench.device.capture():
        bench.bind().run()


def allocated_while_capturing(bench: Bench) -> None:
    with bench.device.capture():
        bench.device.allocate("late", 8)


def read_while_capturing(bench: Bench) -> None:
    with bench.device.capture():
        bench.result()


def synchronised_while_capturing(bench: Bench) -> None:
    with bench.device.capture():
        bench.device.stream.synchronise()


def written_while_capturing(bench: Bench) -> None:
    with bench.device.capture():
        bench.at(1)


def captured_while_capturing(bench: Bench) -> None:
    with bench.device.capture(), bench.device.capture():
        pass


def launched_while_capturing(bench: Bench) -> None:
    with bench.device.capture() as captured:
        pass
    with bench.device.capture():
        captured.launch()


def context_of_two_captured_calls(bench: Bench) -> None:
    shared = Context(bench.graph)
    bench.device._context = lambda graph, key: shared  # type: ignore[method-assign]
    one, other = bench.other_call(), bench.other_call()
    with bench.device.capture():
        one.run()
    with bench.device.capture():
        other.run()


def context_used_elsewhere_since_the_capture(bench: Bench) -> None:
    shared = Context(bench.graph)
    bench.device._context = lambda graph, key: shared  # type: ignore[method-assign]
    one, other = bench.other_call(), bench.other_call()
    with bench.device.capture() as captured:
        one.run()
    other.run()
    captured.launch()


BY_THE_BASE = (updated_cache_elsewhere, input_left_out, off_the_alignment)
"""Refused by `Engine.bind` itself."""

VIOLATIONS = (
    *BY_THE_BASE, updated_cache_in_another_shape, caches_share_memory, output_over_input, shorter_cache, wrong_dtype,
    wrong_width, host_memory_bound, memory_of_another_device, beyond_the_buffer, write_beyond_the_end,
    unwritten_row_visible, rejected_row_visible, input_never_written, token_outside_the_table,
    staging_memory_used_again, wrong_shape_written, wrong_dtype_written, overlapping_copy, copy_beyond_the_buffer,
    bound_while_capturing, bound_again_while_capturing, allocated_while_capturing, read_while_capturing,
    synchronised_while_capturing, written_while_capturing, captured_while_capturing, launched_while_capturing,
    context_of_two_captured_calls, context_used_elsewhere_since_the_capture,
)  # fmt: skip


@fast(
    ("family", "violation"),
    [*product(FAMILIES, VIOLATIONS)],
    {(("t5", "llama")[number % 2], violation) for number, violation in enumerate(VIOLATIONS)},
)
def test_the_device_refuses(device_for: Callable, family: str, violation: Callable[[Bench], None]) -> None:
    bench = Bench(device_for(family))
    bench.bind().run()
    bench.device.stream.drain()  # all is well until here
    with pytest.raises(ValueError if violation in BY_THE_BASE else AssertionError):
        violation(bench)
        bench.device.stream.drain()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_device_accepts_what_is_right(device_for: Callable, family: str) -> None:
    bench = Bench(device_for(family))
    call = bench.bind()
    call.run()
    bench.at(bench.capacity - 2)
    call.run()
    bench.show(0, 1, bench.capacity - 1)
    call.run()
    assert np.isfinite(bench.result()).all()


def test_a_shorter_cache_is_welcome_where_it_may_grow(device_for: Callable) -> None:
    shorter_cache(Bench(device_for("llama", "growing-device")))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_done_before_it_is_waited_for(device_for: Callable, family: str) -> None:
    bench = Bench(device_for(family))
    device, call = bench.device, bench.bind()
    for _ in range(2):
        call.run()
    assert not device.runs and len(device.stream.queue) == device.counts.enqueues
    assert device.counts.synchronisations == 0
    first = bench.result()
    assert len(device.runs) == 2 and not device.stream.queue
    device.write(bench.inputs["hidden"], np.full(bench.inputs["hidden"].shape, 2, np.float32))
    assert np.array_equal(bench.result(), first), "a transfer is not a run"
    call.run()
    assert not np.array_equal(bench.result(), first)


def test_device_calls_are_counted(device_for: Callable) -> None:
    bench = Bench(device_for("llama"))
    device, call = bench.device, bench.bind()
    copy = device.copy(
        bench.new("other", (8,), "float32"), bench.inputs["hidden"].buffer.view((8,), "float32")
    )
    device.stream.drain()
    before = device.counts.copy()
    bench.at(0)
    call.run()
    copy.run()
    out = bench.result()
    assert device.counts - before == Counts(1, 3, 0, 8, out.nbytes)
    with device.capture() as captured:
        call.run()
        copy.run()
    before = device.counts.copy()
    captured.launch()
    captured.launch()
    bench.result()
    assert device.counts - before == Counts(1, 0, 2, 0, out.nbytes)
    assert len(device.runs) == 3


def test_a_captured_call_may_come_back(device_for: Callable) -> None:
    """In one capture or several: its context is its own."""
    bench = Bench(device_for("llama"))
    call, other = bench.bind(), bench.other_call()
    with bench.device.capture() as first:
        call.run()
        other.run()
        call.run()
    with bench.device.capture() as second:
        call.run()
    second.launch()
    first.launch()
    assert np.isfinite(bench.result()).all() and len(bench.device.runs) == 4


def test_read_returns_a_copy(device_for: Callable) -> None:
    bench = Bench(device_for("llama"))
    values = bench.device.read(bench.inputs["hidden"])
    with pytest.raises(ValueError, match="read-only"):
        values[...] = 1
    assert bench.inputs["hidden"].buffer.data is None


def test_memory_holds_nan_unless_it_is_zeroed(device_for: Callable) -> None:
    device = device_for("llama")
    for dtype, undefined in (("float32", np.isnan), ("float16", np.isnan), ("int64", lambda v: v == -1)):
        view = device.allocate("fresh", 64).view((4,), dtype)
        assert undefined(device.read(view)).all()
    assert not device.read(device.allocate("zeroed", 64, zeroed=True).view((16,), "float32")).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_recording_device_wraps_any_engine(
    device_for: Callable, tiny_bundle: Callable, oracle_for: Callable, family: str
) -> None:
    by_onnxruntime = device_for(family)
    tiny, oracle = tiny_bundle(family), oracle_for(family)
    reference = TorchReference(tiny.bundle.manifest, oracle.model, tiny.networks())
    results = []
    for device in (by_onnxruntime, RecordingDevice(tiny.bundle.manifest, reference)):
        bench = Bench(device)
        bench.bind().run()
        results.append(bench.result())
    assert np.abs(results[0] - results[1]).max() < 1e-4 * np.abs(results[0]).max()
