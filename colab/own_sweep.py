# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/own_sweep.ipynb)
#
# # Which layout is better on my text? A sweep with a report
#
# **Standard heads, on the text of this notebook: at equal parameters wide heads are worse by 0.11
# bits per byte (95 % interval 0.05 to 0.16), narrow ones by 0.04 (0.02 to 0.06).** **For your own
# text, `attnlab.lab` takes variants, a budget and seeds, and returns such differences with their
# intervals.** **The conclusion of a small sweep is for this text, this size and this learning rate
# alone, and is often "inconclusive".**

# %% [markdown]
# ![Held-out bits per byte of wide and of narrow heads minus those of standard heads: each seed, the
# mean and its 95 % interval](data:image/png;base64,)

# %% [markdown]
# The cells below run the sweep and show its report. It takes about two minutes on two CPU cores.
#
# 1. Choose variants, budget and seeds.
# 2. Train them.
# 3. Compare: the figure.
# 4. The report.

# %%
# @title Install attnlab where it is missing; JAX and Flax stay as they are
import importlib.util

if importlib.util.find_spec("attnlab") is None:
    print("Installing attnlab takes about a minute.")
    # %pip install -q "attnlab[lab,pretrained] @ git+https://github.com/attnlab/attnlab@main"

# %%
import base64

import matplotlib.pyplot as plt
from IPython.display import IFrame

from attnlab import data, lab
from attnlab.models import FFN, ModelConfig
from attnlab.training import EvaluationConfig, OptimizerConfig, TrainConfig

# %% [markdown]
# ## 1. Variants, budget, seeds
#
# The text is the source of Python's standard library; `data.Text(path="my.txt")` is your own. Every
# variant gets the FFN width with which it has as many parameters as the first one. Each of them has
# four seeds.

# %%
model = ModelConfig(width=32, num_layers=2, ffn=FFN(width=256), max_len=64)
train = TrainConfig(
    steps=200, batch_size=16, length=64,
    optimizer=OptimizerConfig(learning_rate=7e-3),
    evaluation=EvaluationConfig(every=50, windows=256),
)  # fmt: skip
base = lab.Experiment(model=model, train=train, data=data.Text())
layouts = ["standard", "wide", "narrow"]
specs = lab.product(base, layout=layouts, seeds=[0, 1, 2, 3], match="parameters")
for spec in specs[::4]:
    print(spec.tags, "FFN width", spec.config.model.ffn.width)

# %% [markdown]
# ## 2. Train
#
# Other processes train the runs, several at once. If you stop the cell, run it again: finished runs
# are read, and the others resume. In Colab use a folder of your Drive to keep them.

# %%
results = lab.sweep(specs, "runs/layouts", progress=False)
results.table()

# %% [markdown]
# ## 3. Compare
#
# Each difference is variant minus baseline, seed by seed, so a negative number is better than the
# baseline. The interval is that of one comparison; `p_holm` is corrected for the number of
# comparisons, and `conclusion` is "inconclusive" where it is not below 0.05.

# %%
comparisons = results.compare({"layout": "standard"})
comparisons[["variant", "baseline", "difference", "low", "high", "p_holm", "conclusion"]]

# %% tags=["answer"]
runs = results.to_pandas()
by_seed = runs.pivot(index="seed", columns="layout", values="heldout_bits_per_byte")
figure, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
for y, row in enumerate(comparisons.itertuples()):
    seeds = by_seed[row.variant] - by_seed[row.baseline]
    axis.plot([row.low, row.high], [y, y], color="C0", linewidth=2, label="95 % interval")
    axis.plot(seeds, [y] * len(seeds), "o", color="C1", alpha=0.6, label="one seed")
    axis.plot(row.difference, y, "D", color="C0", label="mean")
names = comparisons["variant"] + " − " + comparisons["baseline"]
axis.set_yticks(range(len(names)), names)
axis.set_ylim(len(names) - 0.5, -0.5)
axis.axvline(0, color="black", linewidth=1)
axis.set_xlabel("held-out bits per byte, equal parameters\n(left of 0: better than standard)")
lines, labels = axis.get_legend_handles_labels()
_ = figure.legend(lines[:3], labels[:3], ncols=3, frameon=False, loc="outside upper center")

# %% [markdown]
# ## 4. The report
#
# The same as a page that can be sent to others: question, conclusion, figure, budgets, limits, and
# how it was made.

# %%
page = lab.report(results, "runs/layouts/report.html")
source = base64.b64encode(page.read_bytes()).decode()
IFrame(f"data:text/html;base64,{source}", width="100%", height=700)

# %% [markdown]
# ## What to remember
#
# - Say the budget: at equal width wide heads have more parameters, at equal parameters a narrower
#   FFN.
# - Say what the interval covers: seeds on one text here, no other texts.
# - One learning rate for all variants favours the one that it suits;
#   `lab.sweep(..., policies=[lab.TuneLearningRate()])` finds one for each.
#
# **Next:** [learning rates for each variant, more seeds where they are
# needed](https://github.com/attnlab/attnlab/blob/main/docs/howto/tune_and_seeds.md), [your own
# dataset, objective, layout](https://github.com/attnlab/attnlab/blob/main/docs/howto/own_experiment.md),
# [how conclusions are drawn](https://github.com/attnlab/attnlab/blob/main/docs/explanation/conclusions.md).
#
# ## Exercises
#
# 1. Which budget does `match="parameters"` hold? Print the parameters and the FLOPs per token of
#    each run, and compare with `match="flops"`. *Hint:* `results.to_pandas()` has both.
#
# <details><summary>Solutions (click)</summary>
#
# ```python
# print(runs.groupby("layout")[["parameters", "flops_per_token"]].first())
# assert runs["parameters"].max() < 1.01 * runs["parameters"].min()
# assert runs["flops_per_token"].max() > 1.4 * runs["flops_per_token"].min()
# assert (comparisons["conclusion"] == "worse").all()
# ```
#
# With `match="flops"` wide heads alone cost more than the whole budget of this small FFN, so an
# error asks for a larger one.
#
# </details>
