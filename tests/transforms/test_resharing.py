"""Plans change under a model; what must not move does not, and what moves is measured."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from conversions import logits, random_model
from test_models import SMALL, TOKENS

from attnlab import models, transforms
from attnlab.heads import Latent
from attnlab.load import with_plan_of
from attnlab.models.config import EncoderConfig
from attnlab.sharing import Plan, parse_plan
from attnlab.transforms import change_plan, detect_sharing, output_difference, tie_encoder, unshare

DEEP = replace(SMALL, num_layers=4)
FOUR = (0, 1, 2, 3)
EACH = dict(attention=FOUR, ffn=FOUR)


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("plan", ["albert", "attention_only", "sandwich", "cycle:2", "cycle_rev:3"])
def test_layers_with_copies_give_the_same_logits_and_are_found_to_be_copies(plan):
    """Where one bit differs a group is separate: see `test_written.py`."""
    before = replace(DEEP, sharing=plan)
    params = random_model(before)
    after = unshare(before, {"params": params})
    assert after[0].sharing == "separate"
    assert output_difference((before, params), after, TOKENS) == 0
    equal(change_plan(*after, plan)[1], params)
    found, once = detect_sharing(*after)
    assert found == before
    equal(once, params)


def test_sharing_is_found_beside_pointers_to_keys():
    config = replace(DEEP, sharing="attention=0,1,2,3 kv=0,1,@0,@1 ffn=0,1,2,3")
    params = random_model(config)
    for part in ("attention", "ffn"):
        params["layers"][part] = jax.tree.map(lambda a: a.at[3].set(a[1]), params["layers"][part])
    found, once = detect_sharing(config, params)
    assert found.sharing == "attention=0,1,2,1 kv=0,1,@0,@1 ffn=0,1,2,1"
    assert output_difference((config, params), (found, once), TOKENS) == 0


def test_groups_that_become_one_are_one_for_an_encoder_that_uses_them():
    config = replace(
        SMALL, kind="encoder_decoder", encoder=EncoderConfig(num_layers=2, shares_decoder=True)
    )
    params = random_model(config)
    layers = params["layers"]
    layers["attention"] = jax.tree.map(lambda a: a.at[1].set(a[0]), layers["attention"])
    for own in (None, Plan(attention=(1, 0), ffn=(1, 0))):
        encoder = replace(config.encoder, sharing=own)
        before = replace(config, encoder=encoder), params
        found, once = detect_sharing(*before)
        ffn = (0, 1) if own is None else (1, 0)
        assert found.encoder_model.plan == Plan(attention=(0, 0), ffn=ffn)
    assert output_difference(before, (found, once), TOKENS) == 0


def test_equal_stacks_with_relative_positions_per_layer_stay_two():
    config = replace(BOTH, positions=models.Relative(per_layer=True))
    params = random_model(config)
    for name, a in models.params.encoder_params(config, params).items():
        if f"encoder_{name}" in params:
            ours = params[name]
            is_stack = name == "layers"
            params[f"encoder_{name}"] = {n: ours[n] for n in a} if is_stack else ours
    found, same = detect_sharing(config, params)
    assert not found.encoder.shares_decoder
    equal(same, params)


def test_a_group_is_the_mean_of_its_layers_or_the_first():
    params = random_model(DEEP)
    config, shared = change_plan(DEEP, params, "cycle:2")
    up = params["layers"]["ffn"]["up"]
    assert_close(shared["layers"]["ffn"]["up"], (up[:2] + up[2:]) / 2)
    assert output_difference((DEEP, params), (config, shared), TOKENS) > 0.1
    kept = change_plan(DEEP, params, "cycle:2", merge="first")[1]["layers"]
    equal(kept, jax.tree.map(lambda a: a[:2], params["layers"]))
    by_hand = Plan(attention=(0, 0, 1, 1), ffn=(0, 1, 1, 2))
    config, shared = change_plan(DEEP, params, by_hand)
    assert config.plan == by_hand
    assert shared["layers"]["ffn"]["up"].shape[0] == 3


IMAGES = models.Images(height=6, width=4, channels=3, patch_height=2, patch_width=4)
NO_LOGITS = replace(SMALL, kind="encoder", output=models.OutputHead(kind="none"))
CLASSES = models.OutputHead(kind="none", pooler="first", num_classes=5)
WITHOUT_LOGITS = {
    "hidden": NO_LOGITS,
    "classes": replace(NO_LOGITS, output=CLASSES),
    "images": replace(
        NO_LOGITS, vocab_size=IMAGES.num_features, max_len=IMAGES.num_tokens,
        embedding=models.Embedding(images=IMAGES),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_LOGITS)
def test_models_without_logits_differ_in_their_hidden_states_or_classes(name):
    config = WITHOUT_LOGITS[name]
    params = random_model(config)
    changed = params | {"final_norm": jax.tree.map(lambda a: 1.5 * a, params["final_norm"])}
    pixels = jnp.asarray(np.random.default_rng(3).normal(size=(2, 6, 4, 3)))
    given = pixels if name == "images" else TOKENS
    assert output_difference((config, params), (config, params), given) == 0
    found = output_difference((config, params), (config, changed), given)
    before, after = (config.build().apply({"params": p}, given) for p in (params, changed))
    differences = [
        np.abs(b - a).max() / np.abs(a).max()
        for a, b in ((before.hidden, after.hidden), (before.classes, after.classes))
        if a is not None
    ]
    assert len(differences) == 1 + (name == "classes")
    np.testing.assert_allclose(found, max(differences), rtol=1e-5)
    np.testing.assert_allclose(differences[0], 0.5, rtol=1e-5)


TYPES = replace(
    SMALL, num_layers=6, sharing="cycle:2",
    layer_types=(
        (2, models.LayerOverrides(window=1, sharing="albert")), (1, models.LayerOverrides())
    ),
)  # fmt: skip
ONLY_PLANS = replace(
    TYPES,
    layer_types=((1, models.LayerOverrides(sharing="albert")), (2, models.LayerOverrides())),
)
BOTH = replace(
    DEEP, kind="encoder_decoder", encoder=EncoderConfig(num_layers=4), positions=models.Relative()
)
OTHER_PLANS = replace(BOTH, encoder=EncoderConfig(num_layers=4, sharing="albert"))
LIKE_BOTH = EncoderConfig(num_layers=4, sharing="relaxed:4")
BASE_OF_DELTAS = replace(
    BOTH, sharing="relaxed:1",
    encoder=EncoderConfig(num_layers=4, sharing="albert", shares_decoder=True),
)  # fmt: skip


def changed(plan, **options):
    return lambda config, params: change_plan(config, params, plan, **options)


def as_model(**fields):
    """Under the plan of a model with other fields."""

    def change(config, params):
        model = replace(config, **fields)
        return model, with_plan_of(config, params, model, TOKENS)[0]

    return change


ONE, THREE, KEYS = (0, 0, 0), (0, 1, 2), (0, "@0", "@0")
REUSED = dict(sharing=Plan(attention=ONE, kv=KEYS, ffn=ONE, delta=THREE), delta_rank=2)
OWN = dict(attention=THREE, kv=KEYS, ffn=THREE)
SAME = {
    # Reused keys are those of another layer, without a delta of the layer that reuses them. A
    # latent is; the layer's own delta counts in the keys and values that it makes of it.
    "keys": (replace(SMALL, **REUSED), changed(Plan(**OWN), delta_rank=99)),
    "latents": (
        replace(SMALL, heads=Latent(num_heads=3), **REUSED),
        changed(Plan(**OWN, delta=THREE), delta_rank=99),
    ),
    "full rank": (replace(DEEP, delta_rank=99), changed("relaxed:2")),
    "full rank, first": (replace(DEEP, delta_rank=99), changed("relaxed:2", merge="first")),
    "another rank": (replace(SMALL, sharing="relaxed:2", delta_rank=1), as_model(delta_rank=3)),
    # An encoder follows the decoder's plan; layer types keep a plan of their own.
    "an encoder": (replace(BOTH, sharing="albert"), as_model(sharing=Plan(**EACH))),
    "layer types": (replace(TYPES, sharing="albert"), as_model(sharing="separate")),
    "a plan of a layer type": (
        TYPES,
        as_model(
            layer_types=(
                (2, models.LayerOverrides(window=1, sharing="separate")),
                (1, models.LayerOverrides()),
            )
        ),
    ),
    "an encoder with deltas": (replace(BOTH, encoder=LIKE_BOTH), detect_sharing),
    "unshared layer types": (TYPES, unshare),
    "unshared, albert": (replace(BOTH, sharing="albert"), unshare),
    "unshared, cycle:2": (replace(BOTH, sharing="cycle:2"), unshare),
    "unshared, relaxed:2": (replace(BOTH, sharing="relaxed:2", delta_rank=3), unshare),
}


@pytest.mark.parametrize("name", deep(SAME, *(n for n in SAME if "unshared, " not in n)))
def test_another_plan_of_the_same_function(name, x64):
    config, change = SAME[name]
    config = replace(config, compute=models.Compute(dtype="float64"))
    before = config, random_model(config)
    after = change(*before)
    models.check_params(*after)
    assert output_difference(before, after, TOKENS) < 1e-10
    if change is unshare:
        for stack in after[0].layer_stacks.values():
            assert stack.plan.num_groups["ffn"] == stack.plan.num_layers


REFUSED = [
    (changed(Plan(attention=(0, 0, 0))), SMALL, "a plan has the sublayers"),
    (changed(parse_plan("albert", 2)), SMALL, "is one for 2 layers, not for 3"),
    (changed("albert", merge="median"), SMALL, r"unknown merge 'median'.*mean, first"),
    (changed(Plan(**EACH, delta=(0, 0, 1, 1))), DEEP, "its own delta, in order"),
    (tie_encoder, SMALL, "not an encoder_decoder"),
    (transforms.untie_encoder, SMALL, "its own parameters already"),
    (transforms.untie_encoder, BOTH, "its own parameters already"),
    (tie_encoder, OTHER_PLANS, "encoder and decoder need the same plan"),
    (changed(TYPES.plan), TYPES, "give the name of a plan"),
    (unshare, ONLY_PLANS, "differ only in their plans"),
    (unshare, BASE_OF_DELTAS, "has another plan: use untie_encoder first"),
    (detect_sharing, TYPES, "one layer type"),
]


@pytest.mark.parametrize(("function", "config", "message"), REFUSED)
def test_what_cannot_be_done_says_why(function, config, message):
    with pytest.raises(ValueError, match=message):
        function(config, random_model(config))


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "function",
    [
        changed("groups:2"), unshare, detect_sharing, tie_encoder, transforms.untie_encoder,
        lambda config, params: transforms.scale_heads(config, params, {"heads": jnp.ones((4, 3))}),
        lambda config, params: transforms.remove_heads(config, params, {i: [0] for i in range(4)}),
    ],
)  # fmt: skip
def test_params_of_another_model_and_swapped_arguments_are_refused(function):
    """JAX would take the last group for every later one."""
    params = random_model(SMALL)
    with pytest.raises(ValueError, match="params are not those of this model"):
        function(DEEP, params)
    with pytest.raises(TypeError, match=r"in transforms \(config, params\)"):
        function(params, SMALL)


@pytest.mark.slow
def test_keys_of_neighbours_become_one():
    """Cut into parts and joined again is exact; taken from a neighbour it is another function."""
    params = random_model(DEEP)
    apart = change_plan(DEEP, params, Plan(**EACH, kv=FOUR))
    assert output_difference((DEEP, params), apart, TOKENS) == 0
    equal(unshare(*apart)[1], params)
    pairs = change_plan(DEEP, params, "cla:2")
    keys = params["layers"]["attention"]["k"]
    assert_close(pairs[1]["layers"]["kv"]["k"], (keys[::2] + keys[1::2]) / 2)
    assert output_difference((DEEP, params), pairs, TOKENS) > 0.1
    albert = change_plan(*pairs, "attention=0,0,0,0 kv=0,@0,0,@2 ffn=0,0,0,0")
    assert albert[0].plan.kv_indices == (0, 0, 1, 1)
    with pytest.raises(ValueError, match=r"needs the same sublayer kv, .0, '@0', 1, '@2'."):
        unshare(*pairs)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["separate", "cycle:2", "relaxed:2"])
def test_an_encoder_is_taken_apart_and_tied_again(plan):
    encoder = EncoderConfig(num_layers=4, shares_decoder=True)
    config = replace(BOTH, sharing=plan, encoder=encoder)
    params = random_model(config)
    expected = logits(config, params, TOKENS)
    alone, copied = transforms.untie_encoder(config, params)
    assert_close(logits(alone, copied, TOKENS), expected)
    if plan != "relaxed:2":
        tied, again = tie_encoder(alone, copied)
        assert tied == config
        equal(again, params)
        found, once = detect_sharing(*unshare(alone, copied))
        assert found.encoder.shares_decoder
        assert (found.plan, found.encoder_model.plan) == (config.plan, config.encoder_model.plan)
        equal(once, params)
    apart, more = unshare(config, params)
    assert apart.encoder.shares_decoder
    assert_close(logits(apart, more, TOKENS), expected, loosen=10)


def test_tying_takes_the_mean_of_the_stacks():
    params = random_model(BOTH)
    tied, merged = tie_encoder(BOTH, params)
    mean = lambda one, other: jax.tree.map(lambda *pair: sum(pair) / 2, one, other)
    assert_close(merged["final_norm"], mean(params["final_norm"], params["encoder_final_norm"]))
    for sublayer in ("attention", "ffn"):
        ours, encoder = (params[stack][sublayer] for stack in ("layers", "encoder_layers"))
        assert_close(merged["layers"][sublayer], mean(ours, encoder))
    equal(merged["layers"]["cross"], params["layers"]["cross"])
    assert jax.tree.structure(merged) == jax.tree.structure(models.param_shapes(tied))
