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
# **A comparison needs variants, an equal budget and several seeds; `attnlab.lab` takes these three
# and returns differences with 95 % intervals.** **Differences are paired by seed, and p-values are
# corrected for the number of comparisons.** **The conclusion of a small sweep is for this text,
# this size and this learning rate alone, and is often "inconclusive".**

# %% [markdown]
# ![Held-out bits per byte of each variant, each seed and the mean](data:image/png;base64,)

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
# three seeds.

# %%
model = ModelConfig(width=32, num_layers=2, ffn=FFN(width=256), max_len=64)
train = TrainConfig(
    steps=200, batch_size=16, length=64,
    optimizer=OptimizerConfig(learning_rate=7e-3),
    evaluation=EvaluationConfig(every=50, windows=256),
)  # fmt: skip
base = lab.Experiment(model=model, train=train, data=data.Text())
specs = lab.product(
    base,
    layout=["standard", "wide"],
    sharing=["separate", "albert"],
    seeds=[0, 1, 2],
    match="parameters",
)
for spec in specs[::3]:
    print(spec.tags, "FFN width", spec.config.model.ffn.width)

# %% [markdown]
# ## 2. Train
#
# Each run is a process of its own. If you stop the cell, run it again: finished runs are read, and
# the others go on where they were. In Colab use a folder of your Drive to keep them.

# %%
results = lab.sweep(specs, "runs/layouts", progress=False)
results.table()

# %% [markdown]
# ## 3. Compare
#
# Each difference is a mean over seeds of variant minus baseline, so a negative number is better
# than the baseline. The first rows are averaged over the other choice. `conclusion` is
# "inconclusive" where the corrected p-value is not below 0.05. All variants have one learning rate
# here; `policies=[lab.TuneLearningRate()]` finds one for each.

# %%
results.compare({"layout": "standard", "sharing": "separate"})

# %% tags=["answer"]
runs = results.to_pandas()
runs["variant"] = runs["layout"] + ", " + runs["sharing"]
mean = runs.groupby("variant")["heldout_bits_per_byte"].mean().sort_values()
figure, axis = plt.subplots(figsize=(10, 2.6), layout="constrained")
axis.plot(mean, mean.index, "|", markersize=22, label="mean")
axis.plot(runs["heldout_bits_per_byte"], runs["variant"], "o", alpha=0.5, label="one seed")
axis.set(xlabel="held-out bits per byte (left is better)", title="equal parameters")
axis.invert_yaxis()
_ = axis.legend(frameon=False)

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
# - One learning rate for all variants favours the one that it suits.
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
# print(runs.groupby("variant")[["parameters", "flops_per_token"]].first())
# assert runs["parameters"].max() < 1.01 * runs["parameters"].min()
# assert runs["flops_per_token"].max() > 1.5 * runs["flops_per_token"].min()
# ```
#
# With `match="flops"` wide heads alone cost more than the whole budget of this small FFN, so an
# error asks for a larger one.
#
# </details>
