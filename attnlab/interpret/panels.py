"""A model and one text -> a panel of the viewer: attention, statistics, and ablation effects."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from attnlab.heads import Layout
from attnlab.interpret.importance import HeadsName, head_gates, losses_without_one
from attnlab.interpret.statistics import STATISTICS, ProbsName, head_statistics, stacked_probs
from attnlab.interpret.viewer import AttentionMaps, Panel
from attnlab.models.config import ModelConfig, heads_per_layer
from attnlab.models.embed import check_tokens
from attnlab.models.forward import ModelInputs, Outputs, run_model
from attnlab.sharing import Params, plan_name
from attnlab.tap import Patches

Inputs: TypeAlias = Mapping[str, ArrayLike]
"""Arguments of the model's call: "tokens", and "source", "padding_mask", ... of `ModelInputs`."""


class Attention(NamedTuple):
    """One of the attentions of a model."""

    name: str
    query_text: str
    """The argument of the model's call that holds the query tokens."""
    key_text: str
    sublayers: tuple[str, ...]
    """Sublayers of a plan whose parameters it uses."""
    probs: ProbsName
    heads: HeadsName


SELF = ("attention", "kv", "delta")
ENCODER = Attention("encoder", "source", "source", SELF, "encoder.probs", "encoder.heads")
DECODER = Attention("decoder", "tokens", "tokens", SELF, "probs", "heads")
CROSS = Attention(
    "decoder to encoder", "tokens", "source", ("cross", "delta"), "cross.probs", "cross.heads"
)


class AblationMetric(NamedTuple):
    """A comparison of the model without a head with the whole model.

    That of the loss, with targets of your own:

        def loss(params, patch):
            return token_loss(config, params, tokens, targets=targets)(patch).mean()

        metric = AblationMetric("loss", "increase of the loss in nats", loss, jnp.subtract)
    """

    name: str
    """Of the statistic that the panel shows."""
    description: str
    """What it measures, in words."""
    output: Callable[[Params, Patches], Array]
    """(params, patch of the model's call) -> output to compare."""
    change: Callable[[Array, Array], Array]
    """(output without the head, output of the whole model) -> a number."""


def model_panel(
    config: ModelConfig,
    params: Params,
    inputs: Inputs,
    token_text: Mapping[str, Sequence[str]],
    *,
    metric: AblationMetric | None = None,
    ablate: bool = True,
    name: str = "",
) -> Panel:
    """One model on one text, for `view_panels`.

    Where a head has several softmax distributions (layout `differential`), the heads of the panel
    are these distributions [key head, first or second, query head], each with the effect of its
    head.

    Args:
      config, params: of the model.
      inputs: arguments of the model's call for one text: "tokens" and, with an encoder, "source".
      token_text: the same names -> how each token is written; where shorter than the tokens, the
        rest is padding and is not shown.
      metric: of the ablations; default `default_metric`.
      ablate: gate every head to 0 once and, where layers share parameters, every head of a
        parameter group in all its layers.
      name: title of the panel.

    Raises:
      ValueError: several texts, layers with different numbers of heads or of softmax
        distributions, or inputs that do not fit the model.

    >>> config = ModelConfig(width=8, num_layers=2, sharing="albert")
    >>> tokens = jnp.array([[104, 101, 108, 108, 111]])
    >>> params = config.build().init(jax.random.key(0), tokens)["params"]
    >>> panel = model_panel(config, params, {"tokens": tokens}, {"tokens": "h e l l o".split()})
    >>> panel.maps[0].probs.shape, list(panel.maps[0].statistics)[-2:]
    ((2, 4, 5, 5), ['loss increase', 'loss increase (group)'])
    """
    params = jax.tree.map(jnp.asarray, params)
    config = with_factored_order(config)
    heads_per_layer(config)
    count = len(np.asarray(inputs["tokens"]))
    if count != 1:
        raise ValueError(f"a panel shows one text, not {count}: give inputs of one row")
    attentions = (DECODER,) if config.encoder is None else (ENCODER, DECODER, CROSS)
    names = tuple(one.probs for one in attentions)
    captured = _call(config, params, inputs, capture=names).captured
    probs = {name: stacked_probs(captured, name) for name in names}
    effects: dict[HeadsName, dict[str, tuple[str, np.ndarray]]] = {}
    if ablate:
        heads = [one.heads for one in attentions]
        effects = _ablations(metric or default_metric(config, inputs), config, params, heads)
    maps = []
    for attention in attentions:
        queries, keys = token_text[attention.query_text], token_text[attention.key_text]
        p = probs[attention.probs][..., : len(queries), : len(keys)]
        ids = _ids(inputs[attention.query_text], len(queries))
        key_ids = _ids(inputs[attention.key_text], len(keys))
        same_text = attention.query_text == attention.key_text
        found = head_statistics(p, ids, key_tokens=key_ids, same_text=same_text)
        statistics = {n: np.asarray(a) for n, a in found.items()}
        about = {n: f"{s.formula} ({s.unit}), mean over queries" for n, s in STATISTICS.items()}
        stack = config.encoder_model if attention is ENCODER else config
        head_of_map = np.array([stack.stacks[n].layout.head_of_map for n in stack.layer_names])
        for label, (description, values) in effects.get(attention.heads, {}).items():
            statistics[label] = np.take_along_axis(values, head_of_map, axis=1)
            about[label] = description
        maps.append(
            AttentionMaps(
                probs=np.asarray(p[:, 0], np.float32),
                tokens=queries,
                keys=None if same_text else keys,
                statistics=statistics,
                plan={name: stack.plan[name] for name in attention.sublayers if name in stack.plan},
                descriptions=about,
                name=config.kind if config.encoder is None else attention.name,
            )
        )
    return Panel(tuple(maps), name=name, description=describe_model(config))


def with_factored_order(config: ModelConfig) -> ModelConfig:
    """The same function by products in the order in which heads can be gated and patched."""
    return dataclasses.replace(
        config,
        attention=dataclasses.replace(config.attention, order=None),
        layer_types=tuple(  # not None: types that differ in their order only stay two
            (n, dataclasses.replace(one, order=one.order and "factored"))
            for n, one in config.layer_types
        ),
    )


def _call(
    config: ModelConfig,
    params: Params,
    inputs: Inputs,
    capture: tuple[str, ...] = (),
    patch: Patches | None = None,
) -> Outputs:
    others = {name: jax.tree.map(jnp.asarray, a) for name, a in inputs.items() if name != "tokens"}
    call = ModelInputs(**others, capture=capture, patch=patch)
    return run_model(params, inputs["tokens"], config, call)


def describe_model(config: ModelConfig) -> str:
    """A model in one line.

    >>> from attnlab.heads import Standard
    >>> describe_model(ModelConfig(heads=Standard(num_heads=4, num_kv_heads=2), sharing="cycle:2"))
    'decoder, 4 layers, width 64, 4 standard heads of head_dim 16, 2 KV heads, sharing cycle:2'
    """
    layouts = [c.layout for c in config.stacks.values()]
    depth, shared = f"{config.num_layers}", ""
    if config.encoder is not None:
        layouts = [config.encoder_model.layout, *layouts]
        depth = f"{config.encoder_model.num_layers} + {depth}"
        if config.encoder.shares_decoder:
            shared = ", encoder and decoder share parameters"
    types = f", {len(config.stacks)} layer types" if config.layer_types else ""
    heads = " or ".join(dict.fromkeys(map(_describe_heads, layouts)))
    return (
        f"{config.kind.replace('_', '-')}, {depth} layers, width {config.width}, {heads}, "
        f"sharing {plan_name(config.sharing)}{shared}{types}"
    )


def _describe_heads(layout: Layout) -> str:
    has_head_dim = "head_dim" in {field.name for field in dataclasses.fields(layout)}
    width = layout.size("head_dim") if has_head_dim else layout.score_width
    kv_heads = layout.size("num_kv_heads")
    shared = f", {kv_heads} KV heads" if kv_heads != layout.num_heads else ""
    return f"{layout.num_heads} {layout.name} heads of head_dim {width}{shared}"


def default_metric(config: ModelConfig, inputs: Inputs) -> AblationMetric:
    """The effect of removing a head on one text, without the padding that a "padding_mask" marks.

    For a decoder the increase of the code length of the next token; for an encoder with an LM head,
    and for a text of one token or of vectors, KL(p || q) of its predictions q from p of the whole
    model; both in bits per token. Without an LM head |y - x| / |x| of the hidden states y from x of
    the whole model.

    Args:
      config: of the model.
      inputs: arguments of the model's call for one text, as in `model_panel`.

    >>> from attnlab.models import ModelConfig
    >>> decoder, text = ModelConfig(), {"tokens": np.zeros((1, 3), int)}
    >>> callable(default_metric(decoder, text).output)
    True
    """
    tokens = check_tokens(config, inputs["tokens"], packed=True)  # the model checks the length
    used = jnp.asarray(inputs.get("padding_mask", np.ones(tokens.shape[:2], bool)), bool)
    both = used[:, :-1] & used[:, 1:]  # a token and the next one

    def mean(a: Array, where: Array) -> Array:
        return jnp.sum(jnp.where(where, a, 0)) / jnp.sum(where)

    def log_probs(params: Params, patch: Patches) -> Array:
        logits = _call(config, params, inputs, patch=patch).logits
        assert logits is not None
        return jax.nn.log_softmax(logits.astype(jnp.float32)) / math.log(2)

    def hidden(params: Params, patch: Patches) -> Array:
        found = _call(config, params, inputs, patch=patch).hidden
        return jnp.where(used[..., None], found, 0)

    def next_token(params: Params, patch: Patches) -> Array:
        p = log_probs(params, patch)[:, :-1]
        return -mean(jnp.take_along_axis(p, tokens[:, 1:, None], axis=-1)[..., 0], both)

    if config.output.kind == "none":
        return AblationMetric(
            "output change",
            "relative change of the hidden states when this head is set to 0",
            hidden,
            lambda y, x: jnp.linalg.norm(y - x) / jnp.linalg.norm(x),
        )
    if config.kind == "encoder" or tokens.ndim != 2 or tokens.shape[1] < 2:
        return AblationMetric(
            "output change",
            "KL(p || q) of the predictions in bits per token when this head is set to 0",
            log_probs,
            lambda q, p: mean(jnp.sum(jnp.exp2(p) * (p - q), axis=-1), used),
        )
    return AblationMetric(
        "loss increase",
        "increase of the next-token loss in bits per token when this head is set to 0",
        next_token,
        jnp.subtract,
    )


def _ablations(
    metric: AblationMetric, config: ModelConfig, params: Params, names: Iterable[HeadsName]
) -> dict[HeadsName, dict[str, tuple[str, np.ndarray]]]:
    """Heads -> label -> (description, [L, N]): the effect of each head in one layer and, where
    layers share parameters, in all layers of its group."""
    by_layer = {name: head_gates(config, name) for name in names}
    by_group = {name: head_gates(config, name, by="group") for name in by_layer}
    by_group = {name: g for name, g in by_group.items() if g.shape[0] < len(g.rows)}

    @jax.jit
    def run(params: Params) -> list[dict[HeadsName, Array]]:
        whole = metric.output(params, {})

        def loss(patch: Patches) -> Array:
            return metric.change(metric.output(params, patch), whole)

        return [
            {name: losses_without_one(loss, one) for name, one in gates.items()}
            for gates in (by_layer, by_group)
        ]

    layers, groups = run(params)
    found = {name: {metric.name: (metric.description, np.asarray(a))} for name, a in layers.items()}
    for name, a in groups.items():
        values = np.asarray(a)[list(by_group[name].rows)]
        description = f"{metric.description}, in all layers of its parameter group"
        found[name][f"{metric.name} (group)"] = description, values
    return found


def _ids(tokens: ArrayLike, count: int) -> Array | None:
    """Token ids; None for features, which are not compared."""
    a = jnp.asarray(tokens)[:, :count]
    return a if jnp.issubdtype(a.dtype, jnp.integer) else None
