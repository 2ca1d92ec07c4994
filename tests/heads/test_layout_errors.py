"""Mistakes: each is one clear TypeError or ValueError that says what is allowed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layout_cases import CASES, make

from attnlab import heads
from attnlab.heads import (
    Absorbed,
    Differential,
    ExtraKeys,
    MixtureOfHeads,
    Narrow,
    Sink,
    Standard,
    TalkingHeads,
    Weight,
    Wide,
    init,
    make_layout,
    multi_head_attention,
)

SIZES = {"width": 8, "num_heads": 2}


class Misspelt(Standard):
    def weights(self):
        return {**super().weights(), "q": Weight("project_q", ("width",), ("num_head", "head_dim"))}


class SecondSink(Sink):
    pass


CONSTRUCTION = {
    "size as text": (lambda: Wide(width=8, num_heads="4"), "num_heads must be .* not '4'"),
    "not divisible": (lambda: Standard(width=9, num_heads=2), "width 9 is not divisible by"),
    "key heads": (lambda: Standard(**SIZES, num_kv_heads=3), "not divisible by num_kv_heads 3"),
    "scale": (lambda: Standard(**SIZES, scale="0.3"), "scale must be a finite number.* '0.3'"),
    "unknown bias": (lambda: Absorbed(**SIZES, biases=("k",)), "has no bias 'k'; use some of 'q'"),
    "biases as text": (lambda: Standard(**SIZES, biases="qk"), "biases must be a tuple, not 'qk'"),
    "extra twice": (lambda: Standard(**SIZES, extras=(Sink(), Sink())), "'sink' is given twice"),
    "weight twice": (
        lambda: Standard(**SIZES, extras=(Sink(), SecondSink())), "second weight 'sink'",
    ),
    "extras that exclude each other": (
        lambda: Standard(**SIZES, extras=(TalkingHeads(), ExtraKeys())),
        "'talking_heads' does not combine with 'extra_keys'; leave one out",
    ),
    "an extra's own check": (
        lambda: Standard(**SIZES, extras=(MixtureOfHeads(top=2),)), "top 2 must be from 1 to",
    ),
    "tie of a layout without": (lambda: Differential(**SIZES, tie="kv"), "must be one of '', not"),
    "tied sizes": (lambda: Standard(**SIZES, tie="kv", value_dim=3), "k and v.*|v and k.*"),
    "width without output": (
        lambda: Narrow(**SIZES, output_projection=False, out_width=8), "out_width 8 cannot be set",
    ),
    "no output projection": (lambda: Absorbed(**SIZES, output_projection=False), "needs output_pr"),
    "misspelt axis": (lambda: Misspelt(**SIZES), "weight 'q' has the axis 'num_head', which must"),
    "unknown layout": (lambda: make_layout("wyde"), "unknown layout 'wyde': did you mean 'wide'"),
    "a name that is used": (
        lambda: heads.register_layout("wide")(Misspelt), "'wide' is .*Wide; choose another name",
    ),
}  # fmt: skip


@pytest.mark.unchecked
@pytest.mark.parametrize("name", CONSTRUCTION)
def test_mistakes_in_a_layout(name):
    build, message = CONSTRUCTION[name]
    with pytest.raises((TypeError, ValueError), match=message):
        build()


LAYOUT = Standard(**SIZES)
PARAMS, X, *_ = make(LAYOUT)
ROTARY = jnp.zeros((7, 4))


def call(**changes):
    given = {"params": PARAMS, "x": X, "layout": LAYOUT} | changes
    return multi_head_attention(**given)


CALLS = {
    "layout for params": (lambda: init(0, LAYOUT), "key must be a random key"),
    "key and layout swapped": (lambda: init(LAYOUT, jax.random.key(0)), "layout must be a Layout"),
    "params and x swapped": (lambda: multi_head_attention(X, PARAMS, LAYOUT), r"\(params, x, lay"),
    "integers": (lambda: call(x=jnp.ones((2, 7, 8), int)), "x must be a float array .*int32"),
    "width of x": (lambda: call(x=jnp.ones((2, 7, 6))), r"x \(2, 7, 6\) must be \[batch, "),
    "batch of context": (lambda: call(context=jnp.ones((3, 7, 8))), "the batch size of x"),
    "scale": (lambda: call(scale=0.5), r"scale is a field of the layout.*scale=0.5\)"),
    "weights of another size": (
        lambda: call(params=init(jax.random.key(0), Standard(width=8, num_heads=4))),
        r"weight 'q' has shape \(8, 4, 2\); Standard\(width=8, num_heads=2\) needs \(8, 2, 4\)",
    ),
    "unknown order": (lambda: call(order="bilinaer"), "unknown order .*did you mean 'bilinear'"),
    "rotary for inputs": (
        lambda: multi_head_attention(
            *make(Absorbed(**SIZES))[:2], Absorbed(**SIZES), rotary=ROTARY
        ),
        "cannot be applied to the keys of layout 'absorbed'.*use layout 'bilinear'",
    ),
    "sink twice": (
        lambda: multi_head_attention(
            *make(dataclasses.replace(LAYOUT, extras=(Sink(),)))[:2],
            dataclasses.replace(LAYOUT, extras=(Sink(),)), sink=1.0,
        ),
        "sink is set twice",
    ),
    "score_mods and extra keys": (
        lambda: multi_head_attention(
            *make(CASES["extra keys"])[:2], CASES["extra keys"], talking_heads=(None, None)
        ),
        "extra_keys .*do not combine with talking_heads",
    ),
    "a head mask of tokens": (
        lambda: call(head_mask=jnp.ones(7)),
        r"head_mask \(7,\) must be \[heads\] = \(2,\) or \[batch, heads\] = \(2, 2\)",
    ),
    "a padding mask of numbers": (
        lambda: heads.decode(
            PARAMS, X, LAYOUT, heads.init_cache(LAYOUT, 2, 9), padding_mask=np.full((2, 7), 2)
        ),
        "padding_mask must be a boolean array",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_mistakes_in_a_call(name):
    run, message = CALLS[name]
    with pytest.raises((TypeError, ValueError), match=message) as error:
        run()
    assert len(str(error.value)) < 600
