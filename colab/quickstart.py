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
# # Wide or narrow heads?
#
# Two questions hide in these words: **what a head reads** (all of x, or its own chunk of it) and
# **how wide a head is**. attnlab keeps them apart, counts what each costs, and trains them side
# by side. Choose a TPU or GPU runtime if you like; a CPU does in under two minutes.

# %%
import subprocess
import sys

if "google.colab" in sys.modules:  # JAX and Flax stay as Colab has them
    source = "attnlab[train,plot] @ git+https://github.com/attnlab/attnlab"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)

import jax

print("jax", jax.__version__, "on", jax.device_count(), jax.default_backend())
if jax.default_backend() != "tpu":
    print("No TPU here: fine, only slower.")

# %% [markdown]
# ## One input, three layouts
#
# A layout is a row of a table. `standard` is what BERT and GPT do, `wide` gives each head the
# full width, `narrow` shows each head only its own chunk of x.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import attnlab
from attnlab import HeadSpec
from attnlab.heads import cost

width, num_heads, length = 64, 4, 24  # @param
x = jax.random.normal(jax.random.key(0), (1, length, width))
layouts = ("standard", "wide", "narrow")  # of attnlab.LAYOUTS
specs = {layout: HeadSpec(layout, width, num_heads) for layout in layouts}

print(f"{'layout':10}{'head width':>11}{'parameters':>12}{'FLOPs/token':>13}  W_Q")
for layout, spec in specs.items():
    print(
        f"{layout:10}{spec.sizes['H']:>11}{cost.head_parameters(spec):>12,}"
        f"{cost.head_flops(spec, length):>13,}  {spec.shapes['q']}"
    )

# %% [markdown]
# q, k, v and scores start with variance 1 in every layout, so the initialiser favours none. One map
# each: row = the position that looks, column = the position that is looked at.

# %%
figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
for axis, (layout, spec) in zip(axes, specs.items(), strict=True):
    w = attnlab.init_heads(jax.random.key(1), spec)
    y, probs = attnlab.multi_head_attention(w, x, spec=spec, is_causal=True, return_probs=True)
    axis.imshow(probs[0, 0], cmap="Blues", vmin=0, vmax=1)
    axis.set(title=f"{layout}, head 0, untrained", xlabel="looked at", ylabel="looks")
    print(f"{layout:10} output std {float(jnp.std(y)):.2f}")

# %% [markdown]
# ## Are the weights shared across heads, across layers?
#
# Across heads: look at the shapes above, N sets of W_Q in every layout. Across layers: a *plan*
# says which layer uses which set. `separate` is GPT and BERT, `albert` is ALBERT. Sharing saves
# parameters, not FLOPs.

# %%
for plan in attnlab.plan_names(2):
    config = attnlab.ModelConfig(plan=plan, num_layers=4)
    print(
        f"{plan:15}{attnlab.unique_parameters(config):>9,} parameters"
        f"{attnlab.flops_per_token(config, 64):>9,} FLOPs/token  {config.layer_plan}"
    )

# %% [markdown]
# ## Train a tiny model of each
#
# On the source of the Python standard library, byte by byte, three layouts with the same data,
# seeds and steps. This short run shows that it works; the README has the real comparison.

# %%
import tempfile
from pathlib import Path

from attnlab import training
from attnlab.training import shard, sources, tasks
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.metrics import Recorder, read_metrics

steps = 200  # @param
settings = training.TrainConfig(
    steps=steps,
    batch_size=16,
    length=32,
    seeds=(0, 1),
    eval_every=40,
    log_every=100,
    eval_windows=256,
    curve_windows=128,
)
source = sources.Text().load(settings.length)
curves = {}
for layout in layouts:
    model = attnlab.ModelConfig(
        layout=layout, width=32, num_layers=2, num_heads=4, ffn_width=128, max_len=32
    ).build()
    folder = Path(tempfile.mkdtemp())
    with (
        Recorder(folder, settings.seeds, name=layout) as recorder,
        Checkpoints(folder / "checkpoints") as checkpoints,
    ):
        result = training.fit(
            model,
            tasks.TASKS["causal_lm"],
            training.make_optimizer(settings),
            settings,
            source,
            mesh=shard.data_mesh(batch_size=settings.batch_size),
            recorder=recorder,
            checkpoints=checkpoints,
        )
    name = "eval/bits_per_byte"
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if name in row]
    curves[layout] = [row["step"] for row in rows], np.array([row[name] for row in rows])
    bits = result.heldout["bits_per_byte"]
    print(f"{layout:10} held-out {bits.mean():.3f} bits per byte, seeds {np.round(bits, 3)}")

# %%
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for layout, (at, bits) in curves.items():
    axis.plot(at, bits.mean(axis=1), label=layout)
    axis.fill_between(at, bits.min(axis=1), bits.max(axis=1), alpha=0.2)
unigram = source.yardsticks()["bits_per_byte"]["unigram entropy"]
axis.axhline(unigram, color="gray", linestyle=":", label="unigram entropy")
axis.set(xlabel="step", ylabel="held-out bits per byte", title=f"{source.name}, 2 seeds")
_ = axis.legend(frameon=False)

# %% [markdown]
# Two seeds and a few hundred steps of a tiny model: read the curve as a demonstration. To compare
# layouts and plans with more layers, three seeds, intervals and equal budgets, run on your machine
#
#     python -m experiments.sweep --config=experiments/configs/heads_and_sharing.py \
#         --workdir=runs/first
