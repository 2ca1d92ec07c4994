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
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab/what_makes_heads_differ.ipynb)
#
# # What makes heads different? Do they read chunks of x, or all of it?
#
# **Heads differ because they start from different random numbers: heads that start equal get equal
# gradients and stay equal to the last bit.** **In the Transformer, BERT and GPT every head reads
# all of x; what is cut into chunks is the result, not x.** **How wide a head is, is another
# question than what it reads, and neither more heads nor wider ones are always better.**
#
# Below, each sentence is checked by a cell: what heads of three layouts read (1); heads that start
# equal, trained, with a picture (2); the advice "wide is better", taken apart (3); what the heads
# of a trained model do, against those of a fresh one (4). Two minutes on a CPU.

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

from attnlab import capture, data, training
from attnlab import heads as layouts
from attnlab.heads import Standard, multi_head_attention
from attnlab.models import (
    FFN,
    ModelConfig,
    Norm,
    flops_per_token,
    head_distance,
    identical_heads,
    match_budget,
    num_parameters,
)
from attnlab.models.head_similarity import smallest_change

print("jax", jax.__version__, "on", jax.default_backend())

# %% [markdown]
# ## 1. Two questions: what does a head read, and how wide is it?
#
# *Reads*: change one number of x after the other, and count on how many of them the query of head 0
# depends. *Width*: how many numbers that query has. Here x is 64 wide and there are 4 heads.

# %%
D, h = 64, 4
x = jax.random.normal(jax.random.key(0), (D,))
print(f"{'layout':10}{'reads':>11}{'head width':>12}{'parameters':>12}   W_Q")
reads = {}
for layout in ("standard", "wide", "narrow"):
    made = layouts.make_layout(layout, width=D, num_heads=h)
    params = layouts.init(jax.random.key(1), made)

    def query(row, params=params, made=made):
        _, values = capture(multi_head_attention, params, row[None, None], made, names=("q",))
        return values["q"][0, 0, 0]  # of head 0

    depends = np.asarray(jax.jacobian(query)(x)).any(axis=0)  # on which numbers of x?
    reads[layout] = int(depends.sum())
    print(f"{layout:10}{reads[layout]:>5} of {D}{made.size('head_dim'):>12}", end="")
    print(f"{layouts.num_parameters(made):>12,}   {layouts.weight_shapes(made)['q']}")

assert reads == {"standard": 64, "wide": 64, "narrow": 16}

# %% [markdown]
# `standard` is the paper, BERT, GPT and every large library: it reads all, as `wide` does, with
# heads of D / h, as `narrow` has them. Calling it "wide" or "narrow" mixes up the two columns.
#
# ## 2. Why heads differ: they start apart
#
# Two heads with equal weights compute the same, so they get the same gradient and make the same
# step. Nothing in the loss pulls them apart. The task that shows it is one that provably needs two
# heads: of an arrow a → b between two points the model must say a or b, as it is asked. One head,
# **however wide**, is right in 75 % of the cases at most (Tesfaye et al., ICLR 2026).
#
# Distance 0 means equal to the bit; 1 is that of heads drawn apart. "Least moved" says how far the
# array moved that moved least, so that equality is not standing still.

# %%
points = 8
source = data.Endpoints(vertices=points).load(4)
settings = training.TrainConfig(
    steps=800,
    batch_size=64,
    length=4,
    seeds=(0, 1, 2),
    optimizer="adam",
    learning_rate=1e-2,
    final_learning_rate=1e-3,
    weight_decay=0.0,
    clip_norm=0.0,
    eval_every=50,
    log_every=500,
    eval_windows=0,
    curve_windows=2 * points * (points - 1),
)
sizes = dict(
    vocab_size=points + 3,
    max_len=4,
    width=16,
    num_layers=1,
    ffn=FFN(width=0),
    norm=Norm(bias=False),
)
arms = {  # name: (heads, width of a head, what the start does)
    "two heads, drawn apart": (2, 8, None),
    "two heads, equal but for a noise of 1 %": (2, 8, {"noise": 0.01}),
    "two heads, equal": (2, 8, {}),
    "one head, 8 times as wide": (1, 64, None),
}
curves, right = {}, {}
for name, (heads, head_dim, same) in arms.items():
    config = ModelConfig(heads=Standard(num_heads=heads, head_dim=head_dim), **sizes)
    model = config.build()

    def start(key, inputs, config=config, model=model, same=same):
        params = model.init(key, **inputs)["params"]
        if same is None:
            return params
        return identical_heads(config, params, key=jax.random.fold_in(key, 1), **same)

    def watch(begun, now, config=config):
        return {"apart": head_distance(config, now), "moved": smallest_change(begun, now)}

    run = training.fit_in_memory(
        model,
        training.OBJECTIVES["endpoint"],
        settings,
        source,
        options=training.FitOptions(params=start, measure=watch),
    )
    right[name] = run.result.heldout["accuracy"]
    curves[name] = run.curve("weights/apart")
    apart, moved = run.result.measured["apart"].max(), run.result.measured["moved"].min()
    print(f"{name:40} right {right[name].round(0)} %", end="")
    print(f"   distance {apart:.3f}, least moved {moved:.2f}" if heads > 1 else "")

assert (curves["two heads, equal"][1] == 0.0).all()  # at every step, of every seed, to the bit
assert right["two heads, equal"].max() <= 75
assert right["one head, 8 times as wide"].max() <= 75
assert right["two heads, drawn apart"].mean() > 75

# %%
figure, axis = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
colours = dict(zip(arms, ("#0072b2", "#009e73", "#d55e00"), strict=False))
for name, colour in colours.items():
    steps, apart = curves[name]
    axis.plot(steps, apart.mean(0), color=colour)
    axis.fill_between(steps, apart.min(0), apart.max(0), color=colour, alpha=0.2)
    height = apart[:, -1].mean()
    axis.annotate(
        f"{name}\n{right[name].mean():.0f} % right",
        (steps[-1], height),
        (6, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        annotation_clip=False,
    )
axis.set(xlabel="training step", ylabel="distance between the two heads", xlim=(0, 800))
axis.set_title("Heads that start equal stay equal: 0.0 at every step", fontsize=11)
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Equal heads stay at 0.0 and are worth one head. A little noise is enough to part them. So heads
# differ because they were *drawn* apart.
#
# Here two narrow heads beat one that is eight times as wide. **It also goes the other way round:**
# to find the farthest of some points, one head of full width leaves 1.7 % of the variance
# unexplained, eight narrow ones with as many parameters 53 %
# ([measured, with the command](https://github.com/attnlab/attnlab/blob/main/docs/separations.md);
# Amsel et al., ICLR 2025). It is the exercise below.
#
# ## 3. "Wide gives better results", taken apart
#
# A popular blog (peterbloem.nl/blog/transformers) and its code compared *wide* with *narrow* heads
# and found wide ones better. Its narrow heads differed from its wide ones in four ways at once.
# Here they are changed one by one, with 8 heads in two layers of width 64; the last line is the
# **control**: a standard model that is given as many parameters as the wide one.

# %%
settings = training.TrainConfig(
    steps=250,
    batch_size=16,
    length=32,
    seeds=(0, 1),
    learning_rate=5e-3,
    eval_every=1000,
    log_every=50,
    eval_windows=512,
)
code = data.Text().load(settings.length)


def small(layout, **fields):
    made = layouts.make_layout(layout, num_heads=8, biases=("q", "k", "v", "o"), **fields)
    return ModelConfig(width=64, num_layers=2, heads=made, ffn=FFN(width=128), max_len=32)


wide = small("wide")
arms = {
    "narrow, as coded in 2019": small("narrow_tied", scale=64**-0.5),
    "... scores scaled right": small("narrow_tied"),
    "... a matrix for each head": small("narrow"),
    "... reads all of x (standard)": small("standard"),
    "... heads as wide as x (wide)": wide,
    "standard, parameters of wide": match_budget(small("standard"), wide, "parameters").config,
}
print(f"{'':31}{'parameters':>11}{'FLOPs/token':>13}   bits per byte, 2 seeds")
for name, config in arms.items():
    run = training.fit_in_memory(config.build(), training.OBJECTIVES["causal_lm"], settings, code)
    bits = run.result.heldout["bits_per_byte"]
    counts = f"{num_parameters(config):>11,}{flops_per_token(config, 32):>13,}"
    print(f"{name:31}{counts}   {bits.mean():.3f}  {np.round(bits, 3)}")

most = num_parameters(arms["standard, parameters of wide"])
assert abs(most - num_parameters(wide)) < 200

# %% [markdown]
# Compare neighbours, and hold each step against the spread of its seeds. The wide model has the
# most parameters and FLOPs of the first five; only the last line has as many. Whatever the numbers
# of this short run say, a comparison without that line answers another question. In
# [the measured comparison](https://github.com/attnlab/attnlab/blob/main/docs/results.md) wide heads
# win at equal width, and not at equal parameters. Each cause undone alone, with more seeds and
# steps, is
# [an experiment](https://github.com/attnlab/attnlab/blob/main/experiments/configs/chunks.py).
#
# ## 4. What do the heads of a trained model do?
#
# A text here says four pairs of a key and a value, then asks for the keys again, and at each the
# model must say its value: `a 5 b 3 ... b ?`. Two layers of two heads learn it in seconds. Three
# simple roles of a head, where a key is asked for:
#
# - *back*: how much it looks at the token just before;
# - *same*: at the place where this key stood first;
# - *behind*: at the token behind that place, which is the answer. A head that does this is called
#   an induction head.
#
# The **control** is a model that was never trained: the best of several heads looks like something
# also where nothing was learnt.

# %%
source = data.Recall(vocab_size=32, pairs=4, heldout_rows=256).load(16)
config = ModelConfig(
    vocab_size=32,
    max_len=16,
    width=64,
    num_layers=2,
    heads=Standard(num_heads=2, biases=("q", "k", "v", "o")),
    ffn=FFN(width=0),
)
model = config.build()
settings = training.TrainConfig(
    steps=250,
    batch_size=64,
    length=16,
    seeds=(0, 1),
    learning_rate=5e-3,
    weight_decay=0.0,
    eval_every=1000,
    log_every=50,
    eval_windows=0,
)
run = training.fit_in_memory(model, training.OBJECTIVES["recall"], settings, source)
rows = source.heldout(0)
tokens, values = rows["tokens"], rows["values"]
text, asked = np.nonzero(values >= 0)  # every place where a key is asked for
first = 2 * np.argmax(tokens[text, :8:2] == tokens[text, asked][:, None], axis=1)
places = {"back": asked - 1, "same": first, "behind": first + 1}
assert (tokens[text, first + 1] == values[text, asked]).all()


def maps(params):
    outputs = model.apply({"params": params}, tokens, capture=("probs",))
    return np.asarray(outputs.captured["probs"])  # [layers, texts, heads, queries, keys]


models = {"never trained": model.init(jax.random.key(5), tokens)["params"]}
models |= {f"trained, seed {seed}": run.params(seed) for seed in (0, 1)}
print(f"{'':18}", *(f"layer {layer}, head {head}" for layer in (1, 2) for head in (0, 1)), sep="  ")
best = {}
for name, params in models.items():
    seen = maps(params)
    for role, place in places.items():
        mass = seen[:, text, :, asked, place].mean(0)  # [layers, heads]
        best[name, role] = mass.max()
        print(f"{name:14}{role:>8}", *(f"{value:13.2f}" for value in mass.ravel()), sep="  ")
print("\nright, in %:", run.result.heldout["accuracy"].round(1), " by guessing among four: 25")

chance = best["never trained", "behind"]
found = [best[f"trained, seed {seed}", "behind"] for seed in (0, 1)]
print(f"the best induction head: {found[0]:.2f} and {found[1]:.2f}, never trained {chance:.2f}")
assert max(found) > 2 * chance

# %% [markdown]
# Read a column as one head. Some heads of a trained model have a role that is plain to see, far
# above the control; others have none of these three. And two seeds that are right equally often
# may divide the work in different ways: a role is what training *happened* to give a head, not
# what a head is for.
#
# The same as pictures, of one text: queries downwards, keys to the right, the shade is the square
# root of the probability. A box marks the answer in the row of a question.

# %%
number = 0
ours = text == number
figure, axes = plt.subplots(2, 4, figsize=(10, 5.4), layout="constrained")
for row, (name, title) in enumerate({"never trained": "never trained",
                                     "trained, seed 0": "trained"}.items()):  # fmt: skip
    seen = maps(models[name])[:, number]
    for column, (layer, head) in enumerate(np.ndindex(2, 2)):
        axis = axes[row, column]
        axis.imshow(np.sqrt(seen[layer, head]), cmap="Blues", vmin=0, vmax=1)
        for at, behind in zip(asked[ours], places["behind"][ours], strict=True):
            box = plt.Rectangle((behind - 0.5, at - 0.5), 1, 1, fill=False, color="#d55e00", lw=1.6)
            axis.add_patch(box)
        axis.set_title(f"{title}\nlayer {layer + 1}, head {head}", fontsize=10)
        axis.set(xticks=[], yticks=[])

# %% [markdown]
# ## Exercise
#
# The other way round: find a task where **one full-width head beats many narrow ones** with as
# many parameters. `data.Farthest(dimensions=8)` deals 8 points in 8 dimensions; for each, the
# model must say the point farthest from it. Train one head 16 wide against 8 heads 2 wide. The
# metric is `"unexplained"`, in percent of the variance; the point itself with a minus sign leaves
# about 78 %.
#
# *Hint:* `ModelConfig(kind="encoder", positions=NoPositions(), output=OutputHead(kind="none",
# pooler="each", ...), ...)`, as in the solution; it takes a minute.
#
# <details><summary>Solution (click)</summary>
#
# ```python
# from attnlab.models import NoPositions, OutputHead
#
# far = data.Farthest(dimensions=8).load(8)
# of_points = dict(
#     kind="encoder", vocab_size=8, max_len=8, width=16, num_layers=1, ffn=FFN(width=0),
#     positions=NoPositions(), norm=Norm(kind="rms"),
#     output=OutputHead(kind="none", pooler="each", num_classes=8),
# )
# settings = training.TrainConfig(
#     steps=1500, batch_size=64, length=8, seeds=(0,), optimizer="adam", learning_rate=1e-2,
#     weight_decay=0.0, warmup_steps=75, eval_every=10_000, log_every=500, eval_windows=0,
# )
# left = {}
# for heads, wide in ((1, 16), (8, 2)):
#     config = ModelConfig(heads=Standard(num_heads=heads, head_dim=wide), **of_points)
#     run = training.fit_in_memory(config.build(), training.OBJECTIVES["regression"], settings, far)
#     left[heads] = run.result.heldout["unexplained"][0]
#     told = f"{heads} heads, {wide} wide, {num_parameters(config):,} parameters"
#     print(f"{told}: {left[heads]:.1f} % unexplained")
# assert left[1] < left[8]
# ```
#
# Scores of a narrow head see the points through two dimensions; no sum over heads brings the lost
# ones back.
#
# </details>
