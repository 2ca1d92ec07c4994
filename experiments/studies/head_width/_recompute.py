# Recomputes the main numbers of analysis.md from runs.csv with numpy alone.
import csv

import numpy as np

with open("runs.csv") as file:
    ROWS = list(csv.DictReader(file))
D64 = dict(width="64", budget="flops", length="128", bytes_per_parameter="20.0")
Scores = dict[tuple[str, str], float]


def scores(point: str, plan: str = "separate", layout: str = "standard") -> Scores:
    """(text, seed) -> held-out bits of N heads of h at D = 64; the point is "Nxh"."""
    heads, dim = point.split("x")
    wanted = D64 | dict(num_heads=heads, head_dim=dim, plan=plan, layout=layout)
    found = [r for r in ROWS if r["stage"] in ("3", "5") and wanted.items() <= r.items()]
    return {(r["text"], r["seed"]): float(r["heldout_bits"]) for r in found}


def difference(*pairs: tuple[Scores, Scores]) -> tuple[float, float, int]:
    """Mean over texts of b - a, standard error, texts; paired by text and seed."""
    by_text: dict[str, list[float]] = {}
    for a, b in pairs:
        for text, seed in a.keys() & b.keys():
            by_text.setdefault(text, []).append(b[text, seed] - a[text, seed])
    means = np.array([np.mean(values) for values in by_text.values()])
    return float(means.mean()), float(means.std(ddof=1) / len(means) ** 0.5), len(means)


POINTS = ("2x32", "16x4", "8x8", "1x64", "4x8", "2x16", "1x32", "12x8", "6x16", "3x32")
RESULTS = {p: difference((scores("4x16"), scores(p))) for p in POINTS}
for p in ("4x16", "8x8"):
    RESULTS[f"{p} narrow"] = difference((scores("4x16"), scores(p, layout="narrow")))
wider = (("8x8", "12x8"), ("4x16", "6x16"), ("2x32", "3x32"))
RESULTS["S2"] = difference(*((scores(a), scores(b)) for a, b in wider))
for name, plan in (("S4", "albert"), ("S5", "attention_only")):
    RESULTS[name] = difference(*((scores(p), scores(p, plan)) for p in ("4x16", "2x32")))
print(*RESULTS.items(), sep="\n")

# D = 64 by least squares: every text has every point, so random effects leave means as they are.
part = [r for r in ROWS if r["stage"] == "3"]
columns = ("num_heads", "head_dim", "learning_rate", "heldout_bits")
N, H, rate, bits = (np.array([float(r[name]) for r in part]) for name in columns)
u, v, narrow = np.log2(H / 16), np.log2(N * H / 64), np.array([r["layout"] for r in part])
kind = np.array(["{num_heads}x{head_dim} {layout}".format_map(r) for r in part])
tuning = np.log(rate) - [np.log(rate[kind == k]).mean() for k in kind]
names = sorted({r["text"] for r in part})
texts = [[float(r["text"] == text) for text in names] for r in part]
terms = np.column_stack([u, u**2, v, v**2, u * v, tuning, narrow == "narrow", texts])
c = np.linalg.lstsq(terms, bits)[0]
BEST = -c[0] / (2 * c[1])
print("D = 64: head_dim", 16 * 2**BEST, "N h / D", 2 ** (-(c[2] + c[4] * BEST) / (2 * c[3])))
