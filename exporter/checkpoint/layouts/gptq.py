"""GPTQ as AutoGPTQ, GPTQModel and AutoRound write it.

`qweight` int32 [in * bits / 32, out], eight or four inputs to a word, the lowest bits first; `qzeros` int32
[groups, out * bits / 32], packed along outputs; `scales` [groups, out]; `g_idx` [in], the group of every input, which may be
missing. A weight is (q − z) * scale. In the first form of the checkpoint (`checkpoint_format` gptq) zero points are stored less
one, in the second (gptq_v2) as they are. Read in GPTQModel, gptqmodel/nn_modules/qlinear/__init__.py and utils/model.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ....runtime.common.errors import ExportError, UnsupportedModelError
from .bits import signed, unpack
from .layout import Layout
from .matrix import FLOATS, Headers, IntegerMatrix, Read, StoredMatrix, expect, matrix_shape, modules_with
from .settings import REMEDY, Settings

BITS = (4, 8)
FORMS = ("gptq", "gptq_v2")
GROUP = 128
FLOAT_BITS = 16
"""From here on a module's own entry says that it is not quantized."""


@dataclass(frozen=True)
class GptqMatrix(IntegerMatrix):
    """`less_one`: zero points are stored less one."""

    less_one: bool

    def _codes(self, read: Read) -> Tensor:
        return signed(unpack(read(f"{self.path}.qweight").t(), self.bits), self.bits)

    def _group_scales(self, read: Read) -> Tensor:
        return read(f"{self.path}.scales").t()

    def _group_zero_points(self, read: Read) -> Tensor:
        codes = unpack(read(f"{self.path}.qzeros"), self.bits).t()
        if not self.less_one:
            return signed(codes, self.bits)
        if bool((codes == 2**self.bits - 1).any()):
            raise UnsupportedModelError(
                f"{self.path}: a zero point of gptq's first form is {2**self.bits - 1}, which readers take for "
                f"{2**self.bits}, for 0 or for a carry; save it as gptq_v2, or {REMEDY}"
            )
        return signed(codes + 1, self.bits)

    def _input_groups(self, read: Read) -> Tensor | None:
        name = f"{self.path}.g_idx"
        return read(name) if name in self.parts else None


@dataclass(frozen=True, kw_only=True)
class GptqLayout(Layout):
    """`bits` and `groups`: what a matrix may have; a group of −1 is all inputs. `symmetric` and `reordered` are what the
    configuration says of matrices that cannot be looked at."""

    bits: tuple[int, ...]
    groups: tuple[int, ...]
    less_one: bool
    symmetric: bool
    reordered: bool

    def matrices(self, headers: Headers) -> list[StoredMatrix]:
        return [
            self._matrix(headers, path)
            for path in modules_with(headers, "qweight", ("qzeros", "scales", "g_idx"))
        ]

    def _matrix(self, headers: Headers, path: str) -> StoredMatrix:
        words, out = matrix_shape(headers, f"{path}.qweight", ("int32",))
        groups, _ = matrix_shape(headers, f"{path}.scales", FLOATS)
        _, packed = matrix_shape(headers, f"{path}.qzeros", ("int32",))
        bits = 32 * packed // out
        if 32 * packed != out * bits or bits not in self.bits:
            raise ExportError(
                f"{path}: qzeros {list(headers.shape(f'{path}.qzeros'))} beside {out} outputs are not of "
                f"{' or '.join(map(str, self.bits))} bits; download it again"
            )
        into = words * 32 // bits
        check_group(path, into, groups, self.groups)
        names = [
            f"{path}.qweight",
            expect(headers, f"{path}.scales", (groups, out), FLOATS),
            expect(headers, f"{path}.qzeros", (groups, packed), ("int32",)),
        ]
        if f"{path}.g_idx" in headers:
            names.append(expect(headers, f"{path}.g_idx", (into,), ("int32", "int64")))
        return GptqMatrix(
            path, (out, into), tuple(names), bits, groups,
            zero_points=not self.symmetric,
            order=self.reordered and groups > 1 and len(names) == 4,
            less_one=self.less_one,
        )  # fmt: skip


def check_group(path: str, into: int, groups: int, sizes: tuple[int, ...]) -> None:
    """ExportError where `groups` of `into` inputs are none of `sizes` inputs each (−1: of all)."""
    told = [into if size == -1 else size for size in sizes]
    if any(into == size * groups for size in told):
        return
    if all(into % size for size in told):
        raise UnsupportedModelError(
            f"{path}: groups of {' or '.join(map(str, told))} inputs do not divide its {into}; {REMEDY}"
        )
    raise ExportError(
        f"{path}: {groups} groups of scales are not {into} inputs in groups of {' or '.join(map(str, told))}; download it again"
    )


def allowed(settings: Settings, overrides: list[Settings]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(bits, group sizes) that matrices may have: the configuration's own first, then those of single modules."""
    own = settings.whole("bits")
    if own not in BITS:
        raise settings.refuse(f"only {' and '.join(map(str, BITS))} bits are read")
    bits = [own, *(b for each in overrides if (b := each.whole("bits", own)) is not None and b < FLOAT_BITS)]
    if unread := [b for b in bits if b not in BITS]:
        raise settings.refuse(
            f"some matrices are of {unread[0]} bits, and only {' and '.join(map(str, BITS))} are read"
        )
    sizes = [size for each in (settings, *overrides) if (size := each.whole("group_size")) is not None] or [
        GROUP
    ]
    for size in sizes:
        if size != -1 and size < 1:
            raise settings.refuse(f"group_size={size} is no group")
    return tuple(dict.fromkeys(bits)), tuple(dict.fromkeys(sizes))


def read_gptq(settings: Settings) -> Layout:
    """Raises UnsupportedModelError for another form than GPTQ's own two."""
    form = settings.text("checkpoint_format") or settings.text("format") or FORMS[0]
    if settings.told("is_marlin_format"):
        form = "marlin"
    if form not in FORMS:
        raise settings.refuse(f"the form {form!r:.80} is not read, only {' and '.join(FORMS)}")
    words = settings.text("pack_dtype", "int32")
    if words != "int32":
        raise settings.refuse(f"pack_dtype={words!r:.80} is not read, only int32")
    overrides = settings.parts("dynamic")
    bits, groups = allowed(settings, overrides)
    return gptq_layout(
        form == FORMS[0],
        bits,
        groups,
        settings.flag("sym", True) and all(each.flag("sym", True) for each in overrides),
        settings.flag("desc_act", False) or any(each.flag("desc_act", False) for each in overrides),
    )


def gptq_layout(
    less_one: bool, bits: tuple[int, ...], groups: tuple[int, ...], symmetric: bool, reordered: bool = False
) -> GptqLayout:
    """The layout with these properties."""
    return GptqLayout(
        identity="gptq" if less_one else "gptq_v2",
        bits=bits,
        groups=groups,
        less_one=less_one,
        symmetric=symmetric,
        reordered=reordered,
    )
