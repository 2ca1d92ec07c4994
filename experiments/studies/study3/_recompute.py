# Recomputes the registered differences of study 3 with numpy alone: of runs.csv beside it, or of
# the files that are named.
import csv
import sys

import numpy as np

T975 = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469, 7: 2.3646}
"""Degrees of freedom -> the 97.5 % quantile of Student's t."""
LATER = dict(kind="standard", cache="1", budget="", shared="")
ROWS: list[dict[str, str]] = []
for path in sys.argv[1:] or ["runs.csv"]:
    with open(path) as file:
        ROWS += [LATER | row for row in csv.DictReader(file) if row["role"] == "judged"]
BASE = LATER | dict(width="64", length="128", positions="rotary", bytes_per_parameter="20.0")
BASE |= dict(optimizer="muon", start="scratch", scale="root")


def scores(heads: str, seeds: str = "0", **other: str) -> dict[str, float]:
    """Text -> held-out bits of heads "Nxh", the mean over seeds, whose digits `seeds` has."""
    num_heads, head_dim = heads.split("x")
    wanted = (BASE | other | dict(num_heads=num_heads, head_dim=head_dim)).items()
    found: dict[str, list[float]] = {}
    for row in ROWS:
        if wanted <= row.items() and row["replicate"] in seeds:
            bits = row["heldout_bits"] if row["status"] == "complete" else "nan"
            found.setdefault(row["text"], []).append(float(bits))
    return {text: float(np.mean(bits)) for text, bits in found.items() if not np.isnan(bits).any()}


def estimate(name: str, *signed: tuple[int, dict[str, float]]) -> None:
    """Prints the mean over texts of the sum of sign x bits, with its 95 % interval."""
    texts = [text for text in signed[0][1] if all(text in bits for _, bits in signed)]
    d = np.array([sum(sign * bits[text] for sign, bits in signed) for text in texts])
    if len(d) < 2:
        return print(f"{name}: not run")
    half = T975[len(d) - 1] * d.std(ddof=1) / len(d) ** 0.5
    low, high = d.mean() - half, d.mean() + half
    print(f"{name}: {d.mean():+.4f} ({low:+.4f} to {high:+.4f}), {len(d)} texts")


def best(bits: dict[int, dict[str, float]], texts: list[str]) -> float:
    """log2 of the best width: the minimum of a parabola, or an end."""
    u, means = np.log2([*bits]), [np.mean([one[t] for t in texts]) for one in bits.values()]
    curved, slope, _ = np.polyfit(u, means, 2)
    u_min = -slope / (2 * curved) if curved > 0 else u[0] if means[0] <= means[-1] else u[-1]
    return float(np.clip(u_min, u[0], u[-1]))


def best_widths(first: dict[str, str], second: dict[str, str]) -> dict[str, float]:
    """Text -> numbers whose mean is the difference of `best`, with the jackknife's error."""
    heads = {4: "16x4", 8: "8x8", 16: "4x16", 32: "2x32", 64: "1x64"}
    bits = [{h: scores(name, **one) for h, name in heads.items()} for one in (first, second)]
    texts = [t for t in bits[0][4] if all(t in one for widths in bits for one in widths.values())]
    shift = lambda used: best(bits[1], used) - best(bits[0], used)
    without = {text: shift([t for t in texts if t != text]) for text in texts}
    middle = sum(without.values()) / max(len(texts), 1)
    return {t: shift(texts) + (len(texts) - 1) * (middle - without[t]) for t in texts}


t5, half, reset = dict(positions="t5"), dict(positions="half"), dict(start="reset")
rotary_cost = (1, scores("16x4")), (-1, scores("4x16"))
estimate("A1", *rotary_cost, (-1, scores("16x4", **t5)), (1, scores("4x16", **t5)))
estimate("A2", (1, best_widths({}, t5)))
estimate("A3", (1, scores("8x8", "01", **t5)), (-1, scores("4x16", "01", **t5)))
estimate("A4", *rotary_cost, (-1, scores("16x4", **half)), (1, scores("4x16", **half)))
for heads in ("16x4", "8x8"):
    estimate(f"B1 {heads}", (1, scores(heads, optimizer="muon_per_head")), (-1, scores(heads)))
converted = 1, scores("4x64", **t5, start="converted")
estimate("C1", converted, (-1, scores("4x64", **t5, **reset)))
estimate("C2", converted, (-1, scores("4x16", **t5, **reset)))
equal = dict(length="256", positions="half", budget="parameters", cache="4")
gqa = -1, scores("8x8", **equal, kind="gqa")
for optimizer in ("muon", "muon_per_head"):  # E1 is that with the lower validation bits
    mla = equal | dict(optimizer=optimizer, positions="rotary", kind="mla")
    estimate(f"E1 {optimizer}", (1, scores("8x8", **mla)), gqa)
for name, kind in (("E2", "tied"), ("E3", "cla"), ("E4", "gqa_double")):
    heads = "8x16" if kind == "gqa_double" else "8x8"
    estimate(name, (1, scores(heads, **equal, kind=kind)), gqa)
