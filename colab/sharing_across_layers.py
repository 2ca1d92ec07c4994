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
# **ALBERT shares them on purpose over all twelve layers, and its own table shows which sublayer
# that costs with embeddings of width 128: 81.7 points (the mean of five tasks) with shared
# attention, 80.2 with a shared feed-forward network (FFN) and 80.1 with both shared, against 81.6
# with nothing shared.**
# **Sharing parameters saves memory for parameters, but neither FLOPs nor key/value cache.**

# %% [markdown]
# ![Which layers share which parameters under each plan, and what it saves](data:image/png;base64,)

# %% [markdown]
# A row of the figure is a sharing plan for six layers, a number the parameter group that a layer
# uses; the right panel is what the model costs. The scores above are of one size, ALBERT base: what
# sharing costs elsewhere depends on size, text and budget.
#
# `cla:3` shares more than parameters: layers attend to the keys and values of an earlier layer, so
# it saves cache.
#
# The cells below check each sentence. It takes about two minutes on a CPU.
#
# 1. Count the parameter groups in the arrays.
# 2. Count them in saved files.
# 3. Count them in published models.
# 4. What each sharing plan saves: the figure.
# 5. What sharing costs: ALBERT's table at our size.

# %%
# @title Install attnlab where it is missing; JAX and Flax stay as they are
import importlib.util

if importlib.util.find_spec("attnlab") is None:
    print("Installing attnlab takes about a minute.")
    # %pip install -q "attnlab[lab,pretrained] @ git+https://github.com/attnlab/attnlab@main"

# %%
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from safetensors import safe_open

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

# %% [markdown]
# ## 1. Count the parameter groups in the arrays
#
# A *sharing plan* gives each layer the number of the parameter group that it uses. Here are two
# models of four layers that differ in the plan alone. The parameters of all layers lie stacked in
# one array, so its first axis is the number of groups.


# %%
def small(plan, **changes):
    heads = Standard(num_heads=4, biases=("q", "k", "v", "o"))
    sizes = dict(width=32, num_layers=4, heads=heads, ffn=FFN(width=128), max_len=32)
    return ModelConfig(**(sizes | dict(sharing=plan) | changes))


tokens = jnp.arange(32)[None] % 7
params = {}
for plan in ("separate", "albert"):
    params[plan] = jax.jit(small(plan).build().init)(jax.random.key(0), tokens)["params"]
    shape = params[plan]["layers"]["attention"]["q"].shape
    print(plan, "| group of each layer:", small(plan).plan["attention"], "| W_Q:", shape)

assert len(params["separate"]["layers"]["attention"]["q"]) == 4
assert len(params["albert"]["layers"]["attention"]["q"]) == 1

# %% [markdown]
# Are the four groups of `separate` perhaps the same numbers? No: each is drawn independently, so
# the cosine between two of them is 0 within chance, which is 1 / sqrt(number of weights) = 0.03.

# %%
W_Q = np.asarray(params["separate"]["layers"]["attention"]["q"]).reshape(4, -1)
W_Q = W_Q / np.linalg.norm(W_Q, axis=1, keepdims=True)
print("cosine between the W_Q of two layers:", np.round(W_Q @ W_Q.T, 2), sep="\n")
assert np.abs(W_Q @ W_Q.T - np.eye(4)).max() < 6 * W_Q.shape[1] ** -0.5

# %% [markdown]
# **Control.** Copy the one group of `albert` four times, into a model with four groups. If sharing
# means only "the same numbers in every layer", both models must return the same. They do.

# %%
copied_config, copied = unshare(small("albert"), params["albert"])
one_group = small("albert").build().apply({"params": params["albert"]}, tokens).logits
four_groups = copied_config.build().apply({"params": copied}, tokens).logits
difference = float(jnp.abs(one_group - four_groups).max())
print("parameters", num_parameters(small("albert")), "and", num_parameters(copied_config))
print("largest difference of the logits", difference)
assert difference < 1e-5 * float(jnp.abs(one_group).max())

# %% [markdown]
# ## 2. Count them in saved files
#
# A tiny BERT and a tiny ALBERT of three layers, saved in the format of Hugging Face. How many
# matrices W_Q does each file contain?

# %%
tiny = dict(width=32, num_layers=3, vocab_size=100, max_len=16)
for name, plan, embedding_width in (("bert_base", "separate", None), ("albert_base", "albert", 8)):
    config = published_config(name, sharing=plan)
    model = replace(
        config,
        **tiny,
        heads=replace(config.heads, num_heads=4),
        ffn=replace(config.ffn, width=64),
        embedding=replace(config.embedding, width=embedding_width),
    ).build()
    initial = jax.jit(model.init)(jax.random.key(0), tokens[:, :4])["params"]
    with tempfile.TemporaryDirectory() as folder:
        pretrained.save(folder, model, initial)
        with safe_open(next(Path(folder).glob("*.safetensors")), "np") as file:
            found = sorted(key for key in list(file.keys()) if "query.weight" in key)
    print(name, *found, sep="\n    ")
    assert len(found) == {"separate": 3, "albert": 1}[plan]

# %% [markdown]
# ## 3. Count them in published models
#
# Their sizes are known, so nothing is downloaded. *Layers* counts applications of self-attention,
# *groups* counts how many sets of its parameters exist.

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


def count_groups(config):
    """(applications of self-attention, groups of its parameters)."""
    plans = [config.plan]
    if config.encoder is not None:
        plans.append(config.encoder_model.plan)
    own = plans[:1] if config.encoder and config.encoder.shares_decoder else plans
    return sum(p.num_layers for p in plans), sum(p.num_groups["attention"] for p in own)


counts = pd.DataFrame(
    {name: (*count_groups(config), num_parameters(config)) for name, config in published.items()},
    index=["layers", "groups", "parameters"],
).T
assert tuple(counts.loc["BERT, base"])[:2] == (12, 12)
assert tuple(counts.loc["ALBERT, base"])[:2] == (12, 1)
assert counts.loc["GPT-2", "parameters"] == 124_439_808  # as published
counts

# %% [markdown]
# Two common errors:
#
# - "T5 with a shared encoder and decoder has half the parameters." It keeps 62 %: cross-attention
#   and the embedding have nothing to share with.
# - "ALBERT has 12M parameters instead of 108M because it shares layers." Its embedding is narrower
#   too. The same model with twelve separate layers has 90M.

# %%
assert counts.loc["T5, base", "parameters"] == 222_903_552
kept = counts.loc["T5, base, encoder = decoder", "parameters"] / 222_903_552
encoder = OutputHead(kind="none", pooler="first")
separate_albert = num_parameters(
    published_config("albert_base", sharing="separate", output=encoder)
)
print(f"T5 keeps {100 * kept:.0f} %; ALBERT with separate layers: {separate_albert:,} parameters")
assert (round(100 * kept), separate_albert) == (62, 89_650_176)

# %% [markdown]
# ## 4. What sharing saves: the figure
#
# Eight plans for six layers. A number is the parameter group that a layer uses; cells of one colour
# are one group. The panel "keys and values" shows the group of the projections to keys and values
# (W_K and W_V). An arrow means that the layer computes none: it attends to the keys and values of
# the layer before it (`cla:3`, cross-layer attention, arXiv 2405.12981).
#
# Right: what the whole model costs, relative to `separate`. Sharing parameters changes neither
# FLOPs nor cache. Sharing the keys and values themselves saves cache, and some FLOPs.

# %% tags=["answer"]
num_layers = 6
plans = ["separate", "sandwich", "groups:2", "cycle:2", "attention_only", "ffn_only", "albert"]
plans.append("cla:3")  # add a plan of your own, such as "attention=0,0,0,1,1,1 ffn=0,1,2,3,4,5"

configs = {plan: small(plan, num_layers=num_layers) for plan in plans}
panels = {"attention": "W_Q and W_O", "kv": "keys and values", "ffn": "FFN"}
figure, axes = plt.subplots(
    1, 4, figsize=(13, 4), sharey=True, layout="constrained", width_ratios=[1, 1, 1, 0.9]
)
for axis, (sublayer, title) in zip(axes, panels.items(), strict=False):
    for row, config in enumerate(configs.values()):
        plan = config.plan
        groups = plan[sublayer if sublayer in plan else "attention"]
        sources = plan.kv_sources if sublayer == "kv" else range(num_layers)
        colours = [[groups[source] for source in sources]]
        extent = (-0.5, num_layers - 0.5, row + 0.5, row - 0.5)
        axis.imshow(colours, cmap="Pastel1", vmin=0, vmax=8, aspect="auto", extent=extent)
        for layer, source in enumerate(sources):
            label = str(groups[layer]) if source == layer else "←"
            axis.text(layer, row, label, ha="center", va="center")
    axis.set(title=title, xlabel="layer", xticks=range(num_layers), ylim=(len(plans) - 0.5, -0.5))
axes[0].set_yticks(range(len(plans)), plans, family="monospace")
axes[0].set_ylabel("sharing plan")

costs = {
    "parameters": num_parameters,
    "FLOPs per token": lambda config: flops_per_token(config, 32),
    "cache bytes per token": cache_bytes_per_token,
}
relative = pd.DataFrame(
    {name: {plan: cost(config) for plan, config in configs.items()} for name, cost in costs.items()}
)
relative = relative / relative.loc["separate"]
for column, (name, marker) in enumerate(zip(relative, "os^", strict=True)):
    heights = np.arange(len(plans)) + 0.22 * (column - 1)
    axes[3].plot(relative[name], heights, marker, label=name)
axes[3].set(title="cost of the model", xlabel="relative to separate", xlim=(0, 1.1))
figure.legend(frameon=False, loc="outside lower right", ncols=3)
axes[3].grid(axis="x", alpha=0.3)

only_parameters = relative.drop(index="cla:3")
assert (only_parameters[["FLOPs per token", "cache bytes per token"]] == 1).all(axis=None)
assert relative.loc["cla:3", "cache bytes per token"] == 0.5

# %% [markdown]
# ## 5. What sharing costs, by sublayer
#
# Table 4 of ALBERT (arXiv 1909.11942): average score on five tasks, one run each, 12 layers, with
# embeddings of width 128 and 768. FLOPs are equal in all rows; parameters are not. Sharing
# attention costs little (with embeddings of width 768 more), sharing the FFN costs most of it.

# %%
pd.DataFrame(
    {
        "parameters, E = 128": ["89M", "64M", "38M", "12M"],
        "score, E = 128": [81.6, 81.7, 80.2, 80.1],
        "score, E = 768": [82.3, 81.6, 79.5, 79.8],
    },
    index=["not shared", "attention shared", "FFN shared", "all shared"],
)

# %% [markdown]
# Here is the same table at our size: 4 layers of width 32, the next byte of the source of Python's
# standard library, three seeds. The last variant is the control for the parameter count: all layers
# shared, and the FFN made wider until the model has as many parameters as `separate`.

# %%
steps, seeds = 250, (0, 1, 2)
settings = training.TrainConfig(
    steps=steps, seeds=seeds, batch_size=16, length=32, log_every=50,
    optimizer=training.OptimizerConfig(learning_rate=7e-3),
    evaluation=training.EvaluationConfig(every=1000, windows=256),
)  # fmt: skip
text = data.Text().load(settings.length)
variants = {plan: small(plan) for plan in ("separate", "attention_only", "ffn_only", "albert")}
variants["albert, equal parameters"] = match_budget(
    small("albert"), small("separate"), "parameters"
).config


def train(config):
    objective = training.OBJECTIVES["causal_lm"]
    run = training.fit_in_memory(config.build(), objective, settings, text)
    return run.result.heldout["bits_per_byte"]  # one number per seed


bits = {name: train(config) for name, config in variants.items()}

# %%
t = 4.303  # 97.5 % point of Student's t with 3 - 1 degrees of freedom
table = {}
for name, config in variants.items():
    difference = bits[name] - bits["separate"]  # paired by seed: same batches
    half = t * difference.std(ddof=1) / len(seeds) ** 0.5
    table[name] = {
        "parameters": num_parameters(config),
        "FLOPs per token": flops_per_token(config, 32),
        "bits per byte": bits[name].mean().round(3),
        "difference from separate": difference.mean().round(3),
        "95 % interval": f"{difference.mean() - half:.3f} to {difference.mean() + half:.3f}",
    }
pd.DataFrame.from_dict(table, orient="index")

# %% [markdown]
# In the saved run the order is that of ALBERT with embeddings of width 128: shared attention costs
# least (inconclusive), the shared FFN more, and sharing both costs most. With as many parameters as
# `separate` the shared model is inconclusive too, but it needs 3.3 times the FLOPs. So "does
# sharing hurt?" has no answer before you say *at an equal what*.
#
# That is a short run on one text, at one learning rate. Two studies chose rates for each variant:
# [the first study](https://github.com/attnlab/attnlab/blob/main/docs/results/heads_and_sharing.md)
# on three texts (learned positions, AdamW), and
# [the head-width study](https://github.com/attnlab/attnlab/blob/main/docs/results/head_width/analysis.md)
# on four, with five times the bytes (rotary, Muon; its rates were not tuned for shared models at
# equal parameters). Bits per byte worse than separate layers (95 % intervals over texts):
#
# | shared by all layers | equal | first study | head-width study |
# |---|---|---|---|
# | everything | FLOPs | 0.120 (-0.022 to 0.263) | 0.183 (0.142 to 0.224) |
# | attention | FLOPs | | 0.043 (0.022 to 0.064) |
# | FFN | FLOPs | | 0.096 (0.076 to 0.115) |
# | everything | parameters | -0.017 (-0.059 to 0.025) | 0.050 (0.026 to 0.073) |
# | attention | parameters | | 0.019 (0.007 to 0.031) |
# | FFN | parameters | | 0.007 (-0.004 to 0.018) |
#
# An interval that contains 0 is inconclusive. At equal parameters the FFN takes up the parameters,
# and the models that share have up to 3.6 times the FLOPs. Two sets of layers in turn (`cycle:2`)
# are better there in the first study, by 0.021 (0.012 to 0.030, six seeds, exploratory), and worse
# in the head-width study, by 0.025 (0.007 to 0.042). Which of their differences is the cause was
# not tested.
#
# ## What to remember
#
# - Layers do not share attention weights unless the config does so on purpose: count the groups, or
#   read the first axis of the stacked W_Q.
# - At equal FLOPs a shared FFN costs more than shared attention (0.096 against 0.043 in the
#   head-width study); at equal parameters, where the shared FFN is wider, its cost is inconclusive
#   (0.007 against 0.019).
# - "Does sharing hurt?" needs a budget. Shared parameters cost the same FLOPs and the same cache as
#   separate ones; only shared *keys and values* save cache.
#
# **Where people ask this:** [In attention models with multiple layers, are weight matrices shared
# across layers?](https://ai.stackexchange.com/questions/25222/in-attention-models-with-multiple-layers-are-weight-matrices-shared-across-laye),
# [where does ALBERT's code share?](https://github.com/google-research/albert/issues/200). Papers:
# [ALBERT](https://arxiv.org/abs/1909.11942), [T5](https://arxiv.org/abs/1910.10683),
# [Takase and Kiyono](https://arxiv.org/abs/2104.06022) (other plans),
# [Subformer](https://arxiv.org/abs/2101.00234) (`sandwich`).
#
# ## Exercises
#
# 1. Write a plan in which the first and the last of six layers have their own parameters and all
#    layers between share one group. Which plan of the figure is it? Which half of it saves more
#    parameters, attention or FFN?
# 2. Two layers that share a parameter group both send it a gradient. Is the gradient of the shared
#    W_Q the sum or the mean of the gradients of its four copies? Use `copied_config` and `copied`
#    of section 1.
#
# *Hint:* a plan may be a string, `small("attention=0,0,0 ffn=0,1,2", num_layers=3)`.
#
# <details><summary>Solutions (click)</summary>
#
# ```python
# mine = small("attention=0,1,1,1,1,2 ffn=0,1,1,1,1,2", num_layers=6)
# assert mine.plan == small("sandwich", num_layers=6).plan
#
# every = num_parameters(small("separate", num_layers=6))
# for sublayer, plan in {
#     "attention": "attention=0,1,1,1,1,2 ffn=0,1,2,3,4,5",
#     "FFN": "attention=0,1,2,3,4,5 ffn=0,1,1,1,1,2",
# }.items():
#     saved = every - num_parameters(small(plan, num_layers=6))
#     print(f"{sublayer} shared in the middle saves {saved:,} of {every:,}")
# ```
#
# It is `sandwich`. The FFN saves about twice as much: it has 2 x 32 x 128 weights per layer,
# attention has 4 x 32 x 32.
#
# ```python
# def loss(params, config):
#     return (config.build().apply({"params": params}, tokens).logits ** 2).mean()
#
# of_shared = jax.grad(loss)(params["albert"], small("albert"))["layers"]["attention"]["q"][0]
# of_copies = jax.grad(loss)(copied, copied_config)["layers"]["attention"]["q"]
# print("sum:", float(jnp.abs(of_shared - of_copies.sum(0)).max()))
# print("mean:", float(jnp.abs(of_shared - of_copies.mean(0)).max()))
# assert jnp.allclose(of_shared, of_copies.sum(0), rtol=1e-3, atol=1e-5)
# ```
#
# The sum. That is also how to tell tied weights from copies that merely start equal.
#
# </details>
