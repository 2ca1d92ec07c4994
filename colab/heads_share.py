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
# W_V; they only lie side by side in one big matrix, which is why it looks like one.** **Yes in one
# much-copied tutorial: there a single small matrix serves the chunks of all heads, and that is
# another, weaker function with 1 / h² of these parameters.** **Today's language models share W_K
# and W_V on purpose, to store less, but never W_Q.**
#
# Below, each sentence is checked by a cell: one matrix is h matrices, to the bit (1); the
# tutorial's code beside library code (2); a picture of what each head can read (3); what one
# shared matrix cannot say (4) and what that costs in training (5); sharing on purpose (6). About a
# minute and a half on a CPU.

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
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from attnlab import capture, data, training
from attnlab import heads as layouts
from attnlab.heads import multi_head_attention
from attnlab.models import FFN, ModelConfig, match_budget
from attnlab.models import num_parameters as count
from attnlab.pretrained import from_variables
from attnlab.transforms import Conversion, NotEquivalent, convert

jax.config.update("jax_default_matmul_precision", "highest")  # a TPU rounds products otherwise
rng = np.random.default_rng(0)
T, D, h = 6, 32, 4  # tokens, width, heads
s = D // h  # width of a head
print("jax", jax.__version__, "on", jax.default_backend())

# %% [markdown]
# ## 1. One matrix is h matrices
#
# Library code multiplies x by one D x D matrix and then *views* the result as h pieces. The drawing
# in every explanation has h small matrices instead. Here are both, on whole numbers, so that no
# rounding can hide or make a difference: they agree to the bit.

# %%
x = rng.integers(-9, 10, (T, D)).astype(np.float32)
W_Q = rng.integers(-9, 10, (D, D)).astype(np.float32)

packed = np.asarray(jnp.asarray(x) @ W_Q).reshape(T, h, s)  # as the libraries do it
heads = [W_Q[:, n * s : (n + 1) * s] for n in range(h)]  # h matrices D x s, as it is drawn
explicit = np.stack([np.asarray(jnp.asarray(x) @ W) for W in heads], axis=1)

print("h matrices of shape", heads[0].shape, "= one of", W_Q.shape)
assert np.array_equal(packed, explicit)
print("equal to the bit:", np.array_equal(packed, explicit))

# %% [markdown]
# So the columns of the big matrix are divided among the heads, not its rows: **every head reads all
# of x** and writes its own s numbers. What is cut into pieces is the query, not x.
#
# ## 2. The tutorial's class, and library code
#
# Both are written out here in NumPy. They differ in the first two lines: the tutorial cuts x into
# chunks *first*, and then applies one s x s matrix to all chunks.


# %%
def softmax(a):
    a = np.exp(a - a.max(-1, keepdims=True))
    return a / a.sum(-1, keepdims=True)


def attend(q, k, v, scale):  # [T, h, s] each
    probs = softmax(scale * np.einsum("tns,uns->ntu", q, k))
    return np.einsum("ntu,uns->tns", probs, v).reshape(T, D)


def library(x, w):  # torch.nn.MultiheadAttention, BERT, GPT, T2T
    projected = x @ w["in_proj_weight"].T  # one matrix, D -> 3 D
    q, k, v = (part.reshape(T, h, s) for part in np.split(projected, 3, axis=-1))
    return attend(q, k, v, s**-0.5) @ w["out_proj.weight"].T


def tutorial(x, w):  # "SelfAttention" of a popular video
    chunks = x.reshape(T, h, s)  # cut x first
    q, k, v = (chunks @ w[f"{name}.weight"].T for name in ("queries", "keys", "values"))
    return attend(q, k, v, D**-0.5) @ w["fc_out.weight"].T + w["fc_out.bias"]


x = rng.normal(size=(T, D)).astype(np.float32)
normal = lambda *shape: rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
of_library = {"in_proj_weight": normal(3 * D, D), "out_proj.weight": normal(D, D)}
of_tutorial = {f"{name}.weight": normal(s, s) for name in ("queries", "keys", "values")}
of_tutorial |= {"fc_out.weight": normal(D, D), "fc_out.bias": normal(D)}

# attnlab reads the variables of both systems under their own names.
systems = {
    "torch_mha": (library, of_library, {"embed_dim": D, "num_heads": h}),
    "seed_snippet": (tutorial, of_tutorial, {"embed_size": D, "heads": h}),
}
for name, (formula, variables, sizes) in systems.items():
    module, params = from_variables(name, sizes, variables)
    ours = module.apply({"params": params}, x[None])[0]
    away = np.abs(ours - formula(x, variables)).max()
    print(f"{name:13} is layout {module.layout.name!r:14} difference to the formula {away:.0e}")
    assert away < 1e-4

# %% [markdown]
# How many numbers are W_Q, W_K and W_V? In a model of the usual size:

# %%
print("D = 512, h = 8        W_Q, W_K and W_V of all heads")
small = {}
for layout in ("standard", "narrow", "narrow_tied"):
    shapes = layouts.weight_shapes(layouts.make_layout(layout, width=512, num_heads=8))
    small[layout] = sum(int(np.prod(shapes[name])) for name in "qkv")
    print(f"  {layout:12}{small[layout]:>12,}   W_Q is {shapes['q']}")
assert small["standard"] == small["narrow_tied"] * 8**2

# %% [markdown]
# The tutorial's layout is called `narrow_tied` here: its heads are *narrow*, since each reads its
# own chunk of x alone, and *tied*, since one matrix serves all. `narrow` lies between: chunks, but
# a matrix for each head. Two questions hide in one snippet: **what does a head read**, and **does
# it have weights of its own**?
#
# ## 3. What a head can read: the picture
#
# How much does the query of head n change when a piece of x is changed? (The length of the
# gradient; white is exactly 0.) In `standard` all heads read everything. On the diagonal stand the
# two that read their chunk; and where one matrix serves all heads, all fields have the same shade.


# %%
def sensitivity(layout):
    made = layouts.make_layout(layout, width=D, num_heads=h)
    params = layouts.init(jax.random.key(1), made)

    def query(row):
        _, values = capture(multi_head_attention, params, row[None, None], made, names=("q",))
        return values["q"][0, 0]  # [h, s]

    slopes = np.asarray(jax.jacobian(query)(jnp.asarray(x[0])))  # [h, s, D]
    return np.sqrt((slopes.reshape(h, s, h, s) ** 2).sum((1, 3)))


figure, axes = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained")
seen = {layout: sensitivity(layout) for layout in ("standard", "narrow", "narrow_tied")}
titles = ["standard\nreads all, own matrices", "narrow\nreads its chunk, own matrix"]
titles.append("narrow_tied (the tutorial)\nreads its chunk, one matrix for all")
for axis, values, title in zip(axes, seen.values(), titles, strict=True):
    axis.imshow(values, cmap="Blues", vmin=0, vmax=1.1 * values.max())
    axis.set_title(title, fontsize=10)
    axis.set(xticks=range(h), yticks=range(h), xlabel="chunk of x", ylabel="query of head")
    for (i, j), value in np.ndenumerate(values):
        dark = value > 0.7 * values.max()
        axis.text(j, i, f"{value:.1f}", ha="center", va="center", color="w" if dark else "k")

aside = ~np.eye(h, dtype=bool)
assert (seen["standard"] > 0).all()
assert (seen["narrow"][aside] == 0).all()
assert np.ptp(np.diag(seen["narrow_tied"])) < 1e-5 < np.ptp(np.diag(seen["narrow"]))

# %% [markdown]
# ## 4. What one projection for all heads cannot say
#
# `convert` looks for weights of one layout that are the same function as given weights of another.
# It returns the weights with the largest difference, measured on the weights as returned, or a
# *proof* that there are none: a number that shows why.

# %%
made = {name: layouts.make_layout(name, width=D, num_heads=h) for name in seen}
w = {name: layouts.init(jax.random.key(2), layout) for name, layout in made.items()}
for source_name, target in (("narrow_tied", "standard"), ("standard", "narrow_tied"),
                            ("narrow", "narrow_tied")):  # fmt: skip
    found = convert(w[source_name], made[source_name], made[target])
    if isinstance(found, Conversion):
        print(f"{source_name} -> {target}: possible, difference {found.forward_error:.0e}")
        assert found.forward_error < 1e-6
    elif isinstance(found, NotEquivalent):
        print(f"{source_name} -> {target}: impossible, since\n    {found.reason}")
        assert target == "narrow_tied"
    else:
        print(f"{source_name} -> {target}: undecided")

chunk = jax.random.normal(jax.random.key(3), (1, T, s))
for name in ("narrow_tied", "narrow"):
    equal_chunks = jnp.tile(chunk, h)
    call = multi_head_attention, w[name], equal_chunks, made[name]
    apart = np.ptp(capture(*call, names=("probs",))[1]["probs"], axis=1).max()
    print(f"equal chunks: probabilities of {name} heads differ by {apart:.2f}")

# %% [markdown]
# The tutorial's attention is a special case of library attention, not the other way round.
# `convert` has no proof for the last pair. One is easy to see by hand: *if all chunks of a token
# are equal, tied heads have the same probabilities*. Heads with matrices of their own do not, as
# the last two lines show.
#
# **Control.** Does `convert` say "impossible" to everything? No: take weights that were tied once,
# written as a standard layer. It finds the one matrix in them again.

# %%
as_standard = convert(w["narrow_tied"], made["narrow_tied"], made["standard"]).params
again = convert(as_standard, made["standard"], made["narrow_tied"])
print(f"standard, tied once -> narrow_tied: difference {again.forward_error:.0e}")
assert again.forward_error < 1e-6

# %% [markdown]
# ## 5. What it costs
#
# A fair comparison gives all three the same number of parameters: what the narrow ones save in
# attention they get as a wider feed-forward part. Two layers of width 64 with 8 heads, on the
# source of Python's standard library, two seeds.

# %%
settings = training.TrainConfig(
    steps=500,
    batch_size=16,
    length=32,
    seeds=(0, 1),
    learning_rate=5e-3,
    eval_every=1000,
    log_every=50,
    eval_windows=512,
)
code = data.Text().load(settings.length)


def sized(layout):
    attention = layouts.make_layout(layout, num_heads=8, biases=("q", "k", "v", "o"))
    return ModelConfig(width=64, num_layers=2, heads=attention, ffn=FFN(width=128), max_len=32)


bits = {}
for layout in ("standard", "narrow", "narrow_tied"):
    config = match_budget(sized(layout), sized("standard"), "parameters").config
    result = training.fit_in_memory(
        config.build(), training.OBJECTIVES["causal_lm"], settings, code
    ).result
    bits[layout] = result.heldout["bits_per_byte"]
    told = f"{count(config):,} parameters, feed-forward {config.ffn.width} wide"
    print(f"{layout:12}{told:42}{bits[layout].mean():.3f} bits per byte,", end=" ")
    print(f"seeds {np.round(bits[layout], 3)}")

means = {layout: values.mean() for layout, values in bits.items()}
print(
    f"\nreading a chunk in place of x costs {means['narrow'] - means['standard']:+.3f} bits,",
    end=" ",
)
print(f"one matrix for all heads {means['narrow_tied'] - means['narrow']:+.3f} more;")
print(f"seeds of one layout differ by up to {max(np.ptp(values) for values in bits.values()):.3f}")

# %% [markdown]
# In the run that is stored here, what costs is that a head *reads* only its chunk; that all heads
# share one matrix costs nothing more that two seeds could show. Two questions, two answers. (500
# steps are a demonstration.) In
# [the measured comparison](https://github.com/attnlab/attnlab/blob/main/docs/results.md) heads that
# read only their chunk come last too, at equal parameters.
#
# ## 6. Sharing on purpose
#
# While a model writes, it stores k and v of every token so far (the *cache*). Multi-query attention
# (arXiv 1911.02150) and grouped-query attention (arXiv 2305.13245) give several query heads one
# W_K and one W_V for that reason. Each query head keeps a W_Q of its own.

# %%
print("D = 512, 8 query heads      parameters   cache bytes a token, a layer")
for kv_heads in (8, 2, 1):
    grouped = layouts.Standard(width=512, num_heads=8, num_kv_heads=kv_heads)
    cache = layouts.cache_bytes_per_token(grouped)
    shapes = layouts.weight_shapes(grouped)
    counts = f"{layouts.num_parameters(grouped):>14,}{cache:>12,}"
    print(f"{kv_heads} heads of keys and values{counts}   W_Q {shapes['q']}  W_K {shapes['k']}")
assert cache * 8 == 4 * 2 * 512

# %% [markdown]
# ## Exercise
#
# Repair the tutorial's class so that it is what the paper describes. Change as little as you can in
# `tutorial` above, choose shapes for its weights, and test it: with the right weights it must agree
# with `library`.
#
# *Hint:* only the order of "cut" and "multiply" is wrong, and the scale.
#
# <details><summary>Solution (click)</summary>
#
# ```python
# def repaired(x, w):
#     q, k, v = ((x @ w[f"{name}.weight"].T).reshape(T, h, s)  # multiply first, then cut
#                for name in ("queries", "keys", "values"))
#     return attend(q, k, v, s**-0.5) @ w["fc_out.weight"].T + w["fc_out.bias"]
#
# parts = np.split(of_library["in_proj_weight"], 3)  # D x D each, in place of s x s
# w = dict(zip(["queries.weight", "keys.weight", "values.weight"], parts))
# w |= {"fc_out.weight": of_library["out_proj.weight"], "fc_out.bias": np.zeros(D)}
# print(np.abs(repaired(x, w) - library(x, of_library)).max())
# assert np.allclose(repaired(x, w), library(x, of_library), atol=1e-5)
# ```
#
# `nn.Linear(head_dim, head_dim)` becomes `nn.Linear(embed_size, embed_size)`, called before the
# reshape; the scale becomes 1 / sqrt(width of a head).
#
# </details>
