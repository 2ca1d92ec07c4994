"""Identities between rows, and published counts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from contract import SPECS, attend, make

from attnlab import HeadSpec
from attnlab.heads.old.cost import head_flops, head_parameters


def test_narrow_is_standard_with_block_diagonal_weights(x64):
    narrow = HeadSpec("narrow", width=12, num_heads=3, biases="qkvo")
    w, x, *_ = make(narrow, jnp.float64)
    chunk = narrow.sizes["C"]
    block = dict(w)
    for name in "qkv":
        full = np.zeros((12, 3, chunk))
        for n in range(3):
            full[n * chunk : (n + 1) * chunk, n] = w[name][n]
        block[name] = jnp.asarray(full)
    standard = dataclasses.replace(narrow, layout="standard")
    expected = attend(w, x, spec=narrow)
    assert_close(attend(block, x, spec=standard), expected)


def test_wide_is_standard_with_head_dim_equal_to_width():
    wide = HeadSpec("wide", width=6, num_heads=5)
    standard = HeadSpec("standard", width=6, num_heads=5, head_dim=6)
    assert wide.shapes == standard.shapes == dict.fromkeys("qkv", (6, 5, 6)) | {"o": (5, 6, 6)}


def test_grouped_is_standard_with_repeated_keys_and_values(x64):
    grouped = HeadSpec("standard", width=12, num_heads=6, num_kv_heads=2)
    w, x, *_ = make(grouped, jnp.float64)
    copied = w | {n: jnp.repeat(w[n], 3, axis=1) for n in "kv"}
    got = attend(w, x, spec=grouped)
    standard = dataclasses.replace(grouped, num_kv_heads=None)
    assert_close(got, attend(copied, x, spec=standard))


def test_a_gate_of_zero_removes_a_head(x64):
    spec = SPECS["standard"].spec()
    w, x, *_ = make(spec, jnp.float64)
    gate = jnp.array([1.0, 0.0, 1.0, 1.0])
    without = w | {"o": w["o"].at[1].set(0)}
    got = attend(w, x, spec=spec, head_gate=gate)
    assert_close(got, attend(without, x, spec=spec))
    per_row = jnp.stack([gate, jnp.ones(4)])
    mixed = attend(w, x, spec=spec, head_gate=per_row)
    assert_close(mixed[1], attend(w, x, spec=spec)[1])
    assert_close(mixed[0], got[0])


@pytest.mark.parametrize(
    ("spec", "flops", "parameters"),
    [  # the reference table: d=512, h=8, n=512
        (HeadSpec("standard", 512, 8), 3_145_728, 1_048_576),
        (HeadSpec("wide", 512, 8), 25_165_824, 8_388_608),
        (HeadSpec("narrow", 512, 8), 1_769_472, 360_448),
        (HeadSpec("narrow_tied", 512, 8), 1_769_472, 274_432),
        (HeadSpec("standard", 512, 8, num_kv_heads=1), 2_228_224, 589_824),
        (HeadSpec("bilinear", 512, 8), 9_961_472, 2_621_440),
    ],
)
def test_published_flops_and_parameters(spec, flops, parameters):
    assert (head_flops(spec, 512), head_parameters(spec)) == (flops, parameters)


@pytest.mark.parametrize(
    ("width", "counts"),
    [  # pbloem/former, attention of one layer with 8 heads, bias on the output map alone
        (128, (524_416, 65_664, 39_040, 22_656, 17_280, 768)),
        (256, (2_097_408, 262_400, 155_904, 90_368, 68_864, 3_072)),
    ],
)
def test_parameters_of_former(width, counts):
    specs = [HeadSpec(name, width, 8, biases="o") for name in (
        "wide", "standard", "alt", "narrow", "narrow_tied",
    )]  # fmt: skip
    specs.append(HeadSpec("narrow_tied", width, 8, output=False))
    assert tuple(map(head_parameters, specs)) == counts


def test_collaborative_parameters():
    """2 d R + h R + 2 d^2 (Cordonnier et al. 2020, section 3)."""
    spec = HeadSpec("collaborative", 512, 8, shared_dim=256)
    assert head_parameters(spec) == 2 * 512 * 256 + 8 * 256 + 2 * 512**2
