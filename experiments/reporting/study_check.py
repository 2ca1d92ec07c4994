# Recomputes the main numbers of analysis.md from runs.csv with numpy alone.
import csv

import numpy as np

with open("runs.csv") as file:
    ROWS = list(csv.DictReader(file))


def scores(stages, width, heads, head_dim, plan="separate", budget="flops"):
    """(text, seed) -> held-out bits."""
    wanted = dict(width=width, num_heads=heads, head_dim=head_dim, plan=plan, budget=budget,
                  layout="standard", length=128, bytes_per_parameter=20.0)  # fmt: skip
    return {(r["text"], r["seed"]): float(r["heldout_bits"]) for r in ROWS
            if int(r["stage"]) in stages
            and all(str(v) == r[k] for k, v in wanted.items())}  # fmt: skip


def difference(pairs):
    """Mean over texts of b - a, standard error, texts; paired by text and seed."""
    found: dict = {}
    for a, b in pairs:
        for key in a.keys() & b.keys():
            found.setdefault(key, []).append(b[key] - a[key])
    of_text: dict = {}
    for (text, _), values in found.items():
        of_text.setdefault(text, []).append(np.mean(values))
    means = np.array([np.mean(values) for values in of_text.values()])
    if len(means) < 2:
        return None
    return means.mean(), means.std(ddof=1) / np.sqrt(len(means)), len(means)


def at(heads, head_dim, **more):
    return scores((3, 5, 7), 64, heads, head_dim, **more)


RESULTS = {"P1": difference([(at(4, 16), at(2, 32))])}
RESULTS["S2"] = difference([(at(8, 8), at(12, 8)), (at(4, 16), at(6, 16)), (at(2, 32), at(3, 32))])
for name, plan in (("S4", "albert"), ("S5", "attention_only")):
    RESULTS[name] = difference(
        [(at(4, 16), at(4, 16, plan=plan)), (at(2, 32), at(2, 32, plan=plan))]
    )
print(RESULTS)
