"""Random whole models: causality, caches, padding, counts, round trips, one training step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import LENGTH, VOCAB, draw

from attnlab import heads, models
from attnlab.models import flags

SEEDS = [pytest.param(seed, marks=() if seed < 1 else pytest.mark.slow) for seed in range(300)]
TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, VOCAB, (2, LENGTH)))
SOURCE = jnp.asarray(np.random.default_rng(1).integers(1, VOCAB, (2, 5)))
SOURCE_MASK = jnp.asarray(np.arange(5) < [[5], [3]])
TOLERANCE = 2e-4


class Case:
    """One random model with random parameters."""

    def __init__(self, seed):
        self.config, self.refusals = draw(seed)
        self.model = self.config.build()
        self.inputs = {}
        if self.config.encoder is not None:
            self.inputs = {"source": SOURCE, "source_padding_mask": SOURCE_MASK}
        rng = np.random.default_rng(seed)
        # Away from initial values, where biases, sinks and deltas are zero.
        self.params = jax.tree.map(
            lambda a: jnp.asarray(0.4 * rng.normal(size=a.shape) + (a.ndim < 3) * 0.1, a.dtype),
            models.param_shapes(self.config),
        )
        self.apply = jax.jit(self._apply)

    def _apply(self, params, tokens, **more):
        return self.model.apply({"params": params}, tokens, **(self.inputs | more))

    @property
    def is_causal(self):
        return self.config.kind != "encoder"


def assert_near(got, expected):
    assert got.shape == expected.shape
    got, expected = (np.asarray(a, np.float64) for a in (got, expected))
    scale = max(np.abs(expected).max(initial=0), 1.0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * scale)


def check_causality(case, whole):
    changed = case.apply(case.params, TOKENS.at[:, 4].set(TOKENS[:, 4] % (VOCAB - 1) + 1)).logits
    assert np.isfinite(whole).all()
    moved = np.abs(np.asarray(changed - whole)).max((0, 2))
    assert moved[4] > 0
    if case.is_causal:
        assert (moved[:4] == 0).all()


def check_padding(case, whole):
    """Padding behind the text holds NaN (as a mixture) and changes no token."""
    mask = jnp.asarray(np.arange(LENGTH) < [[LENGTH], [4]])
    words = jnp.where(mask[..., None], jax.nn.one_hot(TOKENS, VOCAB), jnp.nan)
    more = {"padding_mask": mask}
    if case.config.embedding.zero_token is not None:  # is a token, not a mixture
        words = jnp.where(mask, TOKENS, 10**6)
    got = case.apply(case.params, words, **more).logits
    assert_near(got[0], whole[0])
    short = {}
    if case.inputs:
        short = {"source": SOURCE[1:], "source_padding_mask": SOURCE_MASK[1:]}
    alone = case.apply(case.params, TOKENS[1:, :4], **short).logits
    assert_near(got[1, :4], alone[0])


def check_decoding(case, whole):
    """A prompt of 3 tokens, then one by one."""
    cache = case.config.init_cache(2, LENGTH)
    more = dict(case.inputs)
    if case.inputs:
        more["encoded"] = case.apply(case.params, TOKENS).encoded
        more["source"] = None
    found = []
    for start, end in [(0, 3), *((t, t + 1) for t in range(3, LENGTH))]:
        outputs = case.apply(case.params, TOKENS[:, start:end], cache=cache, **more)
        cache = outputs.cache
        found.append(outputs.logits)
    assert_near(jnp.concatenate(found, axis=1), whole)


def check_eager_call(case, whole):
    """Outside of `jit`, with every value captured: the same bits."""
    names = tuple(models.model_values(case.config))
    eager = case.model.apply({"params": case.params}, TOKENS, capture=names, **case.inputs)
    np.testing.assert_array_equal(eager.logits, whole)


def check_counts(case):
    """By formula and by the tree; the config is that of every way to write it."""
    config = case.config
    assert models.num_parameters(config) == sum(a.size for a in jax.tree.leaves(case.params))
    repeated = sum((n - 1) * size for n, size in models.parameters_by_uses(config).items())
    assert models.applied_parameters(config) == models.num_parameters(config) + repeated
    assert models.flops_per_token(config, LENGTH) > 0
    names = {**vars(models), **vars(models.config), **vars(heads)}
    assert eval(repr(config), names) == config
    assert flags.from_json(flags.to_json(config)) == config
    assert flags.from_dict(flags.to_dict(config)) == config
    assert hash(config) == hash(flags.from_json(flags.to_json(config)))


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
    dropout = case.config.dropout
    drops = dropout.rate > 0 or dropout.attention > 0 or (dropout.ffn > 0 and has_ffn(case.config))
    assert (other != value) == drops


def has_ffn(config):
    return any(c.ffn.width for c in config.stacks.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model(seed):
    case = Case(seed)
    whole = case.apply(case.params, TOKENS).logits
    check_eager_call(case, whole)
    check_causality(case, whole)
    check_padding(case, whole)
    if case.is_causal:
        check_decoding(case, whole)
    check_counts(case)
    check_training_step(case)
