"""The tables of all commands on terminals of 60 and 80 columns: no figure is cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.cli import main
from vlmexport.runtime.commands.plans import plans_tables
from vlmexport.runtime.commands.table import Table

ROOT = Path(__file__).parents[3]
WIDTHS = (60, 80)


def check(table: Table, width: float, lines: Iterable[str]) -> None:
    """Every figure and name of the columns that are shown is there as it is, and no line is too long."""
    lines = list(lines)
    assert all(len(line) <= width for line in lines), lines
    shown = [" ".join(line.split()) for line in lines]
    for column in table.kept(width)[0] or table.columns:
        for cell in column.cells if column.whole else []:
            wanted = " ".join(cell.split())
            if not wanted:
                continue
            assert any(re.search(rf"(?<!\S){re.escape(wanted)}(?!\S)", line) for line in shown), (
                wanted,
                lines,
            )
    digits = re.compile(r"\d…")
    assert not any(digits.search(line) for line in lines)


@pytest.mark.parametrize("width", [60, pytest.param(80, marks=pytest.mark.slow)])
def test_tables_of_commands_on_a_bundle(
    tiny_bundle: Callable,
    width: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("COLUMNS", str(width)), ("FORCE_COLOR", "1"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    seen: list[tuple[Table, float, list[str]]] = []
    real = Table.lines

    def lines(self: Table, room: float) -> Iterator[tuple[str, bool]]:
        found = list(real(self, room))
        seen.append((self, room, [line for line, _ in found]))
        yield from found

    monkeypatch.setattr(Table, "lines", lines)
    bundle = str(tiny_bundle("llama").path)
    data = tmp_path / "requests.jsonl"
    data.write_text('{"prompt": "the red cup"}\n{"prompt": "a robot"}\n', "utf-8")
    for line, tables in (
        (["inspect", bundle], 3),
        (["inspect", bundle, "--shapes"], 3),
        (["fit", bundle], 1),
        (["fit", "llava-1.6-vicuna-13b", "--target", "h200"], 1),
        (["profile", bundle, "--widths", "1,2"], 2),
        (["bench", bundle, "--max-new-tokens", "6", "--repeats", "1"], 1),
        (
            [
                "tune",
                bundle,
                "--data",
                str(data),
                "--dry-run",
                "--max-new-tokens",
                "6",
                "--repeats",
                "1",
            ],
            1,
        ),
        (["models"], 1),
    ):
        seen.clear()
        assert main(line) == 0, capsys.readouterr().err
        assert len(seen) == tables, line
        for table, room, shown in seen:
            assert room == width
            check(table, width, shown)


def long_rows(manifest: Any) -> list[Any]:
    """The tables of the exporter and of `eval` with long names and large figures."""
    from vlmexport.calibration.evaluation.acceptance import Acceptance
    from vlmexport.calibration.evaluation.report import drafts_table
    from vlmexport.exporter.cli.tables import dry_run_tables, parity_table, verify_tables
    from vlmexport.exporter.parity.losslessness import LosslessRow
    from vlmexport.exporter.parity.verify import VerifyReport
    from vlmexport.exporter.pipeline.dry_run import DryRun, DryRunGraph, DryRunMemory

    plan = {
        "graph": "imitation.12", "target": "sm120", "backend": "tensorrt-rtx", "version": "1.7.1.116", "precision": "bfloat16",
        "lowering": "portable", "bytes": 123_456_789_012, "weight_bytes": 123_456_789_012, "overhead_bytes": 999_949_999,
        "fused_attention": False, "layers": {"KV_CACHE_UPDATE": 160}, "executed": False,
    }  # fmt: skip
    row = {
        "graph": "cross_kv.imitation.12", "reference": "transformers", "values": 123_456_789, "torch_difference": 3.456e-12,
        "max_abs_difference": 3.456e-12, "relative_difference": 1.234e-10, "limit": 1.2e-10,
    }  # fmt: skip
    generation = row | {"graph": "generation", "values": 24, "limit": 0.0}
    found = DryRun(
        model="M", family="llama", architecture="LlamaForCausalLM", num_layers=40, cuts=[0, 13, 40], drafts=["medusa"] * 9,
        draft_precisions={}, speculative=True, precision="float32", parameters=13_350_839_296, draft_parameters=123_456_789,
        graphs=[
            DryRunGraph(name="segment.0", role="segment", layers=[0, 13], nodes=12345, parameters=13_350_839_296,
                        weight_bytes=123_456_789_012, bytes=1)
        ],
        weight_bytes=1, linked_bytes=2, bundle_bytes=123_456_789_012, kv_bytes_per_token=123_456, kv_bytes_per_image=0,
        kv_bytes_per_sequence=1, kv_bytes=1, cross_kv_bytes_per_row=0, parity="whole", seconds=12345.0, notices=[],
        peak_memory=DryRunMemory(build=123_456_789_012, run=123_456_789_012, weights=1, cache=123_456_789),
    )  # fmt: skip
    report = VerifyReport("bundle", "model", parity=[row, generation])
    report.lossless = [
        LosslessRow(draft="always-wrong (early-exit@12)", requests=12345, tokens=123_456, different=0, near_ties=[],
                    alpha=0.1234, tau=12.34)
    ]  # fmt: skip
    measured = Acceptance(5, 1, 1, 1, 1, 1, 0.87654, 0.76543, [], [], bound=12.34, speedup=2.34)
    return [
        *dry_run_tables(found), parity_table([row, generation]), *verify_tables(report), *plans_tables([plan]),
        drafts_table({"runs/2026-11-27/smollm2-135m/medusa-of-five-heads/best": measured}),
        *plans_tables(manifest.plans),
    ]  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_with_long_names_and_large_figures(tiny_bundle: Callable, width: int) -> None:
    tables = [t for t in long_rows(Bundle.open(tiny_bundle("llama").path).manifest) if isinstance(t, Table)]
    assert len(tables) == 7
    for table in tables:
        check(table, width, (line for line, _ in table.lines(width)))


def test_no_command_makes_a_table_of_its_own() -> None:
    makers = [
        path.relative_to(ROOT).as_posix()
        for room in ("runtime", "exporter", "calibration")
        for path in (ROOT / room).rglob("*.py")
        if "rich.table" in path.read_text("utf-8")
    ]
    assert makers == []
