"""Programs under `numpy_rank_promotion("raise")`, and exported with a symbolic batch size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep, shape
from jax import export
from layout_cases import CASES

from attnlab import dot_product_attention, masks, multi_head_attention
from attnlab.attention.score_mods import ALiBi, RelativeBias, SoftCap
from attnlab.heads import weight_shapes
from attnlab.models import ModelConfig, OutputHead, Relative, Rotary, param_shapes

OURS = deep([name for name in CASES if not name.startswith("outside")], "standard", "extra keys")
BATCH = export.symbolic_shape("b")[0]
EVERY = {
    "is_causal": True, "local_window_size": (2, 1), "bias": np.ones((5, 7), "float32"),
    "mask": np.array([[[[True] * 6 + [False]]]]), "key_value_seq_lengths": np.array([3, 7]),
    "sink": np.ones((4, 1, 1), "float32"),
    "score_mods": (
        ALiBi(np.ones(4, "float32")), RelativeBias(np.ones((4, 6), "float32")),
        SoftCap(np.ones(4, "float32")),
    ),
}  # fmt: skip
EDGES = masks.Edges(np.array([0, 1, 4]), np.array([2, 2, 3]))
ON_EDGES = {"mask": EDGES, "score_mods": (ALiBi(np.ones(4, "float32")),)}
MODELS = {
    "decoder": dict(positions=Rotary()),
    "encoder": dict(output=OutputHead(pooler="mean", num_classes=3)),
    "encoder_decoder": dict(positions=Relative()),
}


def draw(*sizes):
    return np.random.default_rng(0).normal(size=sizes).astype("float32")


@pytest.mark.parametrize(
    ("implementation", "options"),
    [("dense", EVERY), ("blockwise", EVERY), ("dense", ON_EDGES), ("edges", ON_EDGES)],
)
def test_attention_promotes_no_ranks(implementation, options):
    """Forward and backward."""

    def loss(q, k):
        return dot_product_attention(q, k, k, implementation=implementation, **options).sum()

    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(jax.grad(loss, (0, 1)), shape(2, 5, 4, 3), shape(2, 7, 2, 3))


@pytest.mark.unchecked
@pytest.mark.parametrize("name", OURS)
def test_heads_promote_no_ranks_and_take_a_symbolic_batch(name):
    layout = CASES[name]
    widths = [getattr(layout, f"{side}_width", None) or layout.width for side in ("key", "value")]
    w = {n: shape(*sizes) for n, sizes in weight_shapes(layout).items()}

    def run(w, x, key, value):
        return multi_head_attention(w, x, layout, (key, value), is_causal=True)

    arrays = [[shape(b, t, d) for t, d in zip((7, 8, 8), (layout.width, *widths), strict=True)]
              for b in (2, BATCH)]  # fmt: skip
    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(jax.grad(lambda *a: run(*a).sum(), (0, 1)), w, *arrays[0])
    exported = export.export(jax.jit(run))(w, *arrays[1])
    assert exported.out_avals[0].shape[0] == BATCH


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", MODELS)
def test_models_promote_no_ranks_and_take_a_symbolic_batch(kind):
    config = ModelConfig(kind=kind, width=16, num_layers=2, **MODELS[kind])
    source = ["source"] * (config.encoder is not None)

    def run(params, tokens, mask):
        inputs = dict.fromkeys(source, tokens)
        return config.build().apply({"params": params}, tokens, padding_mask=mask, **inputs).hidden

    tokens, mask = (shape(BATCH, 5, dtype=dtype) for dtype in ("int32", "bool"))
    with jax.numpy_rank_promotion("raise"):
        exported = export.export(jax.jit(run))(param_shapes(config), tokens, mask)
    assert exported.out_avals[0].shape == (BATCH, 5, 16)


@pytest.mark.unchecked
def test_an_exported_call_is_the_call_for_every_batch_size():
    call = lambda q, k: dot_product_attention(q, k, k, is_causal=True)
    exported = export.export(jax.jit(call))(shape(BATCH, 5, 4, 3), shape(BATCH, 7, 2, 3))
    for batch in (1, 3):
        q, k = draw(batch, 5, 4, 3), draw(batch, 7, 2, 3)
        assert_close(exported.call(q, k), call(jnp.asarray(q), jnp.asarray(k)))
    with pytest.raises(ValueError, match="symbolic"):
        export.export(
            jax.jit(lambda q: dot_product_attention(q, q, q, implementation="blockwise"))
        )(shape(BATCH, 5, 4, 3))
