"""compressed-tensors, as llm-compressor writes it: integers packed into words or plain, and floats of 8 bits.

`weight_packed` int32 [out, ⌈in * bits / 32⌉], along inputs, the lowest bits first, each number stored plus half its range;
`weight_scale` [out, groups], or one for each output, or one; `weight_shape` (out, in); `weight_zero_point`, packed along
outputs; `weight_g_idx` [in]. Plain integers are `weight` int8. A weight is (q − z) * scale. Read in compressed-tensors 0.20,
compressors/pack_quantized/ and quantization/lifecycle/forward_helpers.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ....runtime.common.errors import ExportError, UnsupportedModelError
from .bits import signed, unpack
from .float8 import FLOAT8, ROUNDED, float8_matrix
from .layout import Layout
from .matrix import FLOATS, Headers, IntegerMatrix, Read, StoredMatrix, expect, matrix_shape
from .settings import REMEDY, Settings

PACKED, PLAIN, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
EITHER = "naive-quantized"
ENDS = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
CACHE = (
    "the checkpoint asks for a key/value cache of 8 bits; the bundle's keeps its precision, and the weights are exactly the "
    "checkpoint's."
)


@dataclass(frozen=True)
class Scheme:
    """How the matrices of one group of modules are stored. `group`: inputs that share a scale; None: all of an output, or
    of the matrix. `block`: of floats, the tile that shares a scale."""

    form: str
    bits: int
    group: int | None
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class CompressedMatrix(IntegerMatrix):
    """`packed`: integers lie in words."""

    packed: bool

    def check(self, read: Read) -> StoredMatrix:
        name = f"{self.path}.weight_shape"
        if name in self.parts and tuple(read(name).tolist()) != self.shape:
            raise ExportError(
                f"tensor {name} says {read(name).tolist()}, but the others are of {list(self.shape)}; download it again"
            )
        return super().check(read)

    def _codes(self, read: Read) -> Tensor:
        stored = read(self.parts[0])
        if not self.packed:
            return stored
        return signed(unpack(stored, self.bits), self.bits)[:, : self.shape[1]].contiguous()

    def _group_scales(self, read: Read) -> Tensor:
        return self._by_output(read(f"{self.path}.weight_scale"))

    def _group_zero_points(self, read: Read) -> Tensor | None:
        name = f"{self.path}.weight_zero_point"
        if name not in self.parts:
            return None
        stored = read(name)
        if stored.element_size() == 1:
            return self._by_output(stored)
        return signed(unpack(stored.t(), self.bits), self.bits)[:, : self.shape[0]].t().contiguous()

    def _input_groups(self, read: Read) -> Tensor | None:
        name = f"{self.path}.weight_g_idx"
        belongs = read(name) if name in self.parts else None
        return None if belongs is None or bool((belongs == -1).all()) else belongs

    def _by_output(self, values: Tensor) -> Tensor:
        return values.reshape(-1, self.groups).expand(self.shape[0], self.groups).contiguous()


@dataclass(frozen=True, kw_only=True)
class CompressedLayout(Layout):
    """`schemes`: those of the configuration's groups, each once."""

    schemes: tuple[Scheme, ...]

    def matrices(self, headers: Headers) -> list[StoredMatrix]:
        found: list[StoredMatrix] = []
        paths: set[str] = set()
        for name in headers:
            path, _, own = name.rpartition(".")
            if own == "weight_packed":
                found.append(self._packed(headers, path))
            elif own == "weight" and headers.dtype(name) == "int8":
                found.append(self._plain(headers, path))
            elif own == "weight" and headers.dtype(name) in FLOAT8:
                found.append(self._float(headers, path))
            else:
                continue
            paths.add(path)
        for name in headers:
            path, _, own = name.rpartition(".")
            if own in ENDS and path not in paths:
                raise ExportError(
                    f"tensor {name} belongs to no matrix that the checkpoint holds; download it again"
                )
        return found

    def _packed(self, headers: Headers, path: str) -> StoredMatrix:
        main = f"{path}.weight_packed"
        out, words = matrix_shape(headers, main, ("int32",))
        scales = _scales(headers, path)
        fitting = {
            (scheme.bits, into)
            for scheme in self.schemes
            if scheme.form == PACKED and (into := _inputs(scheme, out, words, scales)) is not None
        }
        if len(fitting) > 1:
            raise UnsupportedModelError(
                f"{path}: more than one of the config_groups fits its tensors; {REMEDY}"
            )
        if not fitting:
            raise ExportError(
                f"{path}: weight_packed {[out, words]} and weight_scale {list(scales)} fit none of the config_groups; "
                "download it again"
            )
        ((bits, into),) = fitting
        return self._integers(headers, path, main, (out, into), bits, packed=True)

    def _plain(self, headers: Headers, path: str) -> StoredMatrix:
        main = f"{path}.weight"
        shape = matrix_shape(headers, main, ("int8",))
        scales = _scales(headers, path)
        if not any(s.form == PLAIN and _groups(s, shape[0], shape[1], scales) for s in self.schemes):
            raise ExportError(
                f"{path}: weight int8 {list(shape)} and weight_scale {list(scales)} fit none of the config_groups; "
                "download it again"
            )
        return self._integers(headers, path, main, shape, 8, packed=False)

    def _integers(
        self, headers: Headers, path: str, main: str, shape: tuple[int, int], bits: int, *, packed: bool
    ) -> StoredMatrix:
        out, into = shape
        scales = _scales(headers, path)
        groups = scales[1] if len(scales) == 2 else 1
        names = [main, f"{path}.weight_scale"]
        zero_point = f"{path}.weight_zero_point"
        if zero_point in headers:
            if headers.dtype(zero_point) == "int32":
                expect(headers, zero_point, (math.ceil(out * bits / 32), groups), ("int32",))
            else:
                expect(headers, zero_point, scales, ("int8",))
            names.append(zero_point)
        if f"{path}.weight_shape" in headers:
            names.append(expect(headers, f"{path}.weight_shape", (2,), ("int64", "int32")))
        reordered = f"{path}.weight_g_idx" in headers
        if reordered:
            names.append(expect(headers, f"{path}.weight_g_idx", (into,), ("int32", "int64")))
        return CompressedMatrix(
            path, shape, tuple(names), bits, groups,
            zero_points=zero_point in headers, order=reordered and groups > 1, packed=packed,
        )  # fmt: skip

    def _float(self, headers: Headers, path: str) -> StoredMatrix:
        blocks = {scheme.block for scheme in self.schemes if scheme.form == FLOAT}
        if len(blocks) != 1:
            raise UnsupportedModelError(
                f"{path}: weight is {headers.dtype(f'{path}.weight')}, and "
                f"{'several' if blocks else 'none'} of the config_groups are of floats of 8 bits; {REMEDY}"
            )
        return float8_matrix(headers, path, blocks.pop())


def _scales(headers: Headers, path: str) -> tuple[int, ...]:
    name = f"{path}.weight_scale"
    if name not in headers:
        raise ExportError(
            f"the checkpoint has no tensor {name!r}, which belongs to its quantized matrix; download it again"
        )
    if headers.dtype(name) not in FLOATS:
        raise UnsupportedModelError(f"tensor {name} is {headers.dtype(name)}, which is not read; {REMEDY}")
    return headers.shape(name)


def _groups(scheme: Scheme, out: int, into: int, scales: tuple[int, ...]) -> bool:
    """Whether scales of this shape are those of a matrix [out, into]."""
    if scheme.group is None:
        return scales in ((), (1,), (1, 1), (out,), (out, 1))
    return into % scheme.group == 0 and scales == (out, into // scheme.group)


def _inputs(scheme: Scheme, out: int, words: int, scales: tuple[int, ...]) -> int | None:
    """The inputs of a packed matrix, told by its shapes; None where these are not of the scheme."""
    if scheme.group is None:
        into = words * 32 // scheme.bits
    else:
        into = scheme.group * (scales[1] if len(scales) == 2 else 0)
    return (
        into if math.ceil(into * scheme.bits / 32) == words and _groups(scheme, out, into, scales) else None
    )


def read_compressed_tensors(settings: Settings) -> Layout:
    """Raises UnsupportedModelError for sparse and rotated weights, activations of integers, and other numbers than integers
    of 4 and 8 bits and floats of 8."""
    sparsity = settings.part("sparsity_config")
    if sparsity is not None and (kind := sparsity.text("format", "dense")) != "dense":
        raise settings.refuse(f"sparse weights ({kind!r:.80}) are not read")
    if settings.part("transform_config") is not None:
        raise settings.refuse("transformed weights (transform_config) are not read")
    groups = settings.parts("config_groups")
    schemes = tuple(s for group in groups if (s := _scheme(settings, group)) is not None)
    if not schemes:
        raise settings.refuse("its config_groups describe no weights")
    notices, beside = [], []
    if any(group.told(name) for group in groups for name in ("input_activations", "output_activations")):
        notices.append(ROUNDED)
        beside += ["input_scale", "output_scale"]
    if settings.told("kv_cache_scheme"):
        notices.append(CACHE)
        beside += ["k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "output_scale"]
    schemes = tuple(dict.fromkeys(schemes))
    return CompressedLayout(
        identity=f"compressed-tensors|{schemes}",
        notices=tuple(notices),
        beside=tuple(dict.fromkeys(beside)),
        schemes=schemes,
    )


def _scheme(settings: Settings, group: Settings) -> Scheme | None:
    weights = group.part("weights")
    if weights is None:
        return None
    form = group.text("format") or settings.text("format")
    kind, bits = weights.text("type", "int"), weights.whole("num_bits", 8) or 0
    for name in ("input_activations", "output_activations"):
        activations = group.part(name)
        if activations is not None and (activations.text("type", "int") != "float" or kind != "float"):
            raise activations.refuse(
                f"rounded activations ({name}) beside weights of {kind!r:.20} are not read"
            )
    if weights.told("dynamic"):
        raise weights.refuse("weights that are rounded when the model runs are not read")
    if form == EITHER:
        form = FLOAT if kind == "float" else PLAIN
    known = {(PACKED, "int", 4), (PACKED, "int", 8), (PLAIN, "int", 8), (FLOAT, "float", 8)}
    if (form, kind, bits) not in known:
        raise weights.refuse(
            f"the format {form!r:.80} of {kind!r:.20} is not read, only {PACKED} of 4 and 8, {PLAIN} of 8 and {FLOAT} of 8 bits"
        )
    strategy = weights.text("strategy") or ("group" if weights.told("group_size") else "tensor")
    group_size = weights.whole("group_size")
    if strategy == "group" and group_size == -1:
        strategy = "channel"
    if strategy not in ("group", "channel", "tensor", *(("block",) if kind == "float" else ())):
        raise weights.refuse(f"strategy={strategy!r:.80} is not read")
    if strategy == "group" and (group_size is None or group_size < 1):
        raise weights.refuse(f"group_size={group_size} is no group")
    block = weights.sizes("block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise weights.refuse("the strategy 'block' without a block_structure is not read")
    return Scheme(form, bits, group_size if strategy == "group" else None, block)
