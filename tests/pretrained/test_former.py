"""`former` and the tutorial before it, against their definitions written out in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import RNG, E, N, X, attend, draw, layer_norm, linear, run
from conftest import assert_close

from attnlab import pretrained


def former(kind, output=True, at=""):
    """The variables of one attention of `former`."""
    c = E // N
    shape = {"Wide": (N * E, E), "Narrow": (c, c)}.get(kind, (E, E))
    names = ("tokeys", "toqueries", "tovalues")
    if kind == "Alt":
        w = {name: draw(N, c, c) for name in names} | {"downproj.weight": draw(E, E)}
    else:
        w = {f"{name}.weight": draw(*shape) for name in names}
    if output:
        w["unifyheads.weight"] = draw(E, N * E if kind == "Wide" else E)
        w["unifyheads.bias"] = draw(E)
    return {at + name: a for name, a in w.items()}


def former_attention(kind, w, x, revision="HEAD", causal=False):
    """By its definition: what each head reads, and how scores are scaled."""
    split_up = lambda a: a.reshape(*a.shape[:2], N, -1)
    if kind == "Alt":
        chunks = split_up(linear(w, "downproj", x))
        q, k, v = (
            np.einsum("btnk,nik->btni", chunks, w[name])
            for name in ("toqueries", "tokeys", "tovalues")
        )
    else:
        source = split_up(x) if kind == "Narrow" else x
        q, k, v = (linear(w, name, source) for name in ("toqueries", "tokeys", "tovalues"))
        q, k, v = (a if kind == "Narrow" else split_up(a) for a in (q, k, v))
    hidden = np.triu(np.ones((x.shape[1],) * 2, bool), 1) if causal else None
    scale = (E if revision == "2019" else q.shape[-1]) ** -0.5
    heads = attend(q, k, v, scale, hidden)
    return linear(w, "unifyheads", heads) if "unifyheads.weight" in w else heads


FORMS = [
    ("", True, "HEAD"),
    ("", True, "2019"),
    ("Wide", True, "HEAD"),
    ("Narrow", False, "HEAD"),
    ("Narrow", True, "2019"),
    ("Alt", True, "HEAD"),
]


@pytest.mark.parametrize(("kind", "output", "revision"), FORMS)
def test_former_attention(kind, output, revision):
    w = former(kind, output)
    config = dict(module=f"SelfAttention{kind}", emb=E, heads=N, revision=revision)
    model, params = pretrained.from_variables("former", config, w)
    expected = former_attention(kind, w, X, revision)
    assert_close(run(model, params, X), jnp.asarray(expected, jnp.float32), loosen=5)


def test_former_with_norms_and_a_factor():
    """kqnorm: layer norms of each head's queries and keys, scale and bias; scalefactor: 0.3."""
    w = former("") | {f"{n}ln.{m}": draw(E // N) for n in "kq" for m in ("weight", "bias")}

    def normed(name, a):
        a = a.reshape(2, 5, N, -1)
        return layer_norm(a, w[f"{name}.weight"], w[f"{name}.bias"])

    q, k = normed("qln", linear(w, "toqueries", X)), normed("kln", linear(w, "tokeys", X))
    heads = attend(q, k, linear(w, "tovalues", X).reshape(2, 5, N, -1), 0.3)
    config = dict(module="SelfAttention", emb=E, heads=N, kqnorm=True, scalefactor=0.3)
    model, params = pretrained.from_variables("former", config, w)
    expected = jnp.asarray(linear(w, "unifyheads", heads), jnp.float32)
    assert_close(run(model, params, X), expected, loosen=5)


@pytest.mark.parametrize("module", ["GTransformer", "CTransformer-max", "CTransformer-mean"])
@pytest.mark.parametrize("kind", ["", "Wide", "Narrow", "Alt"])
def test_former_models(kind, module):
    module, *pooling = module.split("-")
    outputs = 7 if module == "CTransformer" else 11
    w = {"token_embedding.weight": draw(11, E), "pos_embedding.weight": draw(6, E)}
    w |= {"toprobs.weight": draw(outputs, E), "toprobs.bias": draw(outputs)}
    for i in range(2):
        at = f"tblocks.{i}."
        w |= former(kind, kind != "Narrow", f"{at}attention.")
        w |= {f"{at}norm{j}.{n}": draw(E) for j in (1, 2) for n in ("weight", "bias")}
        w |= {f"{at}ff.0.weight": draw(10, E), f"{at}ff.0.bias": draw(10)}
        w |= {f"{at}ff.2.weight": draw(E, 10), f"{at}ff.2.bias": draw(E)}

    def normalise(name, x):
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"])

    tokens = RNG.integers(0, 11, (2, 5))
    x = w["token_embedding.weight"][tokens] + w["pos_embedding.weight"][:5]
    for i in range(2):
        at = f"tblocks.{i}."
        own = {n.removeprefix(f"{at}attention."): a for n, a in w.items() if n.startswith(at)}
        causal = module == "GTransformer"
        x = normalise(f"{at}norm1", x + former_attention(kind, own, x, causal=causal))
        ff = linear(w, f"{at}ff.2", np.maximum(linear(w, f"{at}ff.0", x), 0))
        x = normalise(f"{at}norm2", x + ff)
    config = dict(module=module, heads=N, attention_type=kind.lower() or "default")
    if pooling:
        x = x.max(1) if pooling == ["max"] else x.mean(1)
        config["max_pool"] = pooling == ["max"]
    expected = linear(w, "toprobs", x)
    model, params = pretrained.from_variables("former", config, w)
    seen = run(model, params, tokens)
    got = seen.classes if pooling else seen.logits
    assert_close(got, jnp.asarray(expected, jnp.float32), loosen=10)


def test_the_tutorial_code():
    """One chunk projection for all heads, scores over sqrt(embed_size), 0 in the mask = hidden."""
    c = E // N
    w = {f"{name}.weight": draw(c, c) for name in ("values", "keys", "queries")}
    w |= {"fc_out.weight": draw(E, E), "fc_out.bias": draw(E)}
    keep = np.arange(5) < np.array([[5], [3]])
    chunks = X.reshape(2, 5, N, c)
    q, k, v = (linear(w, name, chunks) for name in ("queries", "keys", "values"))
    heads = attend(q, k, v, E**-0.5, ~keep[:, None, None])
    model, params = pretrained.from_variables("seed_snippet", dict(embed_size=E, heads=N), w)
    got = run(model, params, X, mask=jnp.asarray(keep)[:, None, None])
    assert_close(got, jnp.asarray(linear(w, "fc_out", heads), jnp.float32), loosen=5)
