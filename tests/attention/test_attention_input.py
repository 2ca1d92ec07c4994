"""What a call may not be, what backends refuse, and what `explain` returns."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from conftest import assert_close
from definition import attention, make

from attnlab import BACKENDS, dot_product_attention, explain, masks, multi_head_attention
from attnlab.attention import ALiBi, AttentionOptions, RelativeBias, ScoreMod, SoftCap, backends
from attnlab.attention.jax_nn import assume_device
from attnlab.tap import Tap


class NoPytree(ScoreMod):
    def apply(self, scores, *, head, query, key):
        return scores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WrongShape(ScoreMod):
    factor: float

    def apply(self, scores, *, head, query, key):
        return self.factor * scores[:, :1]


UNCHECKED = pytest.mark.unchecked
ENDS, PAD = (np.arange(5), np.arange(5)), np.zeros((2, 7), int)
ONES = lambda *shape, dtype="float32": np.ones(shape, dtype)
BAD = [
    # (arguments, exception, what the message has)
    ({"query": ONES(2, 5, 6, 4, dtype=int)}, TypeError, "query must be a float"),
    ({"key": "key"}, TypeError, "key must be a float array, not str"),
    ({"value": ONES(3)}, ValueError, r"value \(3,\) must be \[B, T, N, H\]"),
    ({"query": ONES(5, 6, 4)}, ValueError, "or all without B"),
    ({"key": ONES(2, 3, 3, 4)}, ValueError, "do not fit together"),
    ({"query": ONES(2, 5, 6, 3)}, ValueError, r"query \(2, 5, 6, 3\).* do not fit"),
    ({"key": ONES(2, 7, 4, 4), "value": ONES(2, 7, 4, 8)}, ValueError, "must divide 6 query heads"),
    ({"query": ONES(2, 0, 6, 4)}, ValueError, "no axis may have size 0"),
    ({"mask": ONES(5, 7)}, TypeError, "boolean.*write mask > 0.5 for.*as bias"),
    ({"mask": ONES(2, 5, 7, dtype=bool)}, ValueError, r"mask \(2, 5, 7\) must broadcast.*6, 5, 7"),
    ({"mask": ONES(7, dtype=bool)}, ValueError, r"mask \(7,\) must be \[T, S\], .*\(2, 6, 5, 7\)"),
    ({"mask": True}, ValueError, r"mask \(\) must be \[T, S\]"),
    ({"mask": ONES(2, 7, dtype=bool)}, ValueError, r"mask \(2, 7\).*masks.padding for padding"),
    ({"mask": masks.Edges(*(np.stack([a] * 3) for a in ENDS))}, ValueError, "with B = 2"),
    ({"mask": masks.Edges(ENDS[0] + 4, ENDS[1])}, ValueError, "senders holds 8, .* of 7 nodes"),
    ({"bias": ONES(5, 1, 6, 5, 7)}, ValueError, "bias .* must broadcast"),
    ({"bias": ONES(5, 7, dtype=int)}, TypeError, "bias must be a float array"),
    ({"sink": ONES(3, 1, 1)}, ValueError, r"sink \(3, 1, 1\) must broadcast"),
    ({"query_seq_lengths": np.array([3])}, ValueError, r"lengths \(1,\) must be \[B\] = \(2,\)"),
    ({"key_value_seq_lengths": ONES(2)}, TypeError, "key_value_seq_lengths must be an integer"),
    ({"segments": ONES(2, 5, dtype=int)}, ValueError, r"segments \(2, 5\) must be \[B, S\]"),
    ({"segments": (np.full((2, 5), 2**32), PAD)}, ValueError, "up to 4294967296, which int32 does"),
    ({"segments": (ONES(2, 5, dtype=int),)}, ValueError, "or a pair .*not 1 arrays"),
    ({"local_window_size": (1, -1)}, ValueError, "local_window_size must be at least 0"),
    pytest.param({"local_window_size": (1, 2, 3)}, TypeError, "must be an int or", marks=UNCHECKED),
    ({"local_window_size": True}, TypeError, "local_window_size must be an int"),
    ({"scale": ONES(2)}, TypeError, "scale must be one real number"),
    ({"scale": "large"}, TypeError, "scale must be one real number"),
    ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap: finite Python number above 0"),
    ({"logits_soft_cap": True}, ValueError, "logits_soft_cap: finite Python number above 0"),
    ({"dropout_rate": 1.0}, ValueError, "dropout_rate: a Python number from 0 to below 1"),
    ({"dropout_rate": 0.1}, ValueError, "needs a dropout_key"),
    ({"dropout_rate": 0.1, "dropout_key": 3}, ValueError, "such as jax.random.key"),
    ({"talking_heads": ONES(6, 6)}, TypeError, "talking_heads must be two matrices"),
    ({"talking_heads": (ONES(6, 4), None)}, ValueError, r"talking_heads \(6, 4\) must be \[N, M\]"),
    ({"score_mods": ALiBi(ONES(6))}, TypeError, "score_mods must be a sequence of ScoreMod"),
    ({"score_mods": [abs]}, TypeError, "must be an instance of a subclass of ScoreMod"),
    ({"score_mods": [NoPytree()]}, TypeError, r"score_mods\[0\] \(NoPytree\) is no pytree"),
    ({"score_mods": [WrongShape(2.0)]}, ValueError, r"apply returned shape \(2, 1, 5, 7\)"),
    ({"score_mods": [SoftCap(ONES(4))]}, ValueError, r"cap \(4,\) must have shape \(\) or \(6,\)"),
    ({"score_mods": [ALiBi(ONES(4))]}, ValueError, r"ALiBi.slopes \(4,\) must have shape \(6,\)"),
    ({"score_mods": [RelativeBias(ONES(6, 7))]}, ValueError, "at least 4 buckets, an even"),
    ({"score_mods": [RelativeBias(ONES(6, 32), 8)]}, ValueError, "max_distance 8 must be above 8"),
    ({"biass": 0}, TypeError, r"keyword .*'biass'"),
    ({"implementation": "flash"}, ValueError, "known: dense, blockwise, xla, cudnn"),
    ({"implementation": "attnlab.attention.dense:dense"}, ValueError, "known: dense, blockwise"),
    ({"implementation": "densse"}, ValueError, "did you mean 'dense'"),
]


LENGTHS = [
    *(np.array([large, 3]) for large in (2**40, np.uint32(2**32 - 1), np.iinfo(np.int64).max)),
    *(array([200, 3], "uint8") for array in (np.array, jnp.array)),
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=repr)
@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_a_length_above_the_axis_is_the_whole_axis(name, lengths):
    """Also where int32 does not hold it, or its own type does not hold the axis."""
    call = functools.partial(dot_product_attention, *make(s=300))
    got = call(**{name: lengths})
    np.testing.assert_array_equal(got, call(**{name: np.array([min(int(lengths[0]), 300), 3])}))
    assert np.abs(got[0]).max() > 0.1


def test_a_mask_of_keys_is_one_for_all_queries_of_a_single_row():
    q, k, v = (a[:1] for a in make())
    mask = np.array([[True, False, True, True, False, True, True]])
    expected = dot_product_attention(q, k, v, mask=mask[None])
    np.testing.assert_array_equal(dot_product_attention(q, k, v, mask=mask), expected)


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_calls_say_what_to_do(changes, error, message):
    good = dict(zip(("query", "key", "value"), make(), strict=True))
    for function in (dot_product_attention, explain):
        with pytest.raises(error, match=message):
            function(**(good | changes))


@pytest.mark.unchecked
def test_is_causal_is_not_traced():
    q, k, v = make()
    with pytest.raises(TypeError, match="is_causal must be True or False, which jit keeps static"):
        jax.jit(lambda c: dot_product_attention(q, k, v, is_causal=c))(True)
    assert dot_product_attention(q, k, v, is_causal=np.True_).shape == (2, 5, 6, 8)


def test_options_are_the_keywords():
    names = set(inspect.signature(dot_product_attention).parameters)
    others = {"query", "key", "value", "return_residual", "tap"}
    assert {field.name for field in dataclasses.fields(AttentionOptions)} == names - others


PATCHED = {"tap": Tap(patch={"probs": lambda probs, layer: probs})}
CANNOT = [
    *((name, PATCHED, "it has no probs to patch") for name in ("xla", "blockwise", "edges")),
    ("xla", {"logits_soft_cap": 1.0}, "jax.nn has no logits_soft_cap"),
    ("xla", {"return_residual": True}, "jax.nn has no return_residual"),
    ("xla", {"score_mods": [SoftCap(2.0)]}, "jax.nn has no score_mods"),
    ("xla", {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "jax.nn has no dropout_rate"),
    ("xla", {"dtype": "float16"}, "jax.nn has no float16 on a CPU"),
    ("xla", {"sink": 1.0, "scale": 0.0}, "a sink needs a scale other than 0"),
    ("xla", {"heads": (6, 3, 2)}, r"as many key heads \(3\) as value heads \(2\)"),
    ("cudnn", {}, "cuDNN needs an NVIDIA GPU, this is a cpu"),
    ("blockwise", {"talking_heads": (jnp.eye(6), None)}, "needs the scores of all heads at once"),
    ("blockwise", {"mask": masks.Edges(*ENDS)}, "edges lie anywhere, not in blocks"),
    ("edges", {}, "it needs a mask that is masks.Edges, and nothing else that hides"),
]


@pytest.mark.parametrize(("name", "changes", "message"), CANNOT)
def test_a_backend_that_cannot_says_why(name, changes, message):
    """In an error with the shapes and a way out, and in what `explain` returns."""
    changes = dict(changes)
    arrays = make(changes.pop("dtype", "float32"), changes.pop("heads", (6, 3, 3)))
    with pytest.raises(ValueError, match=rf"query \(2, 5, 6, 4\).*{message}; use impl.*'dense'"):
        dot_product_attention(*arrays, **changes, implementation=name)
    reasons = explain(*arrays, **changes)
    assert not reasons[name].startswith(("chosen", "could run"))
    assert sum(reason.startswith("chosen") for reason in reasons.values()) == 1


def test_explain_names_the_choice():
    """From shapes alone. Scores beyond the cache go to `blockwise`, what it refuses to `dense`."""
    q, k, v = make()
    reasons = explain(q, k, v)
    assert reasons["dense"] == "chosen: measured on 2 CPU cores with 1 MiB of L2 each"
    assert reasons["blockwise"] == reasons["xla"] == "could run"
    assert explain(q, k, v, implementation="xla")["xla"] == "chosen: requested"
    shape = jax.ShapeDtypeStruct((2, 16384, 8, 64), jnp.float32)
    call = {"is_causal": True, "query_seq_lengths": jax.ShapeDtypeStruct((2,), jnp.int32)}
    reasons = explain(shape, shape, shape, **call)
    assert reasons["blockwise"].startswith("chosen: measured on")
    recorded = explain(shape, shape, shape, **call, tap=Tap(("probs",)))
    assert recorded == reasons  # recording never changes the choice
    matrices = (jax.ShapeDtypeStruct((8, 8), jnp.float32), None)
    for refused in ({"talking_heads": matrices}, PATCHED):
        assert explain(shape, shape, shape, **refused)["dense"].startswith("chosen")


def test_explain_says_the_price_of_what_changes_scores():
    """The bytes of a bias as it is stored, and the backends that this option alone excludes."""
    bias, x = jax.ShapeDtypeStruct((8, 64, 32), "bfloat16"), jnp.ones((2, 64, 8, 16), "bfloat16")
    cap, mods = {"logits_soft_cap": 2.0}, {"score_mods": [SoftCap(2.0)]}
    with assume_device("gpu", 9.0):
        biased = explain(x, x[:, :32], x[:, :32], bias=bias)["xla"]
        capped = explain(x, x, x, bias=jnp.ones((64, 64)), **cap)["dense"]
        modified = explain(x, x, x, **cap, **mods)["dense"]
    assert "bias: 32,768 bytes" in biased
    assert "(without it cudnn" in biased  # and splash, once that is registered
    assert "soft_cap: a tanh of each score (without it xla could run); bias: 16,384 b" in capped
    assert "score_mods: computed for each score" in modified
    others = capped.split("bias")[1] + modified
    assert "without it xla" not in others
    assert "without it cudnn" not in others


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
        assert {entry.backend for entry in entries} <= set(BACKENDS) - set(backends.CONTRIB)
        assert entries[-1].backend == "dense"  # which refuses nothing


def test_a_registered_backend_runs_by_name_and_is_never_chosen(monkeypatch):
    calls = []

    def run(call):
        calls.append(call.scores_shape)
        return BACKENDS["dense"].run(call)

    refuse = lambda call: "it has no bias" if call.options.bias is not None else None
    monkeypatch.setattr(backends, "BACKENDS", dict(BACKENDS))
    backends.register_backend("mine", run, refuse)
    q, k, v = make()
    assert_close(dot_product_attention(q, k, v, implementation="mine"), attention(q, k, v, {})[0])
    assert calls == [(2, 6, 5, 7)]
    dot_product_attention(q, k, v)
    assert len(calls) == 1
    with pytest.raises(ValueError, match="it has no bias; use implementation='dense'"):
        dot_product_attention(q, k, v, jnp.ones(7), implementation="mine")
    with pytest.raises(ValueError, match="it has no probs to patch"):  # of any but dense
        dot_product_attention(q, k, v, implementation="mine", **PATCHED)
    with pytest.raises(ValueError, match="'dense' is registered already"):
        backends.register_backend("dense", run)


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
    assert "'splash' is in attnlab.contrib" in error
    assert after == "could run"


@pytest.mark.parametrize("function", [dot_product_attention, multi_head_attention])
def test_help_names_array_likes_by_their_name(function):
    """`help` would print the eight types of a Union for each argument."""
    assert "ArrayLike" in str(inspect.signature(function))
    assert "numpy" not in str(inspect.signature(function))
