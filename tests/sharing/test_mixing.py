"""Slots that are mixed: the sum by hand, a slot whole bit for bit, counts, other plans."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from conftest import assert_close

from attnlab import (
    ModelConfig,
    Plan,
    applied_parameters,
    flops_per_token,
    load_run,
    num_parameters,
    run_stack,
)
from attnlab.heads import Standard
from attnlab.models import (
    FFN,
    Compute,
    EncoderConfig,
    LayerOverrides,
    Norm,
    param_shapes,
    parameters_by_uses,
    weight_flops,
)
from attnlab.sharing import layer_params
from attnlab.sharing.mixing import fit_mixture, mix
from attnlab.sharing.named_plans import parse_plan, plan_name
from attnlab.training.optimizers import weight_decay_mask
from attnlab.transforms import (
    change_plan,
    detect_sharing,
    output_difference,
    remove_heads,
    scale_heads,
    tie_encoder,
    unshare,
)

SMALL = ModelConfig(
    vocab_size=11,
    max_len=6,
    width=6,
    num_layers=5,
    heads=Standard(num_heads=3, head_dim=4, num_kv_heads=1, biases=("v",)),
    ffn=FFN(width=7, bias=False),
    norm=Norm(kind="rms"),
    sharing="dictionary:3",
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 6)))
PARTS = dict(attention=(2, 0, 1, 1, 0), ffn=(0, 1, 0, 2, 2))
MIXED = dict(attention_mixture=range(5), ffn_mixture=range(5))


def draw(config, dtype=None):
    """Large random weights, coefficients too."""
    rng = np.random.default_rng(1)
    make = lambda a: jnp.asarray(rng.normal(size=a.shape), dtype or a.dtype)
    return jax.tree.map(make, param_shapes(config))


def test_a_mixture_is_the_sum(x64):
    """Value and gradients by NumPy; a coefficient of 0 gets its gradient too."""
    rng = np.random.default_rng(0)
    c, atoms, seed = rng.normal(size=4), rng.normal(size=(4, 2, 3, 5)), rng.normal(size=(2, 3, 5))
    c[2] = 0
    value, pull = jax.vjp(jax.jit(mix), jnp.asarray(c), jnp.asarray(atoms))
    assert_close(value, sum(c[s] * atoms[s] for s in range(4)))
    expected = np.array([np.sum(seed * a) for a in atoms]), np.multiply.outer(c, seed)
    assert_close(pull(jnp.asarray(seed)), expected)
    with pytest.raises(ValueError, match="3 coefficients for 4 parameter groups"):
        mix(jnp.ones(3), jnp.ones((4, 2)))


def test_bfloat16_sums_in_float32():
    rng = np.random.default_rng(0)
    c, atoms = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((64,), (64, 5)))
    exact = np.asarray(c, np.float32) @ np.asarray(atoms, np.float32)
    got = jax.jit(mix)(c, atoms)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_among_zeros_is_that_slot_bit_for_bit(dtype):
    """Also -0.0, and beside what is infinite or no number."""
    odd = [-0.0, 0.0, np.inf, -np.inf, np.nan, 1e38, -1e-30, 0.1]
    atoms = jnp.asarray(np.stack([np.roll(odd, i) for i in range(len(odd))]), dtype)
    bits = lambda a: np.asarray(a).tobytes()
    for slot in range(len(odd)):
        got = jax.jit(mix)(jnp.eye(len(odd), dtype=dtype)[slot], atoms)
        assert bits(got) == bits(atoms[slot])
    signs = jax.jit(mix)(jnp.array([0.0, -0.0, 1.0]), jnp.array([[5.0], [-5.0], [-0.0]]))
    assert bits(signs) == bits(jnp.array([-0.0]))


def test_a_stack_with_one_among_zeros_is_that_of_the_slots(optimized):
    """Output and gradients, bit for bit, wherever the mixtures began."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    slots = {"a": {"m": draw(3, 7, 7), "bias": draw(3, 7)}}
    one_hot = jax.tree.map(lambda a: jnp.eye(3)[np.array((2, 0, 1, 1, 0))], slots["a"])
    plain, mixed = Plan(a=(2, 0, 1, 1, 0)), Plan(a=(0, 1, 2, 0, 1), a_mixture=range(5))
    block = lambda w, x, *_: (x + jnp.tanh(x @ w["a"]["m"] + w["a"]["bias"]), None, None)

    def run(plan, pool, x):
        y = run_stack(block, pool, plan, x)[0][0]
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(jax.grad(run, (1, 2), has_aux=True), static_argnums=0)
    (grads, dx), y = run(plain, slots, x := draw(4, 7))
    (mixed_grads, mixed_dx), mixed_y = run(mixed, slots | {"a_mixture": one_hot}, x)
    assert np.asarray(mixed_y).tobytes() == np.asarray(y).tobytes()
    of_coefficients = mixed_grads.pop("a_mixture")
    jax.tree.map(np.testing.assert_array_equal, (mixed_grads, mixed_dx), (grads, dx))
    assert np.abs(of_coefficients["m"]).min() > 0  # those at 0 too


@pytest.mark.slow
@pytest.mark.parametrize("remat", [True, False])
def test_coefficients_of_one_among_zeros_are_the_plan_of_those_slots(remat, optimized):
    """Logits and the gradients of all weights of a model, of both parts."""
    plain = dataclasses.replace(SMALL, sharing=Plan(**PARTS), compute=Compute(remat=remat))
    began = Plan(attention=(0, 1, 2, 0, 1), ffn=(0, 0, 1, 2, 1), **MIXED)
    config, params = dataclasses.replace(plain, sharing=began), draw(plain)
    shapes = param_shapes(config)["layers"]
    one_hot = lambda part: jax.tree.map(
        lambda a: jnp.eye(3)[np.array(PARTS[part])], shapes[f"{part}_mixture"]
    )
    mixed = params["layers"] | {f"{part}_mixture": one_hot(part) for part in PARTS}
    assert jax.tree.structure(mixed) == jax.tree.structure(shapes)

    def run(config, params):
        loss = lambda p: (lambda y: (jnp.sum(jnp.sin(y)), y))(
            config.build().apply({"params": p}, TOKENS).logits
        )
        return jax.jit(jax.grad(loss, has_aux=True))(params)

    grads, logits = run(plain, params)
    mixed_grads, mixed_logits = run(config, params | {"layers": mixed})
    assert np.asarray(mixed_logits).tobytes() == np.asarray(logits).tobytes()
    coefficients = {part: mixed_grads["layers"].pop(f"{part}_mixture") for part in PARTS}
    jax.tree.map(np.testing.assert_array_equal, mixed_grads, grads)
    assert all(np.abs(a).min() > 0 for a in jax.tree.leaves(coefficients["ffn"]["up"]))


@pytest.mark.slow
def test_a_fresh_model_is_that_of_the_slots_it_begins_with():
    config = dataclasses.replace(SMALL, sharing="dictionary:2")
    parts = dict(config.plan.items())
    del parts["attention_mixture"]
    slots = dataclasses.replace(config, sharing=Plan(**parts))
    make = lambda c: jax.jit(c.build().init)(jax.random.key(3), TOKENS)["params"]
    layers = (mixed := make(config))["layers"]
    for a in jax.tree.leaves(layers.pop("attention_mixture")):
        np.testing.assert_array_equal(a, np.eye(2)[[0, 1, 0, 1, 0]])
    jax.tree.map(np.testing.assert_array_equal, mixed, make(slots))


def test_counts():
    """MASA (arXiv 2508.04581): 24 layers of width 1536, of each of 4 maps 8 atoms."""
    sizes = dict(num_layers=24, width=1536, heads=Standard(num_heads=16), norm=Norm(kind="rms"))
    config = ModelConfig(sharing="dictionary:8", ffn=FFN(width=64), **sizes)
    alone = dataclasses.replace(config, sharing="separate")
    shapes = param_shapes(config)["layers"]
    size = lambda part: sum(shapes[part][name].size for name in "qkvo")
    assert (size("attention"), size("attention_mixture")) == (75_497_472, 768)
    saved, norms = 226_492_416 - 75_497_472 - 768, (24 - 8) * 1536 - 24 * 8
    assert num_parameters(alone) - num_parameters(config) == saved + norms
    assert applied_parameters(config) - applied_parameters(alone) == 24 * 8 * 5
    assert flops_per_token(config, 64) == flops_per_token(alone, 64)
    assert weight_flops(config) == 24 * 2 * 8 * (4 * 1536**2 + 1536)
    uses = parameters_by_uses(config)
    assert uses[3] == 75_497_472 + 8 * 1536  # three layers begin with each slot
    assert sum(r * n for r, n in uses.items()) == sum(parameters_by_uses(alone).values()) + 960


def test_products_of_deltas_are_counted():
    layers = dict(
        width=6,
        num_layers=2,
        heads=Standard(num_heads=2, biases=("q", "k", "v", "o")),
        ffn=FFN(width=7),
    )
    config = ModelConfig(sharing="relaxed:1", **layers)
    of = lambda rank: weight_flops(dataclasses.replace(config, delta_rank=rank))
    assert of(2) == 2 * 2 * 2 * (4 * 6 * 6 + 2 * 6 * 7)
    both = Plan(attention=(0, 0), ffn=(0, 1), attention_mixture=(0, 1), delta=(0, 1))
    sums = 2 * 2 * (4 * 36 + 4 * 6 + 2 * 6)
    assert weight_flops(dataclasses.replace(config, sharing=both, delta_rank=2)) == of(2) + sums


def test_to_another_plan_and_back(x64):
    """Each layer unshared is its sum; slots stay as they are; of fewer atoms nothing is nearer."""
    config = dataclasses.replace(
        SMALL,
        compute=Compute(dtype="float64"),
        ffn=FFN(width=0),
        heads=dataclasses.replace(SMALL.heads, biases=()),
    )
    params = draw(config, "float64")
    apart = unshare(config, params)[1]["layers"]["attention"]
    coefficients, atoms = (params["layers"][f"attention{end}"] for end in ("_mixture", ""))
    for c, slots, got in zip(*map(jax.tree.leaves, (coefficients, atoms, apart)), strict=True):
        assert_close(got, np.tensordot(c, slots, 1))
    cycle = change_plan(config, params, "attention=0,1,2,0,1 ffn=0..4")
    layers = change_plan(*cycle, "dictionary:3")[1]["layers"]
    for c in jax.tree.leaves(layers.pop("attention_mixture")):
        np.testing.assert_array_equal(c, np.eye(3)[[0, 1, 2, 0, 1]])
    jax.tree.map(np.testing.assert_array_equal, layers, cycle[1]["layers"])
    few = change_plan(config, params, "dictionary:2")[1]["layers"]
    near = np.tensordot(few["attention_mixture"]["q"], few["attention"]["q"], 1)
    sizes = np.linalg.svd(np.reshape(apart["q"], (5, -1)), compute_uv=False)
    np.testing.assert_allclose(np.sum((near - apart["q"]) ** 2), np.sum(sizes[2:] ** 2))


@pytest.mark.slow
def test_the_function_stays_where_sums_can_say_it(x64):
    config = dataclasses.replace(SMALL, compute=Compute(dtype="float64"), delta_rank=99)
    params = draw(config, "float64")
    alone = unshare(config, params)
    cycle = change_plan(*alone, "attention=0,1,2,0,1 ffn=0..4")
    deltas = "attention=0,0,1,1,1 attention_mixture=0..4 ffn=0..4 delta=0..4"
    for before, plan in ((alone, "dictionary:3"), (alone, "dictionary:5"), (alone, deltas)):
        assert output_difference(before, change_plan(*before, plan), TOKENS) < 1e-10
    assert output_difference((config, params), alone, TOKENS) == 0
    assert output_difference(cycle, change_plan(*cycle, "dictionary:3"), TOKENS) == 0
    assert output_difference(alone, change_plan(*alone, "dictionary:2"), TOKENS) > 0.1
    mixed, keys = "attention=0,1,2,0,1 attention_mixture=0..4", "kv=0,-,1,@0,2 ffn=0..4"
    config = dataclasses.replace(config, sharing=f"{mixed} {keys}")
    reads = config, draw(config, "float64")
    assert output_difference(reads, change_plan(*reads, f"attention=0..4 {keys}"), TOKENS) < 1e-10


def test_atoms_that_say_the_same_are_turned_towards_the_slots(x64):
    rng = np.random.default_rng(0)
    layers = [{"q": jnp.asarray(rng.normal(size=(2, 9)))} for _ in range(4)]
    atoms, c = fit_mixture(layers, layers, (2, 0, 3, 1))
    assert_close(c["q"], np.eye(4)[[2, 0, 3, 1]], loosen=100)
    assert_close(atoms["q"], jnp.stack([layers[i]["q"] for i in (1, 3, 0, 2)]), loosen=100)
    c = fit_mixture(layers, layers[:3], (0, 1, 2, 1))[1]["q"]
    assert_close(c.T @ c, 4 / 3 * np.eye(3), loosen=100)
    short = [{"norm": jnp.asarray(rng.normal(size=2))} for _ in range(4)]  # 2 numbers, 3 slots
    atoms, c = fit_mixture(short, short[:3], (0, 1, 2, 1))
    assert_close(c["norm"] @ atoms["norm"], jnp.stack([w["norm"] for w in short]), loosen=100)


def test_both_texts_and_kinds():
    """A decoder's second attention is mixed as its first; kinds have a dictionary each."""
    both = dataclasses.replace(SMALL, kind="encoder_decoder", encoder=EncoderConfig(num_layers=4))
    assert both.plan["cross_mixture"] == (0, 1, 2, 3, 4)
    assert {*both.encoder_plan} == {"attention", "ffn", "attention_mixture"}
    shared = dataclasses.replace(both, encoder=EncoderConfig(shares_decoder=True))
    params = jax.tree.map(jnp.shape, param_shapes(shared))
    assert params["layers"]["cross_mixture"]["q"] == (5, 3)
    assert "encoder_layers" not in params
    with pytest.raises(ValueError, match="attention_mixture has a coefficient for"):
        dataclasses.replace(
            shared, encoder=EncoderConfig(shares_decoder=True, sharing="dictionary:2")
        )
    with pytest.raises(ValueError, match="without deltas and mixtures"):
        tie_encoder(dataclasses.replace(both, encoder=EncoderConfig(num_layers=5)), {})
    wider = dataclasses.replace(SMALL.heads, head_dim=6)
    types = (
        (1, LayerOverrides(sharing="dictionary:2")),
        (1, LayerOverrides(heads=wider, sharing="albert")),
    )
    kinds = dataclasses.replace(SMALL, layer_types=types)
    assert num_parameters(kinds) == sum(a.size for a in jax.tree.leaves(param_shapes(kinds)))


def test_layers_that_mix_share_nothing_but_coefficients():
    assert SMALL.plan.distinct_parameters("attention") == (0, 1, 2, 3, 4)
    matrices = jax.tree_util.tree_leaves_with_path(weight_decay_mask(param_shapes(SMALL)["layers"]))
    assert {path[-1].key for path, on in matrices if on} == {*"qkvo", "up", "down"}
    assert not any(on for path, on in matrices if path[0].key == "attention_mixture")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("attention=0..4 kv=0..4 ffn=0..4 kv_mixture=0..4", "kv_mixture: 'kv' cannot be mixed"),
        ("attention=0..4 ffn=0..4 delta=0..4 delta_mixture=0..4", "'delta' cannot be mixed"),
        ("attention=0..4 ffn=0..4 cross_mixture=0..4", "the plan has no sublayer 'cross' to mix"),
        ("attention=0,1,0,1,0 ffn=0..4 attention_mixture=0,0,1,1,1", "groups 0 and 1 of"),
        ("dictionary:6", "from 1 to the 5 layers"),
    ],
)  # fmt: skip
def test_plans_that_mix_what_cannot_be(plan, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, sharing=plan)


def test_what_asks_for_whole_slots_is_refused():
    for f, heads in ((remove_heads, {0: [1]}), (scale_heads, {"heads": jnp.ones((3, 3))})):
        with pytest.raises(ValueError, match="to a plan without a mixture first"):
            f(SMALL, {}, heads)
    with pytest.raises(ValueError, match="unshare the model first"):
        detect_sharing(SMALL, {})
    rows = Plan(**PARTS, attention_mixture=(0, 1, 2, 2, 1))
    separate = dataclasses.replace(SMALL, sharing="separate")
    params = jax.tree.map(lambda a: jnp.zeros(a.shape), param_shapes(separate))
    with pytest.raises(ValueError, match="needs its own attention_mixture, in order"):
        change_plan(separate, params, rows)


def test_names():
    plan = parse_plan("dictionary:2", 4)
    assert plan == Plan(attention=(0, 1, 0, 1), ffn=range(4), attention_mixture=range(4))
    assert (plan_name(plan), plan.num_groups["attention_mixture"]) == ("dictionary:2", 4)


@pytest.mark.slow
def test_it_trains_by_flag(tmp_path):
    """Coefficients leave the slots they began with; the next run gives each layer its sum."""
    lab = ["--config=experiments/configs/byte_lm.py:tiny", f"--workdir={tmp_path}/mixed"]
    done = command("experiments.run", *lab, "--config.model.sharing=dictionary:2")
    assert done.returncode == 0, done.stderr
    model, params = load_run(tmp_path / "mixed")
    assert model.config.sharing == "dictionary:2"
    for name in "qkvo":
        c = params["layers"]["attention_mixture"][name]
        assert 1e-5 < np.abs(c - np.eye(2)[np.arange(len(c)) % 2]).max() < 0.5
    lab = [lab[0], f"--workdir={tmp_path}/apart", f"--config.start={tmp_path}/mixed"]
    done = command("experiments.run", *lab, "--config.model.sharing=separate")
    assert done.returncode == 0, done.stderr
    left = (tmp_path / "apart" / "result.json").read_text()
    (told,) = re.findall("dictionary:2 -> separate: outputs differ by (.*) of", left)
    assert float(told) < 1e-6


def test_weights_in_numpy_s_float64_keep_their_digits():
    """Without `jax_enable_x64`, a JAX array would have half of them."""
    stacked = {"attention": {"q": np.arange(6.0).reshape(2, 3) + 1e-12}}
    q = layer_params(stacked, Plan(attention=(0, 1)), 1)["attention"]["q"]
    assert q.dtype == np.float64
    np.testing.assert_array_equal(q, np.arange(3.0, 6) + 1e-12)
