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
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/why_q_and_k.ipynb)
#
# # Why W_Q and W_K, and not one matrix?
#
# **The scores of a head see only the product W_Q W_Kᵀ, so one D x D matrix could say all that the
# pair says, and more.** **The pair is that matrix kept thin: 2 D d numbers in place of D², scores
# of rank d at most, and a key of d numbers to store for each token in place of D.** **Where a head
# is as wide as x, one matrix is the smaller and the cheaper; and today's models with a latent
# cache do multiply the pair together while they write.**
#
# Below, each sentence is checked by a cell: pair and product are one function (1); how many numbers
# each has (2); what the rank takes away, as a picture (3); which of the two is cheaper, counted and
# measured (4); what a paper means that writes D x D (5); and the latent cache (6). Half a minute on
# a CPU.

# %%
# @title Install attnlab if it is missing; JAX and Flax stay as they are
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("attnlab") is None:
    source = "attnlab[train,plot,pretrained] @ git+https://github.com/attnlab/attnlab"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from attnlab import heads as layouts
from attnlab.heads import Bilinear, Standard, Wide, init, multi_head_attention
from attnlab.transforms import NotEquivalent, convert, reparametrize, truncate

jax.config.update("jax_default_matmul_precision", "highest")  # a TPU rounds products otherwise
print("jax", jax.__version__, "on", jax.default_backend())

# %% [markdown]
# ## 1. The scores see the product alone
#
# q kᵀ = (x W_Q) (y W_K)ᵀ = x (W_Q W_Kᵀ) yᵀ: nothing stands between the two, so A = W_Q W_Kᵀ is all
# there is. The layout `bilinear` has that one matrix for each head.

# %%
D, h = 24, 4
pair = Standard(width=D, num_heads=h)
one = Bilinear(width=D, num_heads=h)
w = init(jax.random.key(0), pair)
x = np.asarray(jax.random.normal(jax.random.key(1), (7, D)), np.float64)

W_Q, W_K = (np.asarray(w[name][:, 0], np.float64) for name in "qk")  # of head 0
by_pair, by_one = (x @ W_Q) @ (x @ W_K).T, x @ (W_Q @ W_K.T) @ x.T
print("shapes", W_Q.shape, W_K.shape, "and", (W_Q @ W_K.T).shape)
print("largest difference of the scores", np.abs(by_pair - by_one).max())
assert np.allclose(by_pair, by_one, atol=1e-12)

# %% [markdown]
# The same for all heads with their values and outputs: `convert` makes the weights and measures, in
# double precision, that outputs and gradients agree.


# %%
def errors(found):
    return f"difference {found.forward_error:.0e}, of gradients {found.gradient_error:.0e}"


double = {name: np.asarray(a, np.float64) for name, a in w.items()}
product = convert(double, pair, one)
print({name: a.shape for name, a in product.params.items()})
print("pair -> one matrix:", errors(product))
assert max(product.forward_error, product.gradient_error) < 1e-12

# %% [markdown]
# **Control: the way back.** From a product of two thin matrices the pair can be found again. From
# any D x D matrix it cannot: that one has full rank, and `convert` says so with a number.

# %%
back = convert(product.params, one, pair)
print("product -> pair:", errors(back))
free = init(jax.random.key(2), one)
proof = convert(free, one, pair)
print("any matrix -> pair:", proof.reason)
assert back.forward_error < 1e-9
assert isinstance(proof, NotEquivalent)
assert proof.kind == "rank"

# %% [markdown]
# ## 2. How many numbers
#
# A pair has 2 D d numbers, the matrix D². With d = D / h heads the pair is smaller from three
# heads on, they are even at two, and with one head the *single matrix* has half as many. The true
# freedom of a pair is less still: W_Q M and W_K M⁻ᵀ have the same product for every d x d matrix
# M, so d² of its numbers say nothing.

# %%
wide = 512
print(f"D = {wide}     {'d':>5}{'2 D d':>10}{'freedom':>10}{'D²':>10}   smaller")
for heads in (1, 2, 4, 8, 16, 32):
    d = wide // heads
    two = 2 * wide * d
    name = "the pair" if two < wide**2 else "one matrix" if two > wide**2 else "even"
    print(f"{heads:>2} heads   {d:>7}{two:>10,}{two - d * d:>10,}{wide**2:>10,}   {name}")

M = jax.random.normal(jax.random.key(3), (D // h, D // h))
other = reparametrize(w, pair, qk=M)
xs = jnp.asarray(x[None], jnp.float32)
apart = multi_head_attention(other, xs, pair) - multi_head_attention(w, xs, pair)
print(f"\nother W_Q and W_K, same output: difference {float(jnp.abs(apart).max()):.0e}")
assert jnp.abs(apart).max() < 1e-3
assert jnp.abs(other["q"] - w["q"]).max() > 0.1

# %% [markdown]
# ## 3. What the rank takes away: the picture
#
# A head that is d wide has scores of rank d at most, however long the text is. Left: the singular
# values of A in heads of width 8, 16 and 32 on x 64 wide, and of one free matrix. Each pair stops
# at its d; that is where "thin" bites. Right: how much of a free matrix is lost if it is squeezed
# into a pair of width d, in the best way there is (its d largest singular values).

# %%
D = 64
lines = {}
for d in (8, 16, 32):
    a = init(jax.random.key(d), Standard(width=D, num_heads=1, head_dim=d))
    lines[f"pair, d = {d}"] = np.asarray(a["q"][:, 0] @ a["k"][:, 0].T, np.float64)
one = Bilinear(width=D, num_heads=1)
free = init(jax.random.key(4), one)
lines["one matrix"] = np.asarray(free["qk"][:, 0], np.float64)

ranks = (1, 4, 8, 16, 24, 32, 40, 48, 56, 63, 64)
lost = [float(truncate(free, one, rank).score_error[0]) for rank in ranks]

figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
for (name, matrix), colour in zip(
    lines.items(), ("#56b4e9", "#0072b2", "#009e73", "#d55e00"), strict=True
):
    values = np.linalg.svd(matrix, compute_uv=False)
    values = values / np.linalg.norm(values)
    left.plot(np.arange(1, D + 1), values, color=colour, label=name)
left.set(xlabel="number of the singular value", ylabel="share of the matrix", ylim=(0, None))
left.set_title("scores of a head: rank ends at d", fontsize=11)
left.legend(frameon=False)
right.plot(ranks, lost, "o-", color="#d55e00")
right.set(xlabel="d of the pair", ylabel="share of the matrix that is lost", ylim=(0, None))
right.set_title("one free matrix squeezed into a pair", fontsize=11)

for d in (8, 16, 32):
    assert np.linalg.matrix_rank(lines[f"pair, d = {d}"], tol=1e-4) == d
assert np.linalg.matrix_rank(lines["one matrix"], tol=1e-4) == D
assert lost[-1] < 1e-6 < lost[0]

# %% [markdown]
# Does a head *need* a high rank? Theorem 1 of Bhojanapalli et al. 2020 (arXiv 2002.07028): to give
# any probabilities to n tokens, a head must be about n wide. In practice d = 64 to 128 has been
# enough for texts of thousands of tokens: what a trained head looks for is simple.
#
# ## 4. Which of the two is cheaper
#
# The product can be taken in any layer, so this is a question of arithmetic alone. Thin heads: the
# pair. Heads as wide as x: one matrix, since it needs no keys at all, x itself is the key.
# `multi_head_attention` counts both and takes the cheaper.

# %%
D, h, T = 256, 4, 128
print(f"D = {D}, {h} heads, {T} tokens: million FLOPs a token, and milliseconds a call")
fastest = {}
for d in (16, 64, 256):
    layout = Standard(width=D, num_heads=h, head_dim=d, value_dim=64)
    w = init(jax.random.key(0), layout)
    xs = jax.random.normal(jax.random.key(1), (4, T, D))
    orders = layouts.contraction_orders(layout, layouts.CallSizes(4, T, T))
    told = []
    for order in ("factored", "bilinear"):
        call = jax.jit(lambda w, xs, s=layout, o=order: multi_head_attention(w, xs, s, order=o))
        call(w, xs).block_until_ready()
        seconds = []
        for _ in range(20):
            began = time.perf_counter()
            call(w, xs).block_until_ready()
            seconds.append(time.perf_counter() - began)
        told.append(f"{orders[order] / 4 / T / 1e6:6.2f} {1e3 * min(seconds):7.2f} ms")
    fastest[d] = min(("factored", "bilinear"), key=orders.get)
    print(f"heads {d:>3} wide:   pair {told[0]}    one matrix {told[1]}    cheaper: {fastest[d]}")

assert fastest[16] == "factored"
assert fastest[256] == "bilinear"

# %% [markdown]
# (`factored` means the pair as it is.) Counts are exact; times are those of the machine that ran
# this cell, and other work on it shows.
#
# ## 5. "But the paper writes W_Q as D x D": a typo?
#
# In arXiv 1906.07510 (attention-guided graph networks) W_Q and W_K of a head are D x D. Its code
# has one `Linear(D, D)` and then cuts the result into h pieces of D / h: the D x D matrix is the h
# thin ones **side by side**, as in all libraries. Taken by the letter, with D x D for *each* head,
# the layout is `wide`; it has h times the parameters, and twice what its scores can use.

# %%
D, h = 64, 4
packed = Standard(width=D, num_heads=h)
letter = Wide(width=D, num_heads=h)
one = Bilinear(width=D, num_heads=h, value_dim=D)
for name, layout in {"as coded": packed, "by the letter": letter, "one matrix": one}.items():
    shapes = layouts.weight_shapes(layout)
    scores = sum(int(np.prod(shapes[n])) for n in ("q", "k", "qk") if n in shapes)
    count = layouts.num_parameters(layout)
    print(f"{name:14} layout {layout.name:9}{count:>9,} parameters,", end="")
    print(f"{scores:>8,} of them for scores")
found = convert(init(jax.random.key(0), letter), letter, one)
print("wide pair -> one matrix of half the size:", errors(found))
assert found.forward_error < 1e-6

# %% [markdown]
# ## 6. Today's answer: multiply the pair while writing
#
# DeepSeek's latent attention (arXiv 2405.04434) stores one short vector c for each token, from
# which every head makes its keys: k = c W_K. While the model writes, W_K is multiplied into the
# *query*, exactly as in section 1, so the keys are never made, and the cache is c alone.

# %%
print(f"{'D = 512, 8 heads':18}{'cache bytes a token':>20}")
for name in ("standard", "latent", "latent_absorbed"):
    layout = layouts.make_layout(name, width=512, num_heads=8)
    print(f"{name:18}{layouts.cache_bytes_per_token(layout):>20,}")

latent = layouts.Latent(width=32, num_heads=4)
absorbed = layouts.LatentAbsorbed(width=32, num_heads=4)
found = convert(init(jax.random.key(0), latent), latent, absorbed)
print("\nlatent -> latent_absorbed:", errors(found))
assert found.forward_error < 1e-6

# %% [markdown]
# Why does not everybody do so? Because of positions. Rotary positions turn q and k by the place of
# the token, so something *does* stand between W_Q and W_K, and the product is another one for every
# distance. `convert` finds no
# way; and this is why a latent head keeps a small part of the key, shared by
# all heads, that alone is turned.

# %%
pair = Standard(width=24, num_heads=4)
nothing = convert(init(jax.random.key(0), pair), pair, Bilinear(width=24, num_heads=4), rotary=True)
print("pair -> one matrix, with rotary positions:", nothing.reason)
assert not hasattr(nothing, "params")

# %% [markdown]
# ## Exercise
#
# BERT has a bias in its keys: k = y W_K + b. Use "the scores see the product alone" to find out
# what it does. What happens to the probabilities of a head if b is replaced by something else?
#
# *Hint:* write out q kᵀ and look for what is the same for every key. Test it with
# `Standard(width=24, num_heads=4, biases=("q", "k"))` and `attnlab.capture(..., names=("probs",))`.
#
# <details><summary>Solution (click)</summary>
#
# ```python
# from attnlab import capture
#
# layout = Standard(width=24, num_heads=4, biases=("q", "k"))
# w = init(jax.random.key(0), layout)
# xs = jax.random.normal(jax.random.key(1), (1, 7, 24))
# call = lambda w: capture(multi_head_attention, w, xs, layout, names=("probs",))
# probs = lambda w: call(w)[1]["probs"]
# for name in ("k_bias", "q_bias"):
#     noise = 3 * jax.random.normal(jax.random.key(2), w[name].shape)
#     moved = abs(probs(w | {name: noise}) - probs(w)).max()
#     print(name, "moves the probabilities by", float(moved))
# moved = abs(probs(w | {"k_bias": 3 + w["k_bias"]}) - probs(w)).max()
# assert moved < 1e-4
# ```
#
# Nothing happens: q bᵀ is one number for each query, added to the scores of all keys, and a softmax
# does not see what is added to all. The 12 x 768 key biases of BERT-base do nothing.
#
# </details>
