"""Weights under other systems' names, against the definition of each, written out in NumPy."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import peer_outputs
import pytest
from by_hand import RNG, E, N, X, attend, draw, layer_norm, linear
from conftest import assert_close, deep
from goldens import FAMILIES, split, write

from attnlab import pretrained


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_torch_attention_by_hand(apart, bias):
    """Packed [q; k; v], or apart where keys and values have widths of their own; one bias."""
    widths = (E, 5, 7) if apart else (E, E, E)
    parts = [draw(E, width) for width in widths]
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    w = dict(zip(names, parts, strict=True)) if apart else {"in_proj_weight": np.concatenate(parts)}
    packed = draw(3 * E) * bias
    w |= {"out_proj.weight": draw(E, E)} | (
        {"in_proj_bias": packed, "out_proj.bias": draw(E)} if bias else {}
    )
    config = dict(embed_dim=E, num_heads=N) | (dict(kdim=5, vdim=7) if apart else {})
    model, params = pretrained.from_variables("torch_mha", config, w)
    texts = [X, RNG.normal(size=(2, 4, 5)), RNG.normal(size=(2, 4, 7))] if apart else [X] * 3
    q, k, v = (
        (x @ part.T + packed[i * E : (i + 1) * E]).reshape(2, -1, N, E // N)
        for i, (x, part) in enumerate(zip(texts, parts, strict=True))
    )
    expected = linear(w, "out_proj", attend(q, k, v, (E // N) ** -0.5))
    x, key, value = (jnp.asarray(a, jnp.float32) for a in texts)
    got = jax.jit(lambda p: model.apply({"params": p}, x, (key, value)))(params)
    assert_close(got, jnp.asarray(expected, jnp.float32), loosen=5)


def test_torch_keys_that_no_input_has():
    """bias_k and bias_v come behind the keys, then zeros; nothing hides them."""
    w = {"in_proj_weight": draw(3 * E, E), "in_proj_bias": draw(3 * E)}
    w |= {"out_proj.weight": draw(E, E), "out_proj.bias": draw(E)}
    w |= {"bias_k": draw(1, 1, E), "bias_v": draw(1, 1, E)}
    config = dict(embed_dim=E, num_heads=N, add_bias_kv=True, add_zero_attn=True)
    model, params = pretrained.from_variables("torch_mha", config, w)
    keep = np.arange(5) < np.array([[4], [0]])  # one text with nothing to see
    read = [X @ a.T + b for a, b in zip(np.split(w["in_proj_weight"], 3),
                                        np.split(w["in_proj_bias"], 3), strict=True)]  # fmt: skip
    for i, name in ((1, "bias_k"), (2, "bias_v")):
        more = np.concatenate([np.broadcast_to(w[name], (2, 1, E)), np.zeros((2, 1, E))], axis=1)
        read[i] = np.concatenate([read[i], more], axis=1)
    q, k, v = (a.reshape(2, -1, N, E // N) for a in read)
    hidden = np.pad(~keep, [(0, 0), (0, 2)])[:, None, None]
    expected = linear(w, "out_proj", attend(q, k, v, (E // N) ** -0.5, hidden))
    x, mask = jnp.asarray(X, jnp.float32), jnp.asarray(keep)[:, None, None]
    got = jax.jit(lambda p: model.apply({"params": p}, x, mask=mask))(params)
    assert_close(got, jnp.asarray(expected, jnp.float32), loosen=5)


def t2t_variables(after, three):
    """Two encoder layers, one decoder layer, keys and values of widths of their own."""
    place = {"da": "layer_prepostprocess", "dan": "layer_postprocess"}[after]
    h, k, v, f = N, 2, 5, 10
    w = {f"symbol_modality_11_12/shared/weights_{i}": draw(n, E) for i, n in enumerate((4, 4, 3))}

    def normed(path):
        return {f"{path}/{place}/layer_norm/layer_norm_{n}": draw(E) for n in ("scale", "bias")}

    for stack, depth in (("encoder", 2), ("decoder", 1)):
        for i in range(depth):
            at = f"body/{stack}/layer_{i}/"
            for word in ("self_attention", "encdec_attention")[: 1 + (stack == "decoder")]:
                heads = f"{at}{word}/multihead_attention/"
                if three:
                    w |= {f"{heads}{n}": draw(E, h, d) for n, d in (("q", k), ("k", k), ("v", v))}
                    w[f"{heads}o"] = draw(h, v, E)
                else:
                    sizes = {"q": k, "k": k, "v": v}
                    w |= {f"{heads}{n}/kernel": draw(E, h * d) for n, d in sizes.items()}
                    w[f"{heads}output_transform/kernel"] = draw(h * v, E)
                w |= normed(at + word)
            w |= {f"{at}ffn/conv1/kernel": draw(E, f), f"{at}ffn/conv1/bias": draw(f)}
            w |= {f"{at}ffn/conv2/kernel": draw(f, E), f"{at}ffn/conv2/bias": draw(E)}
            w |= normed(f"{at}ffn")
        w |= normed(f"body/{stack}") if after == "da" else {}
    return {f"transformer/{name}": a for name, a in w.items()}


def t2t_by_hand(w, after, source, target):
    w = {name.removeprefix("transformer/"): a for name, a in w.items()}
    table = np.concatenate([w[f"symbol_modality_11_12/shared/weights_{i}"] for i in range(3)])

    def normalise(path, x):
        place = {"da": "layer_prepostprocess", "dan": "layer_postprocess"}[after]
        path = f"{path}/{place}/layer_norm/layer_norm_"
        return layer_norm(x, w[f"{path}scale"], w[f"{path}bias"], 1e-6)

    def step(path, f, x):
        return x + f(normalise(path, x)) if after == "da" else normalise(path, x + f(x))

    def heads(path, x, context, hidden):
        maps = {}
        for n in "qkv":
            a = w.get(f"{path}/multihead_attention/{n}")
            three = a is not None
            a = a if three else w[f"{path}/multihead_attention/{n}/kernel"].reshape(E, N, -1)
            maps[n] = np.einsum("btd,dnh->btnh", x if n == "q" else context, a)
        scale = 1 if three else maps["q"].shape[-1] ** -0.5
        side = attend(maps["q"], maps["k"], maps["v"], scale, hidden)
        o = "o" if three else "output_transform/kernel"
        return side @ w[f"{path}/multihead_attention/{o}"].reshape(-1, E)

    def ffn(path, x):
        x = np.maximum(x @ w[f"{path}/conv1/kernel"] + w[f"{path}/conv1/bias"], 0)
        return x @ w[f"{path}/conv2/kernel"] + w[f"{path}/conv2/bias"]

    def embedded(ids):
        n = E // 2
        angles = np.arange(ids.shape[1])[:, None] * 1e4 ** (-np.arange(n) / (n - 1))
        words = table[ids] * E**0.5 * (ids != 0)[..., None]
        return words + np.concatenate([np.sin(angles), np.cos(angles)], -1)

    padding = (source == 0)[:, None, None]
    x = embedded(source)
    for i in range(2):
        at = f"body/encoder/layer_{i}/self_attention"
        x = step(at, lambda y, at=at: heads(at, y, y, padding), x)
        at = f"body/encoder/layer_{i}/ffn"
        x = step(at, lambda y, at=at: ffn(at, y), x)
    encoded = normalise("body/encoder", x) if after == "da" else x
    ahead = np.triu(np.ones((target.shape[1],) * 2, bool), 1)
    x, at = embedded(target), "body/decoder/layer_0/"
    x = step(f"{at}self_attention", lambda y: heads(f"{at}self_attention", y, y, ahead), x)
    x = step(
        f"{at}encdec_attention", lambda y: heads(f"{at}encdec_attention", y, encoded, padding), x
    )
    x = step(f"{at}ffn", lambda y: ffn(f"{at}ffn", y), x)
    return (normalise("body/decoder", x) if after == "da" else x) @ table.T


@pytest.mark.parametrize("three", [False, True])
@pytest.mark.parametrize("after", ["da", "dan"])
def test_tensor2tensor(after, three):
    w = t2t_variables(after, three)
    source = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])
    target = np.array([[0, 7, 8, 2], [0, 8, 1, 10]])
    expected = t2t_by_hand(w, after, source, target)
    config = dict(num_heads=N, layer_postprocess_sequence=after, max_length=16)
    model, params = pretrained.from_variables("t2t", config, w)
    texts = jnp.asarray(source), jnp.asarray(target)
    options = dict(source=texts[0], source_padding_mask=texts[0] != 0)
    got = jax.jit(lambda p: model.apply({"params": p}, texts[1], **options))(params)
    assert_close(got.logits, jnp.asarray(expected, jnp.float32), loosen=10)


def summae_variables():
    """Two encoder layers, one decoder layer: 12 each and 18, 4 of the last norms, and the table."""
    w = {"embedding": draw(11, E)}
    normed = lambda path: {f"{path}/preprocess/LayerNorm/{n}": draw(E) for n in ("gamma", "beta")}
    for stack, depth in (("encoder", 2), ("decoder", 1)):
        w |= normed(stack)
        for i in range(depth):
            at = f"{stack}/layer_{i}/"
            for word in ("self_attention", "encdec_attention")[: 1 + (stack == "decoder")]:
                maps = ("q_proj", "k_proj", "v_proj", "output_proj")
                w |= {f"{at}{word}/{n}/kernel": draw(E, E) for n in maps} | normed(at + word)
            w |= {f"{at}ffn/ffn/dense/kernel": draw(E, 10), f"{at}ffn/ffn/dense/bias": draw(10)}
            w |= {f"{at}ffn/ffn/dense_1/kernel": draw(10, E), f"{at}ffn/ffn/dense_1/bias": draw(E)}
            w |= normed(f"{at}ffn")
    assert len(w) == 2 * 12 + 18 + 4 + 1
    return w


def summae_by_hand(w, encoder_heads, source, target):
    def normalise(path, x):
        path = f"{path}/preprocess/LayerNorm/"
        return layer_norm(x, w[f"{path}gamma"], w[f"{path}beta"], 1e-12)

    def heads(path, x, context, hidden):
        count = encoder_heads if path.startswith("encoder") else N
        read = lambda n, x: (x @ w[f"{path}/{n}_proj/kernel"]).reshape(*x.shape[:2], count, -1)
        q, k, v = read("q", x), read("k", context), read("v", context)
        return attend(q, k, v, q.shape[-1] ** -0.5, hidden) @ w[f"{path}/output_proj/kernel"]

    def ffn(path, x):
        x = np.maximum(x @ w[f"{path}/ffn/dense/kernel"] + w[f"{path}/ffn/dense/bias"], 0)
        return x @ w[f"{path}/ffn/dense_1/kernel"] + w[f"{path}/ffn/dense_1/bias"]

    def timed(x):
        angles = np.arange(x.shape[1])[:, None] * 1e4 ** (-np.arange(E // 2) / (E // 2 - 1))
        return x + np.concatenate([np.sin(angles), np.cos(angles)], -1)

    padding = (source == 0)[:, None, None]
    x = timed(w["embedding"][source] * (source != 0)[..., None])
    for i in range(2):
        at = f"encoder/layer_{i}/self_attention"
        y = normalise(at, x)
        x = x + heads(at, y, y, padding)
        at = f"encoder/layer_{i}/ffn"
        x = x + ffn(at, normalise(at, x))
    encoded = normalise("encoder", x)
    # Their decoder is given the targets and pads a zero vector before them.
    x = w["embedding"][target][:, :-1]
    x = timed(np.concatenate([np.zeros((len(x), 1, E)), x], axis=1))
    ahead = np.triu(np.ones((x.shape[1],) * 2, bool), 1)
    y = normalise("decoder/layer_0/self_attention", x)
    x = x + heads("decoder/layer_0/self_attention", y, y, ahead)
    y = normalise("decoder/layer_0/encdec_attention", x)
    x = x + heads("decoder/layer_0/encdec_attention", y, encoded, padding)
    x = 2 * x + ffn("decoder/layer_0/ffn", normalise("decoder/layer_0/ffn", x))
    return encoded, normalise("decoder", x)


@pytest.mark.parametrize("encoder_heads", deep([N, 2], 2))
def test_summae(encoder_heads):
    w = summae_variables()
    source = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])
    target = np.array([[7, 8, 2, 4], [8, 1, 10, 3]])
    config = dict(num_encoder_heads=encoder_heads, num_decoder_heads=N, max_length=16)
    model, params = pretrained.from_variables("summae", config, w)
    texts = jnp.asarray(source), jnp.asarray(np.pad(target, ((0, 0), (1, 0)))[:, :-1])
    options = dict(source=texts[0], source_padding_mask=texts[0] != 0)
    seen = jax.jit(lambda p: model.apply({"params": p}, texts[1], **options))(params)
    encoded, last = summae_by_hand(w, encoder_heads, source, target)
    assert_close(seen.encoded, jnp.asarray(encoded, jnp.float32), loosen=10)
    assert_close(seen.hidden, jnp.asarray(last, jnp.float32), loosen=10)
    with pytest.raises(ValueError, match=r"encoder.num_heads .*not divisible by num_heads 5"):
        pretrained.from_variables("summae", config | dict(num_encoder_heads=5), w)


TO_GOOGLE = {
    r"^(cls/)?predictions/bias": "cls/predictions/output_bias",
    r"^(cls/seq_relationship|sop_classifier/classifier)/": "cls/seq_relationship/output_",
    "/output_weight$": "/output_weights",
    "encoder/layer/": "encoder/layer_",
    "albert_layer_groups/": "transformer/group_",
    "/albert_layers/": "/inner_group_",
    "attention/LayerNorm": "LayerNorm",
    "full_layer_layer_norm": "LayerNorm_1",
    "attention/dense": "attention_1/output/dense",
    "attention/(query|key|value)": r"attention_1/self/\1",
    "/ffn_output": "/ffn_1/intermediate/output/dense",
    "/ffn/": "/ffn_1/intermediate/dense/",
    "^predictions/": "cls/predictions/transform/",
    "^pooler/(weight|bias)": r"pooler/dense/\1",
    r"(LayerNorm\w*)/weight": r"\1/gamma",
    r"(LayerNorm\w*)/bias": r"\1/beta",
    r"^(embeddings/\w+_embeddings)/weight": r"\1",
    "/weight$": "/kernel",
}
"""Pattern in the names of Hugging Face, with slashes -> what Google's have there."""


def to_google(tensors, family):
    """Tensors of Hugging Face's file under the names, and in the order, of Google's."""
    found = {}
    for name, a in tensors.items():
        path = name.removeprefix(f"{family}.").replace(".", "/")
        for old, new in TO_GOOGLE.items():
            path = re.sub(old, new, path)
        path = path if path.startswith("cls/") else f"bert/{path}"
        found[path] = a.T if path.endswith("/kernel") else a
    assert len(found) == len(tensors)
    return found


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_google_names(family, tmp_path):
    """The same weights under Hugging Face's names give the same, with the tanh gelu."""
    config, tensors, _, _ = split(FAMILIES[family])
    folder = write(tmp_path / "folder", config, tensors)
    theirs, expected = pretrained.load(folder)
    config = {n: v for n, v in config.items() if n not in ("model_type", "hidden_act")}
    w = to_google(tensors, family)
    settings = config | {"hidden_act": "gelu"}
    model, params = pretrained.from_variables(f"google_{family}", settings, w)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    config, replace = theirs.config, dataclasses.replace
    assert model.config.dropout.places == ("embeddings", "attention", "ffn")
    assert model.config == replace(
        config,
        ffn=replace(config.ffn, activation="gelu_tanh"),
        output=replace(config.output, transform="gelu_tanh"),
        dropout=replace(config.dropout, places=model.config.dropout.places),
        sharing=model.config.sharing,
    )
    assert model.config.plan == config.plan


def test_googles_albert_is_saved_where_nothing_drops(tmp_path):
    """transformers drops nothing behind the feed-forward part: with no rate there is no place."""
    config, tensors, given, _ = split(FAMILIES["albert"])
    config = {n: v for n, v in config.items() if n not in ("model_type", "hidden_act")}
    w = to_google(tensors, "albert")
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, params = pretrained.from_variables("google_albert", config | rates, w)
    pretrained.save(tmp_path / "saved", model, params)
    again, params_again = pretrained.load(tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, params, params_again)
    outputs = [peer_outputs.run(m, params, given)["logits"] for m in (model, again)]
    np.testing.assert_array_equal(*outputs)
    drops, _ = pretrained.from_variables("google_albert", config | {"hidden_dropout_prob": 0.1}, w)
    with pytest.raises(ValueError, match=r"albert: dropout at each place would be .*'ffn': 0\.1"):
        pretrained.save(tmp_path / "drops", drops, params)


def test_googles_albert_with_equal_sizes_has_no_map():
    sizes = dict(hidden_size=12, num_attention_heads=3, intermediate_size=10, vocab_size=7)
    for width, mapped in ((12, False), (6, True)):
        config, rows = pretrained.SYSTEMS["google_albert"](sizes | {"embedding_size": width}, {})
        assert any("embedding_hidden_mapping_in" in row.name for row in rows) == mapped
        assert (config.embedding.width is not None) == mapped
    many = sizes | dict(num_hidden_layers=22, num_hidden_groups=22)
    config, rows = pretrained.SYSTEMS["google_albert"](many, {})
    assert config.plan["ffn"][14:17] == (14, 14, 15)  # group 15 never comes to exist
    assert not any("/group_15/" in row.name for row in rows)
    assert any("/group_16/" in row.name for row in rows)


NO_OTHERS = dict.fromkeys(f"{n}.weight" for n in ("values", "keys", "queries", "fc_out"))
NO_OTHERS["fc_out.bias"] = None
LINEAR = {"linear1.weight": draw(10, E)}
NORMS = {f"{n}ln.{m}": draw(E // N) for n in "kq" for m in ("weight", "bias")}
SNIPPET, TORCH, LAYERS = dict(embed_size=E, heads=N), dict(embed_dim=E, num_heads=N), dict(nhead=N)
ATTENTION = dict(module="SelfAttention", emb=E, heads=N)
ALT = ATTENTION | dict(module="SelfAttentionAlt")
SHARD = {"symbol_modality_9_12/shared/weights_0": draw(4, E)}
MISFITS = [
    ("seed_snippet", dict(embed_size=E), {}, "config needs 'heads'"),
    ("seed_snippet", SNIPPET | dict(depth=1), {}, "'depth' is unknown"),
    ("seed_snippet", SNIPPET, {"fc_out.bias": None}, "'fc_out.bias'; the model"),
    ("seed_snippet", SNIPPET, {"more": draw(2)}, "no place for .*'more'"),
    ("seed_snippet", SNIPPET, {"fc_out.weight": draw(2, 3)}, r"'fc_out.weight' has shape \(2, 3\)"),
    ("seed_snipet", {}, {}, "did you mean 'seed_snippet'"),
    ("torch_mha", TORCH | dict(add_bias_kv=True), {}, "bias_k is not there"),
    ("torch_mha", TORCH, NO_OTHERS | {"bias_k": draw(1, 1, E)}, "missing"),
    ("torch_layers", LAYERS | dict(activation="mish"), LINEAR, "unknown activation 'mish'"),
    ("torch_layers", dict(nhead=5), LINEAR, "not divisible by num_heads 5"),
    ("torch_layers", LAYERS, {}, "'linear1.weight' is missing"),
    ("t2t", dict(num_heads=N), SHARD, "have 4 rows, their names say 9"),
    ("former", ATTENTION | dict(module="SelfAttentionRelative"), {}, "unknown module"),
    ("former", ATTENTION | dict(revision="1"), {}, "revision"),
    ("former", ATTENTION | dict(kqnorm=False), NORMS, "kqnorm is False, and kln.weight is there"),
    ("former", ATTENTION | dict(module="SelfAttentionWide"), NORMS, "SelfAttention alone"),
    ("former", ALT | dict(scalefactor=0.5), {}, "scalefactor is of former's SelfAttention alone"),
]


@pytest.mark.parametrize(("system", "config", "change", "message"), MISFITS)
def test_what_does_not_fit_is_named(system, config, change, message):
    c = E // N
    w = {f"{name}.weight": draw(c, c) for name in ("values", "keys", "queries")}
    w |= {"fc_out.weight": draw(E, E), "fc_out.bias": draw(E)} | change
    w = {name: a for name, a in w.items() if a is not None}
    with pytest.raises(ValueError, match=message):
        pretrained.from_variables(system, config, w)
