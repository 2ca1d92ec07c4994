"""What holds for every model, for random ones of each layout: who attends to whom, padding, caches,
sharing, captured values, counts, budgets, configs as text, one training step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep, product_flops
from hypothesis import HealthCheck, Phase, given, settings
from random_models import LENGTH, OURS, VOCAB, configs, random_params
from test_budget import assert_nearest

from attnlab import heads, models, prefill
from attnlab.models import flags
from attnlab.models.cost import weight_flops
from attnlab.models.describe import describe
from attnlab.models.ffn import inactive_parameters
from attnlab.transforms import unshare, untie_encoder

TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, VOCAB, (2, LENGTH)))
SOURCE = jnp.asarray(np.random.default_rng(1).integers(1, VOCAB, (2, 5)))
SOURCE_MASK = jnp.asarray(np.arange(5) < [[5], [3]])
assert_near = functools.partial(assert_close, loosen=10)


class Case:
    """A model with random parameters."""

    def __init__(self, config):
        self.config, self.model, self.inputs = config, config.build(), {}
        if config.encoder is not None:
            self.inputs = {"source": SOURCE, "source_padding_mask": SOURCE_MASK}
        # Away from initial values, where biases, sinks and deltas are zero.
        self.params = random_params(config, seed=2, scale=0.4)
        self.apply = jax.jit(self._apply)

    def _apply(self, params, tokens, **more):
        return self.model.apply({"params": params}, tokens, **(self.inputs | more))


def check_causality(case, whole):
    changed = case.apply(case.params, TOKENS.at[:, 4].set(TOKENS[:, 4] % (VOCAB - 1) + 1)).logits
    assert np.isfinite(whole).all()
    moved = np.abs(np.asarray(changed - whole)).max((0, 2))
    assert moved[4] > 0
    if case.config.kind != "encoder":
        # Experts compute rows in blocks, whose bits depend on the rows beside them.
        assert (moved[:4] <= (1e-5 * np.abs(whole).max() if has_experts(case.config) else 0)).all()


def check_padding(case, whole):
    """Padding behind the text holds NaN (as a mixture) and changes no token and no class."""
    mask = jnp.asarray(np.arange(LENGTH) < [[LENGTH], [4]])
    words = jnp.where(mask[..., None], jax.nn.one_hot(TOKENS, VOCAB), jnp.nan)
    more = {"padding_mask": mask}
    if case.config.embedding.zero_token is not None:  # is a token, not a mixture
        words = jnp.where(mask, TOKENS, 10**6)
    got = case.apply(case.params, words, **more)
    assert_near(got.logits[0], whole[0])
    short = {}
    if case.inputs:
        short = {"source": SOURCE[1:], "source_padding_mask": SOURCE_MASK[1:]}
    alone = case.apply(case.params, TOKENS[1:, :4], **short)
    assert_near(got.logits[1, :4], alone.logits[0])
    if alone.classes is not None:
        each = case.config.output.pooler == "each"
        assert_near(got.classes[1, :4] if each else got.classes[1], alone.classes[0])


def check_decoding(case, whole):
    """A prompt of 4 tokens, then one by one; layers with a window have a ring. The second row has 2
    of padding, and is that row alone."""
    cache, text = case.config.init_cache(2, LENGTH, piece=4), np.asarray(TOKENS)
    text = np.stack([text[0], np.roll(text[1], 2)])
    mask = np.arange(4) >= [[0], [2]]
    inputs = {}
    if case.inputs:
        encoded = case.apply(case.params, TOKENS).encoded
        inputs = {"encoded": encoded, "source_padding_mask": SOURCE_MASK}

    @jax.jit
    def decode(params, cache):
        logits, cache = prefill(
            params, text[:, :4], case.config, cache, padding_mask=mask, **inputs
        )

        def step(cache, token):
            logits, cache = prefill(params, token[:, None], case.config, cache, **inputs)
            return cache, logits[:, 0]

        _, rest = jax.lax.scan(step, cache, text[:, 4:].T)
        return jnp.concatenate([logits, rest.swapaxes(0, 1)], axis=1)

    found = decode(case.params, cache)
    assert_near(found[0], whole[0])
    assert_near(found[1, 2:], whole[1, :5])


def check_plan(case, whole):
    """Layers that share parameters are layers with equal parameters of their own."""
    config, params = case.config, case.params
    if config.encoder is not None and config.encoder.shares_decoder:
        config, params = untie_encoder(config, params)
    if not reuses_kv(config):
        config, params = unshare(config, params)
    copied = config.build().apply({"params": params}, TOKENS, **case.inputs).logits
    assert_near(copied, whole)


def check_eager_call(case, whole):
    """Outside of `jit`, with every value captured: the same bits."""
    names = tuple(models.model_values(case.config))
    eager = case.model.apply({"params": case.params}, TOKENS, capture=names, **case.inputs)
    np.testing.assert_array_equal(eager.logits, whole)


def check_counts(case):
    """Parameters by formula and by the tree; FLOPs by formula and traced."""
    config, shapes = case.config, models.param_shapes(case.config)
    assert models.num_parameters(config) == sum(a.size for a in jax.tree.leaves(case.params))
    assert not any(a.weak_type for a in jax.tree.leaves(shapes))  # a step would compile again
    repeated = sum((n - 1) * size for n, size in models.parameters_by_uses(config).items())
    unused = sum(
        inactive_parameters(12, stack.layer.ffn) * stack.plan.num_layers
        for stack in config.layer_stacks.values()
    )
    passed = models.num_parameters(config) + repeated - unused
    assert models.applied_parameters(config) == passed
    rows = [row.split() for row in describe(config, LENGTH).rpartition("\n\n")[2].splitlines()[1:]]
    columns = [[int(row[i].replace(",", "")) for row in rows] for i in (-2, -1)]
    totals = models.num_parameters(config), models.flops_per_token(config, LENGTH)
    assert [(sum(of), last) for *of, last in columns] == [(total, total) for total in totals]
    if reuses_kv(config) or has_experts(config):  # a branch or a loop, whose trace has no count
        return
    options = dataclasses.replace(config.attention, order="factored", implementation="dense")
    types = [(n, dataclasses.replace(one, order="factored")) for n, one in config.layer_types]
    plain = dataclasses.replace(config, attention=options, layer_types=tuple(types))
    inputs = {"source": TOKENS[::-1]} if case.inputs else {}  # another text: equal products are one
    run = lambda p: plain.build().apply({"params": p}, TOKENS, **inputs)
    pooler, width, classes = config.output.pooler, config.width, config.output.num_classes
    once = width * width * (pooler == "first") + width * classes * (pooler not in (None, "each"))
    assert product_flops(jax.make_jaxpr(run)(shapes).jaxpr) == (
        2 * LENGTH * models.flops_per_token(config, LENGTH) + weight_flops(config) + 2 * 2 * once
    )


def check_budget(config):
    """No other width of the FFN has a nearer cost."""
    reference = models.ModelConfig(width=12, heads=heads.Standard(num_heads=3), num_layers=5)
    for budget in ("parameters", "flops"):
        assert_nearest(config, reference, budget)


def check_text(config):
    """The config is that of every way to write it."""
    names = {**vars(models), **vars(models.config), **vars(heads)}
    made = [eval(repr(config), names), flags.from_json(flags.to_json(config))]
    for other in (*made, flags.from_dict(flags.to_dict(config))):
        assert (other, hash(other)) == (config, hash(config))


def check_training_step(case):
    """The loss is finite and falls along its gradient; dropout draws."""

    @jax.jit
    @jax.value_and_grad
    def loss(params, key):
        outputs = case.model.apply(
            {"params": params}, TOKENS, deterministic=False, rngs={"dropout": key}, **case.inputs
        )
        log_probs = jax.nn.log_softmax(outputs.logits)
        value = -jnp.mean(jnp.take_along_axis(log_probs, TOKENS[..., None], -1))
        return value if outputs.classes is None else value + jnp.mean(outputs.classes**2)

    key = jax.random.key(0)
    value, gradient = loss(case.params, key)
    leaves = jax.tree.leaves(gradient)
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    # So short a step that the loss falls by what the gradient says, and still by many roundings.
    squared, fall = sum(float(jnp.sum(leaf**2)) for leaf in leaves), 1e-4 * float(value)
    step = jax.tree.map(lambda a, g: a - fall / squared * g, case.params, gradient)
    assert float(value - loss(step, key)[0]) == pytest.approx(fall, rel=0.5)
    other, _ = loss(case.params, jax.random.key(1))
    dropout, has_ffn = case.config.dropout, any(c.ffn.width for c in case.config.stacks.values())
    drops = dropout.rate > 0 or dropout.attention > 0 or (dropout.ffn > 0 and has_ffn)
    assert (other != value) == drops


def has_experts(config):
    return any(c.ffn.experts for c in config.stacks.values())


def reuses_kv(config):
    return any(any(stack.plan.reuses_kv) for stack in config.layer_stacks.values())


def check(config):
    case = Case(config)
    whole = case.apply(case.params, TOKENS).logits
    check_eager_call(case, whole)
    check_causality(case, whole)
    check_padding(case, whole)
    if config.kind != "encoder":
        check_decoding(case, whole)
    check_plan(case, whole)
    check_counts(case)
    check_budget(config)
    check_text(config)
    check_training_step(case)


USUAL = ("standard", "wide", "narrow", "latent")


@pytest.mark.parametrize("count", deep([1, 3], 1))
@pytest.mark.parametrize("layout", deep(list(OURS), *USUAL))
def test_random_models(layout, count):
    @settings(
        max_examples=count, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(configs(layouts=(layout,)))
    def run(config):
        check(config)

    run()
