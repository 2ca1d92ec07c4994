"""What a `HeadSpec` refuses, and what it says of its weights."""

import jax
import numpy as np
import pytest

from attnlab import LAYOUTS, HeadSpec, init_heads
from attnlab.heads.old.spec import weight_axes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(layout="wid"), "unknown layout 'wid': did you mean 'wide'"),
        (dict(num_heads=5), "width 12 is not divisible by 5 heads; set head_dim"),
        (dict(layout="narrow", num_heads=5, head_dim=4), "divisible by 5 heads; change one"),
        (dict(width=0), "width must be at least 1"),
        (dict(head_dim=-3), "head_dim must be at least 1"),
        (dict(num_kv_heads=3), "not divisible by num_kv_heads 3"),
        (dict(layout="narrow", num_kv_heads=2), "use layout 'standard'"),
        (dict(layout="narrow", key_width=6), "must equal width"),
        (dict(layout="bilinear", head_dim=6), "takes no head_dim"),
        (dict(layout="absorbed", value_dim=6), "takes no value_dim"),
        (dict(shared_dim=6), "only 'collaborative' has one"),
        (dict(layout="bilinear", biases="k"), "no map for bias 'k'; use letters of 'oqv'"),
        (dict(output=False, biases="o"), "without output has no map for bias 'o'"),
        (dict(output=False, out_width=5), "leave out_width out"),
        (dict(layout="absorbed", output=False), "output must be True"),
        (dict(qk_norm="rsm"), "did you mean 'rms'"),
        (dict(qk_norm="rms", qk_norm_bias=True), "set qk_norm='layer'"),
        (dict(qk_norm_bias=True), "set qk_norm='layer'"),
        (dict(layout="bilinear", qk_norm="rms"), "leave qk_norm out"),
        (dict(layout="latent", qk_norm="rms"), "no q and k to normalise"),
        (dict(layout="latent", num_kv_heads=2), "use layout 'standard'"),
        (dict(layout="latent", key_width=6), "must equal width"),
        (dict(layout="latent", biases="q"), "no map for bias 'q'; use letters of 'o'"),
        (dict(latent_dim=6), "only 'latent' and 'latent_absorbed' have one"),
        (dict(layout="collaborative", num_heads=5), "divisible by 5 heads; set value_dim"),
        (dict(biases="qq"), "letters of 'qkvoa'"),
        (dict(biases="x"), "letters of 'qkvoa'"),
        (dict(biases="a"), "no map for bias 'a'"),
        (dict(query_rank=2), "only 'tensor' has one"),
        (dict(latent_norm=False), "'standard' has no latent; leave latent_norm out"),
        (dict(layout="latent", extra_keys=2), "takes no extra_keys: only 'standard', 'wide', "),
        (dict(extra_keys=0), "extra_keys must be at least 1"),
        (dict(ties="vk"), "unknown ties 'vk': .*kv, qk, qkv"),
        (dict(ties="kv", value_dim=4), "value_dim 4 and head_dim 3 must be equal"),
        (dict(ties="qk", num_kv_heads=2), "num_heads 4 and num_kv_heads 2 must be equal"),
        (dict(ties="qk", biases="k"), "no map for bias 'k'; use letters of 'oqv'"),
        (dict(layout="low_rank_q", ties="qkv"), "no map of 'q' that could be that of k"),
        (dict(layout="latent", ties="kv"), "leave 'v' out of ties"),
        (dict(layout="grouped_tied", head_dim=4), "4 numbers of a value of 3 are the key"),
    ],
)
def test_impossible_specs_say_what_to_change(fields, message):
    with pytest.raises(ValueError, match=message):
        HeadSpec(**{"layout": "standard", "width": 12, "num_heads": 4} | fields)


def test_wide_needs_no_divisible_width():
    assert HeadSpec("wide", width=7, num_heads=3).shapes["q"] == (7, 3, 7)


def test_axes_name_every_weight():
    spec = HeadSpec("narrow", width=12, num_heads=3, biases="qkvo")
    assert dict(weight_axes(spec)) == {
        "q": "NCH", "q_bias": "NH", "k": "NCH", "k_bias": "NH",
        "v": "NCV", "v_bias": "NV", "o": "NVO", "o_bias": "O",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("query: -> N H", "is not of the form 'query: D -> N H'"),
        ("ask: D -> N H", "is not of the form"),
        ("query: N R", "sums over nothing, so it has no fan: say where it starts"),
        ("query: N R if qk_norm", "sums over nothing"),
    ],
)
def test_a_map_that_says_nothing_of_its_start_is_refused(text, message, monkeypatch):
    """1/sqrt(fan) of no fan would be 1 in silence."""
    row = LAYOUTS["standard"]
    monkeypatch.setitem(LAYOUTS, "odd", row._replace(maps=row.maps | {"m": text}))
    with pytest.raises(ValueError, match=message):
        HeadSpec("odd", width=12, num_heads=4)


def test_a_map_named_as_a_part_of_the_layer_is_refused(monkeypatch):
    row = LAYOUTS["standard"]
    monkeypatch.setitem(LAYOUTS, "odd", row._replace(maps=row.maps | {"norm": "query: H = 1"}))
    with pytest.raises(ValueError, match="'norm' of its own"):
        HeadSpec("odd", width=12, num_heads=4)


def test_a_start_that_is_told_is_taken(monkeypatch):
    row, own = LAYOUTS["standard"], {"a": "query: N R ~ 0.5", "b": "query: R = 3"}
    monkeypatch.setitem(LAYOUTS, "odd", row._replace(maps=row.maps | own))
    w = init_heads(jax.random.key(0), HeadSpec("odd", 512, 8), std=0.02)
    np.testing.assert_allclose(np.std(w["a"]), 0.5, rtol=0.05)
    assert (w["b"] == 3).all()
    np.testing.assert_allclose(np.std(w["q"]), 0.02, rtol=0.05)
