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
# **Two questions hide in these words: what a head reads (all of x, or its own chunk of it) and
# how wide it is.** **In the Transformer, BERT and GPT a head reads all of x and is D / h wide.**
# **attnlab keeps the two apart, counts what each costs, and trains them side by side.**
#
# One question per notebook, each begins with its answer:
#
# - [Are attention weights shared across layers?](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/sharing_across_layers.ipynb)
# - [Do heads share W_Q, W_K and W_V?](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/heads_share.ipynb)
# - [Why W_Q and W_K, and not one matrix?](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/why_q_and_k.ipynb)
# - [What makes heads different? Do they read chunks of x, or all of it?](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/what_makes_heads_differ.ipynb)
# - [Where do the weights come from, and what are "attention weights"?](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/where_weights_come_from.ipynb)

# %%
# @title Install attnlab if it is missing; JAX and Flax stay as they are
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("attnlab") is None:
    source = "attnlab[train,plot,pretrained] @ git+https://github.com/attnlab/attnlab"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np

from attnlab import data, heads, models, training

print("jax", jax.__version__, "on", jax.device_count(), jax.default_backend())

# %% [markdown]
# ## A layout says how a head computes q, k and v
#
# `standard` is the paper's, `wide` gives each head the full width, `narrow` shows it only its chunk
# of x; `narrow_tied`, a tutorial's code, lets all heads use one small matrix. Are weights shared
# across heads? Look for the number of heads, 4, in the shape of W_Q: the last layout has none.

# %%
print(f"{'layout':12}{'head width':>11}{'parameters':>12}{'FLOPs/token':>13}  W_Q")
for layout in ("standard", "wide", "narrow", "narrow_tied"):
    made = heads.make_layout(layout, width=64, num_heads=4)
    counts = f"{heads.num_parameters(made):>12,}{heads.flops_per_token(made, 24):>13,}"
    print(f"{layout:12}{made.size('head_dim'):>11}{counts}  {heads.weight_shapes(made)['q']}")

# %% [markdown]
# ## A plan says which layer uses which weights
#
# `separate` is the Transformer, BERT and GPT, `albert` is ALBERT. Sharing saves parameters, not
# FLOPs.

# %%
for plan in ("separate", "groups:2", "cycle:2", "albert"):
    config = models.ModelConfig(sharing=plan, num_layers=4)
    counts = f"{models.num_parameters(config):>9,} parameters"
    counts += f"{models.flops_per_token(config, 64):>9,} FLOPs/token"
    print(f"{plan:10}{counts}   layers use sets {config.plan['attention']}")

# %% [markdown]
# ## Train a tiny model of each layout
#
# On the source of Python's standard library, byte by byte, with the same data, seeds and steps.

# %%
settings = training.TrainConfig(
    steps=200, batch_size=16, length=32, seeds=(0, 1), eval_every=40, log_every=40,
    eval_windows=256, curve_windows=128,
)  # fmt: skip
source = data.Text().load(settings.length)
trained, runs = {}, {}
for layout in ("standard", "wide", "narrow"):
    made = heads.make_layout(layout, num_heads=4, biases=("q", "k", "v", "o"))
    sizes = dict(width=32, num_layers=2, ffn=models.FFN(width=128), max_len=32)
    trained[layout] = models.ModelConfig(heads=made, **sizes).build()
    runs[layout] = training.fit_in_memory(
        trained[layout], training.OBJECTIVES["causal_lm"], settings, source
    )
    bits = runs[layout].result.heldout["bits_per_byte"]
    print(f"{layout:10} held out: {bits.mean():.3f} bits per byte, seeds {np.round(bits, 3)}")

# %% [markdown]
# The curves, and what head 0 of the last layer looks at in one held-out line, in the *trained*
# models: a row is the byte that looks, a column the byte that is looked at. (The shade is the
# square root of the probability, so that weak attention shows.)

# %%
figure, axes = plt.subplots(1, 4, figsize=(12, 3.2), layout="constrained")
text = source.heldout(8)["tokens"][3:4, :-1]
for axis, (layout, run) in zip(axes[1:], runs.items(), strict=True):
    steps, bits = run.curve("eval/bits_per_byte")
    axes[0].plot(steps, bits.mean(0), label=layout)
    axes[0].fill_between(steps, bits.min(0), bits.max(0), alpha=0.2)
    outputs = trained[layout].apply({"params": run.params()}, text, capture=("probs",))
    axis.imshow(np.sqrt(outputs.captured["probs"][-1, 0, 0]), cmap="Blues", vmin=0, vmax=1)
    axis.set(title=f"{layout}, trained", xticks=[], yticks=[], xlabel="looked at", ylabel="looks")
axes[0].set(xlabel="step", ylabel="bits per byte, held out", title="2 seeds each")
_ = axes[0].legend(frameon=False)

# %% [markdown]
# Two seeds and 200 steps of a tiny model show that it works, not which is better. For that, with
# more layers, three seeds, intervals and equal budgets, take a clone to your machine:
#
#     git clone https://github.com/attnlab/attnlab && cd attnlab && pip install -e ".[all]"
#     python -m experiments.sweep --config=experiments/configs/heads_and_sharing.py \
#         --workdir=runs/first
