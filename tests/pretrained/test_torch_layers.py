"""torch.nn's layers, from their definition; live in `parity`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import E, N, X, attend, draw, layer_norm, linear, run
from conftest import assert_close

from attnlab import pretrained

F = 10


def layer(at=""):
    w = {
        f"{at}self_attn.in_proj_weight": draw(3 * E, E),
        f"{at}self_attn.in_proj_bias": draw(3 * E),
    }
    shapes = {"self_attn.out_proj": (E, E), "linear1": (F, E), "linear2": (E, F)}
    for name, shape in shapes.items():
        w |= {f"{at}{name}.weight": 0.3 * draw(*shape), f"{at}{name}.bias": draw(shape[0])}
    for name in ("norm1", "norm2"):
        w |= {f"{at}{name}.weight": draw(E), f"{at}{name}.bias": draw(E)}
    return w


def norm(w, name, x):
    return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"])


@pytest.mark.parametrize("first", [False, True])
def test_an_encoder_by_hand(first):
    """Two layers with norms behind the sums, and a last one; or one with norms before."""
    depth = 1 if first else 2
    w = layer() if first else layer("layers.0.") | layer("layers.1.")
    if not first:
        w |= {"norm.weight": draw(E), "norm.bias": draw(E)}
    x = X
    for i in range(depth):
        at = "" if first else f"layers.{i}."
        packed = w[f"{at}self_attn.in_proj_weight"], w[f"{at}self_attn.in_proj_bias"]

        def attention(x, at=at, packed=packed):
            qkv = (x @ packed[0].T + packed[1]).reshape(2, -1, 3, N, E // N)
            return linear(w, f"{at}self_attn.out_proj", attend(*np.moveaxis(qkv, 2, 0), 0.5))

        def ffn(x, at=at):
            return linear(w, f"{at}linear2", np.maximum(linear(w, f"{at}linear1", x), 0))

        for name, f in ((f"{at}norm1", attention), (f"{at}norm2", ffn)):
            x = x + f(norm(w, name, x)) if first else norm(w, name, x + f(x))
    x = x if first else norm(w, "norm", x)
    config = dict(nhead=N, norm_first=first)
    model, params = pretrained.from_variables("torch_layers", config, w)
    assert model.config.num_layers == depth
    assert_close(run(model, params, X).hidden, x.astype(np.float32), loosen=10)


def test_a_decoder_by_hand():
    """It is given what it reads, of which a token is hidden; no encoder has a weight or runs."""
    w = layer() | {f"norm3.{n}": draw(E) for n in ("weight", "bias")}
    w |= {
        f"multihead_attn.in_proj_{n}": draw(*s)
        for n, s in {"weight": (36, E), "bias": (36,)}.items()
    }
    w |= {
        f"multihead_attn.out_proj.{n}": draw(*s)
        for n, s in {"weight": (E, E), "bias": (E,)}.items()
    }
    memory, real = draw(2, 4, E), np.array([[1, 1, 1, 1], [1, 1, 0, 1]], bool)

    def heads(name, x, context, hidden):
        maps = zip(
            np.split(w[f"{name}.in_proj_weight"], 3),
            np.split(w[f"{name}.in_proj_bias"], 3),
            (x, context, context),
            strict=True,
        )
        q, k, v = ((a @ m.T + b).reshape(2, -1, N, E // N) for m, b, a in maps)
        return linear(w, f"{name}.out_proj", attend(q, k, v, 0.5, hidden))

    x = norm(w, "norm1", X + heads("self_attn", X, X, np.triu(np.ones((5, 5), bool), 1)))
    x = norm(w, "norm2", x + heads("multihead_attn", x, memory, ~real[:, None, None]))
    x = norm(w, "norm3", x + linear(w, "linear2", np.maximum(linear(w, "linear1", x), 0)))
    model, params = pretrained.from_variables("torch_layers", dict(nhead=N), w)
    assert set(params) == {"embedding", "layers"}
    texts = (jnp.asarray(a, jnp.float32) for a in (memory, X))
    got = jax.jit(
        lambda p, m, x: model.apply(
            {"params": p}, x, encoded=m, source_padding_mask=jnp.asarray(real)
        )
    )(params, *texts)
    assert_close(got.hidden, x.astype(np.float32), loosen=10)
