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
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/quickstart.ipynb)
#
# # Wide or narrow heads? attnlab in two minutes
#
# **Neither: in small language models with rotary positions and the optimizer Muon, heads of 16
# (head_dim 16) have the lowest loss of the widths tried.** **Wide heads (each as wide as the model)
# and narrow ones (each reads only its own slice of x) are both worse than standard heads at an
# equal budget.** **One parameter group for all layers, as in ALBERT, is worse than separate layers
# in one of two studies, at equal FLOPs and at equal parameters, and inconclusive in the other.**

# %% [markdown]
# ![Bits per byte that each choice loses, with 95 % intervals: other head widths at most 0.02, wide
# heads 0.06, shared layers 0.05 and 0.18](data:image/png;base64,)

# %% [markdown]
# How much each choice loses in a model 64 wide (section 4). The best width depends on the
# positions: heads of 4 against heads of 16 cost +0.027 (+0.021 to +0.033) bits per byte with rotary
# positions and -0.004 (-0.008 to -0.000) with T5's relative bias.
#
# Below you count what a layout and a sharing plan cost, and train three layouts yourself. It takes
# about a minute on a CPU.
#
# The other notebooks answer one question each:
#
# - [Which layout is better on my text? A sweep with a report](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/own_sweep.ipynb)
# - [Are attention weights shared across layers?](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/sharing_across_layers.ipynb)
# - [Do heads share W_Q, W_K and W_V?](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/heads_share.ipynb)
# - [Why W_Q and W_K, and not one matrix?](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/why_q_and_k.ipynb)
# - [What makes heads different?](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/what_makes_heads_differ.ipynb)
# - [Where do the weights come from, and what are "attention weights"?](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/where_weights_come_from.ipynb)

# %%
# @title Install attnlab where it is missing; JAX and Flax stay as they are
import importlib.util

if importlib.util.find_spec("attnlab") is None:
    print("Installing attnlab takes about a minute.")
    # %pip install -q "attnlab[lab,pretrained] @ git+https://github.com/attnlab/attnlab@main"

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from attnlab import data, heads, models, training

# %% [markdown]
# ## 1. A head layout: how a head computes q, k and v
#
# In `standard` (the Transformer, BERT, GPT) each head reads all of x and is D / N wide. In `wide`
# each head is D wide. In `narrow` each head reads only its own D / N columns of x. Change
# `num_heads` and run the cell again: which columns of the table change?

# %%
width, num_heads = 64, 4

table = {}
for name in ("standard", "wide", "narrow"):
    layout = heads.make_layout(name, width=width, num_heads=num_heads)
    table[name] = {
        "a head reads": width // num_heads if name == "narrow" else width,
        "head_dim": layout.size("head_dim"),
        "parameters": heads.num_parameters(layout),
        "FLOPs per token": heads.flops_per_token(layout, 32),
        "shape of W_Q": heads.weight_shapes(layout)["q"],
    }
pd.DataFrame.from_dict(table, orient="index")

# %% [markdown]
# ## 2. A sharing plan: which layers share which parameters
#
# A plan gives each layer the number of its parameter group. `separate` is the Transformer, BERT and
# GPT, `albert` is ALBERT. Sharing saves parameters; the FLOPs stay the same.

# %%
num_layers = 4

table = {}
for plan in ("separate", "groups:2", "cycle:2", "albert"):
    config = models.ModelConfig(sharing=plan, num_layers=num_layers)
    table[plan] = {
        "group of each layer": config.plan["attention"],
        "parameters": models.num_parameters(config),
        "FLOPs per token": models.flops_per_token(config, 64),
    }
pd.DataFrame.from_dict(table, orient="index")

# %% [markdown]
# ## 3. Train three layouts at an equal number of parameters
#
# Two layers predict the next byte of the source of Python's standard library. `match_budget`
# chooses the width of the feed-forward network (FFN) so that all three models have as many
# parameters as the standard one. Each layout gets the learning rate that the study found for it:
# one rate for all favours the layout that it suits.

# %%
steps, seeds = 300, (0, 1)
learning_rates = {"standard": 0.0070, "wide": 0.0047, "narrow": 0.0094}


def config_of(layout_name):
    layout = heads.make_layout(layout_name, num_heads=4, biases=("q", "k", "v", "o"))
    ffn = models.FFN(width=256)
    return models.ModelConfig(heads=layout, width=32, num_layers=2, ffn=ffn, max_len=32)


def train(config, learning_rate):
    settings = training.TrainConfig(
        steps=steps, seeds=seeds, batch_size=16, length=32,
        optimizer=training.OptimizerConfig(learning_rate=learning_rate),
        evaluation=training.EvaluationConfig(every=50, windows=512, curve_windows=128),
    )  # fmt: skip
    model, objective = config.build(), training.OBJECTIVES["causal_lm"]
    return model, training.fit_in_memory(model, objective, settings, text)


text = data.Text().load(32)
trained, table = {}, {}
for name, learning_rate in learning_rates.items():
    config = models.match_budget(config_of(name), config_of("standard"), "parameters").config
    trained[name] = train(config, learning_rate)
    bits = trained[name][1].result.heldout["bits_per_byte"]
    table[name] = {
        "FFN width": config.ffn.width,
        "parameters": models.num_parameters(config),
        "bits per byte, mean": bits.mean().round(3),
        "each seed": bits.round(3),
    }
pd.DataFrame.from_dict(table, orient="index")

# %% [markdown]
# **The figure.** Left: held-out loss during training, mean and range of the seeds. Right: what head
# 0 of the last layer attends to in one held-out text, after training. The colour is the square root
# of the probability, so that small probabilities show.

# %%
figure, axes = plt.subplots(
    1, 4, figsize=(13, 3.4), layout="constrained", gridspec_kw={"width_ratios": [1.4, 1, 1, 1]}
)
tokens = text.heldout(8)["tokens"][3:4, :-1]
for axis, (name, (model, run)) in zip(axes[1:], trained.items(), strict=True):
    curve_steps, bits = run.curve("eval/bits_per_byte")
    axes[0].plot(curve_steps, bits.mean(0), label=name)
    axes[0].fill_between(curve_steps, bits.min(0), bits.max(0), alpha=0.2)
    outputs = model.apply({"params": run.params()}, tokens, capture=("probs",))
    probs = outputs.captured["probs"][-1, 0, 0]  # last layer, first text, head 0
    image = axis.imshow(np.sqrt(probs), cmap="Blues", vmin=0, vmax=1)
    axis.set(title=name, xlabel="key position", ylabel="query position")
axes[0].set(xlabel="training step", ylabel="held-out bits per byte", title="equal parameters")
axes[0].legend(frameon=False, title="layout")
_ = figure.colorbar(image, ax=axes[1:], label="square root of attention probability")

# %% [markdown]
# In the saved run wide heads are last, as in the study. But two seeds and a few hundred steps show
# only that the code works; they do not rank layouts.
#
# ## 4. What the studies found
#
# More steps, more texts, tuned learning rates: the figure at the top. The difference in bits per
# byte, with 95 % intervals over texts (FLOPs without softmax):

# %% tags=["answer"]
columns = ["variant", "compared with", "equal", "difference", "low", "high"]
found = [
    ["8 heads of 8", "4 heads of 16", "FLOPs", 0.007, 0.002, 0.011],
    ["2 heads of 32 (registered)", "4 heads of 16", "FLOPs", 0.013, 0.008, 0.017],
    ["4 narrow heads of 16", "4 standard heads of 16", "FLOPs", 0.014, 0.007, 0.020],
    ["4 wide heads of 64", "4 standard heads of 16", "parameters", 0.064, 0.022, 0.107],
    ["one layer's parameters for all", "separate layers", "parameters", 0.050, 0.026, 0.073],
    ["one layer's parameters for all", "separate layers", "FLOPs", 0.183, 0.142, 0.224],
]
found = pd.DataFrame(found, columns=columns)
figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
reach = [found.difference - found.low, found.high - found.difference]
axis.errorbar(found.difference, found.index, xerr=reach, fmt="o", capsize=3)
labels = found["variant"] + "\nagainst " + found["compared with"] + ",\nequal " + found["equal"]
axis.set_yticks(found.index, labels)
axis.invert_yaxis()
axis.axvline(0, color="grey", linestyle=":")
_ = axis.set(xlabel="bits per byte lost (left is better)")

# %% [markdown]
# The row of wide heads is from
# [the first study](https://github.com/attnlab/attnlab/blob/main/docs/results/heads_and_sharing.md)
# (0.35 million parameters, 3 texts, learned positions, AdamW), the others are from
# [the head-width study](https://github.com/attnlab/attnlab/blob/main/docs/results/head_width/analysis.md)
# (0.22 million parameters, 8 texts; 4 for shared layers; rotary positions, Muon). After correction
# for the number of comparisons heads of 8 against 16 have p = 0.13. T5's
# bias is compared in [study 3](https://github.com/attnlab/attnlab/blob/main/docs/results/study3/positions.md)
# (8 texts; the registered test is the difference of both costs). Whether larger models need wider
# heads is not settled: in a model
# [256 wide](https://github.com/attnlab/attnlab/blob/main/docs/results/head_width/gpu.md) heads of
# 32 have the lowest loss, but 16, 32 and 128 are inconclusive against 64; one head of 256 is worse.
#
# To run such a comparison, see the notebook
# [compare layouts yourself](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/own_sweep.ipynb),
# or clone the repository:
#
#     git clone https://github.com/attnlab/attnlab && cd attnlab && pip install -e ".[all]"
#     python -m experiments.sweep --config=experiments/configs/heads_and_sharing.py \
#         --workdir=runs/first
#
# ## What to remember
#
# - A *layout* says what a head reads and how wide it is; a *plan* says which layers share
#   parameters. You can change either without the other.
# - "Better" needs a budget: equal width, equal parameters and equal FLOPs give different winners.
# - Neither wide nor narrow heads beat standard ones at an equal budget here. With rotary positions
#   and Muon heads of 16 have the lowest loss of the widths tried in these small models, and heads
#   of 8 or 32 are nearly as good; what heads of 4 cost depends on the positions.
#
# **Where people ask this:** [What is the difference between wide and narrow
# attention?](https://github.com/pbloem/former/issues/8),
# [`num_heads` changes the number of parameters in Keras and not in
# PyTorch](https://github.com/keras-team/keras/issues/18373); the blog that compared the two first:
# [peterbloem.nl/blog/transformers](https://peterbloem.nl/blog/transformers).
#
# ## Exercises
#
# 1. Does `num_heads` change the number of parameters? Compare 2 and 8 heads in `standard` and in
#    `wide`. (Keras counts like `wide` with a fixed `key_dim`, PyTorch like `standard`.)
# 2. Repeat section 3 at equal FLOPs: `match_budget(..., "flops", length=32)`. Give the standard
#    model an FFN of width 384, since wide heads alone cost more than all of the present one. Which
#    layout now has the fewest parameters?
#
# <details><summary>Solutions (click)</summary>
#
# ```python
# sizes = {
#     (name, n): heads.num_parameters(heads.make_layout(name, width=64, num_heads=n))
#     for name in ("standard", "wide")
#     for n in (2, 8)
# }
# print(sizes)  # 4 D² for every number of heads; 4 N D² for wide heads
# assert sizes["standard", 2] == sizes["standard", 8] == 4 * 64**2
# assert sizes["wide", 8] == 4 * sizes["wide", 2] == 4 * 8 * 64**2
# ```
#
# ```python
# from dataclasses import replace
#
# reference = replace(config_of("standard"), ffn=models.FFN(width=384))
# counts = {}
# for name in ("standard", "wide", "narrow"):
#     config = models.match_budget(config_of(name), reference, "flops", length=32).config
#     counts[name] = models.num_parameters(config)
#     # train(config, learning_rates[name]) trains it
# print(counts)
# assert min(counts, key=counts.get) == "wide"
# ```
#
# The products of queries and keys, and of probabilities and values, cost FLOPs but have no
# parameters, and they grow with head_dim.
#
# </details>
