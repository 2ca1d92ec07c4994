"""Bad input, refusals of backends, what `explain` says, and any call: right or refused by name."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import (
    CALLS,
    RUNNABLE,
    allowed_of,
    by_hand,
    make,
    small_blocks,  # noqa: F401 (autouse: blocks of 2 queries and 3 keys here too)
)

from attnlab import BACKENDS, dot_product_attention, explain, masks
from attnlab.attention import core, fused
from attnlab.attention.call import checked
from attnlab.attention.visible import Visible

BAD = {
    "query of integers": (
        {"query": np.ones((2, 5, 6, 4), int)},
        TypeError,
        "query must be a float",
    ),
    "no array": ({"key": "key"}, TypeError, "key must be a float array, not str"),
    "one axis": ({"value": np.ones(3)}, ValueError, r"value \(3,\) must be \[B, T, N, H\]"),
    "batch of some": ({"query": np.ones((5, 6, 4))}, ValueError, "or all without B"),
    "other S": ({"key": np.ones((2, 3, 3, 4))}, ValueError, "do not fit together"),
    "other H": ({"query": np.ones((2, 5, 6, 3))}, ValueError, r"query \(2, 5, 6, 3\).* do not fit"),
    "heads": (
        {"key": np.ones((2, 7, 4, 4)), "value": np.ones((2, 7, 4, 8))},
        ValueError,
        "4 key heads and 4 value heads must divide 6 query heads",
    ),
    "empty axis": ({"query": np.ones((2, 0, 6, 4))}, ValueError, "no axis may have size 0"),
    "float mask": ({"mask": jnp.zeros((5, 7))}, TypeError, "added to the scores as bias"),
    "int mask": ({"mask": jnp.zeros((5, 7), int)}, TypeError, "mask must be boolean"),
    "mask shape": (
        {"mask": jnp.ones((2, 5, 7), bool)},
        ValueError,
        r"mask \(2, 5, 7\) must broadcast to the scores \[B, N, T, S\] = \(2, 6, 5, 7\)",
    ),
    "padding mask": (
        {"mask": jnp.ones((2, 7), bool)},
        ValueError,
        r"which keys are no filling is mask\[:, None, None\], or masks.padding",
    ),
    "bias shape": ({"bias": jnp.ones((5, 1, 6, 5, 7))}, ValueError, "bias .* must broadcast"),
    "bias of integers": ({"bias": jnp.ones((5, 7), int)}, TypeError, "bias must be a float array"),
    "lengths shape": (
        {"query_seq_lengths": jnp.array([3])},
        ValueError,
        r"query_seq_lengths \(1,\) must be one length per batch row, \[B\] = \(2,\)",
    ),
    "float lengths": (
        {"key_value_seq_lengths": jnp.array([3.0, 2.0])},
        TypeError,
        "key_value_seq_lengths must be an integer array",
    ),
    "window below 0": ({"local_window_size": (1, -1)}, ValueError, "local_window_size must be at"),
    "three windows": ({"local_window_size": (1, 2, 3)}, TypeError, "must be an int or"),
    "window of floats": ({"local_window_size": 1.5}, TypeError, "local_window_size must be an int"),
    "scale": ({"scale": np.ones(2)}, TypeError, "scale must be one real number"),
    "soft cap": ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap must be above 0"),
    "rate": ({"dropout_rate": 1.0}, ValueError, "dropout_rate must be at least 0 and below 1"),
    "no key": ({"dropout_rate": 0.1}, ValueError, "needs a dropout_key"),
    "seed": ({"dropout_rate": 0.1, "dropout_key": 3}, TypeError, "as of jax.random.key"),
    "mix": ({"mix": np.ones((6, 6))}, TypeError, "mix must be two matrices"),
    "mix shape": ({"mix": (np.ones((6, 4)), None)}, ValueError, r"mix \(\(6, 4\), None\) must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_say_what_to_do(case):
    """Asked of the check itself: in the tests jaxtyping refuses some calls even earlier."""
    changes, error, message = BAD[case]
    good = dict(zip(("query", "key", "value"), make(), strict=True))
    with pytest.raises(error, match=message):
        checked(**(good | changes))


def test_the_check_is_asked_before_anything_runs():
    with pytest.raises(ValueError, match="do not fit together"):
        dot_product_attention(*make()[:2], make(s=3)[2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": "flash"}, "known: dense, blockwise, xla, cudnn"),
        ({"implementation": "xla", "logits_soft_cap": 1.0}, "jax.nn has no logits_soft"),
        ({"implementation": "xla", "return_residual": True}, "jax.nn has no return_residual"),
        ({"implementation": "xla", "float16": True}, "jax.nn has no float16 on a CPU"),
        ({"implementation": "cudnn"}, r"query \(2, 5, 6, 4\).*needs an NVIDIA GPU, this is a cpu"),
        ({"implementation": "blockwise", "mix": (jnp.eye(6), None)}, "mix needs the scores of all"),
    ],
)
def test_a_backend_that_cannot_says_why(changes, message):
    arrays = make(jnp.float16 if "float16" in changes else jnp.float32)
    changes = {n: a for n, a in changes.items() if n != "float16"}
    with pytest.raises(ValueError, match=message) as error:
        dot_product_attention(*arrays, **changes)
    assert changes["implementation"] == "flash" or "use implementation='dense'" in str(error.value)


def test_explain_names_the_choice_and_the_reasons(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    q, k, v = make()
    expected = {
        "dense": "chosen: measured on 2 CPU cores with 1 MiB of L2 each",
        "blockwise": "could run",
        "xla": "could run",
        "cudnn": "cuDNN needs an NVIDIA GPU, this is a cpu",
        "edges": "it needs a mask that is masks.Edges, and nothing else that hides",
        "tokamax": 'tokamax is missing: pip install "attnlab[tokamax]"',
        "splash": "could run",
        "wide": "it is for heads 64 to 1024 wide, not 8",
    }
    assert explain(q, k, v) == expected
    assert explain(q, k, v, return_probs=True) == expected  # looking never changes the choice
    mixed = explain(
        q, k, v, mix=(jnp.eye(6), None), dropout_rate=0.1, dropout_key=jax.random.key(0)
    )
    assert mixed["blockwise"] == "mix needs the scores of all heads at once"
    assert mixed["xla"] == "jax.nn has no dropout_rate"
    assert explain(q, k, v, implementation="xla")["xla"] == "chosen: asked for"
    with pytest.raises(TypeError, match=r"unknown keywords \['causal'\]; known: .*is_causal"):
        explain(q, k, v, causal=True)
    with pytest.raises(TypeError, match="mask must be boolean"):
        explain(q, k, v, mask=jnp.ones((5, 7)))


def test_explain_says_where_the_choice_was_measured(monkeypatch):
    """All of them in one table; on a device that is not in it, as on a TPU."""
    shape = jax.ShapeDtypeStruct((1, 1024, 4, 8), jnp.float32)  # 16 MiB of scores
    for device, words in {"cpu": "measured on 2", "gpu": "not measured", "x": "not mea"}.items():
        monkeypatch.setattr(jax, "default_backend", lambda device=device: device)
        assert explain(shape, shape, shape)["dense"].startswith(f"chosen: {words}")
    for rows in core.CHOICES.values():
        assert {row.backend for row in rows} <= set(BACKENDS)
        assert rows[-1][0] == "dense"  # which refuses nothing


def test_explain_needs_shapes_alone():
    """Scores beyond the cache go to `blockwise`, and those that it refuses to `dense`."""
    shape = jax.ShapeDtypeStruct((2, 16384, 8, 64), jnp.float32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    call = {"is_causal": True, "query_seq_lengths": lengths}
    assert explain(shape, shape, shape, **call)["blockwise"].startswith("chosen: measured on")
    mix = (jax.ShapeDtypeStruct((8, 8), jnp.float32), None)
    assert explain(shape, shape, shape, mix=mix)["dense"].startswith("chosen")


CUDNN = [
    ({}, None),
    ({"is_causal": True, "local_window_size": (2, 0)}, None),
    ({"key_value_seq_lengths": jnp.array([3, 0])}, None),
    ({"query": jnp.float32}, "cuDNN needs float16 or bfloat16, not float32"),
    ({"mask": jnp.ones((1, 8), bool)}, None),
    ({"local_window_size": (2, 1)}, None),
    ({"lengths": (5, 8)}, "the gradient of cuDNN needs even lengths, not T=5 and S=8"),
    ({"lengths": (6, 7), "is_causal": True}, "even lengths, not T=6 and S=7"),
    ({"bias": jnp.ones((6, 6, 8))}, r"bias has shape \(1, 6, 6, 8\)"),
    ({"wide": 129}, "head widths of at most 128, not 129"),
    ({"return_residual": True}, "jax.nn has no return_residual"),
]


@pytest.mark.parametrize(("call", "reason"), CUDNN)
def test_what_cudnn_refuses(call, reason, monkeypatch):
    """On an A100 as seen from here; on a Hopper GPU heads may be twice as wide."""
    call = dict(call)
    t, s = call.pop("lengths", (6, 8))
    q, k, v = make(call.pop("query", jnp.bfloat16), t=t, s=s)
    if wide := call.pop("wide", None):
        v = jnp.ones((*v.shape[:3], wide), v.dtype)
    monkeypatch.setattr(fused, "_gpu", lambda: ("gpu", 8.0))
    got = fused.refuse_cudnn(*checked(q, k, v, **call)[0])
    assert (got is None) == (reason is None)
    if reason:
        with pytest.raises(ValueError, match=reason):
            dot_product_attention(q, k, v, implementation="cudnn", **call)
    if wide:
        monkeypatch.setattr(fused, "_gpu", lambda: ("gpu", 9.0))
        assert fused.refuse_cudnn(*checked(q, k, v, **call)[0]) is None


def test_a_gpu_without_cudnn(monkeypatch):
    """JAX says so only where it is asked to run; here it really has none."""
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    q, k, v = make(jnp.bfloat16, t=6, s=8)
    with pytest.raises(ValueError, match=r"a GPU of which jax.nn says 'cuDNN is not detected"):
        dot_product_attention(q, k, v, implementation="cudnn")


WORDS = [
    "plain",
    "causal, fewer queries",
    "lengths of keys alone",
    "lengths of queries alone",
    "causal window",
    "window",
    "mask with an empty row",
]


@pytest.mark.parametrize("call", WORDS)
def test_what_cudnn_is_told_means_the_same(call, monkeypatch):
    """Causal, lengths and windows in its own words, widths padded to 8: run by jax.nn's XLA."""
    plain = jax.nn.dot_product_attention

    def as_xla(q, k, v, *, implementation, **asked):
        assert implementation == "cudnn"
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 8
        assert "mask" not in asked or asked["mask"].shape[2:] == (5, 7)
        for name in ("query_seq_lengths", "key_value_seq_lengths"):  # NaN where one is 0
            assert asked.get(name) is None or (np.asarray(asked[name]) > 0).all()
        return plain(q, k, v, implementation="xla", **asked)

    monkeypatch.setattr(jax.nn, "dot_product_attention", as_xla)
    monkeypatch.setitem(BACKENDS, "cudnn", core.Backend(fused.cudnn, lambda *call: None))
    q, k, v = make()
    got = dot_product_attention(q, k, v[..., :7], implementation="cudnn", **CALLS[call])
    expected, _ = by_hand(q, k, v[..., :7], allowed=allowed_of(CALLS[call]))
    assert_close(got, jnp.asarray(expected, jnp.float32))


@pytest.mark.parametrize("call", deep(WORDS, "lengths of keys alone"))
def test_what_cudnn_is_told_of_unequal_widths_means_the_same(call, monkeypatch):
    """No padding for what cuDNN lists: the words of the function below jax.nn, run by `dense`."""
    from jax._src.cudnn import fused_attention_stablehlo as of_jax

    def as_dense(q, k, v, bias, mask, q_lengths, k_lengths, *, scale, mask_type, **window):
        assert (q.shape[-1], v.shape[-1], bias) == (4, 8, None)
        kinds, size = of_jax.MaskType, window["sliding_window_length"]
        padded = mask_type in (kinds.PADDING, kinds.PADDING_CAUSAL)
        assert padded == (q_lengths is not None) == (k_lengths is not None)
        told = {
            "mask": mask, "query_seq_lengths": q_lengths, "key_value_seq_lengths": k_lengths,
            "is_causal": mask_type in (kinds.CAUSAL, kinds.PADDING_CAUSAL),
            "local_window_size": size and (size - 1, 0),
        }  # fmt: skip
        return dot_product_attention(q, k, v, scale=scale, implementation="dense", **told)

    monkeypatch.setattr(of_jax, "dot_product_attention", as_dense)
    monkeypatch.setattr(of_jax, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "_gpu", lambda: ("gpu", 9.0))
    monkeypatch.setattr(fused, "UNEQUAL", {(4, 8)})
    monkeypatch.setitem(BACKENDS, "cudnn", core.Backend(fused.cudnn, lambda *call: None))
    got = dot_product_attention(*make(), implementation="cudnn", **CALLS[call])
    assert_close(got, jnp.asarray(by_hand(*make(), allowed=allowed_of(CALLS[call]))[0], got.dtype))


def test_when_cudnn_needs_padding(monkeypatch):
    """Any other widths, an older GPU, an older cuDNN, or a JAX without that function."""
    from jax._src.cudnn import fused_attention_stablehlo as of_jax

    monkeypatch.setattr(of_jax, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "_gpu", lambda: ("gpu", 9.0))
    assert fused._cudnn_of_jax(192, 128) is of_jax
    assert fused._cudnn_of_jax(128, 192) is None
    with monkeypatch.context() as older:
        older.setattr(fused, "_gpu", lambda: ("gpu", 8.0))
        assert fused._cudnn_of_jax(192, 128) is None
    monkeypatch.setattr(of_jax, "check_cudnn_version", lambda: 90900)
    assert fused._cudnn_of_jax(192, 128) is None
    monkeypatch.delattr(of_jax, "check_cudnn_version")
    assert fused._cudnn_of_jax(192, 128) is None


def test_cudnn_gets_a_mask_where_rows_are_empty():
    """Causal, one key back, 8 queries and 3 keys: the last rows see nothing."""
    assert fused.native(Visible(8, 3, is_causal=True, window=(1, 0))) is None
    assert fused.native(Visible(4, 3, is_causal=True, window=(1, 0))) is not None


small = st.integers(1, 3)


@st.composite
def calls(draw):
    """A call that is right, or wrong in one or two arguments."""
    b, t, s, k, kv, h, v = (draw(small) for _ in range(7))
    n = k * kv * draw(st.integers(1, 2))
    call = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, kv, v)}
    for name in draw(st.lists(st.sampled_from(["bias", "mask"]), unique=True)):
        shape = [draw(st.sampled_from([1, size])) for size in (b, n, t, s)]
        call[name] = tuple(shape[draw(st.integers(0, 4)) :])
    if draw(st.booleans()):
        call["query_seq_lengths"] = (b,)
    options = {
        "is_causal": draw(st.booleans()),
        "local_window_size": draw(st.sampled_from([None, 0, 1, (2, 0), (0, 1), (-1, 2), 1.5])),
        "logits_soft_cap": draw(st.sampled_from([None, None, 2.0, -1.0])),
        "implementation": draw(st.sampled_from([None, *RUNNABLE, "dense", "blockwise"])),
    }
    for name in draw(st.lists(st.sampled_from(sorted(call)), max_size=2)):
        if shape := list(call[name]):
            shape[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(0, 4))
            call[name] = tuple(shape[draw(st.integers(0, 1)) :])
    return call, options


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(calls(), st.integers(0, 100))
def test_any_call_is_right_or_refused_by_name(call, seed):
    shapes, options = call
    rng = np.random.default_rng(seed)
    arrays = {n: np.asarray(rng.normal(size=shape), np.float32) for n, shape in shapes.items()}
    if "mask" in arrays:
        arrays["mask"] = arrays["mask"] > 0
    if "query_seq_lengths" in arrays:
        arrays["query_seq_lengths"] = rng.integers(0, 4, shapes["query_seq_lengths"])
    said = None
    try:
        got = jax.jit(lambda a: dot_product_attention(**a, **options))(arrays)
    except (ValueError, TypeError) as error:
        said = str(error)
    if said is not None:
        assert any(n in said for n in (*arrays, *options))
        return
    q, k, v = (
        arrays[n] if arrays[n].ndim == 4 else arrays[n][None] for n in ("query", "key", "value")
    )
    t, s = q.shape[1], k.shape[1]
    allowed = arrays.get("mask", True)
    if options["is_causal"]:
        allowed = allowed & np.asarray(masks.causal(t, s))
    if (window := options["local_window_size"]) is not None:
        left, right = (window, window) if isinstance(window, int) else window
        allowed = allowed & np.asarray(masks.window(t, s, left=left, right=right))
    if "query_seq_lengths" in arrays:
        lengths = arrays["query_seq_lengths"].reshape(-1, 1, 1, 1)
        allowed = allowed & (np.arange(t)[:, None] < lengths)
    expected, _ = by_hand(q, k, v, arrays.get("bias", 0.0), allowed, options["logits_soft_cap"])
    assert_close(got, np.asarray(expected, np.float32).reshape(got.shape))
