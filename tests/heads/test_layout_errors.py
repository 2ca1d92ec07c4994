"""Mistakes: each is one clear TypeError or ValueError that says what is allowed."""

import dataclasses
from typing import Literal

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
    Gate,
    GroupedTied,
    HeadNorm,
    LatentAbsorbed,
    LearntSoftCap,
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


class NoDefault(Standard):
    def weights(self):
        return {**super().weights(), "more": Weight("project_q", ("scale",), ("num_heads",))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(Standard):
    temperature: float = 1.0
    mode: Literal["a", "b"] | None = None


class SecondSink(Sink):
    pass


CONSTRUCTION = {
    "size as text": (lambda: Wide(width=8, num_heads="4"), "num_heads must be .* not '4'"),
    "negative size": (lambda: Wide(width=-64, num_heads=4), "width must be .* not -64"),
    "zero": (lambda: Wide(width=8, num_heads=0), "num_heads must be .* not 0"),
    "bool": (lambda: Wide(width=True, num_heads=1), "width must be .* not True"),
    "an option": (
        lambda: Standard(**SIZES, output_projection="no"), "output_projection must be True or",
    ),
    "optional size": (lambda: Wide(**SIZES, head_dim=2.0), "head_dim must be .* not 2.0"),
    "not divisible": (lambda: Standard(width=9, num_heads=2), "width 9 is not divisible by"),
    "key heads": (lambda: Standard(**SIZES, num_kv_heads=3), "not divisible by num_kv_heads 3"),
    "scale": (lambda: Standard(**SIZES, scale="0.3"), "scale must be a finite number.* '0.3'"),
    "epsilon": (lambda: Standard(**SIZES, norm_eps=-1.0), "norm_eps must be .* at least 0"),
    "unknown bias": (lambda: Absorbed(**SIZES, biases=("k",)), "has no bias 'k'; use some of 'q'"),
    "biases as text": (lambda: Standard(**SIZES, biases="qk"), r"such as \('q', .*, not 'qk'"),
    "biases as a bool": (lambda: Standard(**SIZES, biases=True), r"such as \('q', 'k', 'v', 'o'\)"),
    "one extra": (lambda: Standard(**SIZES, extras=Gate()), r"such as \(Gate\(\),\), not Gate"),
    "extra by name": (lambda: Standard(**SIZES, extras=("gate",)), "Extra instances .* not 'gate'"),
    "extra twice": (lambda: Standard(**SIZES, extras=(Sink(), Sink())), "'sink' is given twice"),
    "weight twice": (
        lambda: Standard(**SIZES, extras=(Sink(), SecondSink())), "second weight 'sink'",
    ),
    "extras that exclude each other": (
        lambda: Standard(**SIZES, extras=(TalkingHeads(), ExtraKeys())),
        "'talking_heads' does not combine with 'extra_keys'; leave one out",
    ),
    "learnt cap and extra keys": (
        lambda: Standard(**SIZES, extras=(LearntSoftCap(), ExtraKeys())),
        "'extra_keys' does not combine with 'learnt_soft_cap'",
    ),
    "extra that the layout cannot have": (
        lambda: Absorbed(**SIZES, extras=(Gate("element"),)), "use Gate\\(by='head'\\)",
    ),
    "and another": (
        lambda: LatentAbsorbed(**SIZES, extras=(Gate("element"),)), "use Gate\\(by='head'\\)",
    ),
    "an extra's own check": (
        lambda: Standard(**SIZES, extras=(MixtureOfHeads(top=2),)), "top 2 must be from 1 to",
    ),
    "qk_norm as text": (lambda: Standard(**SIZES, qk_norm="rms"), r"'rms'; write HeadNorm\("),
    "number of a layout's own": (
        lambda: Scaled(**SIZES, temperature="hot"), "temperature must be a finite number",
    ),
    "choice of a layout's own": (
        lambda: Scaled(**SIZES, mode="c"), "unknown mode 'c': known: a, b; None is allowed",
    ),
    "norm without bias": (lambda: HeadNorm("rms", bias=True), "'rms' has no bias"),
    "tie of a layout without": (lambda: Differential(**SIZES, tie="kv"), "must be one of '', not"),
    "tied sizes": (lambda: Standard(**SIZES, tie="kv", value_dim=3), "k and v.*|v and k.*"),
    "tied bias": (lambda: Standard(**SIZES, tie="kv", biases=("v",)), "leave 'v' out of biases"),
    "width without output": (
        lambda: Narrow(**SIZES, output_projection=False, out_width=8), "out_width 8 cannot be set",
    ),
    "no output projection": (lambda: Absorbed(**SIZES, output_projection=False), "needs output_pr"),
    "key wider than value": (lambda: GroupedTied(**SIZES, head_dim=5), "head_dim 5 must be at"),
    "misspelt axis": (lambda: Misspelt(**SIZES), "weight 'q' has the axis 'num_head', which must"),
    "axis without a default": (lambda: NoDefault(**SIZES), "weight 'more' has the axis 'scale'"),
    "unknown layout": (lambda: make_layout("wyde"), "unknown layout 'wyde': did you mean 'wide'"),
    "field of no layout": (
        lambda: Standard(**SIZES, num_head=4), "'num_head': did you mean 'num_heads'.* head_dim",
    ),
    "heads for num_heads": (
        lambda: Standard(width=8, heads=4), "'heads'.* width, num_heads",
    ),
    "no names": (lambda: Standard(8, 2), r"as in Standard\(width=\.\.\.\), not 8; known: width, n"),
    "keyword of Keras": (lambda: Standard(**SIZES, key_dim=3), "'key_dim'.* head_dim"),
    "unknown field": (
        lambda: make_layout("wide", **SIZES, latent_dim=3),
        "no field 'latent_dim': its fields are width, .*; latent_dim is a field of latent, latent_",
    ),
    "a field of none": (lambda: make_layout("wide", **SIZES, heads=3), "no field 'heads': .*width"),
    "a name that is used": (
        lambda: heads.register_layout("wide")(Misspelt), "'wide' is .*Wide; choose another name",
    ),
    "an extra's name that is used": (
        lambda: heads.register_extra("gate")(SecondSink), "'gate' is .*Gate; choose another name",
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
    "x and layout swapped": (lambda: multi_head_attention(PARAMS, LAYOUT, X), "layout is of type "),
    "a class for a layout": (lambda: call(layout=Standard), "layout is of type "),
    "integers": (lambda: call(x=jnp.ones((2, 7, 8), int)), "x must be a float array .*int32"),
    "a list": (lambda: call(x=[[1.0]]), "x must be a float array .* not list"),
    "rank of x": (lambda: call(x=jnp.ones((7, 8))), r"x \(7, 8\) must be \[batch, length, 8\]"),
    "width of x": (lambda: call(x=jnp.ones((2, 7, 6))), r"x \(2, 7, 6\) must be \[batch, "),
    "batch of context": (lambda: call(context=jnp.ones((3, 7, 8))), "the batch size of x"),
    "length of values": (
        lambda: call(context=(jnp.ones((2, 7, 8)), jnp.ones((2, 6, 8)))), "must be as long as",
    ),
    "heads=4": (
        lambda: call(heads=4), "multi_head_attention.* unknown keyword 'heads'.* known:",
    ),
    "causal=True": (lambda: call(causal=True), "'causal'.* is_causal"),
    "scale": (lambda: call(scale=0.5), r"scale is a field of the layout.*scale=0.5\)"),
    "weights of another layout": (
        lambda: call(params=init(jax.random.key(0), heads.Bilinear(**SIZES))),
        "have no 'q'.*attnlab.convert",
    ),
    "weights of another size": (
        lambda: call(params=init(jax.random.key(0), Standard(width=8, num_heads=4))),
        r"weight 'q' has shape \(8, 4, 2\); Standard\(width=8, num_heads=2\) needs \(8, 2, 4\)",
    ),
    "superfluous bias": (lambda: call(params={**PARAMS, "q_bias": X}), "also have 'q_bias'"),
    "unknown order": (lambda: call(order="bilinaer"), "unknown order .*did you mean 'bilinear'"),
    "order that cannot run": (lambda: call(order="bilinear", rotary=ROTARY[:, :2]), "cannot run"),
    "too many angles": (lambda: call(rotary=ROTARY), r"at most 4, head_dim"),
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
    "a head mask that would be one for all": (
        lambda: call(head_mask=jnp.ones(1)),
        r"head_mask \(1,\) must be",
    ),
    "a padding mask of numbers": (
        lambda: heads.decode(
            PARAMS, X, LAYOUT, heads.init_cache(LAYOUT, 2, 9), padding_mask=np.full((2, 7), 2)
        ),
        "padding_mask must be a boolean array",
    ),
    "a padding mask as a list": (
        lambda: heads.decode(
            PARAMS, X, LAYOUT, heads.init_cache(LAYOUT, 2, 9), padding_mask=[[True] * 7] * 2
        ),
        "padding_mask must be a boolean array",
    ),
    "NumPy integers": (lambda: call(x=np.ones((2, 7, 8), np.int8)), "x must be a float array"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_mistakes_in_a_call(name):
    run, message = CALLS[name]
    with pytest.raises((TypeError, ValueError), match=message) as error:
        run()
    assert len(str(error.value)) < 600
