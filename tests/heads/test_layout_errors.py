"""Mistakes: each is one clear TypeError or ValueError that says what is allowed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layout_cases import CASES, make

from attnlab import ALiBi, heads
from attnlab.heads import Absorbed, ExtraKeys, Sink, Standard, TalkingHeads, multi_head_attention
from attnlab.tap import Tap, capture

small = functools.partial(Standard, width=8, num_heads=2)


class SecondSink(Sink):
    pass


CONSTRUCTION = [
    (lambda: small(scale="0.3"), "scale must be a finite number.* '0.3'"),
    (lambda: Absorbed(width=8, num_heads=2, biases=("k",)), "no bias 'k'; use some of 'q'"),
    (lambda: small(extras=(Sink(), Sink())), "'sink' is given twice"),
    (lambda: small(extras=(Sink(), SecondSink())), "second weight 'sink'"),
    (lambda: small(extras=(TalkingHeads(), ExtraKeys())), "does not combine with 'extra_keys'"),
    (lambda: small(extras=(heads.MixtureOfHeads(top=2),)), "top 2 must be from 1 to"),
    (lambda: heads.Differential(width=8, num_heads=2, tie="kv"), "must be one of '', not"),
    (lambda: small(tie="kv", value_dim=3), "v and k one projection, but they differ"),
    (lambda: heads.Narrow(width=8, num_heads=2, output_projection=False, out_width=8),
     "out_width 8 cannot be set"),
    (lambda: Absorbed(width=8, num_heads=2, output_projection=False), "needs output_projection"),
    (lambda: heads.make_layout("wyde"), "unknown layout 'wyde': did you mean 'wide'"),
    (lambda: heads.register_layout("wide")(SecondSink), "'wide' is .*Wide; choose another name"),
]  # fmt: skip


LAYOUT, ONE_KEY = small(), small(num_kv_heads=1)
PARAMS, X, *_ = make(LAYOUT)
REAL = np.ones((2, 7), bool)


def call(layout=LAYOUT, **changes):
    return multi_head_attention(**{"params": make(layout)[0], "x": X, "layout": layout} | changes)


def step(layout=LAYOUT, batch=2, size=9, order="factored", **keywords):
    cache = heads.init_cache(layout, batch, size, order=order)
    return heads.decode(PARAMS, X, layout, cache, **keywords)


def patched(names=(), order=None, **patch):
    run = functools.partial(multi_head_attention, order=order)
    return capture(run, PARAMS, X, LAYOUT, names=names, patch=patch)


CALLS = [
    (lambda: heads.init(LAYOUT, jax.random.key(0)), "layout must be a Layout"),
    (lambda: multi_head_attention(X, PARAMS, LAYOUT), r"\(params, x, layout\)"),
    (lambda: call(x=jnp.ones((2, 7, 8), int)), "x must be a float array .*int32"),
    (lambda: call(scale=0.5), r"scale is a field of the layout.*scale=0.5\)"),
    (lambda: call(params=PARAMS | {"q": PARAMS["q"][:, :1]}),
     r"'q' has shape \(8, 1, 4\), .* \(8, 2, 4\)"),
    (lambda: call(params=PARAMS | {"o_bias": X[0, 0]}), "'o_bias' has shape .* no such weight"),
    (lambda: call(params={"q": PARAMS["q"]}), "'k' is missing"),
    (lambda: call(order="bilinaer"), "unknown order .*did you mean 'bilinear'"),
    (lambda: call(Absorbed(width=8, num_heads=2), rotary=jnp.zeros((7, 4))),
     "cannot be applied to the keys of layout 'absorbed'.*use layout 'bilinear'"),
    (lambda: call(small(extras=(Sink(),)), sink=1.0), "sink is set twice"),
    (lambda: call(small(extras=(ExtraKeys(),)), talking_heads=(None, None)),
     "extra_keys .*do not combine with talking_heads"),
    (lambda: call(head_mask=jnp.ones(7)),
     r"head_mask \(7,\) must be \[heads\] = \(2,\) or \[batch, heads\] = \(2, 2\)"),
    (lambda: call(context=X, cache={"length": 0}), "leave context out"),
    (lambda: step(mask=np.ones((7, 7), bool)), r"masks \(7, 7\) and \(7, 9\) do not fit"),
    (lambda: step(is_causal="no"), "is_causal must be True or False"),
    (lambda: call(mask=np.ones((7, 5), bool), padding_mask=REAL), r"7, 5\) and .* do not fit"),
    (lambda: step(padding_mask=np.full((2, 7), 2)), "padding_mask must be a boolean array"),
    (lambda: step(padding_mask=np.ones((2, 6), bool)),
     r"padding_mask \(2, 6\) must be .* \(2, 7\)"),
    (lambda: step(local_window_size="2"), r"local_window_size must be an int or \(left, right\)"),
    (lambda: step(size=4), "7 tokens do not fit a cache of size 4"),
    (lambda: step(batch=3), "batch=2"),
    (lambda: step(order="absorbed", rotary=jnp.zeros((7, 2))), "the cache holds x"),
    (lambda: step(order="absorbed", tap=Tap(("scores",))), "holds x; .* needs k, v; .*'factored'"),
    (lambda: step(order="absorbed", tap=Tap(patch={"v": lambda a, layer: a})),
     "holds x; .* needs k, v; .*orders that can: absorbed"),
    (lambda: call(rotary=jnp.zeros((3, 7, 2))), r"rotary \(3, 7, 2\) must be angles .*\[batch, "),
    (lambda: call(rotary=jnp.zeros((2, 1, 7, 2))), r"rotary \(2, 1, 7, 2\) must be angles"),
    (lambda: step(score_mods=ALiBi(jnp.ones(2))), "a sequence of ScoreMod, not ALiBi"),
    (lambda: call(small(extras=(heads.LearntSoftCap(),)), score_mods=ALiBi(jnp.ones(2))),
     "a sequence of ScoreMod, not ALiBi"),
    (lambda: step(score_mods=[ALiBi(jnp.ones(2))]), "ALiBi of score_mods .* pass bias"),
    (lambda: call(kv=heads.project_kv(PARAMS, jnp.ones((2, 5, 8)), LAYOUT), padding_mask=REAL),
     r"padding_mask \(2, 7\) .* kv is of other tokens: hide those by mask"),
    (lambda: call(kv={}), "this form needs k, v"),
    (lambda: call(kv=heads.project_kv(make(ONE_KEY)[0], X, ONE_KEY)),
     r"k \(2, 7, 1, 4\) .*num_key_heads is 2, .*kv is of another layout"),
    (lambda: heads.project_kv(PARAMS, LAYOUT, X), r"\(params, x, layout\)"),
    (lambda: heads.project_kv(PARAMS, X[..., :7], LAYOUT), r"context \(2, 7, 7\) must be .* 8\]"),
    (lambda: heads.project_kv(PARAMS, jnp.ones((2, 7, 8), int), LAYOUT), "context must be a float"),
    (lambda: heads.project_kv(PARAMS, X, LAYOUT, jnp.zeros((3, 2))), r"rotary \(3, 2\) must be"),
    (lambda: call(cache={"k": X, "v": X}), r"must be that of init_cache\(layout, batch, size\)"),
    (lambda: call(cache={"k": X, "length": jnp.array(0)}),
     "the cache holds k; this form needs k, v"),
    (lambda: heads.identical_heads(PARAMS, LAYOUT, ("math:pi",)), "unknown value .*'math:pi'"),
    (lambda: heads.identical_heads(PARAMS | {"q": 1.0}, LAYOUT), r"'q' has shape \(\)"),
    (lambda: heads.identical_heads(PARAMS | {"q": [1.0]}, LAYOUT), "'q' must be an array, not a l"),
    (lambda: call(order="math:pi"), "unknown order .*'math:pi'"),
    (lambda: step(CASES["cross"]), "must be equal for a cache"),
    (lambda: patched(("lambda",)), "no value 'lambda'"),
    (lambda: patched(nope=jnp.add), "no value 'nope'"),
    (lambda: patched("probs"), r"a tuple of names such as \('probs',\), not 'probs'"),
    (lambda: patched(q=lambda a, layer: a[0]), "'q' returned shape"),
    (lambda: patched(order="bilinear", q=lambda a, layer: a), "a patch of 'q' means"),
]  # fmt: skip


@pytest.mark.unchecked
@pytest.mark.parametrize(("run", "message"), CONSTRUCTION + CALLS)
def test_mistakes(run, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        run()
    assert len(str(error.value)) < 600


def test_weights_that_are_not_of_heads_may_stand_beside_theirs():
    assert call(params=PARAMS | {"norm": {"scale": 1}}).shape == (2, 7, 8)


def test_sizes_that_a_layout_does_not_state_are_refused():
    """Its scale and its FLOPs would be wrong."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Twice(Standard):
        def project_q(self, params, x, rotate):
            return jnp.repeat(super().project_q(params, x, rotate), 2, axis=2)

    with pytest.raises(ValueError, match="head_width is 4: define them"):
        call(Twice(width=8, num_heads=2))
