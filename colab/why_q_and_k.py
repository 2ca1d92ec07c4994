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
# **The scores of a head depend only on the product W_Q W_Kᵀ (with rotary positions: on one such
# product for each distance), so one D x D matrix can express all that the pair can, and more.**
# **The pair is a low-rank form of that matrix: for a model of width D and a head of width H it has
# 2 D H numbers in place of D², scores of rank H at most, and a key of H numbers to store for each
# token in place of D.** **Asymmetry is no reason for two matrices: one free matrix is asymmetric
# too, and only W_Q = W_K forces the scores to be symmetric.**

# %% [markdown]
# ![Left: training makes few singular values of the score matrix large. Right: bits lost if only the
# largest r are kept](data:image/png;base64,)

# %% [markdown]
# The figure is of one small model without rotary positions and one text.
#
# The cells below check each sentence. It takes about two minutes on a CPU.
#
# 1. Pair and product are one function.
# 2. How many numbers each has.
# 3. A task that symmetric scores cannot solve, and one free matrix can.
# 4. Pair and product trained on text.
# 5. The rank that a trained head needs: the figure.
# 6. Rotary positions and latent caches.

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
import optax
import pandas as pd

from attnlab import data, training
from attnlab import heads as layouts
from attnlab.heads import Bilinear, Standard, init, multi_head_attention
from attnlab.models import FFN, ModelConfig, NoPositions, match_budget, num_parameters
from attnlab.transforms import NotEquivalent, convert, reparametrize

jax.config.update("jax_default_matmul_precision", "highest")  # a TPU rounds products otherwise

# %% [markdown]
# ## 1. The scores depend on the product alone
#
# q kᵀ = (x W_Q) (y W_K)ᵀ = x (W_Q W_Kᵀ) yᵀ: nothing stands between the two matrices. The layout
# `bilinear` has that one matrix for each head. `convert` multiplies the pairs of a whole attention
# layer together and measures, in double precision, that outputs and gradients agree.

# %%
D, N = 24, 4  # width of x, heads; H = D / N = 6 is the width of a head

pair, one = Standard(width=D, num_heads=N), Bilinear(width=D, num_heads=N)
weights = jax.tree.map(lambda a: np.asarray(a, np.float64), init(jax.random.key(0), pair))
product = convert(weights, pair, one)
print("pair:   ", {name: a.shape for name, a in weights.items()})
print("product:", {name: a.shape for name, a in product.params.items()})
print(
    "largest difference of outputs", product.forward_error, "of gradients", product.gradient_error
)
assert max(product.forward_error, product.gradient_error) < 1e-12

# %% [markdown]
# **Control: the way back.** A product of two thin matrices can be factored again. Any D x D matrix
# cannot: it has full rank, and `convert` proves it with a number.

# %%
back = convert(product.params, one, pair)
impossible = convert(init(jax.random.key(2), one), one, pair)
print("product -> pair: largest difference", back.forward_error)
print("any matrix -> pair: impossible,", impossible.reason)
assert back.forward_error < 1e-9
assert isinstance(impossible, NotEquivalent)

# %% [markdown]
# ## 2. How many numbers, how many FLOPs
#
# A pair has 2 D H numbers, one matrix D². With H = D / N the pair is smaller from three heads on.
# Its true number of degrees of freedom is smaller still: W_Q M and W_K M⁻ᵀ have the same product
# for every invertible H x H matrix M. The FLOPs of a layer (per token, in a text of 128 tokens)
# follow a similar rule: with one head one matrix is cheaper, with more heads the pair.

# %%
D, T = 512, 128

table = {}
for N in (1, 2, 4, 8, 16, 32):
    H = D // N
    layouts_of = {
        "pair": Standard(width=D, num_heads=N),
        "one matrix": Bilinear(width=D, num_heads=N, value_dim=H),
    }
    table[f"{N} heads"] = {
        "H": H,
        "pair: 2 D H": 2 * D * H,
        "degrees of freedom": 2 * D * H - H * H,
        "one matrix: D²": D * D,
    } | {f"{name}: FLOPs": layouts.flops_per_token(a, T) for name, a in layouts_of.items()}
pd.DataFrame.from_dict(table, orient="index")

# %%
M = jax.random.normal(jax.random.key(3), (6, 6))
weights = init(jax.random.key(0), pair)
other = reparametrize(weights, pair, qk=M)  # another W_Q and W_K with the same product
x = jax.random.normal(jax.random.key(1), (1, 7, 24))
moved = multi_head_attention(other, x, pair) - multi_head_attention(weights, x, pair)
print(
    "W_Q changes by", jnp.abs(other["q"] - weights["q"]).max(), "outputs by", jnp.abs(moved).max()
)
assert jnp.abs(moved).max() < 1e-3 < 0.1 < jnp.abs(other["q"] - weights["q"]).max()

# %% [markdown]
# ## 3. The asymmetry myth
#
# A common answer is: "with one matrix, token a would attend to b exactly as b attends to a". That
# holds for W_Q = W_K, where x W_Q W_Qᵀ xᵀ is symmetric. It does not hold for one free matrix A: x A
# xᵀ is symmetric only if A is.
#
# The test is rock, paper, scissors. A text has the twelve symbols of four such games in random
# order, each with a random number; every symbol must return the number of the symbol *that beats
# it*. So rock must attend more to paper than to scissors, paper more to scissors than to rock,
# scissors more to rock than to paper. With symmetric scores at most two of these three can hold:
# all three would say s(rock, paper) > s(rock, scissors) > s(paper, scissors) > s(rock, paper).

# %%
games, numbers = 4, 8
symbols = 3 * games


def deal(key, texts=64):
    """Tokens [texts, 12], the number to return, and where the winner and the loser stand."""
    order_key, number_key = jax.random.split(key)
    order = jnp.broadcast_to(jnp.arange(symbols), (texts, symbols))
    order = jax.random.permutation(order_key, order, axis=1, independent=True)
    number = jax.random.randint(number_key, (texts, symbols), 0, numbers)  # of each symbol
    winner, loser = (3 * (order // 3) + (order + step) % 3 for step in (1, 2))
    take = lambda array, index: jnp.take_along_axis(array, index, axis=1)
    places = jnp.argsort(order, axis=1)
    tokens = order * numbers + take(number, order)
    return tokens, take(number, winner), take(places, winner), take(places, loser)


# %% [markdown]
# The model is one attention layer of one head and nothing else. `constrain` sees its weights in
# every step, so that a variant can force the scores to be symmetric.


# %%
def train(heads, constrain=lambda weights: weights, steps=500, seeds=3):
    """% right, and % of queries that attend more to the winner than to the loser, per seed."""
    model = ModelConfig(
        kind="encoder", vocab_size=symbols * numbers, max_len=symbols, width=32, num_layers=1,
        heads=heads, ffn=FFN(width=0), positions=NoPositions(),
    ).build()  # fmt: skip
    adam = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    def constrained(params):  # `constrain` sees the weights of the attention sublayer
        layers = params["layers"]
        return params | {"layers": layers | {"attention": constrain(layers["attention"])}}

    def loss(params, key):
        tokens, answer, *_ = deal(key)
        logits = model.apply({"params": constrained(params)}, tokens).logits[..., :numbers]
        return optax.softmax_cross_entropy_with_integer_labels(logits, answer).mean()

    def step(carry, key):
        params, state = carry
        updates, state = adam.update(jax.grad(loss)(params, key), state)
        return (optax.apply_updates(params, updates), state), None

    def run(key):
        params = model.init(key, deal(key)[0])["params"]
        keys = jax.random.split(key, steps)
        (params, _), _ = jax.lax.scan(step, (params, adam.init(params)), keys)
        tokens, answer, winner, loser = deal(jax.random.key(99), 1024)
        outputs = model.apply({"params": constrained(params)}, tokens, capture=("probs",))
        probs = outputs.captured["probs"][0, :, 0]  # [texts, queries, keys]
        to = lambda place: jnp.take_along_axis(probs, place[..., None], axis=2)
        right = outputs.logits[..., :numbers].argmax(-1) == answer
        return 100 * right.mean(), 100 * (to(winner) > to(loser)).mean()

    return jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), seeds))


# %% [markdown]
# Two variants have free matrices, two are forced to give symmetric scores.

# %%
pair, one = Standard(num_heads=1, head_dim=16), Bilinear(num_heads=1, value_dim=16)
variants = {
    "pair W_Q, W_K": (pair,),
    "one free matrix A": (one,),
    "pair with W_Q = W_K": (pair, lambda w: w | {"q": w["k"]}),
    "one matrix, A = Aᵀ": (one, lambda w: w | {"qk": (w["qk"] + w["qk"].swapaxes(1, 3)) / 2}),
}
table = {}
for name, variant in variants.items():
    right, order = train(*variant)
    table[name] = {"% right, 3 seeds": right.round(0), "% winner above loser": order.round(0)}
    assert (order.max() <= 100 * 2 / 3 + 1e-3) == ("=" in name)  # the bound of symmetric scores
    assert (right.min() > 90) == ("=" not in name)
pd.DataFrame.from_dict(table, orient="index")

# %% [markdown]
# One free matrix solves the task as the pair does. Both symmetric variants stay at or below the
# bound of two thirds in the second column. So it is not the number of matrices that allows
# asymmetry; it is leaving them free.
#
# ## 4. Pair against product on text
#
# "One matrix trains worse" is the next common answer. Here two layers of width 48 with 4 heads
# predict the next byte of the source of Python's standard library. Both models have the same number
# of parameters (the FFN of `bilinear` is smaller). Each is trained at two learning rates, with
# three seeds.

# %%
steps, seeds, learning_rates = 200, (0, 1, 2), (5e-3, 1e-2)
text = data.Text().load(32)


def config_of(heads):
    return ModelConfig(width=48, num_layers=2, heads=heads, ffn=FFN(width=192), max_len=32)


def fit(config, learning_rate):
    settings = training.TrainConfig(
        steps=steps, seeds=seeds, batch_size=16, length=32, log_every=50,
        optimizer=training.OptimizerConfig(learning_rate=learning_rate),
        evaluation=training.EvaluationConfig(every=1000, windows=512),
    )  # fmt: skip
    objective = training.OBJECTIVES["causal_lm"]
    return training.fit_in_memory(config.build(), objective, settings, text)


reference = config_of(Standard(num_heads=4))
product = match_budget(config_of(Bilinear(num_heads=4)), reference, "parameters").config
runs, table = {}, {}
for name, config in {"pair": reference, "one matrix": product}.items():
    for rate in learning_rates:
        runs[name, rate] = fit(config, rate)
        bits = runs[name, rate].result.heldout["bits_per_byte"]
        table[name, rate] = {
            "parameters": num_parameters(config),
            "bits per byte, mean": bits.mean().round(3),
            "each seed": bits.round(3),
        }
pd.DataFrame.from_dict(table, orient="index").rename_axis(["scores by", "learning rate"])

# %% [markdown]
# At the better of the two rates the means are 3.509 and 3.516: the difference is smaller than the
# one between seeds, so this run shows no difference in either direction. (200 steps, one text: a
# demonstration.)
#
# ## 5. How low a rank is enough? The figure
#
# A head of width H has scores of rank H at most. Does a trained head need more? Take the *trained*
# one-matrix model of section 4, which may use rank 48, and keep only the r largest singular values
# of every matrix A. How many bits does that cost?

# %%
trained = runs["one matrix", 1e-2].params()  # of the first seed
model = product.build()
heldout = text.heldout(256)["tokens"]


def keep_rank(params, r):
    """The parameters with every matrix A at rank r: the nearest there is, by its SVD."""
    A = jnp.moveaxis(params["layers"]["attention"]["qk"], -2, -3)  # [layers, heads, D, D]
    u, s, v = jnp.linalg.svd(A)
    low = jnp.moveaxis((u[..., :r] * s[..., None, :r]) @ v[..., :r, :], -3, -2)
    attention = params["layers"]["attention"] | {"qk": low}
    return params | {"layers": params["layers"] | {"attention": attention}}


@jax.jit
def bits_of(params):
    logits = model.apply({"params": params}, heldout[:, :-1]).logits
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, heldout[:, 1:])
    return loss.mean() / jnp.log(2)


ranks = (0, 1, 2, 4, 8, 12, 24, 48)
cost = {r: float(bits_of(keep_rank(trained, r)) - bits_of(trained)) for r in ranks}
print("bits lost at each rank:", {r: round(bits, 3) for r, bits in cost.items()})
print(f"rank 12 of 48 keeps {100 * (1 - cost[12] / cost[0]):.0f} % of what the scores are worth")
assert abs(cost[48]) < 1e-3 < cost[12] < cost[0]

# %% tags=["answer"]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
initial = model.init(jax.random.key(0), heldout[:1, :-1])["params"]
for label, params in {"one matrix, initial": initial, "one matrix, trained": trained}.items():
    A = jnp.moveaxis(params["layers"]["attention"]["qk"], -2, -3)
    values = jnp.linalg.svd(A, compute_uv=False).mean((0, 1))
    left.plot(range(1, 49), values / values[0], label=label)
W = runs["pair", 1e-2].params()["layers"]["attention"]
A = jnp.einsum("ldnh,lenh->lnde", W["q"], W["k"])
values = jnp.linalg.svd(A, compute_uv=False).mean((0, 1))
left.plot(range(1, 49), values / values[0], label="pair with H = 12, trained")
left.axvline(12, color="grey", linestyle=":", label="H = 12")
left.set(xlabel="index of the singular value", ylabel="singular value / largest")
left.set_title("spectrum of the score matrix (mean of 8 heads)")
left.legend(frameon=False)
right.plot(range(len(ranks) - 1), [cost[r] for r in ranks[:-1]], "o-", color="C1")
right.axhline(0.01, color="grey", linestyle=":", label="0.01 bits")
right.set(xlabel="rank kept, of 48", ylabel="increase in bits per byte", yscale="log")
right.set_xticks(range(len(ranks) - 1), ranks[:-1])
right.set_title("one matrix, trained: loss after truncation")
_ = right.legend(frameon=False)

# %% [markdown]
# The scores of the saved run are worth 0.70 bits. Rank 12, which is what a standard head has here,
# keeps 99 % of that, rank 4 keeps 95 %. So a trained head uses only a few directions of x.
# The left panel shows the same: training makes a few singular values
# large and leaves the rest as the random draw left them.
#
# ## 6. Where the product is used, and where it cannot be
#
# DeepSeek's latent attention (arXiv 2405.04434) stores one short vector c per token, from which
# every head makes its keys. During generation W_K is multiplied into the *query*, as in section 1,
# so keys are never computed and the cache is c alone. Rotary positions stop this: they rotate q and
# k by their positions, so something *does* stand between W_Q and W_K, and the product is a
# different one for each distance. That is why latent attention keeps a small part of the key for
# rotary positions.

# %%
latent, absorbed = (
    kind(width=32, num_heads=4) for kind in (layouts.Latent, layouts.LatentAbsorbed)
)
found = convert(init(jax.random.key(0), latent), latent, absorbed)
print("latent -> latent_absorbed: largest difference", found.forward_error)
pair, one = Standard(width=24, num_heads=4), Bilinear(width=24, num_heads=4)
rotary = convert(init(jax.random.key(0), pair), pair, one, rotary=True)
print("pair -> one matrix, with rotary positions:", rotary.reason)
assert found.forward_error < 1e-6
assert not hasattr(rotary, "params")

# %% [markdown]
# ## What to remember
#
# - Pair and product are the same function; the pair is the low-rank form, which is smaller whenever
#   H < D / 2, and its keys are short.
# - Two matrices are not needed for asymmetric attention. Only W_Q = W_K makes scores symmetric.
# - Low rank was enough in this small run (one text, learned positions): see the number of section
#   5. In theory a head needs H of about the number of tokens to express any attention matrix
#   (Bhojanapalli et al. 2020).
#
# **Where people ask this:** [why do we need both a key and a query weight
# matrix?](https://stats.stackexchange.com/questions/515477/when-calculating-self-attention-for-transformer-ml-architectures-why-do-we-need),
# [why not combine the query and key weights?](https://www.reddit.com/comments/1qlciqp/) (its first
# answer is the myth of section 3), and a question on attention-guided graph networks (arXiv
# 1906.07510), whose D x D matrix W_Q is the N thin ones side by side:
# [ai.stackexchange 25217](https://ai.stackexchange.com/questions/25217). Papers:
# [Bhojanapalli et al. 2020](https://arxiv.org/abs/2002.07028) (rank),
# [Luong et al. 2015](https://arxiv.org/abs/1508.04025) (one matrix: the "general" score),
# [DeepSeek-V2](https://arxiv.org/abs/2405.04434).
#
# ## Exercises
#
# 1. BERT has a bias in its keys: k = y W_K + b. Use "the scores depend on the product alone" to
#    find out what b does to the probabilities of a head. *Hint:* write out q kᵀ and find what is
#    the same for every key. Test it with `Standard(width=24, num_heads=4, biases=("q", "k"))` and
#    `attnlab.capture(..., names=("probs",))`.
# 2. How much of a free, untrained D x D matrix is lost at rank r? Use `numpy.linalg.svd`, and
#    compare with the trained matrices of section 5. *Hint:* the nearest matrix of rank r keeps the
#    r largest singular values (Eckart and Young 1936).
#
# <details><summary>Solutions (click)</summary>
#
# ```python
# from attnlab import capture
#
# layout = Standard(width=24, num_heads=4, biases=("q", "k"))
# weights = init(jax.random.key(0), layout)
# x = jax.random.normal(jax.random.key(1), (1, 7, 24))
#
# def probs(weights):
#     return capture(multi_head_attention, weights, x, layout, names=("probs",))[1]["probs"]
#
# for name in ("k_bias", "q_bias"):
#     noise = 3 * jax.random.normal(jax.random.key(2), weights[name].shape)
#     change = abs(probs(weights | {name: noise}) - probs(weights)).max()
#     print(name, "changes the probabilities by", float(change))
#     assert (change < 1e-4) == (name == "k_bias")
# ```
#
# The key bias does nothing: q bᵀ is one number for each query, added to the scores of all keys, and
# a softmax ignores what is added to all. The 12 x 768 key biases of BERT-base do nothing.
#
# ```python
# layout = Bilinear(width=64, num_heads=1)
# free = init(jax.random.key(4), layout)["qk"][:, 0]
# u, values, vt = np.linalg.svd(free)
# lost = {}
# for r in (1, 8, 16, 32, 64):
#     low = (u[:, :r] * values[:r]) @ vt[:r]
#     lost[r] = float(np.linalg.norm(free - low) / np.linalg.norm(free))
# print(lost)
# assert lost[64] < 1e-5 < lost[32] < lost[8]
# ```
#
# A random matrix has no small singular values to drop, so it loses a lot at every rank below 64.
#
# </details>
