"""What is no model, no call of a model, or no text to write: one error that names it and what is
allowed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_params
from test_models import SMALL, SOURCE, TOKENS, change

from attnlab import heads, models
from attnlab.interpret import head_gates
from attnlab.models import Attention, LayerOverrides, ModelConfig, OutputHead, from_dict, from_json

BOTH = (TypeError, ValueError)
ENCODER_DECODER = change(SMALL, kind="encoder_decoder")
TALKING = heads.Standard(num_heads=4, extras=(heads.TalkingHeads(),))
IMAGES = models.Images(height=6, width=15, channels=2, patch_height=3, patch_width=5)
ROTARY, RELATIVE = heads.Standard(num_heads=2, head_dim=3), models.Relative()


def types(*pairs, **fields):
    """A model with a type of layers for each (count, fields)."""
    pairs = [(count, LayerOverrides(**own)) for count, own in pairs]
    return ModelConfig(**{"num_layers": 5, "layer_types": pairs} | fields)


def images(**fields):
    base = {"kind": "encoder", "vocab_size": 32, "max_len": 7}
    return ModelConfig(embedding=models.Embedding(images=IMAGES), **base | fields)


def layout(name="wide", **fields):
    return from_dict({"heads": {"layout": name, "num_heads": 2, **fields}})


def backend(name, **fields):
    return ModelConfig(attention=Attention(implementation=name), **fields)


# "package.module:name" is for registries, whose entries are objects.
FIXED_NAME = "unknown .*'math:sin'.* known: "
CONFIGS = [
    (lambda: models.FFN(width=5, activation="math:sin"), FIXED_NAME),
    (lambda: head_gates(SMALL, "math:sin"), FIXED_NAME),
    (lambda: head_gates(SMALL, by="math:sin"), FIXED_NAME),
    *((lambda k=k: models.limit_logits(TOKENS, top_k=k), f"top_k .* 7, not {k}") for k in (0, 8)),
    (lambda: Attention(position_scale=(0.1,)), "position_scale must be a tuple of 2"),
    (lambda: Attention(position_scale=(0.1, 0)), "position_scale must be a finite number"),
    (lambda: SMALL.build().init(0, TOKENS), r"random key first, as of jax\.random\.key\(0\)"),
    (lambda: models.FFN(experts=models.Experts(num_experts=2, top_k=3)), "lower top_k"),
    (lambda: OutputHead(num_classes=3), r"output\.num_classes"),
    (lambda: OutputHead(kind="none", bias=True), "leave bias and transform out"),
    (lambda: Attention(implementation="flsh"), "implementation"),
    (lambda: ModelConfig(sharing="albrt"), "albert"),
    (lambda: ModelConfig(width=65), "width 65"),
    (lambda: ModelConfig(heads=heads.Standard(num_heads=4, key_width=5)), "leave key_width and"),
    (lambda: ModelConfig(attention=Attention(layer_scales=(1.0,))), "layer_scales"),
    (lambda: ModelConfig(positions=models.Rotary(scaling="dynamic:2,9"), max_len=10), "at most 9"),
    (lambda: ModelConfig(kind="encoder", positions=models.Learned(pad_token=3), max_len=4),
     "the first token is at position 4"),
    # Encoders.
    (lambda: ModelConfig(encoder=models.EncoderConfig()), "encoder"),
    (lambda: models.EncoderConfig(num_heads=4, shares_decoder=True),
     "both stacks have the same heads"),
    (lambda: change(ENCODER_DECODER, sharing="0,1,2", encoder=models.EncoderConfig(num_layers=2)),
     r"encoder\.sharing"),
    # Layer types.
    (lambda: ModelConfig(layer_types=((1, LayerOverrides(window=3)), 1)), "LayerOverrides"),
    (lambda: types((0, {"window": 3}), (1, {})), "number of layers"),
    (lambda: types((2, {"window": 3})), "has one type of layer"),
    (lambda: types((5, {"window": 3}), (1, {})), "has 6 layers, num_layers is 5"),
    (lambda: types((1, {"heads": ROTARY, "positions": models.Rotary()}), (1, {})),
     "the 3 layers of type .*rotary positions rotate pairs"),
    (lambda: types((1, {"sharing": "cla:9"}), (1, {})), "of type .*'cla:9' needs a"),
    (lambda: types((1, {"positions": RELATIVE}), (1, {})), r"not Relative\(\) and Learned\(\)"),
    (lambda: types((1, {"positions": models.Learned(offset=2)}), (1, {})), r"Learned\(offset=2\)"),
    (lambda: types((1, {"heads": ROTARY}), (1, {}), positions=RELATIVE), "table for 4 heads"),
    (lambda: types((1, {"window": 2}), (1, {}), kind="encoder_decoder"), "an encoder_decoder"),
    (lambda: LayerOverrides(window=3, full_attention=True), "give window or full_attention=True"),
    # Backends that cannot run the heads.
    (lambda: backend("blockwise", heads=TALKING), "'blockwise' .*talking_heads"),
    (lambda: backend("edges"), r"'edges' .*masks\.Edges"),
    (lambda: backend("xla", dropout=models.Dropout(attention=0.1)), "'xla' .*has no dropout_rate"),
    # Images.
    (lambda: change(IMAGES, height=7), "7 x 15"),
    (lambda: images(vocab_size=31), "set vocab_size=32"),
    (lambda: images(max_len=6), "set max_len=7"),
    (lambda: images(kind="encoder_decoder"), "set kind='encoder'"),
    # Nested dicts and JSON.
    (lambda: layout(latent_dim=8), "heads has no field 'latent_dim': .* of Wide"),
    (lambda: layout("wde"), "unknown layout 'wde'"),
    (lambda: layout(None), "heads.layout is not set; known: bilinear, "),
    (lambda: from_dict({"heads": {"layout": "wide"}}), "heads.num_heads is not set"),
    (lambda: layout(extras={"gates": {"on": True}}), "unknown extra 'gates'"),
    (lambda: layout(extras={"gate": {"per": "head"}}), "heads.extras.gate has no field 'per'"),
    (lambda: layout(extras={"gate": {"on": False, "by": "element"}}), "gate.on=True"),
    (lambda: layout(extras={"gate": 3}), "heads.extras.gate must be a dict of its fields, not 3"),
    (lambda: layout(biases=3), "biases must be names .* not 3"),
    (lambda: from_dict({"widht": 3}), "a model config has no field 'widht': .* are kind, "),
    (lambda: from_dict({"sharing": "Plan(attention=0"}), "sharing: cannot parse 'Plan"),
    (lambda: from_dict({"layer_types": [3]}), r"layer_types holds pairs \(count, .* not 3"),
    (lambda: from_dict({"layer_types": [[1, {"dropout": {}}]]}), "has no field 'dropout'"),
    (lambda: from_json("{"), "no JSON of a model config"),
    (lambda: from_json("[" * 100_000), "no JSON of a model config"),
    (lambda: from_json("[]"), "version None"),
    (lambda: from_json('{"version": 2, "model": {}}'), "version 2; this attnlab reads version 1"),
    (lambda: from_json('{"version": 1}'), "a dict of fields, not None"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), CONFIGS)
def test_fields(make, message):
    with pytest.raises(BOTH, match=message):
        make()


# Calls --------------------------------------------------------------------------------------------

TYPED = change(SMALL, embedding=models.Embedding(token_types=2))
TYPES = types((1, {"heads": heads.Narrow(num_heads=2)}), (1, {}), num_layers=3)
POOLED = change(SMALL, output=OutputHead(pooler="mean"))
LEARNED = change(ENCODER_DECODER, positions=models.Learned())
TABLE = change(SMALL, positions=models.Relative(table=True))
IDS, LONG_IDS = np.ones((2, 7), int), np.ones((2, 10), int)
ADDED = jnp.array([[0.0] * 6 + [-1e9]] * 2)
TEXT, ENCODED = {"source": SOURCE}, {"encoded": jnp.ones((2, 5, 12))}
CALLS = [
    (SMALL, {"tokens": jnp.zeros((1, 10), int)}, "10 tokens are longer than max_len 9"),
    (SMALL, {"mask": jnp.ones(3, bool)}, "mask"),
    (SMALL, {"padding_mask": jnp.ones(7, bool)}, "padding_mask"),
    (SMALL, {"padding_mask": ADDED}, "^padding_mask must be boolean .* not float32"),
    (SMALL, {"padding_mask": 2 * IDS}, "^padding_mask must hold 0"),
    (SMALL, {"positions": jnp.ones((3, 7), int)}, "positions"),
    (SMALL, {"positions": jnp.ones(7)}, "positions"),
    (TABLE, {"positions": np.arange(3, 10)}, r"position 9 at \[6\]"),
    (TYPED, {"token_types": jnp.zeros((3, 7), int)}, "token_types"),
    (TYPED, {"token_types": 2 * IDS}, r"token type 2 at \[0, 0\].* 0 to 1"),
    (SMALL, {"head_mask": jnp.ones((2, 3))}, r"head_mask \(2, 3\) must be .*\(3, 3\)"),
    (TYPES, {"head_mask": [np.ones(3)] * 2}, "head_mask has 2 arrays for 3 layers"),
    (TYPES, {"head_mask": np.ones((3, 4))}, "layers have 2 or 4 heads"),
    (SMALL, {"capture": "probs"}, "capture must be a tuple"),
    (SMALL, {"capture": ("math:sin",)}, FIXED_NAME),
    (SMALL, {"capture": ("porbs",)}, r"did you mean 'probs'\? known: .*scores"),
    (SMALL, {"patch": {"probs": 3}}, "patch"),
    (SMALL, {"patch": {"probs": lambda a, layer: a[..., 1:]}}, "patch of 'probs' returned shape"),
    # Caches.
    (SMALL, {"cache": 8}, "init_cache"),
    (SMALL, {"cache": {"k": jnp.ones(3)}}, "init_cache"),
    # Packed texts.
    (SMALL, {"segments": IDS[:, :5]}, r"segments \(2, 5\) must be \[B, T\] = \(2, 7\)"),
    (SMALL, {"segments": np.full((2, 7), 2**32 + 1)}, "segments has numbers up to 4294967297"),
    (SMALL, {"segments": (IDS, IDS)}, "segments must be a pair .* else one array"),
    (SMALL, {"segments": IDS, "cache": SMALL.init_cache(2, 9)}, "a cache holds one text a row"),
    (SMALL, {"segments": (IDS, IDS, IDS)}, "segments must be a pair .* else one array"),
    (POOLED, {"segments": IDS}, "makes one vector of a row"),
    # Of an encoder and its source.
    (SMALL, TEXT, "source is for kind='encoder_decoder'"),
    (ENCODER_DECODER, {}, "needs source"),
    (ENCODER_DECODER, TEXT | {"segments": IDS}, "segments must be a pair"),
    (LEARNED, {"source": LONG_IDS, "segments": (IDS, LONG_IDS)}, "position 9"),
    (ENCODER_DECODER, ENCODED | {"capture": ("encoder.probs",)}, "unknown.*: .*cross.probs"),
    (ENCODER_DECODER, {"source": SOURCE - 20}, r"token id -\d+ at \[0, 0\]"),
    (ENCODER_DECODER, TEXT | {"source_padding_mask": ADDED[:, 2:]}, "^source_padding_mask must be"),
    (ENCODER_DECODER, TEXT | {"source_padding_mask": 2 * IDS[:, 2:]}, "^source_.* must hold 0"),
    # Images.
    (images(), {"tokens": jnp.zeros((2, 15, 6, 2))}, r"images \(2, 15, 6, 2\) must be \[batch, 6"),
    (images(), {"tokens": jnp.zeros((2, 2, 6, 15))}, r"jnp.moveaxis\(images, 1, -1\)"),
    (images(), {"tokens": jnp.zeros((2, 6, 15, 2), "uint8")}, "uint8 must be float"),
    (images(), {"tokens": jnp.zeros((6, 15, 2))}, r"float32 and shape \(6, 15, 2\)"),
    (SMALL, {"tokens": jnp.zeros((2, 6, 15, 2))}, "images"),
]


@pytest.mark.parametrize(("config", "inputs", "message"), CALLS)
def test_calls(config, inputs, message):
    """Before anything is compiled."""
    params = random_params(config)
    with pytest.raises(BOTH, match=message):
        config.build().apply({"params": params}, **{"tokens": TOKENS} | inputs)


# Generated text -----------------------------------------------------------------------------------

LONG = change(SMALL, max_len=14)
FACTORS = models.Rotary(scaling="longrope:6,1,1,4,4")
LONGROPE = change(LONG, positions=FACTORS, attention=Attention(window=3))
TEXTS = [
    ({"num_tokens": 8}, "max_len"),
    ({"num_tokens": 0}, "num_tokens"),
    ({"num_tokens": 1.5}, "num_tokens"),
    ({"sampling": models.Sampling(temperature=0.5)}, "key"),
    ({"sampling": models.Sampling(top_k=20)}, "top_k"),
    ({"sampling": models.Sampling(temperature=1), "key": 0}, "key"),
    ({"cache_size": 8}, "cache_size"),
    ({"cache_size": 9.0}, "cache_size"),
    ({"config": LONGROPE, "cache_size": 5}, "9 tokens are above the 6 of longrope"),
    ({"end": 4.7}, "end"),
    ({"end": (3, 19)}, "end 19"),
    ({"source_padding_mask": IDS}, "source_padding_mask"),
    ({"padding_mask": IDS[:, :3]}, "padding_mask"),
    ({"padding_mask": np.arange(7) >= [[0], [7]]}, "padding_mask: row 1"),
    ({"padding_mask": ADDED}, "padding_mask must be boolean"),
    ({"source": TOKENS}, "source"),
    ({"prompt": TOKENS.at[0, 2].set(-1)}, r"-1 at \[0, 2\]"),
    ({"prompt": TOKENS[:, :0]}, "no tokens"),
    ({"params": {}}, "params"),
    ({"temperature": 1.0}, "temperature"),
    ({"config": change(LONG, kind="encoder")}, "encoder"),
    ({"config": change(LONG, output=OutputHead(kind="none"))}, "none"),
    ({"config": change(LONG, kind="encoder_decoder")}, "source"),
    ({"config": change(LONG, kind="encoder_decoder"), "source": -IDS}, r"token id -1 at \[0, 0\]"),
]


@pytest.mark.parametrize(("changes", "message"), TEXTS)
def test_texts(changes, message):
    """Before anything is compiled; `stream` at the call, not with its first token."""
    given = {"prompt": TOKENS, "config": LONG, "num_tokens": 2} | changes
    given.setdefault("params", random_params(given["config"]))
    for write in (models.generate, models.stream):
        with pytest.raises(BOTH, match=message):
            write(**given)


def test_prefilled_caches():
    params, windowed = random_params(LONG), change(LONG, attention=Attention(window=3))
    mask = jnp.ones((2, 6), bool)
    full = LONG.init_cache(2, 20) | {"length": jnp.full(3, 14)}
    for message, config, tokens, cache, options in (
        (r"cache of size 6; .*=7", LONG, TOKENS, LONG.init_cache(2, 6), {}),
        ("max_len 14", LONG, TOKENS[:, :1], full, {}),
        ("window", windowed, TOKENS, windowed.init_cache(2, 3), {}),
        ("padding_mask", LONG, TOKENS, LONG.init_cache(2, 7), {"padding_mask": mask}),
        ("7 tokens are above the 6", LONGROPE, TOKENS, LONGROPE.init_cache(2, 5), {}),
        ("no token", LONG, TOKENS[:, :0], LONG.init_cache(2, 6), {}),
    ):
        with pytest.raises(ValueError, match=message):
            models.prefill(params, tokens, config, cache, **options)


# Weights of another model -------------------------------------------------------------------------

TWO_TYPES = ((2, LayerOverrides(window=2)), (1, LayerOverrides()))
OTHERS = [
    # fields of the other model -> the weight, and its shape there (or "missing")
    ({"sharing": "albert"}, "layers/attention/k.*change_plan"),
    ({"sharing": "relaxed:3"}, "layers/delta/attention/k"),
    ({"sharing": "cla:2"}, "layers/attention/k' is missing"),
    ({"heads": heads.Wide(num_heads=3)}, r"layers/attention/k.*\(3, 12, 3, 12\)"),
    ({"output": OutputHead(kind="own")}, "lm_head' .* no such weight"),
    ({"kind": "encoder_decoder"}, "encoder_final_norm"),
    ({"layer_types": TWO_TYPES}, "layers/attention/k' is missing"),
]


@pytest.mark.parametrize(("fields", "message"), OTHERS)
def test_weights_of_another_model(fields, message):
    params = random_params(change(SMALL, **fields))
    run = lambda params: models.run_model(params, TOKENS, SMALL)
    for call in (run, lambda params: jax.eval_shape(run, params)):
        with pytest.raises(ValueError, match=message):
            call(params)


def test_what_is_no_tree_of_weights():
    params = random_params(SMALL)
    shared = change(ENCODER_DECODER, encoder=models.EncoderConfig(shares_decoder=True))
    for config, given, message in (
        (SMALL, params | {"layers": "x"}, "'layers'"),
        (SMALL, {"transformer.h.0.attn.c_attn.weight": jnp.ones(3)}, r"pretrained\.load"),
        (ENCODER_DECODER, random_params(shared), "encoder_"),
        (params, SMALL, "params the dict of"),
    ):
        with pytest.raises(BOTH, match=message):
            models.run_model(given, TOKENS, config)
