"""What a page says of a model is what the model does: gates, losses, plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from interpreted_models import config_of, random_params

from attnlab import interpret
from attnlab.attention.masks import Edges
from attnlab.heads import Differential, Standard
from attnlab.interpret import head_predictions, model_panel, statistics_with_baselines
from attnlab.models import FFN, Embedding, EncoderConfig, Images, LayerOverrides, OutputHead
from attnlab.models.params import param_shapes

DECODER = config_of(num_heads=2, head_dim=5, sharing="attention=0,1,1 ffn=0,1,0")
TOKENS = np.array([[3, 1, 4, 3, 1, 5]], np.int32)
TEXT, NAMES = {"tokens": TOKENS}, {"tokens": list("abcdef")}


@pytest.fixture(scope="module")
def decoder():
    """What a page shows of a decoder, and its call with a gate for each head."""
    params, model = random_params(DECODER), DECODER.build()
    panel = model_panel(DECODER, params, TEXT, NAMES)

    @jax.jit
    def logits(params, gate):
        return model.apply({"params": params}, TOKENS, head_mask=gate, capture=("probs",))

    return panel, functools.partial(logits, params)


def bits(logits):
    """Mean code length of every next token, by NumPy."""
    logits = np.asarray(logits, np.float64)[0, :-1]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    return -np.mean(np.log2(p[np.arange(5), TOKENS[0, 1:]]))


def test_maps_and_statistics_are_those_of_the_model(decoder):
    panel, logits = decoder
    maps = panel.maps[0]
    probs = logits(np.ones((3, 2))).captured["probs"]
    assert_close(jnp.asarray(maps.probs), probs[:, 0])
    for name, value in interpret.head_statistics(probs, TOKENS).items():
        assert_close(jnp.asarray(maps.statistics[name]), value)
        assert name in maps.descriptions
    assert (maps.name, maps.keys, maps.plan) == ("decoder", None, {"attention": (0, 1, 1)})
    said = "3 layers, width 12, 2 standard heads of head_dim 5, sharing attention=0,1,1"
    assert said in panel.description


def test_a_loss_without_a_head_is_that_of_its_gate(decoder):
    panel, logits = decoder
    found = panel.maps[0].statistics
    whole = bits(logits(np.ones((3, 2))).logits)
    for layer, head in ((0, 1), (1, 0), (2, 1)):
        gate = np.ones((3, 2))
        gate[layer, head] = 0
        alone = bits(logits(gate).logits) - whole
        gate[(1, 2) if layer else 0, head] = 0  # layers 1 and 2 are one set
        whole_set = bits(logits(gate).logits) - whole
        assert abs(found["loss increase"][layer, head] - alone) < 1e-4
        assert abs(found["loss increase (group)"][layer, head] - whole_set) < 1e-4
    apart = found["loss increase"] - found["loss increase (group)"]
    assert np.abs(apart[1:]).min() > 1e-3
    assert np.abs(apart[0]).max() < 1e-6


def test_a_metric_may_be_a_ratio():
    """Of a model that adds the heads; layers 1 and 2 share theirs."""

    def added(params, patch):
        return sum(patch.get("heads", lambda a, i: a)(jnp.ones((1, 1, 2, 1)), i) for i in range(3))

    ratio = interpret.AblationMetric("ratio", "", added, lambda a, b: jnp.sum(a) / jnp.sum(b))
    panel = model_panel(DECODER, random_params(DECODER), TEXT, NAMES, metric=ratio)
    found = panel.maps[0].statistics
    np.testing.assert_allclose(found["ratio"], np.full((3, 2), 5 / 6), rtol=1e-6)
    of_groups = np.array([[5, 5], [4, 4], [4, 4]]) / 6
    np.testing.assert_allclose(found["ratio (group)"], of_groups, rtol=1e-6)


@pytest.mark.parametrize("typed", deep([False, True], False))
def test_both_maps_of_a_differential_head_have_the_effect_of_the_head(typed):
    """Maps of 4 heads of 2 key heads: [key head, first or second, query head of this key head]."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 5}
    types = ((1, LayerOverrides(heads=Differential(**sizes), window=n)) for n in (7, 8))
    config = config_of(
        "standard" if typed else "differential", **sizes, num_layers=2,
        layer_types=tuple(types) if typed else (),
    )  # fmt: skip
    params = random_params(config)
    panel = model_panel(config, params, TEXT, NAMES)
    found = panel.maps[0].statistics["loss increase"]
    assert panel.maps[0].probs.shape == (2, 8, 6, 6)
    assert_close(found[:, [2, 3, 6, 7]], found[:, [0, 1, 4, 5]])
    gates = np.ones((3, 2, 4))
    gates[1, 0, 1] = gates[2, 1, 2] = 0
    model = config.build()
    run = jax.jit(lambda gate: model.apply({"params": params}, TOKENS, head_mask=gate).logits)
    whole, first, second = (bits(run(gate)) for gate in gates)
    np.testing.assert_allclose(found[0, [1, 3]], first - whole, atol=1e-4)
    np.testing.assert_allclose(found[1, [4, 6]], second - whole, atol=1e-4)
    assert len(np.unique(found.round(5))) == 8
    assert "loss increase" in interpret.view_panels([panel]).html


@pytest.mark.parametrize("readout", ["tied", "none"])
def test_an_encoder_says_how_far_its_answer_moves(readout):
    config = config_of(num_heads=2, kind="encoder", num_layers=1, output=OutputHead(kind=readout))
    params, model = random_params(config), config.build()
    panel = model_panel(config, params, TEXT, NAMES)
    found = panel.maps[0].statistics["output change"]
    gates = np.array([[[1, 1]], [[0, 1]], [[1, 0]]], np.float32)  # whole, and without each head

    run = jax.jit(lambda gate: model.apply({"params": params}, TOKENS, head_mask=gate))
    answers = [one.hidden if readout == "none" else one.logits for one in map(run, gates)]
    x = np.array(answers, np.float64)[:, 0]
    if readout == "none":
        expected = [np.linalg.norm(a - x[0]) / np.linalg.norm(x[0]) for a in x]
    else:
        p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        expected = [np.mean(np.sum(p[0] * np.log2(p[0] / q), -1)) for q in p]
    assert np.abs(found - expected[1:]).max() < 1e-4
    assert found.min() > 1e-3


@pytest.mark.parametrize("kind", ["decoder", "encoder", "hidden"])
def test_padding_does_not_count(kind):
    output = OutputHead(kind="none" if kind == "hidden" else "tied")
    kind = "decoder" if kind == "decoder" else "encoder"
    config = config_of(num_heads=2, kind=kind, num_layers=1, output=output)
    params, patch = random_params(config), {"heads": lambda a, layer: a.at[..., 1, :].set(0)}
    longer = np.pad(TOKENS, [(0, 0), (0, 2)])

    @jax.jit
    def change(params):
        found = []
        for tokens in (TOKENS, longer):
            inputs = {"tokens": tokens, "padding_mask": np.arange(tokens.shape[1])[None] < 6}
            metric = interpret.default_metric(config, inputs)
            found.append(metric.change(metric.output(params, patch), metric.output(params, {})))
        return found

    alone, padded = change(params)
    assert abs(alone - padded) < 1e-5 < abs(alone)


def test_an_image_has_a_panel_of_patches():
    images = Images(height=4, width=6, channels=1, patch_height=2, patch_width=2)
    config = config_of(
        num_heads=2, kind="encoder", num_layers=1, output=OutputHead(kind="none"),
        embedding=Embedding(images=images), vocab_size=images.num_features,
    )  # fmt: skip
    image = np.random.default_rng(0).normal(size=(1, 4, 6, 1)).astype(np.float32)
    panel = model_panel(config, random_params(config), {"tokens": image}, {"tokens": "0123456"})
    assert panel.maps[0].probs.shape == (1, 2, 7, 7)
    assert (panel.maps[0].statistics["output change"] > 0).all()


def test_a_graph_is_shown_over_its_edges():
    """As a mask of edges, which is no array."""
    config = config_of(num_heads=2, kind="encoder", num_layers=1)
    edges = Edges(np.array([[0, 1, 2, 3, 4, 5, 0]]), np.array([[0, 1, 2, 3, 4, 5, 3]]))
    inputs = {"tokens": TOKENS, "mask": edges}
    panel = model_panel(config, random_params(config), inputs, NAMES)
    probs = np.asarray(panel.maps[0].probs)[0]
    assert ((probs > 0) == np.asarray(edges.matrix(6))[0]).all()


BOTH = config_of(
    num_heads=2, kind="encoder_decoder", num_layers=2, sharing="albert", ffn=FFN(width=6),
    encoder=EncoderConfig(num_layers=1),
)  # fmt: skip
TEXTS = {"source": TOKENS, "tokens": TOKENS[:, :4]}
WRITTEN = {"source": list("abcde"), "tokens": list("xyzw")}  # the last of the source is filling


@pytest.mark.slow
def test_an_encoder_decoder_has_three_attentions():
    """A head of each is gated."""
    params = random_params(BOTH)
    panel = model_panel(BOTH, params, TEXTS, WRITTEN)
    shapes = {maps.name: maps.probs.shape for maps in panel.maps}
    assert shapes == {
        "encoder": (1, 2, 5, 5), "decoder": (2, 2, 4, 4), "decoder to encoder": (2, 2, 4, 5),
    }  # fmt: skip
    plans = [dict(maps.plan) for maps in panel.maps]
    assert plans == [{"attention": (0,)}, {"attention": (0, 0)}, {"cross": (0, 0)}]
    assert (panel.maps[2].tokens, panel.maps[2].keys) == (list("xyzw"), list("abcde"))
    apply = lambda edit: BOTH.build().apply({"params": params}, **TEXTS, patch=edit).logits

    def gone(last):
        return lambda heads, layer: jnp.where(layer == last, heads.at[:, :, 1].set(0), heads)

    edits = {"encoder": (0, "encoder."), "decoder": (1, ""), "decoder to encoder": (1, "cross.")}
    named = {name: {f"{prefix}heads": gone(last)} for name, (last, prefix) in edits.items()}
    logits = jax.jit(lambda: {name: apply(edit) for name, edit in {"": {}, **named}.items()})()
    cost = lambda a: -jnp.mean(jax.nn.log_softmax(a[0, :-1])[jnp.arange(3), TOKENS[0, 1:4]])
    for maps in panel.maps:
        worth = float(cost(logits[maps.name]) - cost(logits[""])) / np.log(2)
        assert abs(worth) > 1e-3
        last = edits[maps.name][0]
        assert abs(maps.statistics["loss increase"][last, 1] - worth) < 1e-4


@pytest.mark.slow
def test_layer_types_with_equal_heads_have_a_panel():
    types = ((1, LayerOverrides(window=2, order="bilinear")), (1, LayerOverrides(sharing="albert")))
    config = config_of(num_layers=5, layer_types=types, num_heads=4, num_kv_heads=2)
    panel = model_panel(config, random_params(config), TEXT, NAMES)
    assert panel.maps[0].probs.shape == (5, 4, 6, 6)
    groups = panel.maps[0].plan["attention"]
    assert groups[1] == groups[3]
    assert len(set(groups)) == 4
    assert "2 layer types" in panel.description


def test_one_text_and_equal_heads_at_a_time():
    """As many heads, and as many softmax distributions of each."""
    pairs, mixed = (
        config_of(layer_types=((1, LayerOverrides(heads=heads)), (1, LayerOverrides())))
        for heads in (Differential(num_heads=3), Standard(num_heads=1))
    )
    apart = config_of(kind="encoder_decoder", encoder=EncoderConfig(num_heads=4))
    two, rest = {"tokens": np.concatenate([TOKENS, TOKENS])}, {"key": jax.random.key(0)}
    for call, message in (
        (lambda p: model_panel(pairs, p, TEXT, NAMES), "'probs' of different shapes"),
        (lambda p: head_predictions(pairs, p, [(TOKENS[0], np.eye(6))]), "different shapes"),
        (lambda p: statistics_with_baselines(pairs, p, TOKENS, **rest), "different shapes"),
        (lambda p: model_panel(DECODER, p, two, NAMES), "one text, not 2"),
        (lambda p: model_panel(apart, p, TEXT, NAMES), "layers have 3 or 4 heads"),
        (lambda p: model_panel(mixed, p, TEXT, NAMES), "layers have 1 or 3 heads"),
        (lambda p: head_predictions(mixed, p, []), "layers have 1 or 3 heads"),
        (lambda p: interpret.head_gates(mixed), "layers have 1 or 3 heads"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(call, param_shapes(pairs))
