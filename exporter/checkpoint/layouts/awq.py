"""AWQ's GEMM layout, as AutoAWQ and AutoRound write it; always of 4 bits.

`qweight` int32 [in, out / 8] and `qzeros` int32 [groups, out / 8], eight outputs to a word in an order of their own;
`scales` [groups, out]. A weight is (q − z) * scale. Read in AutoAWQ, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .bits import signed, unpack_awq
from .gptq import GROUP, check_group
from .layout import Layout
from .matrix import FLOATS, Headers, IntegerMatrix, Read, StoredMatrix, expect, matrix_shape, modules_with
from .settings import Settings

BITS = 4


@dataclass(frozen=True)
class AwqMatrix(IntegerMatrix):
    """A matrix of AWQ."""

    def _codes(self, read: Read) -> Tensor:
        return signed(unpack_awq(read(f"{self.path}.qweight")), BITS).t().contiguous()

    def _group_scales(self, read: Read) -> Tensor:
        return read(f"{self.path}.scales").t()

    def _group_zero_points(self, read: Read) -> Tensor:
        return signed(unpack_awq(read(f"{self.path}.qzeros")), BITS).t().contiguous()


@dataclass(frozen=True, kw_only=True)
class AwqLayout(Layout):
    """`groups`: sizes of a group that a matrix may have; −1 is all inputs."""

    groups: tuple[int, ...]

    def matrices(self, headers: Headers) -> list[StoredMatrix]:
        return [
            self._matrix(headers, path) for path in modules_with(headers, "qweight", ("qzeros", "scales"))
        ]

    def _matrix(self, headers: Headers, path: str) -> StoredMatrix:
        into, words = matrix_shape(headers, f"{path}.qweight", ("int32",))
        out = words * 32 // BITS
        groups, _ = matrix_shape(headers, f"{path}.scales", FLOATS)
        check_group(path, into, groups, self.groups)
        names = (
            f"{path}.qweight",
            expect(headers, f"{path}.scales", (groups, out), FLOATS),
            expect(headers, f"{path}.qzeros", (groups, words), ("int32",)),
        )
        return AwqMatrix(path, (out, into), names, BITS, groups, zero_points=True, order=False)


def read_awq(settings: Settings) -> Layout:
    """Raises UnsupportedModelError for other bits and for the layouts of single kernels."""
    bits = settings.whole("bits", settings.whole("w_bit", BITS))
    if bits != BITS:
        raise settings.refuse("only 4 bits are read")
    form = settings.text("version") or settings.text("checkpoint_format") or settings.text("format") or "gemm"
    if form != "gemm" or settings.text("backend") == "llm-awq":
        raise settings.refuse(
            f"the version {'llm-awq' if form == 'gemm' else form!r:.80} is not read, only gemm"
        )
    group = settings.whole("group_size", settings.whole("q_group_size", GROUP)) or -1
    if group != -1 and group < 1:
        raise settings.refuse(f"group_size={group} is no group")
    return AwqLayout(identity="awq", groups=(group,))
