# Recomputes the main numbers of analysis.md from runs.csv with numpy alone.
import csv

import numpy as np

with open("runs.csv") as file:
    ROWS = list(csv.DictReader(file))
Scores = dict[tuple[str, str], float]


def scores(heads: int, head_dim: int, stages: tuple[int, ...] = (3, 5), plan: str = "separate",
           layout: str = "standard") -> Scores:  # fmt: skip
    """(text, seed) -> held-out bits at D = 64."""
    wanted = dict(width=64, num_heads=heads, head_dim=head_dim, plan=plan, budget="flops",
                  layout=layout, length=128, bytes_per_parameter=20.0)  # fmt: skip
    return {(r["text"], r["seed"]): float(r["heldout_bits"]) for r in ROWS
            if int(r["stage"]) in stages
            and all(str(v) == r[k] for k, v in wanted.items())}  # fmt: skip


def difference(*pairs: tuple[Scores, Scores]) -> tuple[float, float, int]:
    """Mean over texts of b - a, standard error, texts; paired by text and seed."""
    of_text: dict[str, list[float]] = {}
    for a, b in pairs:
        for text, seed in a.keys() & b.keys():
            of_text.setdefault(text, []).append(b[text, seed] - a[text, seed])
    means = np.array([np.mean(values) for values in of_text.values()])
    error = means.std(ddof=1) / len(means) ** 0.5 if len(means) > 1 else np.nan
    return float(means.mean()) if of_text else np.nan, float(error), len(means)


REFERENCE, OTHER = scores(4, 16), scores(2, 32)
RESULTS = {"P1 first look": difference((REFERENCE, OTHER))}
if sum(row["stage"] == "7" for row in ROWS) == 32:
    RESULTS["P1 second look"] = difference((scores(4, 16, (3, 7)), scores(2, 32, (3, 7))))
for point in ((16, 4), (8, 8), (1, 64), (4, 8), (2, 16), (1, 32), (12, 8), (6, 16), (3, 32)):
    RESULTS["{}x{}".format(*point)] = difference((REFERENCE, scores(*point)))
for point in ((4, 16), (8, 8)):
    name = "{}x{} narrow".format(*point)
    RESULTS[name] = difference((REFERENCE, scores(*point, layout="narrow")))
three = ((8, 8), (4, 16), (2, 32))
RESULTS["S2"] = difference(*((scores(n, h), scores(3 * n // 2, h)) for n, h in three))
COMPLETE = sum(row["stage"] == "5" for row in ROWS) == 64
for name, plan in (("S4", "albert"), ("S5", "attention_only")) if COMPLETE else ():
    RESULTS[name] = difference(*((scores(*p), scores(*p, plan=plan)) for p in ((4, 16), (2, 32))))
print(*RESULTS.items(), sep="\n")

# D = 64 by least squares: every text has every point, so random effects leave means as they are.
part = [r for r in ROWS if r["stage"] == "3"]
n, h, rate = (np.array([float(r[k]) for r in part])
              for k in ("num_heads", "head_dim", "learning_rate"))  # fmt: skip
u, v, narrow = np.log2(h / 16), np.log2(n * h / 64), np.array([r["layout"] for r in part])
kind = [(r["num_heads"], r["head_dim"], r["layout"]) for r in part]
middle = {k: np.mean([np.log(x) for x, j in zip(rate, kind, strict=True) if j == k]) for k in kind}
tuning = np.log(rate) - [middle[k] for k in kind]
texts = sorted({r["text"] for r in part})
levels = [[float(r["text"] == text) for text in texts] for r in part]
terms = np.column_stack([u, u**2, v, v**2, u * v, tuning, narrow == "narrow", levels])
b = np.linalg.lstsq(terms, np.array([float(r["heldout_bits"]) for r in part]), rcond=None)[0]
BEST = -b[0] / (2 * b[1])
print("D = 64: head_dim", 16 * 2**BEST, "N h / D", 2 ** (-(b[2] + b[4] * BEST) / (2 * b[3])))
