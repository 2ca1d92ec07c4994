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
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/heads_share.ipynb)
#
# # Do heads share W_Q, W_K and W_V?
#
# **No: in the Transformer, BERT, GPT and every large library each head has its own W_Q, W_K and
# W_V; they are stored side by side in one big matrix, which is why it looks like one.** **One
# much-copied tutorial does share: a single small matrix serves the slices of all heads, and that is
# a different, weaker function with 1 / N² of these parameters, for N heads.** **Today's language
# models share W_K and W_V among heads on purpose, to store fewer keys and values, and keep a W_Q
# for each head.**

# %% [markdown]
# ![What each head can read: in standard heads every head depends on every slice of x, in narrow
# ones on its own slice, in the tutorial's all heads do the same](data:image/png;base64,)

# %% [markdown]
# The figure is of new weights; what a head cannot read it cannot learn to read. How models are
# built does not say what is best: section 5 measures that, on one text.
#
# The cells below check each sentence. It takes about a minute and a half on a CPU.
#
# 1. One matrix is N matrices, bit for bit.
# 2. The tutorial's code and library code.
# 3. What each head can read: the figure.
# 4. What one shared matrix cannot express.
# 5. What that costs in training.
# 6. Sharing on purpose.

# %%
# @title Install attnlab where it is missing; JAX and Flax stay as they are
import importlib.util

if importlib.util.find_spec("attnlab") is None:
    print("Installing attnlab takes about a minute.")
    # %pip install -q "attnlab[lab,pretrained] @ git+https://github.com/attnlab/attnlab@main"

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from attnlab import capture, data, training
from attnlab import heads as layouts
from attnlab.heads import multi_head_attention
from attnlab.models import FFN, ModelConfig, match_budget, num_parameters
from attnlab.pretrained import from_variables
from attnlab.transforms import NotEquivalent, convert

jax.config.update("jax_default_matmul_precision", "highest")  # a TPU rounds products otherwise
rng = np.random.default_rng(0)
T, D, N = 6, 32, 4  # tokens, width, heads
H = D // N  # width of a head

# %% [markdown]
# ## 1. One matrix is N matrices
#
# Library code multiplies x by one D x D matrix and then reshapes the result into N pieces. The
# drawing in every explanation has N small matrices. Here are both, on whole numbers, so that
# rounding can neither hide nor make a difference: they agree bit for bit.

# %%
x = rng.integers(-9, 10, (T, D)).astype(np.float32)
W_Q = rng.integers(-9, 10, (D, D)).astype(np.float32)

packed = np.asarray(jnp.asarray(x) @ W_Q).reshape(T, N, H)  # as in a library
matrices = [W_Q[:, n * H : (n + 1) * H] for n in range(N)]  # N matrices D x H, as in a drawing
explicit = np.stack([np.asarray(jnp.asarray(x) @ W) for W in matrices], axis=1)

print(N, "matrices of shape", matrices[0].shape, "equal one of shape", W_Q.shape)
assert np.array_equal(packed, explicit)

# %% [markdown]
# So the *columns* of the big matrix are divided among the heads, not its rows: **every head reads
# all of x** and writes its own H numbers. The query is divided, x is not.
#
# ## 2. The tutorial's class and library code
#
# Here are both in NumPy. They differ in the first two lines: the tutorial divides x into slices
# *first* and then applies one H x H matrix to all slices.


# %%
def softmax(a):
    a = np.exp(a - a.max(-1, keepdims=True))
    return a / a.sum(-1, keepdims=True)


def attend(q, k, v, scale):  # [T, N, H] each
    probs = softmax(scale * np.einsum("tnh,snh->nts", q, k))
    return np.einsum("nts,snh->tnh", probs, v).reshape(T, D)


def library(x, w):  # torch.nn.MultiheadAttention, BERT, GPT, tensor2tensor
    projected = x @ w["in_proj_weight"].T  # one matrix, D -> 3 D
    q, k, v = (a.reshape(T, N, H) for a in np.split(projected, 3, axis=-1))
    return attend(q, k, v, H**-0.5) @ w["out_proj.weight"].T


def tutorial(x, w):  # "SelfAttention" of a popular video
    slices = x.reshape(T, N, H)  # divide x first
    q, k, v = (slices @ w[f"{name}.weight"].T for name in ("queries", "keys", "values"))
    return attend(q, k, v, D**-0.5) @ w["fc_out.weight"].T + w["fc_out.bias"]


def normal(*shape):
    return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)


x = rng.normal(size=(T, D)).astype(np.float32)
library_weights = {"in_proj_weight": normal(3 * D, D), "out_proj.weight": normal(D, D)}
tutorial_weights = {f"{name}.weight": normal(H, H) for name in ("queries", "keys", "values")}
tutorial_weights |= {"fc_out.weight": normal(D, D), "fc_out.bias": normal(D)}

# %% [markdown]
# attnlab reads the variables of both under their own names. Which layout does it find, and does it
# compute the same?

# %%
systems = {
    "torch_mha": (library, library_weights, {"embed_dim": D, "num_heads": N}),
    "seed_snippet": (tutorial, tutorial_weights, {"embed_size": D, "heads": N}),
}
for name, (formula, weights, sizes) in systems.items():
    module, params = from_variables(name, sizes, weights)
    output = module.apply({"params": params}, x[None])[0]
    difference = np.abs(output - formula(x, weights)).max()
    print(f"{name}: layout {module.layout.name!r}, largest difference {difference:.0e}")
    assert difference < 1e-4

# %% [markdown]
# The tutorial's layout is `narrow_tied`: *narrow*, since a head reads only its own slice of x, and
# *tied*, since one matrix serves all heads. `narrow` lies between: slices, but a matrix for each
# head. So two questions hide in one snippet: **what does a head read**, and **does it have its own
# weights**? How many numbers are W_Q, W_K and W_V in a model of the usual size?

# %%
width, num_heads = 512, 8

table = {}
for name in ("standard", "narrow", "narrow_tied"):
    shapes = layouts.weight_shapes(layouts.make_layout(name, width=width, num_heads=num_heads))
    numbers = sum(int(np.prod(shapes[weight])) for weight in "qkv")
    table[name] = {"shape of W_Q": shapes["q"], "numbers in W_Q, W_K, W_V": numbers}
counts = pd.DataFrame.from_dict(table, orient="index")
assert counts.iloc[0, 1] == counts.iloc[2, 1] * num_heads**2
counts

# %% [markdown]
# ## 3. What a head can read: the figure
#
# How much does the query of a head change when a slice of x changes? (The norm of the Jacobian; 0
# is exactly 0.) In `standard` every head reads every slice. The other two read their own slice
# alone, so only the diagonal is not 0; and where one matrix serves all heads, all numbers on the
# diagonal are equal.


# %% tags=["answer"]
def sensitivity(name):
    layout = layouts.make_layout(name, width=D, num_heads=N)
    params = layouts.init(jax.random.key(1), layout)

    def query(row):
        _, values = capture(multi_head_attention, params, row[None, None], layout, names=("q",))
        return values["q"][0, 0]  # [N, H]

    jacobian = np.asarray(jax.jacobian(query)(jnp.asarray(x[0])))  # [N, H, D]
    return np.sqrt((jacobian.reshape(N, H, N, H) ** 2).sum((1, 3)))


titles = {
    "standard": "standard\nall of x, own matrices",
    "narrow": "narrow\nown slice, own matrices",
    "narrow_tied": "narrow_tied (the tutorial)\nown slice, one matrix",
}
norms = {name: sensitivity(name) for name in titles}
top = max(a.max() for a in norms.values())
figure, axes = plt.subplots(1, 3, figsize=(10, 3.5), layout="constrained", sharey=True)
for axis, (name, norm) in zip(axes, norms.items(), strict=True):
    image = axis.imshow(norm, cmap="Blues", vmin=0, vmax=top)
    axis.set(title=titles[name], xlabel="slice of x", xticks=range(N), yticks=range(N))
    for (i, j), value in np.ndenumerate(norm):
        colour = "white" if value > 0.6 * top else "black"
        axis.text(j, i, f"{value:.1f}", ha="center", va="center", color=colour)
axes[0].set_ylabel("head")
figure.colorbar(image, ax=axes, label="norm of d query / d slice")

off_diagonal = ~np.eye(N, dtype=bool)
assert (norms["standard"] > 0).all()
assert (norms["narrow"][off_diagonal] == 0).all()
assert np.ptp(np.diag(norms["narrow_tied"])) < 1e-5 < np.ptp(np.diag(norms["narrow"]))

# %% [markdown]
# ## 4. What one projection for all heads cannot express
#
# `convert` looks for weights of one layout that are the same function as given weights of another.
# It returns the weights with the measured difference, or a proof that there are none.

# %%
made = {name: layouts.make_layout(name, width=D, num_heads=N) for name in titles}
w = {name: layouts.init(jax.random.key(2), layout) for name, layout in made.items()}

as_standard = convert(w["narrow_tied"], made["narrow_tied"], made["standard"])
back = convert(w["standard"], made["standard"], made["narrow_tied"])
print("narrow_tied -> standard: largest difference", as_standard.forward_error)
print("standard -> narrow_tied: impossible,", back.reason)
assert as_standard.forward_error < 1e-6
assert isinstance(back, NotEquivalent)

# %% [markdown]
# The tutorial's attention is a special case of library attention, not the reverse. Do the heads
# need their own matrices once each reads its own slice? Yes: *if all slices of a token are equal,
# tied heads attend alike*, and heads with their own matrices do not.

# %%
equal_slices = jnp.tile(jax.random.normal(jax.random.key(3), (1, T, H)), N)
for name in ("narrow_tied", "narrow"):
    _, values = capture(multi_head_attention, w[name], equal_slices, made[name], names=("probs",))
    print(name, "heads: probabilities differ by", np.ptp(values["probs"], axis=1).max().round(2))

# %% [markdown]
# **Control.** Does `convert` call everything impossible? Give it weights of a standard layer that
# were made from a tied one. It finds the one matrix in them again.

# %%
again = convert(as_standard.params, made["standard"], made["narrow_tied"])
print("standard, made from narrow_tied -> narrow_tied: difference", again.forward_error)
assert again.forward_error < 1e-6

# %% [markdown]
# ## 5. What it costs in training
#
# A fair comparison gives all three layouts the same number of parameters (`match_budget` gives the
# narrow ones a wider FFN) and each its own learning rate (those that
# [the study](https://github.com/attnlab/attnlab/blob/main/docs/results/heads_and_sharing.md) found,
# `narrow_tied` that of `narrow`; one rate for all favours the layout that it suits). Two layers of
# width 64 with 8 heads predict the next byte of the source of Python's standard library.

# %%
steps, seeds = 300, (0, 1, 2)
learning_rates = {"standard": 0.0070, "narrow": 0.0094, "narrow_tied": 0.0094}

text = data.Text().load(32)


def config_of(name):
    attention = layouts.make_layout(name, num_heads=8, biases=("q", "k", "v", "o"))
    return ModelConfig(width=64, num_layers=2, heads=attention, ffn=FFN(width=128), max_len=32)


def train(config, learning_rate):
    settings = training.TrainConfig(
        steps=steps, seeds=seeds, batch_size=16, length=32, log_every=50,
        optimizer=training.OptimizerConfig(learning_rate=learning_rate),
        evaluation=training.EvaluationConfig(every=1000, windows=512),
    )  # fmt: skip
    objective = training.OBJECTIVES["causal_lm"]
    run = training.fit_in_memory(config.build(), objective, settings, text)
    return run.result.heldout["bits_per_byte"]  # one number per seed


bits, table = {}, {}
for name, learning_rate in learning_rates.items():
    config = match_budget(config_of(name), config_of("standard"), "parameters").config
    bits[name] = train(config, learning_rate)
    difference = bits[name] - bits["standard"]  # paired by seed: same batches
    half = 4.303 * difference.std(ddof=1) / 3**0.5  # Student's t, 3 seeds
    table[name] = {
        "parameters": num_parameters(config),
        "bits per byte": bits[name].mean().round(3),
        "minus standard": difference.mean().round(3),
        "95 % interval": f"{difference.mean() - half:.3f} to {difference.mean() + half:.3f}",
    }
pd.DataFrame.from_dict(table, orient="index")

# %% [markdown]
# In the saved run it costs 0.05 bits to *read* only a slice. That all heads also share one matrix
# costs nothing more that three seeds could show. Two questions, two answers.
#
# A few hundred steps on one text are a demonstration. In [the head-width
# study](https://github.com/attnlab/attnlab/blob/main/docs/results/head_width/analysis.md) (8
# texts, 2 seeds, 216,448 parameters, equal FLOPs, rotary positions, Muon; exploratory) four narrow
# heads of width 16 are worse than four standard ones by 0.014 bits per byte (95 % interval 0.007 to
# 0.020). Wide heads are no remedy: at equal parameters they are worse than standard ones too, by
# 0.064 (0.022 to 0.107), in [the first
# study](https://github.com/attnlab/attnlab/blob/main/docs/results/heads_and_sharing.md) (3 texts,
# 3 seeds, learned positions, AdamW; registered).
#
# ## 6. Sharing on purpose
#
# During generation a model stores k and v of every earlier token (the *cache*). Multi-query
# attention (arXiv 1911.02150) and grouped-query attention (arXiv 2305.13245) let several query
# heads share one W_K and one W_V, so the cache is smaller. Each query head keeps its own W_Q.

# %%
table = {}
for num_kv_heads in (8, 2, 1):
    grouped = layouts.Standard(width=512, num_heads=8, num_kv_heads=num_kv_heads)
    shapes = layouts.weight_shapes(grouped)
    table[f"{num_kv_heads} key/value heads"] = {
        "shape of W_Q": shapes["q"],
        "shape of W_K": shapes["k"],
        "parameters": layouts.num_parameters(grouped),
        "cache bytes per token": layouts.cache_bytes_per_token(grouped),
    }
pd.DataFrame.from_dict(table, orient="index")

# %% [markdown]
# ## What to remember
#
# - One D x D matrix followed by a reshape *is* N separate matrices D x D / N. Nothing is shared.
# - Reshape first and multiply afterwards, and it is another function: a head reads only its slice,
#   and one matrix serves all heads.
# - Sharing that helps is sharing of keys and values among query heads (MQA, GQA): it saves cache.
#
# **Where people ask this:**
# [should the Linear see the whole embedding?](https://github.com/aladdinpersson/Machine-Learning-Collection/issues/3)
# (the tutorial of section 2), [is the narrow class one
# head?](https://github.com/pbloem/former/issues/13), [does splitting the last dimension contradict
# the paper?](https://github.com/kpot/keras-transformer/issues/17).
#
# ## Exercises
#
# 1. Repair the tutorial's class so that it is what the paper describes. Change as little as you can
#    in `tutorial`, choose shapes for its weights, and test it: with the right weights it must agree
#    with `library`. *Hint:* only the order of "divide" and "multiply" is wrong, and the scale.
# 2. A model has 32 query heads of width 128 in 40 layers and stores float16. How many bytes does
#    its cache need for 8,192 tokens with 32 key/value heads, and with 8?
#
# <details><summary>Solutions (click)</summary>
#
# ```python
# def repaired(x, w):
#     q, k, v = ((x @ w[f"{name}.weight"].T).reshape(T, N, H)  # multiply first, then divide
#                for name in ("queries", "keys", "values"))
#     return attend(q, k, v, H**-0.5) @ w["fc_out.weight"].T + w["fc_out.bias"]
#
# matrices = np.split(library_weights["in_proj_weight"], 3)  # D x D each, not H x H
# repaired_weights = dict(zip(["queries.weight", "keys.weight", "values.weight"], matrices))
# repaired_weights |= {"fc_out.weight": library_weights["out_proj.weight"], "fc_out.bias": 0}
# assert np.allclose(repaired(x, repaired_weights), library(x, library_weights), atol=1e-5)
# ```
#
# `nn.Linear(head_dim, head_dim)` becomes `nn.Linear(embed_size, embed_size)`, called before the
# reshape; the scale becomes 1 / sqrt(head_dim).
#
# ```python
# for num_kv_heads in (32, 8):
#     layout = layouts.Standard(width=4096, num_heads=32, num_kv_heads=num_kv_heads)
#     float32 = layouts.cache_bytes_per_token(layout) * 40 * 8192
#     print(num_kv_heads, "key/value heads:", float32 / 2 / 2**30, "GiB in float16")
#     assert float32 / 2 == 2 * num_kv_heads * 128 * 2 * 40 * 8192
# ```
#
# 5 GiB and 1.25 GiB.
#
# </details>
