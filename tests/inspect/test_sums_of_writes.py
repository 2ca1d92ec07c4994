"""Who wrote the stream, the logits and the scores: sums that are exact, terms by hand in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep

from attnlab import LAYOUTS, ModelConfig
from attnlab.inspect import (
    decompose,
    final_norm,
    flatten,
    linear_at,
    logits_by_term,
    read_by,
    split_scores,
    stack_of,
    summed,
    watch,
)
from attnlab.inspect.writes import normalising

BASE = dict(vocab_size=11, max_len=8, width=12, num_layers=3, num_heads=3, ffn_width=10)
FAMILIES = {
    "gpt2": dict(kind="decoder", readout_bias=True, readout_scale=0.7),
    "bert": dict(
        kind="encoder", norm="post", embedding_norm=True, embedding_width=5, readout="own",
        token_types=2, ffn_skip=2.0, attention_gain=0.3,
    ),
    "t5": dict(
        kind="encoder_decoder", encoder_layers=2, encoder_plan="albert", norm_kind="rms",
        norm_bias=False, positions="relative", attention_biases="", ffn_bias=False,
        attention_scale=1.0, activation="gated_gelu", relative_buckets=8,
    ),
    "llama": dict(
        kind="decoder", norm_kind="rms", norm_bias=False, positions="rotary", readout="own",
        attention_biases="", ffn_bias=False, activation="gated_silu",
    ),
    "turned": dict(
        kind="decoder", norm="parallel", positions="rotary", window=2,
        rotary_scaling="linear:4",
    ),
}  # fmt: skip
SOURCE = jnp.asarray([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]])
TOKENS = jnp.asarray([[4, 1, 7, 2, 2, 0], [10, 3, 5, 6, 1, 8]])
REAL = jnp.asarray([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
POINTER = "attention=0,1,2 kv=0,1,@0 ffn=0,0,1"
EVERY = [(f, layout, plan) for f in FAMILIES for layout in LAYOUTS for plan in ("albert", "cla:2")]
EVERY += [
    (f, "standard", plan) for f in FAMILIES for plan in ("relaxed:2", "dictionary:2", POINTER)
]
FAMILIES["gemma"] = dict(
    kind="decoder", norm="sandwich", norm_kind="rms_plus_one", norm_bias=False, positions="rotary",
    qk_norm="rms_plus_one",
)  # fmt: skip
EVERY += [("gemma", "standard", "albert")]
KEPT = [
    ("bert", "latent", "cla:2"), ("t5", "two_stage", "albert"),
    ("llama", "standard", "relaxed:2"),
]  # fmt: skip


def texts_of(config):
    return (SOURCE, TOKENS) if config.kind == "encoder_decoder" else (TOKENS,)


def draw(config, seed=0):
    """Large random weights."""
    init = lambda key: config.build().init(key, *texts_of(config))["params"]
    shapes, rng = jax.eval_shape(init, jax.random.key(0)), np.random.default_rng(seed)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.5, a.dtype), shapes)


def of_a_call(config, params, f, **options):
    """(f(what was watched), what was shown, what the first layer read), as one program."""

    def run(params):
        seen = watch(config, params, TOKENS, **options)
        return f(seen), seen.outputs.shown, seen.outputs.first

    return jax.tree.map(np.asarray, jax.jit(run)(params))


def sum_of(split):
    total = jnp.sum(split.terms, axis=tuple(range(split.terms.ndim - 3)))
    return total if split.bias is None else total + split.bias


@pytest.mark.parametrize("case", deep(EVERY, *KEPT), ids="-".join)
def test_terms_are_the_logits_and_the_scores(case):
    family, layout, plan = case
    if plan.startswith("cla") and layout == "absorbed":
        pytest.skip("its inputs are its keys, which layers cannot share")
    turned = FAMILIES[family].get("positions") == "rotary"
    if turned and LAYOUTS[layout].turned is None:
        pytest.skip("its keys cannot be turned")
    config = ModelConfig(**BASE | FAMILIES[family] | {"layout": layout, "plan": plan})
    if turned and config.heads.turned % 2:
        pytest.skip("pairs are turned")
    names = {"scores": "query", "cross.scores": "key", "encoder.scores": "both"}
    names = names if family == "t5" else {"scores": "both"}
    names = {} if layout == "tensor" else names
    options = {"padding_mask": REAL} if family == "t5" else {}

    @jax.jit
    def run(params):
        seen = watch(config, params, *texts_of(config), **options)
        shown, one = seen.outputs.shown, logits_by_term(seen, TOKENS[:, ::-1])
        both = [
            (summed(logits_by_term(seen)), seen.outputs.logits),
            (
                summed(one, 2),
                jnp.take_along_axis(seen.outputs.logits, TOKENS[:, ::-1, None], 2)[..., 0],
            ),
            (summed(read_by(seen, 1, "ffn")), read_by_ffn(seen)),
        ]
        if family == "t5":
            both += [(summed(final_norm(seen, encoder=True)), seen.outputs.encoded)]
        for name, side in names.items():
            split = split_scores(seen, 1, 2, name=name, side=side)
            # Keys that nobody may see are zeros where attention runs.
            real = REAL[:, None] if name != "scores" else True
            both.append([jnp.where(real, a, 0) for a in (sum_of(split), shown[name][1, :, 2])])
        return both

    for got, expected in run(draw(config)):
        assert_close(got, expected)


def read_by_ffn(seen):
    """In layer 1, from what the model showed."""
    shown, c, stack = seen.outputs.shown, seen.config, stack_of(seen)
    normalise, w = normalising(stack.block), stack.weights(1)
    x, wrote = shown["residual"][0], c.attention_gain * shown["attention_out"][1]
    if c.norm == "sandwich":
        wrote = normalise(w["attention"]["norm_after"], wrote)
    if c.norm != "parallel":
        x = x + wrote
    if c.norm == "post":
        return normalise(w["attention"]["norm"], x)
    x = x + shown["cross.attention_out"][1] if "cross.attention_out" in shown else x
    return normalise(w["ffn"]["norm"], x)


def normed(w, x, at=None):
    """A layer norm without its bias, divided by the deviation of `at`."""
    at = x if at is None else at
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(at.var(-1, keepdims=True) + 1e-5) * w["scale"]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_each_term_by_hand(norm):
    """What head 2 of layer 0 and the bias of layer 1 say for every word; names do not move."""
    config = ModelConfig(
        **BASE | dict(num_layers=2, norm=norm, ffn_skip=2.0, attention_gain=0.5, plan="ffn_only")
    )
    params = draw(config)
    got, out, x = of_a_call(config, params, logits_by_term)
    w = jax.tree.map(np.asarray, params)
    head, bias = (
        0.5 * out["outputs"][0][:, 2],
        np.broadcast_to(0.5 * w["layers"]["attention"]["o_bias"][1], (2, 6, 12)),
    )
    if norm == "pre":
        x, last = out["residual"][1], w["final_norm"]
        head, bias = 4 * normed(last, head, x), 2 * normed(last, bias, x)
        added = np.broadcast_to(last["bias"], x.shape)
    else:
        attention, ffn = (w["layers"][p]["norm"] for p in ("attention", "ffn"))
        first = jax.tree.map(lambda a: a[0], ffn)
        for i in range(2):
            own = jax.tree.map(lambda a, i=i: a[i], attention)
            x = x + 0.5 * out["attention_out"][i]
            head = normed(own, head, x)
            bias = normed(own, bias, x) if i else bias
            x = normed(own, x) + own["bias"]
            before = x = 2 * x + out["ffn_out"][i]
            head = normed(first, 2 * head, x)
            bias = normed(first, 2 * bias, x) if i else bias
            x = normed(first, x) + first["bias"]
        added = normed(first, 2 * np.broadcast_to(own["bias"], x.shape), before) + first["bias"]
    table = w["embedding"].T
    assert_close(got["heads"][0, 2], head @ table)
    assert_close(got["attention_bias"][1], bias @ table)
    assert_close(got["final_norm"] if norm == "pre" else got["norm"][1], added @ table)
    assert ("norm" in got) == (norm == "post")


def test_a_split_by_hand():
    """Which pair of what was written made a score: the rows of Q and K that stand between them."""
    config = ModelConfig(**BASE | dict(norm="pre", ffn_width=0, num_layers=2))
    params = draw(config)
    names = []

    def f(seen):
        split, by_key = split_scores(seen, 1, 2), split_scores(seen, 1, 2, side="key")
        names[:] = split.queries, split.keys, by_key.queries
        return split.terms, by_key.terms

    (terms, by_key), out, word = of_a_call(config, params, f)
    queries, keys, whole = names
    w = jax.tree.map(np.asarray, params)
    own = jax.tree.map(lambda a: a[1], w["layers"]["attention"])
    x, head = out["residual"][0], out["outputs"][0][:, 1]
    q = normed(own["norm"], head, x) @ own["q"][:, 2]
    k = normed(own["norm"], word, x) @ own["k"][:, 2]
    place = queries.index(("heads", 0, 1)), keys.index(("embedding",))
    assert_close(terms[place], q @ k.swapaxes(1, 2) / 2)
    constant = queries.index(("norm_before",)), keys.index(("map",))
    one = (own["norm"]["bias"] @ own["q"][:, 2]) @ own["k_bias"][2] / 2
    assert_close(terms[constant], np.full((2, 6, 6), one))
    assert whole == []
    assert_close(by_key, terms.sum(0))


def test_heads_that_were_taken_away_write_nothing():
    config = ModelConfig(**BASE | dict(plan="albert"))
    gate = jnp.ones((3, 3)).at[1, 2].set(0)
    terms, shown, _ = of_a_call(config, draw(config), decompose, head_gate=gate)
    names, each = flatten(terms)
    assert ("embedding",) in names
    assert not np.any(each[names.index(("heads", 1, 2))])
    assert np.any(each[names.index(("heads", 0, 2))])
    assert_close(jnp.sum(each, axis=0), shown["residual"][-1])


REFUSED = {
    "a transform": (
        dict(readout_transform="gelu"),
        lambda s: logits_by_term(s),
        "final_norm gives",
    ),
    "no logits": (dict(readout="none"), lambda s: logits_by_term(s), "no logits"),
    "products": (dict(layout="tensor"), lambda s: split_scores(s, 0, 0), "'tensor' is not linear"),
    "mixed": (dict(talking_heads=True), lambda s: split_scores(s, 0, 0), "talking heads mix"),
    "no encoder": ({}, lambda s: decompose(s, encoder=True), "a decoder has one stack"),
    "no such layer": ({}, lambda s: decompose(s, layer=1), "must be one of 0 to 0"),
    "no such head": ({}, lambda s: split_scores(s, 0, 3), "1 layers of 3 heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_sum_is_refused(case):
    fields, f, message = REFUSED[case]
    config = ModelConfig(**BASE | dict(num_layers=1, ffn_width=0) | fields)
    init = lambda: watch(config, config.build().init(jax.random.key(0), TOKENS)["params"], TOKENS)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: f(init()))


def test_the_stream_may_not_be_edited():
    config = ModelConfig(**BASE)
    with pytest.raises(ValueError, match="no sum of what was written"):
        watch(config, None, TOKENS, edit={"residual": lambda x, layer: x})


def test_what_is_linear():
    x = jnp.arange(1.0, 4)
    root = lambda x: x / jnp.sqrt(jnp.sum(x * x)) * 2 + 1
    found = linear_at(root, x)
    np.testing.assert_allclose(found.linear(jnp.eye(3)[0]), [2 / 14**0.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found.constant, 1, rtol=1e-6)
    assert linear_at(lambda x: x @ jnp.ones((3, 2)), x).constant is None
    assert linear_at(lambda x: jnp.pad(x, 1), x).of(jnp.ones((4, 3))).shape == (4, 5)
    for f in (lambda x: x * x, lambda x: jnp.sqrt(x) + x**3, lambda x: 1 / x):
        with pytest.raises(ValueError, match="not linear"):
            linear_at(f, x)
    with pytest.raises(ValueError, match="rsqrt"):
        linear_at(lambda x: x * jax.lax.rsqrt(jnp.sum(x)), x, hold=False)
