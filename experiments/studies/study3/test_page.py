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

from experiments.studies.study3 import analysis, page, parts, positions, worth
from experiments.studies.study3.analysis import over_texts
from experiments.studies.study3.comparisons import Comparison, registered_table
from experiments.studies.study3.rows import COLUMNS, LATER_FIELDS, NEW, OLD
from experiments.studies.study3.spec import Variant, num_steps

WORTH = worth.Law(alpha=0.4, beta=0.8, attention=0.7, ffn=0.2, both=0.3)


def made_up_bits(variant: Variant) -> float:
    """Rotary heads are best at 16 and cost 0.01 (log2 h - 4)^2; with T5's bias at 8, a third.

    MLA costs 0.03 less than others of its cache, per-head Muon 0.01 less again; layers obey WORTH.
    """
    if variant.shared:
        terms = worth.basis(worth.design_of([variant]), WORTH)[0]
        return float(terms @ [1.2, 0.6, 0.2])
    if variant.budget:
        mla = 0.03 + 0.01 * (variant.optimizer == "muon_per_head")
        return 2.0 + 0.05 * math.log2(variant.cache) - mla * (variant.kind == "mla")
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
                    | {"validation_bits": bits, "parameters": 216_448, "version": 1}
                    | {"steps": num_steps(cell.variant), "replicate": replicate}
                    | {"learning_rate": 0.01, "first_rate": 0.0, "probe_bits": "0:8.0"}
                )
    return pd.DataFrame(rows, columns=COLUMNS)


def write_rows(table: pd.DataFrame, folder: Path) -> None:
    """The pinned rows and the later ones."""
    pinned = table["part"].isin(parts.PINNED_PARTS)
    table[pinned].drop(columns=[*LATER_FIELDS]).to_csv(folder / OLD, index=False)
    table[~pinned].to_csv(folder / NEW, index=False)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return made_up_table("A", "B", "C", "D", "E", "F")


def test_the_page_on_positions_states_the_effects_that_were_put_in(table):
    found = " ".join(page.make_page("A", table).split())
    cost = float(re.search(r"[-+][0-9.]+", found.split("**")[1]).group())
    assert cost == pytest.approx(0.040, abs=0.003)  # 0.01 x (4 - 2)^2 with rotary
    assert "16.0 with rotary" in found
    best = float(re.search(r"and ([0-9.]+) with T5", found).group(1))
    assert best == pytest.approx(8, abs=0.5)
    assert "with T5's bias is shown" in found
    low, high = map(float, re.search(r"gives A2 ([-+.0-9]+) to ([-+.0-9]+)\. ", found).groups())
    assert -1.5 < low < high < -0.5
    assert found.count("| log2 of the best h: T5 less rotary |") == 2  # other bytes, 7 units
    half = re.search(r"rotary less rotary on half a head: ([-+.0-9]+) \(", found).group(1)
    assert float(half) == pytest.approx(0, abs=0.004)
    assert "Holm's change no conclusion." in found
    a3 = found.split("| A3")[1].split("| A4")[0]
    assert "within the margin" in a3  # 0.003, by 16, which is 1 further from T5's best


def a1_row(text: str) -> list[str]:
    row = next(line for line in text.splitlines() if line.startswith("| A1"))
    return [cell.strip() for cell in row.split("|") if cell.strip()]


def test_a1_is_read_from_its_own_runs_and_the_first_seeds(table):
    """Amendment 2. The second seed of 4x16 with T5's bias is A3's, and moves A3 alone."""
    cells = parts.PARTS["A"][0].cells
    own = pd.concat([analysis.rows_of(table, cell.variant) for cell in cells])
    own = own[own["replicate"] == 0]
    found = page.make_page("A", own)
    assert "not run: 104 judged" in found
    row = a1_row(found)
    assert a1_row(page.make_page("A", table)) == row
    second = (table["part"] == "A") & (table["replicate"] == 1) & (table["head_dim"] == 16)
    moved = table.assign(heldout_bits=table["heldout_bits"] + 0.1 * second)
    assert a1_row(page.make_page("A", moved)) == row
    assert "Incomplete" in page.make_page("A", own.drop(own.index[-1]))


def test_a2_and_a3_are_read_when_their_own_groups_are_complete(table, tmp_path):
    """Amendment 7. Their p-values are multiplied by 3, and nothing is said or drawn of others."""

    def rows_with(name: str, count: int) -> list[list[str]]:
        cells = [cell for group in parts.PARTS["A"][:count] for cell in group.cells]
        cells += parts.PARTS["A"][3].cells[:2]  # with rotary positions on half a head
        keep = [table[(table["part"] == "A") & (table["replicate"] == replicate)
                      & (table["num_heads"] == cell.variant.num_heads)
                      & (table["positions"] == cell.variant.positions)]
                for cell in cells for replicate in cell.replicates]  # fmt: skip
        write_rows(pd.concat(keep).drop_duplicates(), tmp_path)
        [written, *figures] = page.write_pages(["A"], tmp_path)
        assert [one.name for one in figures] == (["positions.svg"] if count > 1 else [])
        lines = [line for line in written.read_text().splitlines() if line.startswith(f"| {name}")]
        return [[cell.strip() for cell in line.split("|")] for line in lines]

    [whole] = rows_with("A2", 4)
    assert rows_with("A2", 1) == []
    [early] = rows_with("A2", 2)
    assert early[:5] == whole[:5]
    found = analysis.width_shift(*(positions.by_width(table[table["replicate"] == 0], p)
                                   for p in ("rotary", "t5")))  # fmt: skip
    assert early[5] == ("< 0.001" if 3 * found.p < 0.001 else f"{3 * found.p:.3f}")
    assert rows_with("A3", 2) == []
    assert len(rows_with("A3", 3)) == 1
    assert "half a head" not in (tmp_path / "positions.md").read_text()
    assert "half a head" not in (tmp_path / "positions.svg").read_text()


NOISE = np.array([1, -1, 1, -1, 1, -1, 1, -1])


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        (0.02 + 0.002 * NOISE, "rotated is shown.**"),
        (0.004 + 0.001 * NOISE, "rotated is shown; the difference is within 0.007.**"),
        (-0.02 + 0.002 * NOISE, "rotated is not shown: they cost more.**"),
        (0.002 * NOISE, "rotated is not shown; both costs are equivalent within 0.007.**"),
        (0.04 * NOISE, "is not shown, nor that both costs are equivalent within 0.007.**"),
        (0.02 + 0.002 * NOISE[:7], "7 texts"),
    ],
)
def test_a4_in_words(differences, expected):
    test = Comparison("A4", "", over_texts(differences))
    assert expected in " ".join(positions.half_said(test, 2 * test.found.p).split())


def test_a_conclusion_that_holm_changes_is_named():
    """Amendment 7."""
    found = [over_texts(d) for d in (0.03 + 0.03 * NOISE, 0.001 * NOISE, 0.03 + 0.001 * NOISE)]
    tests = [Comparison(name, "", one) for name, one in zip(("A2", "A3", "A4"), found, strict=True)]
    said = positions.correction(tests, positions.corrected(tests))
    assert said.endswith("Holm's change A2 from inconclusive to different.")


def test_a_diverged_run_of_a4_takes_its_text(table):
    half = (table["positions"] == "half") & (table["length"] == 128) & (table["num_heads"] == 16)
    gone = half & (table["text"] == "web")
    assert gone.sum() == 1
    found = page.make_page("A", table.assign(status=np.where(gone, "diverged", "complete")))
    assert "7 texts. That they cost less" in " ".join(found.split())


def test_a_rate_at_the_end_of_its_grid_is_named(table):
    variant = Variant(16, 4, positions="half")
    tried = [
        dataclasses.asdict(variant) | {"role": "tuning", "learning_rate": rate, "replicate": 0}
        for rate in (0.005, 0.01, 0.02)
    ]
    for bits, expected in (((2.0, 1.9, 2.1), 0), ((2.0, 1.9, 1.8), 1)):
        tuned = pd.DataFrame(tried).assign(validation_bits=bits)
        found = page.make_page("A", pd.concat([table, tuned]))
        assert found.count("0.01, end of its grid") == expected


def test_part_d_with_few_events_is_not_tested(table, tmp_path):
    never = (table["part"] == "D") & (table["text"] == "python")
    few = table.assign(copy_step=table["copy_step"].mask(never, -1))
    write_rows(few[few["part"] == "D"], tmp_path)
    written = page.write_pages(["D"], tmp_path)
    assert [one.name for one in written] == ["copying.md", "copying.svg"]
    found = " ".join(written[0].read_text().split())
    assert "D1 is not tested: 16 of 80 runs copied" in found
    assert "p =" not in found
    assert found.endswith("D1 not tested, E1 not tested, F1 not tested.")


def test_holm_over_the_primary_tests_counts_those_not_tested_as_1(table):
    found = " ".join(page.primaries(table[table["part"].isin(["A", "B", "C", "D"])]).split())
    assert "A1 < 0.001, B1 < 0.001, C1 " in found
    assert found.endswith("D1 < 0.001, E1 not tested, F1 not tested.")


def test_c1_and_c2_are_read_without_the_scales_of_scores(table):
    """Amendment 4. The page has no row of runs that no one has made."""
    early = [*parts.PARTS["A"][:1], *parts.PARTS["C"][:2]]
    cells = [cell for group in early for cell in group.cells]
    own = pd.concat([analysis.rows_of(table, cell.variant) for cell in cells])
    found, whole = page.make_page("C", own), page.make_page("C", table)
    assert "scores are not run: 16 judged runs" in found
    tests = [line for line in whole.splitlines() if line.startswith(("| C", "| reset"))]
    assert len(tests) == 4
    for line in tests:
        cells_of = [cell.strip() for cell in line.split("|")]
        assert cells_of in [[c.strip() for c in row.split("|")] for row in found.splitlines()]
    times = {
        cells[2]: cells[-2]
        for cells in ([c.strip() for c in line.split("|")] for line in found.splitlines())
        if cells[1:2] == ["4x64"]
    }
    assert times == {"scratch": "104", "reset": "", "converted": ""}  # these share a first half
    assert "inverse" not in found
    assert "inverse" in whole
    assert "Incomplete" in page.make_page("C", own.drop(own.index[-1]))


@pytest.mark.parametrize("part", list(page.PAGES))
def test_every_page_is_written_from_complete_rows_and_from_no_fewer(part, table):
    assert "Incomplete" not in page.make_page(part, table)
    judged = table[table["part"] == part]
    fewer = table.drop(judged.index[-1])
    found = page.make_page(part, fewer)
    if part in page.FIRST_LOOKS:  # whose first groups are complete
        left = {"A": "A4 is not run: 1 judged", "C": "scores are not run: 1 judged"}
        assert left[part] in found
    else:
        assert "Incomplete: 1 judged runs" in found
        assert "p =" not in found


def test_per_head_muon_is_judged_by_its_own_cells(table):
    lines = page.make_page("B", table).splitlines()
    rows = [line for line in lines if line.startswith("| B1") or "16x4 less 4x16: per head" in line]
    assert "-0.02" in rows[0]  # 16x4
    assert "different" in rows[0]
    assert "different" not in rows[1]  # 8x8: no effect was put in
    assert "-0.02" in rows[2]  # of what heads of 4 cost
    assert "different" in rows[2]


def test_corrected_p_values_decide():
    """Of the difference, and of the equivalence."""
    noise = np.array([1, -1, 1, -1, 1, -1, 1, -1])
    found, equal = over_texts(0.03 + 0.03 * noise), over_texts(0.006 * noise)
    assert 0.02 < found.p < 0.05
    test, other = Comparison("X", "x", found), Comparison("Y", "y", equal)
    for corrected, expected in (({}, "different"), ({"X": 2 * found.p}, "inconclusive")):
        assert f" {expected} " in registered_table([test], corrected)
    assert " equivalent " in registered_table([other], {}, equal="Y")
    assert " inconclusive " in registered_table([other], {"Y": 0.06}, equal="Y")


def test_the_page_on_caches_states_the_effects_that_were_put_in(table):
    """MLA is that with per-head Muon, which has the lower validation bits."""
    found = page.make_page("E", table)
    rows = [line for line in found.splitlines() if line.startswith(("| E", "| 1/4"))]
    means = [float(re.search(r"([-+][0-9.]+) \(", row).group(1)) for row in rows]
    assert means == pytest.approx([-0.04, 0, 0, 0, 0.1], abs=0.004)
    assert "per-head Muon less grouped-query" in rows[0]
    assert "different" in rows[0]
    assert "1,610" in found.split("## Equal FLOPs")[1]  # steps of MLA


def test_the_page_on_shared_layers_states_the_effects_that_were_put_in(table):
    found = page.make_page("F", table)
    worths = [float(x) for x in re.findall(r"(?:worth|FFN)\s+([0-9.]+)", found.split("**")[1])]
    assert worths == pytest.approx([4**0.7, 4**0.2], rel=0.1)
    assert "A shared attention keeps more" in found


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (-0.02, 0.0, "of no further use"),
        (-0.02, -0.02, "Width helps"),
        (0.0, 0.02, "undoes"),
        (0.02, 0.0, "no trouble of training"),
        (-0.02, 0.02, "no reading"),
        (0.0, 0.0, "Exploratory"),
    ],
)
def test_the_registered_reading_of_the_conversion(first, second, expected):
    noise = 0.002 * np.array([1, -1, 1, -1, 1, -1, 1, -1])
    assert expected in page.reading(over_texts(first + noise), over_texts(second + noise))


def test_wide_intervals_have_no_reading():
    noise = 0.04 * np.array([1, -1, 1, -1, 1, -1, 1, -1])
    assert page.reading(over_texts(noise), over_texts(noise)) == "Inconclusive."


def test_the_figure_of_a_page_is_written_beside_it_when_the_part_is_complete(table, tmp_path):
    write_rows(table, tmp_path)
    written = page.write_pages(["A", "B", "D", "E", "F"], tmp_path)
    figures = {one.name for one in written if one.suffix == ".svg"}
    assert figures == {"positions.svg", "copying.svg", "cache.svg", "worth.svg"}
    for one in written:
        for name in re.findall(r"\]\((\w+\.svg)\)", one.read_text()):
            assert (tmp_path / name).read_text().startswith("<svg")


def test_the_recomputation_with_numpy_alone_agrees_with_the_page(table, tmp_path):
    write_rows(table, tmp_path)
    script = Path(page.__file__).with_name("_recompute.py")
    words = [sys.executable, script, tmp_path / OLD, tmp_path / NEW]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    pages = {part: page.make_page(part, table).splitlines() for part in "ABCE"}
    lines = [line for line in said.splitlines() if not line.startswith("E1 muon:")]
    assert len(lines) == 12
    for line in lines:
        name, numbers = line.replace("E1 muon_per_head", "E1").split(": ")
        mean, low, high = (float(x) for x in re.findall(r"[-+][0-9.]+", numbers))
        row = next(
            line for line in pages[name[0]]
            if line.startswith(f"| {name.replace('B1 ', 'B1, ')} ")
        )  # fmt: skip
        printed = re.search(r"([-+][0-9.]+) \(([-+][0-9.]+) to ([-+][0-9.]+)\)", row)
        assert [*map(float, printed.groups())] == pytest.approx([mean, low, high], abs=6e-4)
