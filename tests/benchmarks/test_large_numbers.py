"""Seconds and memory of a round's own work at ten times the size each: what is not linear shows as a ratio above ten.

No engine is started. `EAGLE3_BENCHMARK_LINES` names other sizes, as `10000,100000`. Of so many lines every tenth is
chosen as a prompt, and answered.
"""

import os
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.large import STEPS, Measured, make, measure
from rich.console import Console
from rich.table import Table

LINES = tuple(int(size) for size in os.environ.get("EAGLE3_BENCHMARK_LINES", "10000,100000,1000000").split(","))
SHORTEST = 2.0
"""What takes less is mostly what any size takes, CPU seconds."""


@pytest.mark.timeout(3600)
def test_a_round_of_ten_times_the_size_takes_ten_times_as_long(tmp_path: Path) -> None:
    found: dict[str, list[Measured]] = {step: [] for step in (*STEPS, "read Parquet")}
    for lines in LINES:
        folder = tmp_path / str(lines)
        make(folder, lines, lines // 10, answers=True)
        for step in STEPS:
            found[step].append(measure(step, folder))
        parquet = tmp_path / f"{lines}-parquet"
        make(parquet, lines, lines // 10, kind="parquet")
        found["read Parquet"].append(measure("read", parquet))
        assert found["read Parquet"][-1].found == found["read"][-1].found
    table = Table("step", *(f"{lines:,} lines, {lines // 10:,} prompts" for lines in LINES), "ratios of CPU seconds")
    for step, sizes in found.items():
        ratios = " ".join(f"{more.cpu / less.cpu:.1f}" for less, more in pairwise(sizes))
        table.add_row(
            step, *(f"{item.seconds:.1f} s, {item.cpu:.1f} s CPU, {item.mb:.0f} MB" for item in sizes), ratios
        )
    Console(width=180).print(table)
    for step, sizes in found.items():
        for (less, more), (few, many) in zip(pairwise(sizes), pairwise(LINES), strict=True):
            assert more.cpu < 1.3 * many / few * max(less.cpu, SHORTEST * few / many), step
