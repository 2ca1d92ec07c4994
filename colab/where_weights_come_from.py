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
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/where_weights_come_from.ipynb)
#
# # Where do the weights come from, and what are "attention weights"?
#
# **W_Q, W_K, W_V and W_O are parameters of the model: drawn at random before training, with a
# standard deviation of 1 / sqrt(fan-in) here, and then changed by gradient descent together with
# all other parameters; no second network makes them.** **"Attention weights" are something else
# with the same name: probabilities, computed anew for every text, whose rows sum to 1.** **After
# training the parameters stay as they are, and the same parameters give other probabilities on
# another text.**

# %% [markdown]
# ![W_Q before, during and after training, and the attention probabilities that are computed from
# it](data:image/png;base64,)

# %% [markdown]
# The figure is of one head on a tiny task: what it shows holds for every model, its numbers do not.
#
# The cells below check each sentence. It takes about two minutes on a CPU.
#
# 1. The parameters before training, and the name of their initialisation.
# 2. A head trained in a loop of ten lines, with a figure of it before, during and after.
# 3. The two meanings of the word.
# 4. Parameters that are not allowed to learn.

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

from attnlab.heads import Standard
from attnlab.models import FFN, ModelConfig, NoPositions

# %% [markdown]
# ## 1. Before training: parameters drawn at random
#
# The task: eight cards, each of another colour and with a number on it; then a colour is named, and
# the model must return the number on that card. One layer, one head, nothing else: no positions, no
# feed-forward network.

# %%
colours, numbers, width = 8, 8, 32
vocabulary = colours * numbers + colours  # every card, and the names of the colours
config = ModelConfig(
    vocab_size=vocabulary,
    max_len=colours + 1,
    width=width,
    num_layers=1,
    heads=Standard(num_heads=1, biases=("q", "k", "v", "o")),
    ffn=FFN(width=0),
    positions=NoPositions(),
)
model = config.build()


def deal(key, texts=64):
    """Tokens [texts, 9], the place of the card that is named, and its number."""
    order_key, number_key, place_key = jax.random.split(key, 3)
    order = jnp.broadcast_to(jnp.arange(colours), (texts, colours))
    order = jax.random.permutation(order_key, order, axis=1, independent=True)
    number = jax.random.randint(number_key, (texts, colours), 0, numbers)
    place = jax.random.randint(place_key, (texts,), 0, colours)
    named = jnp.arange(texts), place
    name = colours * numbers + order[named]
    return jnp.concatenate([order * numbers + number, name[:, None]], 1), place, number[named]


tokens, place, answer = deal(jax.random.key(0))
initial = jax.jit(model.init)(jax.random.key(1), tokens)["params"]
print("a text:", tokens[0].tolist(), "| named card at place", place[0], "| its number", answer[0])

# %% [markdown]
# All parameters of the model, with two numbers each: the standard deviation of the initial values,
# and the norm of the gradient of the loss before the first step.


# %%
def loss(params, tokens, answer, **options):
    logits = model.apply({"params": params}, tokens, **options).logits[:, -1, :numbers]
    return optax.softmax_cross_entropy_with_integer_labels(logits, answer).mean()


def by_name(params):
    """{"layers/attention/q": array, ...}"""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    return {"/".join(str(key.key) for key in path): np.asarray(array) for path, array in flat}


gradients = by_name(jax.grad(loss)(initial, tokens, answer))
table = {
    name: {
        "shape": array.shape,
        "standard deviation": array.std().round(3),
        "norm of the gradient": float(f"{np.linalg.norm(gradients[name]):.1e}"),
    }
    for name, array in by_name(initial).items()
}
for name in ("q", "k", "v", "o"):
    assert gradients[f"layers/attention/{name}"].any()
assert np.abs(gradients["layers/attention/k_bias"]).max() < 1e-6
pd.DataFrame.from_dict(table, orient="index")

# %% [markdown]
# That is the whole model. W_Q, W_K, W_V and W_O are four arrays among the others, and each has a
# gradient from the start: the direction in which the loss falls. (Biases start at 0. The key bias
# has no gradient: it adds the same number to all scores of a query, which a softmax ignores.)
#
# The standard deviation 0.177 of the four is no accident: it is 1 / sqrt(32) = 1 / sqrt(fan-in).
# Each number of the output is a sum over inputs; the fan-in is how many. So the output of a
# matrix is about as large as its input. This is *fan-in* or LeCun initialisation, the default of
# Flax. Other systems use other formulas:

# %%
fan_in = fan_out = width
measured = by_name(initial)["layers/attention/q"].std()
formulas = {
    "fan-in, LeCun (Flax, attnlab)": fan_in**-0.5,
    "Xavier, Glorot (Keras)": (2 / (fan_in + fan_out)) ** 0.5,
    "He, Kaiming (before a ReLU)": (2 / fan_in) ** 0.5,
    "fixed 0.02 (BERT, GPT-2)": 0.02,
}
assert abs(measured - formulas["fan-in, LeCun (Flax, attnlab)"]) < 0.02
pd.DataFrame({"standard deviation of W_Q, 32 x 32": formulas}).round(3)

# %% [markdown]
# For a square matrix fan-in and Xavier are equal. They differ where they see different shapes:
# torch's `MultiheadAttention` initialises W_Q, W_K and W_V as *one* matrix of 3 D outputs, so its
# Xavier draw is smaller by sqrt(2).
#
# ## 2. Training: the same arrays, changed a little, many times
#
# This loop is all there is to "learning": draw texts, take the gradient of the loss with respect to
# *all* parameters, and move each a small step. `learns` says which parameters may move. (`lax.scan`
# is a `for` loop that is compiled once.)


# %%
def train(params, learns=lambda name: True, steps=500, **options):
    """The parameters at the start, after an eighth of the steps, and at the end."""
    moves = jax.tree_util.tree_map_with_path(lambda path, a: learns(path[-1].key), params)
    adam = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    def step(now, number):
        params, state = now
        tokens, _, answer = deal(jax.random.fold_in(jax.random.key(2), number))
        gradients = jax.grad(loss)(params, tokens, answer, **options)
        updates, state = adam.update(gradients, state)
        updates = jax.tree.map(lambda update, moves: update * moves, updates, moves)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    _, history = jax.lax.scan(step, (params, adam.init(params)), jnp.arange(1, steps + 1))
    after = lambda number: jax.tree.map(lambda a: a[number - 1], history)
    return [params, after(steps // 8), after(steps)]


new_tokens, new_place, new_answer = deal(jax.random.key(3), 1024)


def evaluate(params, **options):
    """% right on 1,024 new texts, and the probabilities of the last token [texts, 9]."""
    outputs = model.apply({"params": params}, new_tokens, capture=("probs",), **options)
    right = jnp.argmax(outputs.logits[:, -1, :numbers], -1) == new_answer
    return 100 * right.mean(), outputs.captured["probs"][0, :, 0, -1]


history = jax.jit(train)(initial)
stages = dict(zip(("before", "during", "after"), history, strict=True))
results = {name: evaluate(params) for name, params in stages.items()}
for name, (right, probs) in results.items():
    on_card = probs[np.arange(1024), new_place].mean()
    print(f"{name} training: {right:.1f} % right, probability on the named card {on_card:.2f}")
assert results["before"][0] < 40
assert results["after"][0] > 80

# %% [markdown]
# **The figure.** Top: W_Q, 32 x 32 *parameters*. It looks as random after training as before; what
# has changed is how it fits the other arrays. Bottom: the *probabilities* with which the last token
# attends to the eight cards, one row for each of ten new texts; a box marks the named card. The
# bottom row is computed from the top row and the texts. (A row without a dark field attends to the
# last token itself, which is left out.)

# %% tags=["answer"]
figure, axes = plt.subplots(2, 3, figsize=(10, 5.6), layout="constrained")
limit = 2.5 * np.std(by_name(history[2])["layers/attention/q"])
for column, (name, params) in enumerate(stages.items()):
    right, probs = results[name]
    top, bottom = axes[:, column]
    W_Q = by_name(params)["layers/attention/q"].reshape(width, width)
    parameters = top.imshow(W_Q, cmap="RdBu", vmin=-limit, vmax=limit)
    top.set(title=f"W_Q {name} training", xlabel="dimension of the query", ylabel="dimension of x")
    attention = bottom.imshow(probs[:10, :8], cmap="Blues", vmin=0, vmax=1, aspect="auto")
    bottom.plot(new_place[:10], range(10), "s", mfc="none", mec="C3", ms=16)
    bottom.set(title=f"attention: {right:.0f} % right", xlabel="key position", ylabel="text")
figure.colorbar(parameters, ax=axes[0], label="parameter")
_ = figure.colorbar(attention, ax=axes[1], label="attention probability")

# %% [markdown]
# ## 3. One word, two things
#
# | | weights = parameters | "attention weights" = probabilities |
# |---|---|---|
# | what | W_Q, W_K, W_V, W_O | softmax of the scores |
# | made by | a random draw, then gradient descent | a forward pass |
# | on another text | the same | different |
# | how many per layer | 4 D², whatever the text | N T², for N heads and T tokens |
# | sign and sum | any | at least 0, rows sum to 1 |

# %%
trained, maps = history[-1], []
for seed in (10, 11):
    text = deal(jax.random.key(seed), 1)[0]
    before = by_name(trained)
    outputs = model.apply({"params": trained}, text, capture=("probs",))
    maps.append(np.asarray(outputs.captured["probs"])[0, 0, 0])  # [queries, keys]
    print("probabilities of the last token:", np.round(maps[-1][-1], 2))
    assert all(np.array_equal(a, by_name(trained)[name]) for name, a in before.items())
    assert np.allclose(maps[-1].sum(-1), 1, atol=1e-5)
assert np.abs(maps[0] - maps[1]).max() > 0.1  # the same parameters, other probabilities

# %% [markdown]
# ## 4. Parameters that must not learn
#
# How far does a model get if some of its parameters stay as they were drawn? Three seeds each. The
# **control** at the end has no useful probabilities: all its scores are 0, so the last token
# attends to all cards alike and cannot use the colour that was named.

# %%
seeds = (0, 1, 2)

zero_scores = dict(patch={"scores": lambda scores, layer: 0 * scores})
variants = {
    "all learn": (lambda name: True, {}),
    "W_Q, W_K stay random": (lambda name: name not in ("q", "k", "q_bias", "k_bias"), {}),
    "W_V, W_O stay random": (lambda name: name not in ("v", "o", "v_bias", "o_bias"), {}),
    "nothing learns": (lambda name: False, {}),
    "all learn, scores are 0": (lambda name: True, zero_scores),
}


def run(key, learns, options):
    last = train(model.init(key, tokens)["params"], learns, **options)[-1]
    return evaluate(last, **options)[0]


keys = jax.vmap(jax.random.key)(jnp.array(seeds))
right = {
    name: jax.jit(jax.vmap(lambda key, v=variant: run(key, *v)))(keys)
    for name, variant in variants.items()
}
scores = pd.DataFrame(right, index=[f"seed {seed}" for seed in seeds], dtype=float).T.round(1)
scores["mean"] = scores.mean(axis=1).round(1)
assert scores.loc["W_Q, W_K stay random", "mean"] > 70
assert scores.loc["nothing learns", "mean"] < 40
assert scores.loc["all learn, scores are 0", "mean"] < 60
scores

# %% [markdown]
# Random W_Q and W_K are good enough here: the embedding learns to work with them (99 % right, mean
# of three seeds). In each of these seeds they do better than learnt ones (80 %); three seeds that
# differ as much as 63 and 94 % are too few to conclude more. Where all learn, some colours end with
# nearly all attention on a wrong token (row 4 of the figure), where the gradient of a softmax is
# almost 0. So "learnt" is not what makes a matrix useful. Where attention does not depend on the
# text (the control), everything else may learn and only 35 % are right, about what naming the most
# frequent number of the text gives (32 %).
#
# On text the learnt ones are better, by little
# ([three seeds](https://github.com/attnlab/attnlab/blob/main/docs/results/known_answers.md)). Bits
# per byte that are lost, with 95 % intervals:
#
# | attention | bits per byte lost |
# |---|---|
# | W_Q and W_K stay random | 0.035 (0.015 to 0.055) |
# | W_V and W_O stay random | 0.068 (0.047 to 0.090) |
# | a learnt function of the distance alone | -0.009 (-0.036 to 0.017), inconclusive |
# | a random function of the distance alone | 0.489 (0.479 to 0.499) |
#
# So on text, in 800 steps, attention need not even depend on the text, where it may learn which
# distances matter.

# %% [markdown]
# ## What to remember
#
# - W_Q, W_K, W_V and W_O are ordinary parameters: random at first, then moved by the gradient of
#   the one loss. Nothing else makes them.
# - "Attention weights" are probabilities: outputs of the model for one text, not parameters.
# - W_Q and W_K themselves may stay random where the embedding learns.
#
# **Where people ask this:** [how are Q, K and V vectors
# trained?](https://datascience.stackexchange.com/questions/68220/how-are-q-k-and-v-vectors-trained-in-a-transformer-self-attention),
# [questions about W_Q, W_K and
# W_V](https://community.deeplearning.ai/t/questions-about-transformer-w-q-w-k-and-w-v/96960).
# Papers: [Glorot and Bengio 2010](https://proceedings.mlr.press/v9/glorot10a.html) (Xavier),
# [He et al. 2015](https://arxiv.org/abs/1502.01852).
#
# ## Exercises
#
# 1. The trained head has no positions. What happens to its answer if the eight cards are shuffled?
#    And to its probabilities? Predict it, then test it on `tokens`. *Hint:* the last token must
#    stay last; `tokens[:, [*order, 8]]` shuffles the cards.
# 2. Change the initialisation to the 0.02 of BERT: `ModelConfig(..., init=Init(std=0.02))`. Which
#    standard deviation has W_Q then, and how large are the initial scores compared with fan-in?
#
# <details><summary>Solutions (click)</summary>
#
# ```python
# order = np.array([3, 1, 4, 0, 5, 7, 2, 6])
# original = model.apply({"params": trained}, tokens, capture=("probs",))
# shuffled = model.apply({"params": trained}, tokens[:, [*order, 8]], capture=("probs",))
# print("logits change by", abs(original.logits[:, -1] - shuffled.logits[:, -1]).max())
# a, b = (outputs.captured["probs"][0, :, 0, -1, :8] for outputs in (original, shuffled))
# print("probabilities, shuffled in the same way, by", np.abs(a[:, order] - b).max())
# assert np.allclose(a[:, order], b, atol=1e-3)
# ```
#
# The answer stays, the probabilities move with their cards. (The last token attends to all others,
# so the causal mask does not tell it their places.) To know an order, a model needs positions.
#
# ```python
# from dataclasses import replace
#
# from attnlab.models import Init
#
# spread = {}
# for name, init in {"fan-in": Init(), "0.02": Init(std=0.02)}.items():
#     other = replace(config, init=init).build()
#     params = other.init(jax.random.key(1), tokens)["params"]
#     outputs = other.apply({"params": params}, tokens, capture=("scores",))
#     last = outputs.captured["scores"][0, :, 0, -1]
#     spread[name] = float(last.std())
#     print(name, by_name(params)["layers/attention/q"].std(), "scores:", spread[name])
# assert spread["0.02"] < 0.1 * spread["fan-in"]
# ```
#
# Scores are products of two matrices, so they shrink by about (0.177 / 0.02)² = 78: attention
# starts almost uniform.
#
# </details>
