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
# # What makes heads different? Do they read slices of x, or all of it?
#
# **Random initial weights break the symmetry and training amplifies the difference: heads that
# start equal get equal gradients and stay equal to the last bit, heads that start 1 % apart learn
# to attend to different tokens.** **They do not differ by what they read: in the Transformer, BERT
# and GPT every head reads all of x, and only the result is divided among heads.** **Different does
# not mean needed: after training many heads can be removed one by one at little cost (Michel et al.
# 2019, Voita et al. 2019).**

# %% [markdown]
# ![Heads that start equal stay equal; heads that start 1 % apart learn to attend to different
# tokens](data:image/png;base64,)

# %% [markdown]
# The figure is of two heads on a small task that needs two, with four seeds: heads that start equal
# (green) stay equal, heads that start 1 % apart (orange) move apart. It does not show how many
# heads a larger model needs.
#
# The cells below check each sentence. It takes about two minutes on a CPU.
#
# 1. What heads of three layouts read.
# 2. Heads that start equal, trained: the figure.
# 3. What the heads of a trained model do.
# 4. Which of them are redundant.

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

from attnlab import capture, data, interpret, training
from attnlab import heads as layouts
from attnlab.heads import Standard, multi_head_attention
from attnlab.models import FFN, ModelConfig, Norm, head_distance, identical_heads

# %% [markdown]
# ## 1. What does a head read, and how wide is it?
#
# *Reads*: on how many numbers of x does the query of head 0 depend? *Width*: how many numbers has
# that query? The Jacobian answers the first question.

# %%
width, num_heads = 64, 4

x = jax.random.normal(jax.random.key(0), (width,))
table = {}
for name in ("standard", "wide", "narrow"):
    layout = layouts.make_layout(name, width=width, num_heads=num_heads)
    params = layouts.init(jax.random.key(1), layout)

    def query(x, params=params, layout=layout):
        _, values = capture(multi_head_attention, params, x[None, None], layout, names=("q",))
        return values["q"][0, 0, 0]  # of head 0

    table[name] = {
        "numbers of x that a head reads": int(np.asarray(jax.jacobian(query)(x)).any(0).sum()),
        "width of a head": layout.size("head_dim"),
        "parameters": layouts.num_parameters(layout),
    }
reads = pd.DataFrame.from_dict(table, orient="index")
assert reads.iloc[:, 0].tolist() == [64, 64, 16]
reads

# %% [markdown]
# `standard` is the Transformer, BERT, GPT and every large library: a head reads all of x, as a
# `wide` one does, and is D / N wide, as a `narrow` one is. So "wide or narrow" mixes two questions.
#
# A [well-known blog](https://peterbloem.nl/blog/transformers) found that wide heads "give better
# results" than narrow ones. Its narrow heads had two fifths of the parameters. [Taken apart, with
# tuned learning rates](https://github.com/attnlab/attnlab/blob/main/docs/results/known_answers.md),
# as many parameters take away 0.091 of the 0.126 bits between the two (0.018 to 0.164, p = 0.23
# after correction for eight comparisons). Against standard
# heads wide ones are worse, by 0.064 bits per byte at equal parameters (95 % interval over three
# texts 0.022 to 0.107, registered; [the first
# study](https://github.com/attnlab/attnlab/blob/main/docs/results/heads_and_sharing.md)). A short
# run with few seeds and one learning rate for all layouts can show the opposite.
#
# ## 2. Why heads differ: initialisation breaks the symmetry, training amplifies it
#
# The task needs two heads: of an arrow a → b the model must return a or b, as a selector token
# says. One head, **however wide**, is right in at most 75 % of the cases (Tesfaye et al., ICLR
# 2026). Three models with two heads start with
#
# - independent random weights;
# - equal weights, plus noise of 1 %;
# - equal weights.
#
# The fourth is the **control**: one head with as many numbers as eight. During training we measure
# how far apart the two heads are, in two ways:
#
# - the distance of their weights: 0 is equal, 1 as far as independent draws;
# - the Jensen-Shannon divergence of their attention probabilities at the last token: 0 if they
#   attend alike, ln 2 = 0.69 if they attend to different tokens.

# %%
steps, seeds, vertices = 800, (0, 1, 2, 3), 8
starts = {  # name: (heads, width of a head, noise on equal heads or None)
    "independent": (2, 8, None),
    "equal, plus 1 % noise": (2, 8, 0.01),
    "equal": (2, 8, 0.0),
    "one head, 64 wide": (1, 64, None),
}

arrows = data.Endpoints(vertices=vertices).load(4)
examples = arrows.heldout(0)["tokens"]
arrow_settings = training.TrainConfig(
    steps=steps, seeds=seeds, batch_size=64, length=4, log_every=500,
    optimizer=training.OptimizerConfig(
        name="adam", learning_rate=1e-2, weight_decay=0.0, clip_norm=0.0
    ),
    schedule=training.ScheduleConfig(final_learning_rate=1e-3),
    evaluation=training.EvaluationConfig(every=50, windows=0, curve_windows=len(examples)),
)  # fmt: skip


def train(heads, head_dim, noise):
    config = ModelConfig(
        heads=Standard(num_heads=heads, head_dim=head_dim), vocab_size=vertices + 3, max_len=4,
        width=16, num_layers=1, ffn=FFN(width=0), norm=Norm(bias=False),
    )  # fmt: skip
    model = config.build()

    def initial(key, inputs):
        params = model.init(key, **inputs)["params"]
        if noise is None:
            return params
        return identical_heads(config, params, noise=noise, key=jax.random.fold_in(key, 1))

    def measure(_, params):
        outputs = model.apply({"params": params}, examples, capture=("probs",))
        divergence = interpret.js_divergence(outputs.captured["probs"][..., -1:, :])
        moved = jnp.abs(params["layers"]["attention"]["q"]).mean()
        return {
            "distance": head_distance(config, params),
            "divergence": divergence[0, 0, 0, -1],
            "mean of |W_Q|": moved,
        }

    options = training.FitOptions(params=initial, callbacks=[training.measured(measure, every=50)])
    objective = training.OBJECTIVES["endpoint"]
    return training.fit_in_memory(model, objective, arrow_settings, arrows, options=options)


runs = {name: train(*start) for name, start in starts.items()}

# %%
table = {}
for name, run in runs.items():
    table[name] = {
        "% right, each seed": run.result.heldout["accuracy"].round(0),
        "distance of weights: start": run.curve("weights/distance")[1][:, 0].mean().round(3),
        "end": run.curve("weights/distance")[1][:, -1].mean().round(3),
        "divergence of attention: start ": run.curve("weights/divergence")[1][:, 0].mean().round(3),
        "end ": run.curve("weights/divergence")[1][:, -1].mean().round(3),
    }
pd.DataFrame(table)

# %% tags=["answer"]
assert (runs["equal"].curve("weights/distance")[1] == 0).all()  # every step, every seed, every bit
assert np.ptp(runs["equal"].curve("weights/mean of |W_Q|")[1], axis=1).min() > 0.01  # it does move
for name in ("equal", "one head, 64 wide"):
    assert runs[name].result.heldout["accuracy"].max() <= 75
for name in ("independent", "equal, plus 1 % noise"):
    start, *_, end = runs[name].curve("weights/divergence")[1].mean(0)
    assert end > 2 * start
    assert runs[name].result.heldout["accuracy"].mean() > 75

figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
names = {"distance": "distance of the weights", "divergence": "divergence of attention, in nats"}
for axis, (measure, label) in zip(axes, names.items(), strict=True):
    for name in list(starts)[:3]:
        at, values = runs[name].curve(f"weights/{measure}")
        axis.plot(at, values.mean(0), label=name)
        axis.fill_between(at, values.min(0), values.max(0), alpha=0.2)
    axis.set(xlabel="training step", ylabel=label, ylim=(-0.02, None))
axes[1].axhline(np.log(2), color="grey", linestyle=":", label="ln 2: different tokens")
lines = axes[1].get_legend_handles_labels()
title = "start of the two heads"
_ = figure.legend(*lines, loc="outside lower center", ncols=4, frameon=False, title=title)

# %% [markdown]
# - *Equal* heads stay at exactly 0 and are no better than one head. One wide head is no better
#   either.
# - *With 1 % of noise* the weights move apart from 0.01 to 0.32 and the attention from 0.00 to 0.63
#   nats: *training* did that.
# - *Independent* heads have nothing to gain in the left panel: random weights are as far apart as
#   they can be from the start. Their attention diverges too, from 0.16 to 0.51 in the right
#   panel. (One of the four seeds ends at 84 %: a random start can also be unlucky.)
#
# So both are needed: a start that is not symmetric, and a gradient that then differs from head to
# head.
#
# ## 3. What do the heads of a trained model do?
#
# A text has four pairs of a key and a value, then asks for the keys again, and the model must
# return each value: `a 5 b 3 ... b ?`. Two layers of two heads learn it in seconds. Where a key is
# asked for, we measure three roles of a head, as the mean attention probability of
#
# - *previous*: the token just before;
# - *same*: the place where this key stood first;
# - *after same*: the token behind that place, which is the answer. A head that attends there is
#   called an induction head.
#
# The baseline is a model that was never trained.

# %%
task = data.Recall(vocab_size=32, pairs=4, heldout_rows=256).load(16)
heads = Standard(num_heads=2, biases=("q", "k", "v", "o"))
sizes = dict(vocab_size=32, max_len=16, width=64, num_layers=2, ffn=FFN(width=0))
model = ModelConfig(heads=heads, **sizes).build()
settings = training.TrainConfig(
    steps=250, seeds=(0, 1), batch_size=64, length=16, log_every=50,
    optimizer=training.OptimizerConfig(learning_rate=5e-3, weight_decay=0.0),
    evaluation=training.EvaluationConfig(every=1000, windows=0),
)  # fmt: skip
run = training.fit_in_memory(model, training.OBJECTIVES["recall"], settings, task)
print("% right:", run.result.heldout["accuracy"].round(1), "by guessing one of four: 25")

tokens, values = (task.heldout(0)[name] for name in ("tokens", "values"))
text, asked = np.nonzero(values >= 0)  # every place where a key is asked for
first = 2 * np.argmax(tokens[text, :8:2] == tokens[text, asked][:, None], axis=1)
roles = {"previous": asked - 1, "same": first, "after same": first + 1}
assert (tokens[text, first + 1] == values[text, asked]).all()


def attention_maps(params):
    outputs = model.apply({"params": params}, tokens, capture=("probs",))
    return np.asarray(outputs.captured["probs"])  # [layers, texts, heads, queries, keys]


models = {"untrained": model.init(jax.random.key(5), tokens)["params"]}
models |= {f"trained, seed {seed}": run.params(seed) for seed in (0, 1)}
table = {}
for name, params in models.items():
    probs = attention_maps(params)
    for role, place in roles.items():
        table[name, role] = probs[:, text, :, asked, place].mean(0).ravel().round(2)
columns = [f"layer {layer}, head {head}" for layer in (0, 1) for head in (0, 1)]
found = pd.DataFrame.from_dict(table, orient="index", columns=columns)
induction = {name: found.loc[[(name, "after same")]].max(axis=None) for name in models}
assert max(induction.values()) > 2 * induction["untrained"]
found

# %% [markdown]
# Each column is one head. In seed 0 both heads of layer 1 are induction heads, far above the
# untrained baseline, and so do the same work twice; in seed 1 the effect is weaker, with the same
# accuracy. The heads of layer 0 have none of these three roles. So a role is what training
# *happened* to give a head, not what the head is for.
#
# The attention maps of one text: a box marks the answer in the row of a question. The colour is the
# square root of the probability, so that small probabilities show.

# %%
shown = text == 0  # the first text
figure, axes = plt.subplots(2, 4, figsize=(11, 5.4), layout="constrained", sharex=True, sharey=True)
for row, name in enumerate(("untrained", "trained, seed 0")):
    probs = attention_maps(models[name])[:, 0]
    for column, (layer, head) in enumerate(np.ndindex(2, 2)):
        axis = axes[row, column]
        image = axis.imshow(np.sqrt(probs[layer, head]), cmap="Blues", vmin=0, vmax=1)
        axis.plot(roles["after same"][shown], asked[shown], "s", mfc="none", mec="C3", ms=9)
        axis.set_title(f"{name}\nlayer {layer}, head {head}", fontsize=10)
    axes[row, 0].set(ylabel="query position", xticks=range(0, 16, 5), yticks=range(0, 16, 5))
for axis in axes[1]:
    axis.set_xlabel("key position")
_ = figure.colorbar(image, ax=axes, label="square root of attention probability")

# %% [markdown]
# ## 4. When are heads redundant?
#
# Train a language model with 16 heads (2 layers of 8), then remove heads *after* training: each one
# alone, and one after the other from the least to the most important. This is the experiment of
# Michel et al. 2019 at our size.

# %%
code = data.Text().load(32)
config = ModelConfig(
    width=64, num_layers=2, heads=Standard(num_heads=8), ffn=FFN(width=256), max_len=32
)
settings = training.TrainConfig(
    steps=400, seeds=(0,), batch_size=16, length=32, log_every=50,
    optimizer=training.OptimizerConfig(learning_rate=7e-3),
    evaluation=training.EvaluationConfig(every=1000, windows=512),
)  # fmt: skip
run = training.fit_in_memory(config.build(), training.OBJECTIVES["causal_lm"], settings, code)

rows = code.heldout(256)["tokens"]
loss = interpret.token_loss(config, run.params(), rows[:, :-1], targets=rows[:, 1:])
gates = interpret.head_gates(config)
bits = lambda nats: np.asarray(nats) / np.log(2)
alone = bits(interpret.ablation_effects(loss, gates))  # [layers, heads]
order = interpret.ascending_order(alone)
curve = bits(interpret.pruning_curve(loss, gates, order))  # after removing 0, 1, ..., 16 heads
increase = curve - curve[0]
print("heads that cost less than 0.02 bits if removed alone:", (alone < 0.02).sum(), "of 16")
print("removed in order, before the loss grows by 0.1 bits:", (increase < 0.1).sum() - 1, "of 16")
print("all 16 removed: ", increase[-1].round(2), "bits")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
image = left.imshow(alone, cmap="Blues", vmin=0)
for (layer, head), value in np.ndenumerate(alone):
    colour = "white" if value > 0.6 * alone.max() else "black"
    left.text(head, layer, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=9)
left.set(xlabel="head", ylabel="layer", yticks=(0, 1), title="each head removed alone")
figure.colorbar(image, ax=left, label="bits per byte", shrink=0.6)
right.plot(range(17), increase, "o-")
right.set(xlabel="heads removed, least important first", ylabel="increase in bits per byte")
_ = right.set(title="heads removed one after the other", xticks=range(0, 17, 4))

# %% [markdown]
# In the saved run each of the eight heads of layer 1 can be removed at a cost of 0.01 bits or less.
# All eight together cost 0.09, less than the best head of layer 0 alone. The last heads are the
# expensive ones. Large models show the same:
#
# - Michel et al. (2019): of the 96 encoder heads of a translation model only 8 change the BLEU
#   score significantly when they are removed alone.
# - Voita et al. (2019): 38 of 48 encoder heads can be pruned for 0.15 BLEU, and the ones that stay
#   have clear roles.
#
# Heads become redundant when others do the same work (section 3), when their layer adds little, or
# when the task needs fewer of them than there are. That is a statement about *trained* models: it
# does not say that a model with fewer heads would train as well.
#
# ## What to remember
#
# - Equal start, equal forever: random initialisation is what allows heads to differ. Noise, dropout
#   of probabilities or other values are enough too.
# - Training does the rest: the divergence of attention grows from a small start.
# - Every head reads all of x. Width, what a head reads and number of parameters are three
#   different things; change one at a time.
# - Trained heads differ and still overlap: many can be removed afterwards.
#
# **Where people ask this:** [what makes differences in each head in the multiheaded
# attention?](https://datascience.stackexchange.com/q/109197), [what is different in each
# head?](https://ai.stackexchange.com/questions/25148/what-is-different-in-each-head-of-a-multi-head-attention-mechanism),
# [different subsets of the encoding, or different
# initialisation?](https://forums.fast.ai/t/some-vague-questions-about-transformers/91374). Papers:
# [Michel et al. 2019](https://arxiv.org/abs/1905.10650) and [Voita et al.
# 2019](https://arxiv.org/abs/1905.09418) (redundant heads), [Amsel et al.
# 2025](https://arxiv.org/abs/2407.16153) (exercise 2).
#
# ## Exercises
#
# 1. What is the smallest noise that still separates the heads within 800 steps? Try `noise=1e-4`
#    and `1e-6` with `train(2, 8, noise)`.
# 2. Find a task where **one full-width head beats many of small width** with as many parameters.
#    `data.Farthest(dimensions=8)` draws 8 points in 8 dimensions; for each, the model must return
#    the point farthest from it. Train one head of width 16 against 8 heads of width 2. The metric
#    is `"unexplained"`, in percent of the variance; minus the point itself leaves about 78 %.
#
# <details><summary>Solutions (click)</summary>
#
# ```python
# for noise in (1e-4, 1e-6):
#     run = train(2, 8, noise)
#     right = run.result.heldout["accuracy"]
#     distance = run.curve("weights/distance")[1][:, -1]
#     print(noise, "right:", right.round(0), "distance", distance.round(3))
#     assert (distance > 0).all()
# ```
#
# Neither is enough in 800 steps: from 1e-4 the distance has grown to 0.004 to 0.03, from 1e-6 it is
# still below 0.001, and the accuracy is that of one head. Each step multiplies the difference, so a
# smaller one needs more steps.
#
# ```python
# from attnlab.models import NoPositions, OutputHead
#
# far = data.Farthest(dimensions=8).load(8)
# sizes = dict(
#     kind="encoder", vocab_size=8, max_len=8, width=16, num_layers=1, ffn=FFN(width=0),
#     positions=NoPositions(), norm=Norm(kind="rms"),
#     output=OutputHead(kind="none", pooler="each", num_classes=8),
# )
# settings = training.TrainConfig(
#     steps=1500, batch_size=64, length=8, seeds=(0,), log_every=500,
#     optimizer=training.OptimizerConfig(name="adam", learning_rate=1e-2, weight_decay=0.0),
#     schedule=training.ScheduleConfig(warmup_steps=75),
#     evaluation=training.EvaluationConfig(every=10_000, windows=0),
# )
# left = {}
# for num_heads, head_dim in ((1, 16), (8, 2)):
#     config = ModelConfig(heads=Standard(num_heads=num_heads, head_dim=head_dim), **sizes)
#     run = training.fit_in_memory(config.build(), training.OBJECTIVES["regression"], settings, far)
#     left[num_heads] = run.result.heldout["unexplained"][0]
# print({f"{n} heads": f"{value:.1f} % unexplained" for n, value in left.items()})
# assert left[1] < left[8]
# ```
#
# The scores of a head of width 2 see the points through two dimensions; no sum over heads restores
# what is lost.
#
# </details>
