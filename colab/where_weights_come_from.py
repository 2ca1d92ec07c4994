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
# **W_Q, W_K and W_V are arrays of the model itself: drawn at random at the start, then changed by
# gradient descent together with all its other arrays; no second network makes them.** **"Attention
# weights" are something else that has the same name: probabilities, computed anew for every text,
# whose rows sum to 1.** **After training the arrays stay as they are, and the same arrays give
# other probabilities on another text.**
#
# Below, each sentence is checked by a cell: the arrays before any training (1); a head that is
# trained in a loop of ten lines, and the picture of it before, during and after (2); the two
# meanings of the word (3); arrays that are not allowed to learn (4); and the probabilities as the
# edges of a graph (5). About a minute on a CPU.

# %%
# @title Install attnlab if it is missing; JAX and Flax stay as they are
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("attnlab") is None:
    source = "attnlab[train,plot,pretrained] @ git+https://github.com/attnlab/attnlab"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)

# %%
import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from attnlab import data, training
from attnlab.attention import attention_over_edges, dot_product_attention, masks
from attnlab.heads import Standard
from attnlab.models import FFN, Dropout, ModelConfig, NoPositions, OutputHead

print("jax", jax.__version__, "on", jax.default_backend())

# %% [markdown]
# ## 1. Before training: arrays, drawn at random
#
# The task: eight cards lie on the table, each of another colour and with a number on it; then a
# colour is named, and the model must say the number on that card. One layer, one head, nothing
# else: no positions, no feed-forward part.

# %%
colours, numbers = 8, 8
vocabulary = colours * numbers + colours  # every card, and the names of the colours
config = ModelConfig(
    vocab_size=vocabulary,
    max_len=colours + 1,
    width=32,
    num_layers=1,
    heads=Standard(num_heads=1, biases=("q", "k", "v", "o")),
    ffn=FFN(width=0),
    positions=NoPositions(),
)
model = config.build()


def deal(key, rows=128):
    """Tokens [rows, 9], the place of the card that is asked for, and its number."""
    order, number, asked = jax.random.split(key, 3)
    shuffled = jax.random.permutation(
        order, jnp.broadcast_to(jnp.arange(colours), (rows, colours)), axis=1, independent=True
    )
    written = jax.random.randint(number, (rows, colours), 0, numbers)
    place = jax.random.randint(asked, (rows,), 0, colours)
    at = jnp.arange(rows), place
    name = colours * numbers + shuffled[at]
    return jnp.concatenate([shuffled * numbers + written, name[:, None]], 1), place, written[at]


tokens, place, answer = deal(jax.random.key(0))
fresh = model.init(jax.random.key(1), tokens)["params"]
print("a text:", tokens[0].tolist(), "  the last token names colour", int(tokens[0, -1]) - 64)
print("its answer:", int(answer[0]), "  on the card at place", int(place[0]))


# %%
def loss(params, tokens, answer, **options):
    logits = model.apply({"params": params}, tokens, **options).logits[:, -1, :numbers]
    return optax.softmax_cross_entropy_with_integer_labels(logits, answer).mean()


def named(tree):
    """'attention/q' -> array, for every array of the model."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in flat}


slopes = named(jax.grad(loss)(fresh, tokens, answer))
print(f"{'array':30}{'shape':17}{'spread':>8}{'length of the gradient':>25}")
for name, array in named(fresh).items():
    length = np.linalg.norm(slopes[name])
    print(f"{name:30}{array.shape!s:17}{array.std():>8.3f}{length:>25.1e}")

for name in ("q", "k", "v", "o"):
    assert slopes[f"layers/attention/{name}"].any()
assert np.abs(slopes["layers/attention/k_bias"]).max() < 1e-6  # a softmax does not see it

# %% [markdown]
# That is the whole model. W_Q, W_K, W_V and W_O are four arrays among the others, filled with
# random numbers, and each has a gradient from the start: the direction in which the loss falls.
# (Biases start at 0. The bias of the keys has no gradient: it adds the same number to all scores
# of a row, which a softmax does not see.)
#
# ## 2. Training: the same arrays, a little changed, many times
#
# The loop is all there is to "learning": draw texts, take the gradient of the loss with respect to
# *all* arrays, and move each a small step. `learns` names the arrays that may move.


# %%
def train(params, learns=lambda name: True, steps=500, **options):
    """The weights at the start, after an eighth of the steps, and at the end."""
    moves = jax.tree_util.tree_map_with_path(lambda path, a: learns(path[-1].key), params)
    adam = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    @jax.jit
    def step(params, state, key):
        tokens, _, answer = deal(key)
        grads = jax.grad(loss)(params, tokens, answer, **options)
        updates, state = adam.update(grads, state)
        updates = jax.tree.map(lambda u, moves: u * moves, updates, moves)
        return optax.apply_updates(params, updates), state

    kept, state = [params], adam.init(params)
    for number in range(1, steps + 1):
        params, state = step(params, state, jax.random.fold_in(jax.random.key(2), number))
        if number in (steps // 8, steps):
            kept.append(params)
    return kept


def look(params, **options):
    """(% of 1,024 new texts that are answered right, the probabilities of the last token)."""
    tokens, place, answer = deal(jax.random.key(3), 1024)
    outputs = model.apply({"params": params}, tokens, capture=("probs",), **options)
    right = jnp.argmax(outputs.logits[:, -1, :numbers], -1) == answer
    probs = np.asarray(outputs.captured["probs"])[0, :, 0, -1]
    return 100 * float(right.mean()), probs, np.asarray(place)


history = train(fresh)
names = ("before", "during", "after")
seen = [look(params) for params in history]
for name, (right, probs, place) in zip(names, seen, strict=True):
    on_card = probs[np.arange(len(place)), place].mean()
    print(f"{name:7} training: {right:5.1f} % right, probability on the card {on_card:.2f}")
assert seen[0][0] < 40
assert seen[2][0] > 80

# %% [markdown]
# **The picture.** Above: W_Q, 32 x 32 *parameters*. It looks as random after training as before;
# what has changed is how it fits to the other arrays. Below: the *probabilities* with which the
# last token looks at the eight cards, for ten new texts, a row each; a box marks the card that is
# asked for. The lower pictures are computed from the upper ones and the text. (Where a row has no
# dark field, the last token looks at itself, which is left out.)

# %%
figure, axes = plt.subplots(2, 3, figsize=(9, 6.6), layout="constrained")
limit = 2.5 * np.std(named(history[2])["layers/attention/q"])
for column, (name, params, (right, probs, place)) in enumerate(
    zip(names, history, seen, strict=True)
):
    W_Q = named(params)["layers/attention/q"].reshape(32, 32)
    upper = axes[0, column].imshow(W_Q, cmap="RdBu", vmin=-limit, vmax=limit)
    axes[0, column].set_title(f"{name}\nW_Q: the same for every text", fontsize=11)
    lower = axes[1, column].imshow(probs[:10, :8], cmap="Blues", vmin=0, vmax=1)
    axes[1, column].set_title(f"probabilities on ten texts\n{right:.0f} % right", fontsize=11)
    axes[1, column].set(xlabel="card", ylabel="text" if column == 0 else None)
    for row, at in enumerate(place[:10]):
        box = plt.Rectangle((at - 0.5, row - 0.5), 1, 1, fill=False, color="#d55e00", lw=1.6)
        axes[1, column].add_patch(box)
for axis in axes.flat:
    axis.set(xticks=[], yticks=[])
figure.colorbar(upper, ax=axes[0], label="parameter")
_ = figure.colorbar(lower, ax=axes[1], label="probability")

# %% [markdown]
# ## 3. One word, two things
#
# | | weights = parameters | "attention weights" = probabilities |
# |---|---|---|
# | what | W_Q, W_K, W_V, W_O | softmax of the scores |
# | made by | drawing, then gradient descent | a forward pass |
# | on another text | the same | others |
# | how many, a layer | 4 D², whatever the text | h T², for T tokens |
# | sign and sum | any | 0 or more, rows sum to 1 |


# %%
def fingerprint(tree):
    return hashlib.sha256(b"".join(a.tobytes() for a in named(tree).values())).hexdigest()[:12]


trained, maps = history[-1], []
for seed in (10, 11):
    text = deal(jax.random.key(seed), 1)[0]
    before = fingerprint(trained)
    outputs = model.apply({"params": trained}, text, capture=("probs",))
    maps.append(np.asarray(outputs.captured["probs"])[0, 0, 0])
    print("parameters", fingerprint(trained), "  last row", np.round(maps[-1][-1], 2))
    assert fingerprint(trained) == before  # looking changed nothing
    assert np.allclose(maps[-1].sum(-1), 1, atol=1e-5)
assert np.abs(maps[0] - maps[1]).max() > 0.1

print("\nD = 512, 8 heads: 4 D² =", f"{4 * 512**2:,} parameters, and of probabilities")
for length in (64, 256, 1024):
    print(f"   {8 * length**2:>10,} for {length:,} tokens")

# %% [markdown]
# ## 4. Arrays that must not learn
#
# If the arrays come from a random draw, how far does one get without changing them? `learns` holds
# some of them still. The **control** at the end has no probabilities to speak of: all its scores
# are 0, so the last token looks at all cards alike and cannot use the colour that was named.

# %%
blind = dict(patch={"scores": lambda scores, layer: 0 * scores})
arms = {
    "all learn": (lambda name: True, {}),
    "W_Q and W_K stay random": (lambda name: name not in ("q", "k", "q_bias", "k_bias"), {}),
    "W_V and W_O stay random": (lambda name: name not in ("v", "o", "v_bias", "o_bias"), {}),
    "nothing learns": (lambda name: False, {}),
    "all learn, but scores are 0": (lambda name: True, blind),
}
scores = {}
for name, (learns, options) in arms.items():
    first, _, last = train(fresh, learns, **options)
    scores[name] = look(last, **options)[0]
    still = [n for n, a in named(last).items() if np.array_equal(a, named(first)[n])]
    held = "W_Q" if "layers/attention/q" in still else ""
    print(f"{name:30}{scores[name]:6.1f} % right   arrays that did not move: {len(still)} {held}")

assert scores["W_Q and W_K stay random"] > 80
assert scores["nothing learns"] < 40
assert scores["all learn, but scores are 0"] < 60

# %% [markdown]
# Random W_Q and W_K are good enough here: the embedding learns to be found by them. So "learnt" is
# not what makes a matrix useful; that *something* on the way from the tokens to the probabilities
# can adapt is. Where attention does not read the text at all, everything else may learn and it does
# not help.
# [The same with three seeds, longer texts and a check against a
# paper](https://github.com/attnlab/attnlab/blob/main/docs/separations.md).
#
# ## 5. Attention as a graph
#
# Tokens are nodes; token t looking at token s is an edge from s to t, and its probability is the
# weight of that edge. Full attention is the *complete* graph, a mask takes edges out. So attention
# computed edge by edge must be the same as attention computed with matrices and a mask.

# %%
T, d = 6, 4
q, k, v = jax.random.normal(jax.random.key(0), (3, T, 1, d))
graphs = {
    "complete": [(s, t) for s in range(T) for t in range(T)],
    "causal": [(s, t) for s in range(T) for t in range(T) if s <= t],
    "a ring": [(s, (s + step) % T) for s in range(T) for step in (-1, 0, 1)],
}
for name, edges in graphs.items():
    senders, receivers = jnp.array(edges).T
    by_edges = attention_over_edges(q, k, v, senders, receivers)
    mask = masks.from_edges(senders, receivers, T)[None, None]
    by_matrix = dot_product_attention(q[None], k[None], v[None], mask=mask)[0]
    away = float(jnp.abs(by_edges - by_matrix).max())
    print(f"{name:9}{len(edges):>3} edges, difference to the matrix form {away:.0e}")
    assert away < 1e-2 if jax.default_backend() == "tpu" else away < 1e-5

equal = attention_over_edges(0 * q, k, v, senders, receivers)[:, 0]
ring = np.zeros((T, T))
ring[np.asarray(receivers), np.asarray(senders)] = 1
mean = ring / ring.sum(1, keepdims=True) @ np.asarray(v[:, 0])
print("equal scores: every node gets the mean of its neighbours,", end=" ")
print(f"difference {np.abs(equal - mean).max():.0e}")
assert np.allclose(equal, mean, atol=1e-5)

# %% [markdown]
# On a graph that is given, this is a graph attention network (arXiv 1710.10903). Cora is the usual
# one: 2,708 papers, an edge where one cites the other; each paper looks at itself and its
# neighbours. The cell runs where a folder `cora` lies beside the notebook
# ([its format](https://github.com/attnlab/attnlab/blob/main/docs/data.md)), and says so where not.

# %%
if Path("cora").is_dir():
    source = data.Nodes(path="cora").load(2708)
    on_graph = ModelConfig(
        kind="encoder", vocab_size=1433, max_len=2708, width=64, num_layers=2,
        heads=Standard(num_heads=8, biases=("q", "k", "v", "o")), ffn=FFN(width=64),
        positions=NoPositions(), output=OutputHead(kind="none", pooler="each", num_classes=7),
        dropout=Dropout(rate=0.6, attention=0.6, ffn=0.6),
    )  # fmt: skip
    settings = training.TrainConfig(
        steps=100, warmup_steps=10, length=2708, batch_size=1, eval_batch_size=1, seeds=(0,),
        learning_rate=5e-3, weight_decay=0.5, eval_every=1000, eval_windows=0,
    )  # fmt: skip
    result = training.fit_in_memory(
        on_graph.build(), training.OBJECTIVES["node_class"], settings, source
    ).result
    print(f"attention over citations: {result.heldout['accuracy'][0]:.1f} % of the test papers")
    for name, value in source.baselines()["accuracy"].items():
        print(f"{name}: {value:.1f} %")
else:
    print("There is no folder 'cora' here: this cell is skipped.")

# %% [markdown]
# ## Exercise
#
# The trained head has no positions. What happens to its answer if the eight cards are shuffled? And
# to its probabilities? Say it first, then test it on `tokens`.
#
# *Hint:* the last token must stay last. `tokens[:, list(order) + [8]]` shuffles the cards.
#
# <details><summary>Solution (click)</summary>
#
# ```python
# order = np.array([3, 1, 4, 0, 5, 7, 2, 6])
# shuffled = tokens[:, [*order, 8]]
# one = model.apply({"params": trained}, tokens, capture=("probs",))
# two = model.apply({"params": trained}, shuffled, capture=("probs",))
# print("answers move by", float(abs(one.logits[:, -1] - two.logits[:, -1]).max()))
# last = [np.asarray(seen.captured["probs"])[0, :, 0, -1, :8] for seen in (one, two)]
# print("probabilities, shuffled the same way, by", np.abs(last[0][:, order] - last[1]).max())
# assert np.allclose(last[0][:, order], last[1], atol=1e-3)
# ```
#
# The answer stays, the probabilities move along with their cards: in a graph the names of the nodes
# mean nothing. (The last token sees all others, so the causal mask does not tell places apart for
# it.) To know an order, a model needs positions.
#
# </details>
