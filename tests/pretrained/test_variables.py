"""Weights under other systems' names, against the definition of each, written out in NumPy, or
what torch computes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import peer_outputs
import pytest
from conftest import assert_close, deep
from definition import attention
from goldens import FAMILIES, TORCH, close, golden_folder, split

from attnlab import pretrained
from attnlab.tap import Tap

RNG = np.random.default_rng(0)
E, N = 12, 3
X = RNG.normal(size=(2, 5, E))


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def attend(q, k, v, scale, hidden=None):
    """[B, T, N, H] each -> the heads side by side."""
    mask = None if hidden is None else ~hidden
    heads = attention(q, k, v, {"scale": scale, "mask": mask})[0]
    return heads.reshape(*heads.shape[:2], -1)


def layer_norm(x, scale, bias, eps=1e-5):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale + bias


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def check(got, expected, loosen=10):
    assert_close(got, jnp.asarray(expected, jnp.float32), loosen=loosen)


def run(system, config, w, x, **options):
    model, params = pretrained.from_variables(system, config, w)
    x = jnp.asarray(x, jnp.int32 if x.dtype.kind == "i" else jnp.float32)
    return jax.jit(lambda p, x: model.apply({"params": p}, x, **options))(params, x)


@pytest.mark.parametrize("path", TORCH, ids=lambda path: path.stem)
def test_modules_of_torch(path):
    """Output, and the probabilities of each head."""
    config, tensors, given, expected = split(path)
    model, params = pretrained.from_variables(config.pop("system"), config, tensors)
    given = {name: jnp.asarray(a) for name, a in given.items()}
    x, tap = given.pop("x"), Tap(("probs",))
    if "key" in given:
        given |= {"context": (given.pop("key"), given.pop("value")), "tap": tap}
    got = model.apply({"params": params}, x, **given)
    valid = expected.get("valid", ...)
    close(np.asarray(getattr(got, "hidden", got))[valid], expected["output"][valid])
    if "probs" in expected:
        close(tap.captured["probs"], expected["probs"])


def former(kind, output=True):
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
    return w


def former_attention(kind, w, x, scale=None, hidden=None):
    """By its definition: what each head reads, and how scores are scaled."""
    split_up = lambda a: a.reshape(*a.shape[:2], N, -1)
    names = ("toqueries", "tokeys", "tovalues")
    if kind == "Alt":
        chunks = split_up(linear(w, "downproj", x))
        q, k, v = (np.einsum("btnk,nik->btni", chunks, w[name]) for name in names)
    elif kind == "Narrow":
        q, k, v = (linear(w, name, split_up(x)) for name in names)
    else:
        q, k, v = (split_up(linear(w, name, x)) for name in names)
    if "qln.weight" in w:
        q = layer_norm(q, w["qln.weight"], w["qln.bias"])
        k = layer_norm(k, w["kln.weight"], w["kln.bias"])
    heads = attend(q, k, v, scale or q.shape[-1] ** -0.5, hidden)
    return linear(w, "unifyheads", heads) if "unifyheads.weight" in w else heads


NORMS = {f"{n}ln.{m}": draw(E // N) for n in "kq" for m in ("weight", "bias")}
FORMS = [
    # kind, has it an output projection, more words, the scale, more variables
    ("", True, {}, None, {}),
    ("", True, {"revision": "2019"}, E**-0.5, {}),
    ("", True, {"kqnorm": True, "scalefactor": 0.3}, 0.3, NORMS),
    ("Wide", True, {}, None, {}),
    ("Narrow", False, {}, None, {}),
    ("Narrow", True, {"revision": "2019"}, E**-0.5, {}),
    ("Alt", True, {}, None, {}),
]


@pytest.mark.parametrize(("kind", "output", "words", "scale", "more"), FORMS)
def test_former_attention(kind, output, words, scale, more):
    w = former(kind, output) | more
    config = dict(module=f"SelfAttention{kind}", emb=E, heads=N) | words
    check(run("former", config, w, X), former_attention(kind, w, X, scale), loosen=5)


def test_the_tutorial_code():
    """One chunk projection for all heads, scores over sqrt(embed_size), 0 in the mask = hidden."""
    names = {"toqueries": "queries", "tokeys": "keys", "tovalues": "values", "unifyheads": "fc_out"}
    w = former("Narrow")
    keep = np.arange(5) < np.array([[5], [3]])
    expected = former_attention("Narrow", w, X, E**-0.5, ~keep[:, None, None])
    theirs = {f"{names[n.partition('.')[0]]}.{n.partition('.')[2]}": a for n, a in w.items()}
    config, mask = dict(embed_size=E, heads=N), jnp.asarray(keep)[:, None, None]
    check(run("seed_snippet", config, theirs, X, mask=mask), expected, loosen=5)


@pytest.mark.parametrize("module", ["GTransformer", "CTransformer-max", "CTransformer-mean"])
@pytest.mark.parametrize("kind", ["", "Wide", "Narrow", "Alt"])
def test_former_models(kind, module):
    module, _, pooling = module.partition("-")
    outputs = 7 if pooling else 11
    w = {"token_embedding.weight": draw(11, E), "pos_embedding.weight": draw(6, E)}
    w |= {"toprobs.weight": draw(outputs, E), "toprobs.bias": draw(outputs)}
    tokens = RNG.integers(0, 11, (2, 5))
    x = w["token_embedding.weight"][tokens] + w["pos_embedding.weight"][:5]
    hidden = None if pooling else np.triu(np.ones((5, 5), bool), 1)
    for i in range(2):
        own = {f"norm{j}.{n}": draw(E) for j in (1, 2) for n in ("weight", "bias")}
        own |= {"ff.0.weight": draw(10, E), "ff.0.bias": draw(10)}
        own |= {"ff.2.weight": draw(E, 10), "ff.2.bias": draw(E)}
        heads = former(kind, kind != "Narrow")
        x = x + former_attention(kind, heads, x, hidden=hidden)
        x = layer_norm(x, own["norm1.weight"], own["norm1.bias"])
        x = x + linear(own, "ff.2", np.maximum(linear(own, "ff.0", x), 0))
        x = layer_norm(x, own["norm2.weight"], own["norm2.bias"])
        own |= {f"attention.{name}": a for name, a in heads.items()}
        w |= {f"tblocks.{i}.{name}": a for name, a in own.items()}
    config = dict(module=module, heads=N, attention_type=kind.lower() or "default")
    if pooling:
        x = x.max(1) if pooling == "max" else x.mean(1)
        config["max_pool"] = pooling == "max"
    seen = run("former", config, w, tokens)
    check(seen.classes if pooling else seen.logits, linear(w, "toprobs", x))


STACKS = {
    "encoder": ("self_attention", "ffn"),
    "decoder": ("self_attention", "encdec_attention", "ffn"),
}


def graph_variables(names, sizes, has_final):
    """Two encoder layers and one decoder layer in the names of a graph.

    `names`: of the parts of a sublayer, behind that of the sublayer; `sizes`: of q, k, v and o."""
    norm = {names[n]: (E,) for n in ("scale", "bias")}
    heads = {names[n]: size for n, size in sizes.items()}
    up, down = names["up"], names["down"]
    ffn = {f"{up}/kernel": (E, 10), f"{up}/bias": (10,)}
    ffn |= {f"{down}/kernel": (10, E), f"{down}/bias": (E,)}
    shapes = {}
    for stack, depth in (("encoder", 2), ("decoder", 1)):
        shapes |= {f"{stack}/{n}": size for n, size in norm.items() if has_final}
        for i in range(depth):
            for sublayer in STACKS[stack]:
                own = norm | (ffn if sublayer == "ffn" else heads)
                shapes |= {f"{stack}/layer_{i}/{sublayer}/{n}": size for n, size in own.items()}
    return {name: draw(*size) for name, size in shapes.items()}


def graph_by_hand(w, names, texts, *, eps, encoder_heads=N, scale=None, post=False, times=1):
    """What encoder and decoder make of (tokens of the source, it embedded, the target embedded);
    the decoder adds the input of its FFN `times`."""
    source, x, y = texts

    def norm(path, a):
        return layer_norm(a, w[f"{path}/{names['scale']}"], w[f"{path}/{names['bias']}"], eps)

    def heads(path, a, context, hidden):
        count, read = encoder_heads if path.startswith("encoder") else N, (a, context, context)
        q, k, v = (
            np.einsum("btd,dnh->btnh", one, w[f"{path}/{names[n]}"].reshape(E, count, -1))
            for n, one in zip("qkv", read, strict=True)
        )
        side = attend(q, k, v, scale or q.shape[-1] ** -0.5, hidden)
        return side @ w[f"{path}/{names['o']}"].reshape(-1, E)

    def ffn(path, a):
        up, down = (f"{path}/{names[n]}" for n in ("up", "down"))
        a = np.maximum(a @ w[f"{up}/kernel"] + w[f"{up}/bias"], 0)
        return a @ w[f"{down}/kernel"] + w[f"{down}/bias"]

    def step(path, f, a, times=1):
        return norm(path, a + f(path, a)) if post else times * a + f(path, norm(path, a))

    final = (lambda path, a: a) if post else norm
    padding = (source == 0)[:, None, None]
    ahead = np.triu(np.ones((y.shape[1],) * 2, bool), 1)
    for i in range(2):
        x = step(f"encoder/layer_{i}/self_attention", lambda p, a: heads(p, a, a, padding), x)
        x = step(f"encoder/layer_{i}/ffn", ffn, x)
    x = final("encoder", x)
    y = step("decoder/layer_0/self_attention", lambda p, a: heads(p, a, a, ahead), y)
    y = step("decoder/layer_0/encdec_attention", lambda p, a: heads(p, a, x, padding), y)
    return x, final("decoder", step("decoder/layer_0/ffn", ffn, y, times))


def timed(x):
    """With sinusoids: all sines, then all cosines."""
    angles = np.arange(x.shape[1])[:, None] * 1e4 ** (-np.arange(E // 2) / (E // 2 - 1))
    return x + np.concatenate([np.sin(angles), np.cos(angles)], -1)


SOURCE = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])
READS = dict(source=jnp.asarray(SOURCE), source_padding_mask=jnp.asarray(SOURCE != 0))


@pytest.mark.parametrize("three", [False, True])
@pytest.mark.parametrize("after", ["da", "dan"])
def test_tensor2tensor(after, three):
    """Widths of keys and values of their own; a table in three pieces."""
    place = {"da": "layer_prepostprocess", "dan": "layer_postprocess"}[after]
    names = {n: f"{place}/layer_norm/layer_norm_{n}" for n in ("scale", "bias")}
    names |= {"up": "conv1", "down": "conv2"}
    if three:
        names |= {n: f"multihead_attention/{n}" for n in "qkvo"}
        sizes = {"q": (E, N, 2), "k": (E, N, 2), "v": (E, N, 5), "o": (N, 5, E)}
    else:
        ours = {"q": "q", "k": "k", "v": "v", "o": "output_transform"}
        names |= {n: f"multihead_attention/{name}/kernel" for n, name in ours.items()}
        sizes = {"q": (E, N * 2), "k": (E, N * 2), "v": (E, N * 5), "o": (N * 5, E)}
    w, pieces = graph_variables(names, sizes, after == "da"), [draw(n, E) for n in (4, 4, 3)]
    target, table = np.array([[0, 7, 8, 2], [0, 8, 1, 10]]), np.concatenate(pieces)
    x, y = (timed(table[ids] * E**0.5 * (ids != 0)[..., None]) for ids in (SOURCE, target))
    options = dict(eps=1e-6, post=after == "dan", scale=1 if three else None)
    _, last = graph_by_hand(w, names, (SOURCE, x, y), **options)
    theirs = {f"transformer/body/{name}": a for name, a in w.items()}
    at = "transformer/symbol_modality_11_12/shared/weights"
    theirs |= {f"{at}_{i}": piece for i, piece in enumerate(pieces)}
    config = dict(num_heads=N, layer_postprocess_sequence=after, max_length=16)
    check(run("t2t", config, theirs, target, **READS).logits, last @ table.T)


@pytest.mark.parametrize("encoder_heads", deep([N, 2], 2))
def test_summae(encoder_heads):
    """Their decoder is given the targets and pads a zero vector before them."""
    names = {"scale": "preprocess/LayerNorm/gamma", "bias": "preprocess/LayerNorm/beta"}
    ours = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "output_proj"}
    names |= {n: f"{name}/kernel" for n, name in ours.items()}
    names |= {"up": "ffn/dense", "down": "ffn/dense_1"}
    w = graph_variables(names, dict.fromkeys("qkvo", (E, E)), True)
    table, target = draw(11, E), np.array([[7, 8, 2], [8, 1, 10]])
    x = timed(table[SOURCE] * (SOURCE != 0)[..., None])
    y = timed(np.concatenate([np.zeros((2, 1, E)), table[target]], axis=1))
    options = dict(eps=1e-12, encoder_heads=encoder_heads, times=2)
    encoded, last = graph_by_hand(w, names, (SOURCE, x, y), **options)
    config = dict(num_encoder_heads=encoder_heads, num_decoder_heads=N, max_length=16)
    shifted = np.pad(target, ((0, 0), (1, 0)))
    seen = run("summae", config, w | {"embedding": table}, shifted, **READS)
    check(seen.encoded, encoded)
    check(seen.hidden, last)


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


def google_case(family):
    """(config, tensors, inputs) of a golden file with the names, and in the order, of Google's."""
    config, tensors, given, _ = split(FAMILIES[family])
    config = {n: v for n, v in config.items() if n not in ("model_type", "hidden_act")}
    found = {}
    for name, a in tensors.items():
        path = name.removeprefix(f"{family}.").replace(".", "/")
        for old, new in TO_GOOGLE.items():
            path = re.sub(old, new, path)
        path = path if path.startswith("cls/") else f"bert/{path}"
        found[path] = a.T if path.endswith("/kernel") else a
    assert len(found) == len(tensors)
    return config, found, given


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_google_names(family, tmp_path):
    """The same weights under Hugging Face's names give the same, with the tanh gelu."""
    config, w, _ = google_case(family)
    theirs, expected = pretrained.load(golden_folder(tmp_path / "folder", family))
    settings = config | {"hidden_act": "gelu"}
    model, params = pretrained.from_variables(f"google_{family}", settings, w)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    config, replace = theirs.config, dataclasses.replace
    assert model.config.dropout.places == ("embeddings", "attention", "ffn")
    assert model.config == replace(
        config, dropout=replace(config.dropout, places=model.config.dropout.places),
        ffn=replace(config.ffn, activation="gelu_tanh"), sharing=model.config.sharing,
        output=replace(config.output, transform="gelu_tanh"),
    )  # fmt: skip
    assert model.config.plan == config.plan


def test_googles_albert_is_saved_where_nothing_drops(tmp_path):
    """transformers drops nothing behind the feed-forward part: with no rate there is no place."""
    config, w, given = google_case("albert")
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
    for own, width in (({"embedding_size": 12}, None), ({"embedding_size": 6}, 6), ({}, 128)):
        config, rows = pretrained.SYSTEMS["google_albert"](sizes | own, {})
        assert config.embedding.width == width
        assert any("embedding_hidden_mapping_in" in row.name for row in rows) == bool(width)
    many = sizes | dict(num_hidden_layers=22, num_hidden_groups=22)
    config, rows = pretrained.SYSTEMS["google_albert"](many, {})
    assert config.plan["ffn"][14:17] == (14, 14, 15)  # group 15 never comes to exist
    assert not any("/group_15/" in row.name for row in rows)
    assert any("/group_16/" in row.name for row in rows)


NO_OTHERS = dict.fromkeys(f"{n}.weight" for n in ("values", "keys", "queries", "fc_out"))
NO_OTHERS["fc_out.bias"] = None
LINEAR = {"linear1.weight": draw(10, E)}
SNIPPET, MODULE, LAYERS = dict(embed_size=E, heads=N), dict(embed_dim=E, num_heads=N), dict(nhead=N)
ATTENTION = dict(module="SelfAttention", emb=E, heads=N)
ALT = ATTENTION | dict(module="SelfAttentionAlt")
SUMMAE = {"encoder/layer_0/ffn/ffn/dense/kernel": draw(E, 10), "embedding": draw(11, E)}
SUMMAE |= {f"{stack}/layer_0/x": draw(1) for stack in ("encoder", "decoder")}
SHARD = {"symbol_modality_9_12/shared/weights_0": draw(4, E)}
MISFITS = [
    ("seed_snippet", dict(embed_size=E), {}, "config needs 'heads'"),
    ("seed_snippet", SNIPPET | dict(depth=1), {}, "'depth' is unknown"),
    ("seed_snippet", SNIPPET, {"fc_out.bias": None}, "'fc_out.bias'; the model"),
    ("seed_snippet", SNIPPET, {"more": draw(2)}, "no place for .*'more'"),
    ("seed_snippet", SNIPPET, {"fc_out.weight": draw(2, 3)}, r"'fc_out.weight' has shape \(2, 3\)"),
    ("seed_snipet", {}, {}, "did you mean 'seed_snippet'"),
    ("torch_mha", MODULE | dict(add_bias_kv=True), {}, "bias_k is not there"),
    ("torch_mha", MODULE, NO_OTHERS | {"bias_k": draw(1, 1, E)}, "missing"),
    ("torch_layers", LAYERS | dict(activation="mish"), LINEAR, "unknown activation 'mish'"),
    # No references, which would run code.
    ("torch_layers", LAYERS | dict(activation="os:getcwd"), LINEAR, "unknown activation"),
    ("t2t", dict(num_heads=N, layer_postprocess_sequence="os:getcwd"), {}, "unknown layer_post"),
    ("former", ATTENTION | dict(module="os:getcwd"), {}, "unknown module"),
    ("former", ATTENTION | dict(revision="os:getcwd"), {}, "unknown revision"),
    ("torch_layers", dict(nhead=5), LINEAR, "not divisible by num_heads 5"),
    ("torch_layers", LAYERS, {}, "'linear1.weight' is missing"),
    ("t2t", dict(num_heads=N), SHARD, "have 4 rows, their names say 9"),
    ("summae", dict(num_encoder_heads=5, num_decoder_heads=N), SUMMAE, "by num_heads 5"),
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
