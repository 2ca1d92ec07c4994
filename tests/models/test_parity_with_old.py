"""The new models equal the old ones. Temporary: goes with `attnlab/model`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.model.as_models import as_config, as_model_params
from attnlab.model.config import ModelConfig as OldConfig
from attnlab.sharing import Plan

SIZES: dict[str, Any] = dict(
    vocab_size=19, max_len=9, width=12, num_heads=2, num_layers=4, ffn_width=10
)
BERT: dict[str, Any] = dict(
    kind="encoder", norm="post", embedding_norm=True, token_types=2, readout_transform="gelu",
    readout_bias=True, pooler="first", pooled_classes=3,
)  # fmt: skip
T5: dict[str, Any] = dict(
    kind="encoder_decoder", positions="relative", norm_kind="rms", norm_bias=False,
    relative_buckets=8, relative_distance=20, attention_biases="", ffn_bias=False,
    activation="gated_gelu_tanh", readout="own",
)  # fmt: skip
KINDS = "2(window=2; plan=albert; head_dim=4) 1(positions=none; ffn_width=6)"
CASES: dict[str, dict[str, Any]] = {
    "standard": {},
    "wide": dict(layout="wide", plan="albert"),
    "narrow": dict(layout="narrow", plan="cycle:2"),
    "narrow_tied": dict(layout="narrow_tied", norm="post"),
    "alt": dict(layout="alt"),
    "grouped queries, qk norm": dict(num_kv_heads=1, qk_norm="rms", positions="rotary"),
    "collaborative": dict(layout="collaborative", shared_dim=5),
    "bilinear, groups": dict(layout="bilinear", plan="sequence:2"),
    "absorbed": dict(layout="absorbed"),
    "latent, rotary": dict(
        layout="latent", latent_dim=5, rotary_dim=4, positions="rotary", head_dim=4
    ),
    "tensor": dict(layout="tensor", query_rank=3, key_rank=2, value_rank=2),
    "grouped_tied": dict(
        layout="grouped_tied", num_kv_heads=1, rotary_dim=2, positions="rotary", head_dim=4
    ),
    "low_rank_q": dict(layout="low_rank_q"),
    "cla": dict(plan="cla:2", positions="rotary"),
    "kv of an earlier layer": dict(
        plan=Plan(attention=(0, 0, 1, 1), ffn=(0, 1, 2, 3), kv=(0, 1, "@0", None)), num_kv_heads=1
    ),
    "relaxed": dict(plan="relaxed:2", delta_rank=2),
    "dictionary": dict(plan="dictionary:2"),
    "layer types": dict(kinds=KINDS, positions="rotary", rotary_fraction=0.5),
    "layer types, other heads": dict(kinds="1(num_heads=3) 1()"),
    "parallel": dict(norm="parallel", positions="rotary", activation="gated_silu"),
    "sandwich, rms": dict(norm="sandwich", norm_kind="rms_plus_one", norm_bias=False, window=3),
    "post_final": dict(norm="post_final", positions="sinusoidal"),
    "pre_open": dict(norm="pre_open", positions="sinusoidal_halves", remat=False),
    "relative": dict(positions="relative", relative_buckets=8, relative_distance=20),
    "sink, gate": dict(sink="learnt", gate="element"),
    "gate per head, extra keys": dict(gate="head", extra_keys=2),
    "talking heads": dict(talking_heads=True, layer_scales=(1.0, 0.5, 0.25, 0.2)),
    "GPT-2": dict(init_std=0.02, init_residual="depth", activation="gelu_tanh", attention_gain=0.5),
    "bert": BERT,
    "roberta": BERT | dict(positions="learned_unpadded", pad_token=1, pooler="mean"),
    "images": dict(
        kind="encoder", images="4x4x2/2", vocab_size=10, pooler="first_plain", readout="none",
        pooled_classes=3,
    ),
    "encoder_decoder": dict(kind="encoder_decoder", norm="post", encoder_layers=3),
    "encoder_decoder, merged": dict(kind="encoder_decoder", cross="merged", positions="rotary"),
    "t5, shared encoder": T5 | dict(share_encoder=True),
    "t5, own encoder": T5 | dict(encoder_heads=3, plan="albert"),
    "factorized": dict(embedding_width=6, readout_transform="gelu", plan="albert"),
    "no FFN, zero token": dict(ffn_width=0, zero_token=0, embedding_scale=2.0, readout_scale=0.5),
    "bfloat16": dict(dtype="bfloat16", positions="rotary"),
}  # fmt: skip


class Pair(NamedTuple):
    """The old and the new model of one case, and their calls."""

    old: OldConfig
    arguments: tuple[dict[str, Any], dict[str, Any]]
    models: tuple[Any, Any]

    def init(self) -> tuple[Any, Any]:
        """Initial parameters of both."""
        return tuple(
            jax.jit(model.init)(jax.random.key(0), **kwargs)["params"]
            for model, kwargs in zip(self.models, self.arguments, strict=True)
        )


def make(name: str, **changes: Any) -> Pair:
    """Both models of a case, with a batch that has padding."""
    old = OldConfig(**(SIZES | CASES[name] | changes))
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(2, old.vocab_size, (2, 6)))
    arguments: tuple[dict[str, Any], dict[str, Any]]
    if old.kind == "encoder_decoder":
        source = jnp.asarray(rng.integers(2, 19, (2, 5)))
        mask = jnp.arange(5) < jnp.array([[5], [3]])
        arguments = (
            dict(source=source, tokens=tokens, padding_mask=mask),
            dict(tokens=tokens, source=source, source_padding_mask=mask),
        )
    elif old.images is not None:
        arguments = (dict(tokens=jnp.asarray(rng.normal(size=(2, 4, 4, 2)), jnp.float32)),) * 2
    else:
        arguments = (dict(tokens=tokens, padding_mask=jnp.arange(6) < jnp.array([[6], [4]])),) * 2
    return Pair(old, arguments, (old.build(), as_config(old).build()))


def difference(a: Any, b: Any) -> float:
    """Largest difference of two trees, relative to the largest value of each pair of arrays."""

    def relative(x: Any, y: Any) -> float:
        assert x.shape == y.shape
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        return float(np.max(np.abs(x - y), initial=0) / max(np.max(np.abs(y), initial=0), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(relative, a, b)), default=0.0)


def compare(name: str) -> dict[str, float]:
    """Differences of the new model from the old: parameters, outputs, gradients, values."""
    pair = make(name)
    old, new = pair.models
    of_old, of_new = pair.arguments
    old_params, new_params = pair.init()
    as_new = as_model_params(pair.old, old_params)
    report = {"init": difference(new_params, as_new)}
    # Larger weights, so that attention is not uniform.
    old_params = jax.tree.map(lambda a: 3 * a + 0.1, old_params)
    as_new = as_model_params(pair.old, old_params)
    values = new_values(pair)

    def run_old(params: Any) -> Any:
        out = old.apply({"params": params}, **of_old, show=values, return_outputs=True)
        return out, out.shown

    def run_new(params: Any) -> Any:
        out = new.apply({"params": params}, **of_new, capture=values)
        return out, out.captured

    (a, shown), (b, captured) = jax.jit(run_old)(old_params), jax.jit(run_new)(as_new)
    for field, other in [("logits", "logits"), ("last", "hidden"), ("classes", "classes")]:
        if getattr(a, field) is not None:
            report[other] = difference(getattr(b, other), getattr(a, field))
    each = {n: shown[n] for n in values}
    report["captured"] = max(
        difference(as_list(captured, n, pair), list(a)) for n, a in each.items()
    )
    report["gradient"] = gradient_difference(pair, old_params)
    return report


def new_values(pair: Pair) -> tuple[str, ...]:
    """Values that both models have."""
    from attnlab.models import model_values

    return tuple(n for n in model_values(pair.models[1].config) if "embeddings" not in n)


def as_list(captured: Any, name: str, pair: Pair) -> list[Any]:
    """A captured value layer by layer."""
    from attnlab.models import captured_per_layer

    return captured_per_layer(captured, name, pair.models[1].config.layer_names)


def gradient_difference(pair: Pair, old_params: Any) -> float:
    """Largest difference of the gradients of a sum of squares of the outputs."""
    old, new = pair.models
    of_old, of_new = pair.arguments

    def loss_old(params: Any) -> Any:
        out = old.apply({"params": params}, **of_old, return_outputs=True)
        return jnp.sum(jnp.sin(out.classes if out.logits is None else out.logits) * 1.0)

    def loss_new(params: Any) -> Any:
        out = new.apply({"params": params}, **of_new)
        return jnp.sum(jnp.sin(out.classes if out.logits is None else out.logits) * 1.0)

    g_old = jax.jit(jax.grad(loss_old))(old_params)
    g_new = jax.jit(jax.grad(loss_new))(as_model_params(pair.old, old_params))
    g_old = as_model_params(pair.old, g_old)
    scale = max(float(np.abs(np.asarray(a, np.float64)).max()) for a in jax.tree.leaves(g_old))
    apart = jax.tree.map(
        lambda x, y: float(np.abs(np.asarray(x - y, np.float64)).max()), g_new, g_old
    )
    return max(jax.tree.leaves(apart)) / scale


def lowered(name: str, *, capture: bool = True, **changes: Any) -> list[str]:
    """The lowered programs of gradients and captured values, of the old and the new model."""
    pair, texts = make(name, **changes), []
    values = new_values(pair) if capture else ()
    for i, model in enumerate(pair.models):
        kwargs = pair.arguments[i]

        def loss(params: Any, kwargs: Any = kwargs, model: Any = model, i: int = i) -> Any:
            asked: Any = {"capture": values} if i else {"show": values, "return_outputs": True}
            out = model.apply({"params": params}, **kwargs, **asked)
            captured = out.captured if i else out.shown
            return jnp.sum(out.classes if out.logits is None else out.logits), captured

        shapes = jax.eval_shape(model.init, jax.random.key(0), **kwargs)["params"]
        texts.append(jax.jit(jax.grad(loss, has_aux=True)).lower(shapes).as_text())
    return texts


@pytest.mark.parametrize("name", CASES)
def test_a_model_equals_the_old_one(name):
    """The compiled program is the same text, or its results are the same bits."""
    pair = make(name)
    old_params, new_params = pair.init()
    assert difference(new_params, as_model_params(pair.old, old_params)) == 0
    old, new = lowered(name)
    if old != new:
        assert set(compare(name).values()) == {0}


DECODING = [
    "standard", "cla", "kv of an earlier layer", "layer types", "relative", "latent, rotary",
    "sandwich, rms", "t5, own encoder", "encoder_decoder, merged",
]  # fmt: skip


@pytest.mark.parametrize("name", DECODING)
def test_decoding_in_pieces_equals_the_whole_and_the_old_model(name):
    """Pieces of 3, 1 and 2 tokens; logits of the old cache are those of the new one."""
    pair = make(name)
    old, new = pair.models
    of_old, of_new = map(dict, pair.arguments)
    if pair.old.kind == "decoder":
        del of_old["padding_mask"], of_new["padding_mask"]
    old_params = jax.tree.map(lambda a: 3 * a + 0.1, pair.init()[0])
    params = as_model_params(pair.old, old_params)
    whole = new.apply({"params": params}, **of_new).logits
    caches = [pair.old.empty_cache(2, 6), new.config.init_cache(2, 6)]
    assert difference(caches[1], caches[0]) == 0
    found = []
    for start, end in [(0, 3), (3, 4), (4, 6)]:
        tokens = of_new["tokens"][:, start:end]
        a, caches[0] = old.apply(
            {"params": old_params}, **(of_old | dict(tokens=tokens, cache=caches[0]))
        )
        outputs = new.apply({"params": params}, **(of_new | dict(tokens=tokens, cache=caches[1])))
        caches[1] = outputs.cache
        assert difference(outputs.logits, a) <= 2e-6
        assert difference(caches[1], caches[0]) <= 2e-6
        found.append(outputs.logits)
    assert difference(jnp.concatenate(found, axis=1), whole) <= 1e-5


@pytest.mark.parametrize("name", ["standard", "cla", "relaxed", "layer types", "encoder_decoder"])
def test_the_program_is_as_long_at_every_depth(name):
    programs = [lowered(name, capture=False, num_layers=n) for n in (6, 12, 48)]
    lengths = {tuple(text.count("\n") for text in texts) for texts in programs}
    [(old, new)] = lengths
    assert new <= old
