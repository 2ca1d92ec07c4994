"""Bad input, refusals of backends, what `explain` says, and any call: right or refused by name."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from conftest import assert_close
from definition import attention
from test_attention import (
    make,
    small_blocks,  # noqa: F401 (autouse: blocks of 2 queries and 3 keys here too)
)

from attnlab import BACKENDS, dot_product_attention, explain, multi_head_attention
from attnlab.attention import AttentionOptions, SoftCap, backends, register_backend
from attnlab.tap import Tap, capture

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
    "int mask": ({"mask": jnp.zeros((5, 7), int)}, TypeError, "boolean.*write mask > 0.5 for"),
    "mask shape": (
        {"mask": jnp.ones((2, 5, 7), bool)},
        ValueError,
        r"mask \(2, 5, 7\) must broadcast to the scores \[B, N, T, S\] = \(2, 6, 5, 7\)",
    ),
    "mask of one axis": (
        {"mask": jnp.ones(7, bool)},
        ValueError,
        r"mask \(7,\) must be \[T, S\], \[N, T, S\] or \[B, N, T, S\].*\(2, 6, 5, 7\)",
    ),
    "mask without axes": ({"mask": True}, ValueError, r"mask \(\) must be \[T, S\]"),
    "padding mask": (
        {"mask": jnp.ones((2, 7), bool)},
        ValueError,
        r"mask \(2, 7\).*masks.padding for padding of keys",
    ),
    "bias shape": ({"bias": jnp.ones((5, 1, 6, 5, 7))}, ValueError, "bias .* must broadcast"),
    "bias of integers": ({"bias": jnp.ones((5, 7), int)}, TypeError, "bias must be a float array"),
    "lengths shape": (
        {"query_seq_lengths": jnp.array([3])},
        ValueError,
        r"query_seq_lengths \(1,\) must be \[B\] = \(2,\)",
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
    "seed": ({"dropout_rate": 0.1, "dropout_key": 3}, ValueError, "such as jax.random.key"),
    "talking heads": (
        {"talking_heads": np.ones((6, 6))},
        TypeError,
        "talking_heads must be two matrices",
    ),
    "talking heads shape": (
        {"talking_heads": (np.ones((6, 4)), None)},
        ValueError,
        r"talking_heads \(6, 4\) must be \[N, M\] = \(6, 6\)",
    ),
    "near keyword": ({"biass": 0}, TypeError, r"keyword .*'biass'"),
    "distance 8": ({"heads": 4}, TypeError, r"keyword .*'heads'"),
    "far keyword": ({"xyz": 4}, TypeError, r"keyword .*'xyz'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_say_what_to_do(case):
    changes, error, message = BAD[case]
    good = dict(zip(("query", "key", "value"), make(), strict=True))
    for function in (dot_product_attention, explain):
        with pytest.raises(error, match=message):
            function(**(good | changes))


def test_options_are_the_keywords():
    names = set(inspect.signature(dot_product_attention).parameters)
    others = {"query", "key", "value", "return_residual", "tap"}
    assert {field.name for field in dataclasses.fields(AttentionOptions)} == names - others


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": "flash"}, "known: dense, blockwise, xla, cudnn"),
        ({"implementation": "xla", "logits_soft_cap": 1.0}, "jax.nn has no logits_soft"),
        ({"implementation": "xla", "return_residual": True}, "jax.nn has no return_residual"),
        ({"implementation": "xla", "float16": True}, "jax.nn has no float16 on a CPU"),
        ({"implementation": "cudnn"}, r"query \(2, 5, 6, 4\).*needs an NVIDIA GPU, this is a cpu"),
        (
            {"implementation": "blockwise", "talking_heads": (jnp.eye(6), None)},
            "talking_heads needs the scores of all",
        ),
        ({"implementation": "xla", "score_mods": [SoftCap(2.0)]}, "jax.nn has no score_mods"),
        ({"implementation": "densse"}, "did you mean 'dense'"),
    ],
)
def test_a_backend_that_cannot_says_why(changes, message):
    arrays = make(jnp.float16 if "float16" in changes else jnp.float32)
    changes = {n: a for n, a in changes.items() if n != "float16"}
    with pytest.raises(ValueError, match=message) as error:
        dot_product_attention(*arrays, **changes)
    known = changes["implementation"] in BACKENDS
    assert ("use implementation='dense'" in str(error.value)) == known


def test_explain_names_the_choice_and_the_reasons():
    q, k, v = make()
    expected = {
        "dense": "chosen: measured on 2 CPU cores with 1 MiB of L2 each",
        "blockwise": "could run",
        "xla": "could run",
        "cudnn": "cuDNN needs an NVIDIA GPU, this is a cpu",
        "edges": "it needs a mask that is masks.Edges, and nothing else that hides",
    }
    assert explain(q, k, v).items() >= expected.items()
    captured = explain(q, k, v, tap=Tap(("probs",)))
    assert captured.items() >= expected.items()  # recording never changes the choice
    mixed = explain(
        q, k, v, talking_heads=(jnp.eye(6), None), dropout_rate=0.1, dropout_key=jax.random.key(0)
    )
    assert mixed["blockwise"] == "talking_heads needs the scores of all heads at once"
    assert mixed["xla"] == "jax.nn has no dropout_rate"
    assert explain(q, k, v, implementation="xla")["xla"] == "chosen: requested"
    with pytest.raises(TypeError, match="mask must be boolean"):
        explain(q, k, v, mask=jnp.ones((5, 7)))


def test_explain_says_where_the_choice_was_measured(monkeypatch):
    """All of them in one table; on a device that is not in it, as on a TPU."""
    shape = jax.ShapeDtypeStruct((1, 1024, 4, 8), jnp.float32)  # 16 MiB of scores
    for device, (name, words) in {
        "cpu": ("dense", "measured on 2"),
        "gpu": ("xla", "measured on one H200"),
        "x": ("dense", "not measured"),
    }.items():
        monkeypatch.setattr(jax, "default_backend", lambda device=device: device)
        assert explain(shape, shape, shape)[name].startswith(f"chosen: {words}")
    for entries in backends.CHOICES.values():
        assert {entry.backend for entry in entries} <= set(BACKENDS)
        assert entries[-1].backend == "dense"  # which refuses nothing


def test_explain_needs_shapes_alone():
    """Scores beyond the cache go to `blockwise`, and those that it refuses to `dense`."""
    shape = jax.ShapeDtypeStruct((2, 16384, 8, 64), jnp.float32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    call = {"is_causal": True, "query_seq_lengths": lengths}
    assert explain(shape, shape, shape, **call)["blockwise"].startswith("chosen: measured on")
    matrices = (jax.ShapeDtypeStruct((8, 8), jnp.float32), None)
    assert explain(shape, shape, shape, talking_heads=matrices)["dense"].startswith("chosen")


def test_a_registered_backend_runs_by_name_and_is_never_chosen(monkeypatch):
    calls = []

    def run(call):
        calls.append(call.scores_shape)
        return BACKENDS["dense"].run(call)

    def refuse(call):
        return "it has no bias" if call.options.bias is not None else None

    monkeypatch.setattr(backends, "BACKENDS", dict(BACKENDS))
    register_backend("mine", run, refuse)
    q, k, v = make()
    assert_close(dot_product_attention(q, k, v, implementation="mine"), attention(q, k, v, {})[0])
    assert calls == [(2, 6, 5, 7)]
    dot_product_attention(q, k, v)
    assert len(calls) == 1
    with pytest.raises(ValueError, match="it has no bias; use implementation='dense'"):
        dot_product_attention(q, k, v, jnp.ones(7), implementation="mine")
    with pytest.raises(ValueError, match="'dense' is registered already"):
        register_backend("dense", run)


def test_backends_of_contrib_need_an_import(tmp_path):
    """In a process of its own: other tests may have imported them."""
    file = tmp_path / "script.py"
    file.write_text("""
import jax.numpy as jnp, attnlab
x = jnp.ones((1, 3, 2, 4))
try:
    attnlab.dot_product_attention(x, x, x, implementation="splash")
except ValueError as error:
    print(error)
import attnlab.contrib
print(attnlab.explain(x, x, x)["splash"])
""")
    error, after = command(file).stdout.splitlines()
    assert "'splash'; it is in attnlab.contrib" in error
    assert after == "could run"


def test_patched_values_reach_the_output_or_are_refused():
    q, k, v = make(heads=(6, 6, 6))
    uniform = {"probs": lambda probs, layer: jnp.full_like(probs, 1 / 7)}
    for name in ("dense", None):
        got, _ = capture(
            dot_product_attention, q, k, v, names=(), patch=uniform, implementation=name
        )
        assert_close(got, jnp.broadcast_to(v.mean(1, keepdims=True), got.shape))
    for name in ("blockwise", "xla"):
        with pytest.raises(ValueError, match=r"query \(2, 5, 6, 4\).* has no probs to patch; use"):
            dot_product_attention(q, k, v, tap=Tap(patch=uniform), implementation=name)
    long = jax.ShapeDtypeStruct((64, 2048, 4, 8), "float32")
    assert explain(long, long, long, tap=Tap(("probs",)))["blockwise"].startswith("chosen")
    reasons = explain(long, long, long, tap=Tap(patch=uniform))
    assert reasons["dense"].startswith("chosen")
    assert reasons["blockwise"] == "it has no probs to patch"


def test_the_mask_hides_from_patched_scores():
    """And a call without a batch axis has values without one."""
    q, k, v = make(heads=(6, 6, 6), s=5)
    patch = {"scores": lambda scores, layer: scores.at[..., 4].set(50.0)}
    run = functools.partial(
        capture, dot_product_attention, names=("scores", "probs"), patch=patch, is_causal=True
    )
    out, values = run(q, k, v)
    assert not np.triu(values["probs"], 1).any()
    assert (values["scores"][..., 4] == 50).all()
    assert_close(out[:, 4], v[:, 4])
    one, of_one = run(q[0], k[0], v[0])
    assert_close((one, of_one), (out[0], {name: a[0] for name, a in values.items()}))
    with pytest.raises(ValueError, match="patch of 'probs' returned shape"):
        capture(dot_product_attention, q, k, v, names=(), patch={"probs": lambda a, layer: a[0]})


@pytest.mark.parametrize("function", [dot_product_attention, multi_head_attention])
def test_help_names_array_likes_by_their_name(function):
    """`help` would print the eight types of a Union for each argument."""
    assert "ArrayLike" in str(inspect.signature(function))
    assert "numpy" not in str(inspect.signature(function))
