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
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/sharing_across_layers.ipynb)
#
# # Are attention weights shared across layers?
#
# **No: in the Transformer, BERT, GPT-2 and T5 every layer has its own W_Q, W_K, W_V and W_O.**
# **ALBERT shares on purpose: one set serves all twelve layers, and T5 tried one set for encoder and
# decoder.** **Sharing saves parameters, but neither arithmetic nor cache, and at the same width it
# costs some quality.**
#
# Below, each sentence is checked by a cell: the sets are counted in the arrays (1), in the files of
# two libraries (2) and in six published models (3); one picture shows what a plan of sharing saves
# (4); and a small training shows what it costs (5). About a minute and a half on a CPU.

# %%
# @title Install attnlab if it is missing; JAX and Flax stay as they are
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("attnlab") is None:
    source = "attnlab[train,plot,pretrained] @ git+https://github.com/attnlab/attnlab"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)

# %%
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from attnlab import data, pretrained, training
from attnlab.heads import Standard
from attnlab.models import (
    FFN,
    EncoderConfig,
    ModelConfig,
    OutputHead,
    cache_bytes_per_token,
    flops_per_token,
    match_budget,
    num_parameters,
)
from attnlab.pretrained import published_config
from attnlab.transforms import unshare

print("jax", jax.__version__, "on", jax.default_backend())

# %% [markdown]
# ## 1. Count the sets in the arrays
#
# A *plan* says which layer uses which set of weights. Two models with four layers each, alike but
# for the plan. The layers of a model lie stacked in one array, so its first axis counts the sets.


# %%
def small(plan, **changes):
    heads = Standard(num_heads=4, biases=("q", "k", "v", "o"))
    sizes = dict(width=32, num_layers=4, heads=heads, ffn=FFN(width=128), max_len=32)
    return ModelConfig(**(sizes | dict(sharing=plan) | changes))


text = jnp.arange(32)[None] % 7
weights = {}
for plan in ("separate", "albert"):
    weights[plan] = small(plan).build().init(jax.random.key(0), text)["params"]
    shape = weights[plan]["layers"]["attention"]["q"].shape
    uses = small(plan).plan["attention"]
    print(f"{plan:9} layers use set {uses}   W_Q {shape} = {shape[0]} x (width, heads, head width)")

assert len(weights["separate"]["layers"]["attention"]["q"]) == 4
assert len(weights["albert"]["layers"]["attention"]["q"]) == 1

# %% [markdown]
# Are the four sets of `separate` perhaps the same numbers? No: each is drawn for itself, and the
# angle between two of them is a right one, as near as chance has it (cosine 0, give or take
# 1 / sqrt(number of weights)).

# %%
sets = np.asarray(weights["separate"]["layers"]["attention"]["q"]).reshape(4, -1)
sets = sets / np.linalg.norm(sets, axis=1, keepdims=True)
print("cosine between the W_Q of two layers:")
print(np.round(sets @ sets.T, 2), "  chance: +-", round(sets.shape[1] ** -0.5, 2))
assert np.abs(sets @ sets.T - np.eye(4)).max() < 6 * sets.shape[1] ** -0.5

# %% [markdown]
# **Control.** Write the one set of `albert` down four times, as a model with four sets. If "shared"
# means only that, the two models must say the same. They do.

# %%
config, params = small("albert"), weights["albert"]
copied_config, copied = unshare(config, params)
one = config.build().apply({"params": params}, text).logits
four = copied_config.build().apply({"params": copied}, text).logits
print("parameters", f"{num_parameters(config):,} and {num_parameters(copied_config):,}")
print("largest difference of the outputs", float(jnp.abs(one - four).max()))
assert jnp.abs(one - four).max() < 1e-5 * jnp.abs(one).max()

# %% [markdown]
# ## 2. Count them in the files
#
# A tiny BERT and a tiny ALBERT of three layers, written as Hugging Face's library writes them.
# These are the names of all their matrices W_Q.

# %%
tiny = dict(width=32, num_layers=3, vocab_size=100, max_len=16)
stored = {}
for name, plan, embedding_width in (("bert_base", "separate", None), ("albert_base", "albert", 8)):
    config = published_config(name, sharing=plan)
    model = replace(
        config,
        **tiny,
        heads=replace(config.heads, num_heads=4),
        ffn=replace(config.ffn, width=64),
        embedding=replace(config.embedding, width=embedding_width),
    ).build()
    fresh = model.init(jax.random.key(0), text[:, :4])["params"]
    with tempfile.TemporaryDirectory() as folder:
        pretrained.save(folder, model, fresh)
        from safetensors import safe_open

        with safe_open(next(Path(folder).glob("*.safetensors")), "np") as file:
            stored[name] = sorted(key for key in list(file.keys()) if "query.weight" in key)
    print(f"a {name} of 3 layers holds {len(stored[name])} W_Q:", *stored[name], sep="\n    ")

assert [len(names) for names in stored.values()] == [3, 1]

# %% [markdown]
# ## 3. Count them in published models
#
# Their sizes are known, so all can be counted without a download. *Layers* are applications of
# self-attention, *sets* are sets of its weights.

# %%
published = {
    "Transformer, base": published_config("transformer_base"),
    "BERT, base": published_config("bert_base"),
    "GPT-2": published_config("gpt2"),
    "T5, base": published_config("t5_base"),
    "T5, base, encoder = decoder": published_config(
        "t5_base", encoder=EncoderConfig(shares_decoder=True)
    ),
    "ALBERT, base": published_config("albert_base"),
}


def count_sets(config):
    """(applications of self-attention, sets of its weights)."""
    plans = [config.plan]
    if config.encoder is not None:
        plans.append(config.encoder_plan)
    own = plans[:1] if config.encoder and config.encoder.shares_decoder else plans
    return sum(p.num_layers for p in plans), sum(p.num_groups["attention"] for p in own)


print(f"{'model':30}{'layers':>7}{'sets':>6}{'parameters':>14}")
for name, config in published.items():
    layers, sets = count_sets(config)
    print(f"{name:30}{layers:>7}{sets:>6}{num_parameters(config):>14,}")

assert count_sets(published["BERT, base"]) == (12, 12)
assert count_sets(published["ALBERT, base"]) == (12, 1)
assert num_parameters(published["GPT-2"]) == 124_439_808  # as published

# %% [markdown]
# Two things that are often told wrongly:
#
# - T5's paper says that sharing encoder and decoder halves the model. It keeps 62 %: the attention
#   from decoder to encoder and the embedding have no partner to share with.
# - "12M against 108M" compares BERT with an ALBERT whose embedding is narrower too. The same model
#   with twelve sets of its own has 90M.

# %%
t5, shared = (num_parameters(published[n]) for n in ("T5, base", "T5, base, encoder = decoder"))
print(f"T5 with one set for encoder and decoder: {100 * shared / t5:.1f} % of {t5:,}")
assert (t5, round(100 * shared / t5)) == (222_903_552, 62)

encoder = OutputHead(kind="none", pooler="first")
for plan in ("albert", "separate"):
    config = published_config("albert_base", sharing=plan, output=encoder)
    print(f"ALBERT's encoder, plan {plan:9}{num_parameters(config):>12,} parameters")
assert num_parameters(config) == 89_650_176

# %% [markdown]
# ## 4. What sharing saves: the picture
#
# Eight plans for six layers. A cell holds the number of the set that a layer uses; cells of one
# colour are one set. To the right, what the whole model costs: parameters fall with the number of
# sets, the arithmetic for a token and the cache of a decoder do not change at all. The last plan is
# of another kind: in `cla:3` every second layer reads the *keys and values* of the layer before it,
# what was computed and not only the weights. That alone saves cache, and some arithmetic.

# %%
plans = ["separate", "sandwich", "groups:2", "cycle:2", "attention_only", "ffn_only", "albert"]
plans.append("cla:3")
configs = {plan: small(plan, num_layers=6) for plan in plans}
figure, axes = plt.subplots(1, 2, figsize=(10, 3.9), sharey=True)
figure.subplots_adjust(left=0.13, right=0.62, wspace=0.12, top=0.84, bottom=0.13)
for axis, (part, title) in zip(
    axes, {"attention": "attention", "ffn": "feed-forward"}.items(), strict=True
):
    slots = np.array([config.plan[part] for config in configs.values()])
    axis.imshow(slots, cmap="Pastel1", vmin=0, vmax=8, aspect="auto")
    for (i, j), slot in np.ndenumerate(slots):
        axis.text(j, i, slot, ha="center", va="center", fontsize=10)
    axis.set_title(f"{title}: set of layer ...", fontsize=11)
    axis.set_xticks(range(6), range(1, 7))
    axis.set_yticks(range(len(plans)), plans, family="monospace")
    axis.tick_params(length=0)
costs = {
    "parameters": num_parameters,
    "FLOPs\na token": lambda c: flops_per_token(c, 32),
    "cache bytes\na token": cache_bytes_per_token,
}
for column, (name, cost) in enumerate(costs.items()):
    x = 6.55 + 2.3 * column
    axes[1].text(x + 0.9, -0.75, name, ha="center", va="bottom", fontsize=10, clip_on=False)
    for row, config in enumerate(configs.values()):
        told = f"{cost(config):,}"
        axes[1].text(x + 1.7, row, told, ha="right", va="center", fontsize=10, clip_on=False)

flops = {flops_per_token(c, 32) for name, c in configs.items() if name != "cla:3"}
caches = {cache_bytes_per_token(c) for name, c in configs.items() if name != "cla:3"}
assert len(flops) == len(caches) == 1  # no plan of sharing weights changes either

# %% [markdown]
# ## 5. What sharing costs: a row of ALBERT's table at our size
#
# Table 4 of ALBERT (arXiv 1909.11942) compares shared with separate layers at one width and depth:
# 79.8 against 82.3 points on average (embedding 768 wide), 80.1 against 81.6 (128 wide), without a
# spread. Here are both plans in a model of 4 layers, on the source of Python's standard library,
# byte by byte, with three seeds each, so that the difference can be held against the spread.
#
# The third arm is the control: *shared, but with as many parameters* as the separate one, because
# its one feed-forward part is made wider.

# %%
settings = training.TrainConfig(
    steps=200,
    batch_size=16,
    length=32,
    seeds=(0, 1, 2),
    eval_every=1000,
    log_every=50,
    eval_windows=512,
)
code = data.Text().load(settings.length)
arms = {
    "separate": small("separate"),
    "albert": small("albert"),
    "albert, as many parameters": match_budget(
        small("albert"), small("separate"), "parameters"
    ).config,
}
found = {}
print(f"{'bits per byte, held out':28}{'parameters':>11}{'FLOPs/token':>13}   mean   the 3 seeds")
for name, config in arms.items():
    result = training.fit_in_memory(
        config.build(), training.OBJECTIVES["causal_lm"], settings, code
    ).result
    bits = found[name] = result.heldout["bits_per_byte"]
    counts = f"{num_parameters(config):>11,}{flops_per_token(config, 32):>13,}"
    print(f"{name:28}{counts}   {bits.mean():.3f}  {np.round(bits, 3)}")

gap = found["albert"].mean() - found["separate"].mean()
print(f"\nsharing costs {gap:.3f} bits at equal width;", end=" ")
print(f"seeds of one plan differ by up to {np.ptp(found['separate']):.3f}")

# %% [markdown]
# Read the last lines in this order. At equal width the shared model has a third of the parameters
# and does worse. Given as many parameters it catches up, and pays in FLOPs. So "does sharing
# hurt?" has no answer before one says *at an equal what*. Three seeds of a tiny model are a
# demonstration; [the measured
# comparison](https://github.com/attnlab/attnlab/blob/main/docs/results.md) has larger ones.
#
# ## Exercise
#
# Write a plan by hand in which the first and the last of six layers have sets of their own and all
# layers between share one. Which name in the picture is it? And which half of it, attention or
# feed-forward, saves more parameters?
#
# *Hint:* a plan may be a string, `small("attention=0,0,0 ffn=0,1,2", num_layers=3)`.
#
# <details><summary>Solution (click)</summary>
#
# ```python
# mine = small("attention=0,1,1,1,1,2 ffn=0,1,1,1,1,2", num_layers=6)
# assert mine.plan == small("sandwich", num_layers=6).plan
#
# every = num_parameters(small("separate", num_layers=6))
# for part, plan in {
#     "attention": "attention=0,1,1,1,1,2 ffn=0,1,2,3,4,5",
#     "feed-forward": "attention=0,1,2,3,4,5 ffn=0,1,1,1,1,2",
# }.items():
#     saved = every - num_parameters(small(plan, num_layers=6))
#     print(f"{part} shared in the middle saves {saved:,} of {every:,}")
# ```
#
# It is `sandwich` (Reid et al. 2021). The feed-forward part saves about twice as much: it has
# 2 x 32 x 128 weights a layer, attention 4 x 32 x 32.
#
# </details>
