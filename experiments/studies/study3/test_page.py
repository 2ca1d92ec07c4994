"""The pages on made-up rows of complete parts, whose effects are known."""

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.studies.study3 import page, parts
from experiments.studies.study3.analysis import over_texts
from experiments.studies.study3.spec import Variant


def made_up_bits(variant: Variant) -> float:
    """Rotary heads are best at 16 and cost 0.01 (log2 h - 4)^2; with T5's bias at 8, a third."""
    best, curve = (3, 0.003) if variant.positions == "t5" else (4, 0.01)
    gain = 0.02 * (variant.optimizer == "muon_per_head" and variant.num_heads == 16)
    return 2.0 + curve * (math.log2(variant.head_dim) - best) ** 2 - gain


def made_up_table(*names: str) -> pd.DataFrame:
    rng, rows = np.random.default_rng(0), []
    cells = [(p, cell) for p in names for group in parts.PARTS[p] for cell in group.cells]
    for part, cell in cells:
        for text in cell.texts:
            for replicate in cell.replicates:
                bits = made_up_bits(cell.variant) + 0.002 * rng.standard_normal()
                wide = cell.variant.head_dim in (16, 32)
                rows.append(
                    dataclasses.asdict(cell.variant)
                    | {"part": part, "role": "judged", "status": "complete", "text": text}
                    | {"seed": replicate, "learning_rate": 0.01, "flops_per_token": 557_056}
                    | {"heldout_bits": bits, "heldout_other_bits": bits, "heldout_bytes": 100}
                    | {"heldout_copy_bits": bits - wide, "heldout_copy_bytes": 25, "steps": 1920}
                    | {"copy_step": 960 if wide else -1, "cpu_seconds": 200.0}
                )
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return made_up_table("A", "B", "C", "D")


def test_the_page_on_positions_states_the_effects_that_were_put_in(table):
    found = page.make_page("A", table)
    assert "+0.040 (" in found.split("**")[1]  # 0.01 x (4 - 2)^2 with rotary
    assert "16.0 with rotary" in found
    best = float(re.search(r"and ([0-9.]+) with T5", found).group(1))
    assert best == pytest.approx(8, abs=0.3)
    a3 = next(line for line in found.splitlines() if line.startswith("| A3"))
    assert "within the margin" in a3  # 0.003, by 16, which is 1 further from T5's best


@pytest.mark.parametrize("part", list(page.PAGES))
def test_every_page_is_written_from_complete_rows_and_from_no_fewer(part, table):
    assert "Incomplete" not in page.make_page(part, table)
    judged = table[table["part"] == part]
    fewer = table.drop(judged.index[-1])
    found = page.make_page(part, fewer)
    assert "Incomplete: 1 judged runs" in found
    assert "p =" not in found


def test_per_head_muon_is_judged_by_its_own_cells(table):
    rows = [line for line in page.make_page("B", table).splitlines() if line.startswith("| B1")]
    assert "-0.02" in rows[0]  # 16x4
    assert "different" in rows[0]
    assert "different" not in rows[1]  # 8x8: no effect was put in


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (-0.02, 0.0, "of no further use"),
        (-0.02, -0.02, "Width helps"),
        (0.0, 0.02, "undoes"),
        (0.02, 0.0, "no trouble of training"),
        (-0.02, 0.02, "inconclusive"),
    ],
)
def test_the_registered_reading_of_the_conversion(first, second, expected):
    noise = 0.002 * np.array([1, -1, 1, -1, 1, -1, 1, -1])
    assert expected in page.reading(over_texts(first + noise), over_texts(second + noise))


def test_the_figure_of_a_page_is_written_beside_it_when_the_part_is_complete(table, tmp_path):
    table.to_csv(tmp_path / "runs.csv", index=False)
    written = page.write_pages(["A", "B", "D"], tmp_path / "runs.csv", tmp_path)
    figures = {one.name for one in written if one.suffix == ".svg"}
    assert figures == {"positions.svg", "copying.svg"}
    for one in written:
        for name in re.findall(r"\]\((\w+\.svg)\)", one.read_text()):
            assert (tmp_path / name).read_text().startswith("<svg")


def test_the_recomputation_with_numpy_alone_agrees_with_the_page(table, tmp_path):
    table.to_csv(tmp_path / "runs.csv", index=False)
    script = Path(page.__file__).with_name("_recompute.py")
    said = subprocess.run(
        [sys.executable, script, tmp_path / "runs.csv"], capture_output=True, text=True, check=True
    ).stdout
    for line in said.splitlines()[:-1]:
        name, numbers = line.split(": ")
        page_of = "A" if name[0] == "A" else "B" if name[0] == "B" else "C"
        mean, low, high = (float(x) for x in re.findall(r"[-+][0-9.]+", numbers))
        row = next(
            line for line in page.make_page(page_of, table).splitlines()
            if line.startswith(f"| {name.replace('B1 ', 'B1, ')} ")
        )  # fmt: skip
        printed = re.search(r"([-+][0-9.]+) \(([-+][0-9.]+) to ([-+][0-9.]+)\)", row)
        assert [*map(float, printed.groups())] == pytest.approx([mean, low, high], abs=6e-4)
