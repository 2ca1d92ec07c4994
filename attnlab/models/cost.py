"""Parameters, FLOPs and cache bytes of a model, by formula from its config.

FLOPs are those of matrix products in the forward pass, 2 for a multiply-add: every weight that is
applied, the scores and the product with the values over all keys (a causal mask saves none here),
LM head and token classifier. Left out are biases, norms, softmax, rotary embedding, embedding
look-ups, `weight_flops`, and what runs once per text: the pooler and its classifier. At about 5
operations a score softmax is 5 N T L more per token, so it depends on the number of heads. With 4
layers and T = 128: 23 % in 16 heads of 2 at width 32, 7 % in 16 of 4, 2 % in 4 of 16 and 0.5 % in 1
of 64 at width 64.
"""

import collections
import functools
import itertools
from collections.abc import Mapping

import jax

from attnlab import heads
from attnlab.fields import as_count
from attnlab.models.config import ModelConfig
from attnlab.models.ffn import ffn_flops, inactive_parameters
from attnlab.models.layer import init_layer
from attnlab.models.params import num_outer_parameters, owned_stacks
from attnlab.models.specs import LayerSpec
from attnlab.sharing import Params, PyTree

# Parameters ---------------------------------------------------------------------------------------


def num_parameters(config: ModelConfig) -> int:
    """Parameters of a model: those of a parameter group count once.

    >>> alone, shared = (ModelConfig(sharing=plan) for plan in ("separate", "albert"))
    >>> layer = sum(sublayer_parameters(alone.layer).values())
    >>> num_parameters(alone) - num_parameters(shared) == 3 * layer
    True
    """
    _check_config("num_parameters", config)
    owned = owned_stacks(config).values()
    return num_outer_parameters(config) + sum(_weighted(c.layer, c.plan.num_groups) for c in owned)


def applied_parameters(config: ModelConfig) -> int:
    """Parameters that a token passes through: a parameter group counts for each layer that uses it.

    Of experts, those count that a token uses.

    >>> alone, shared = (ModelConfig(sharing=plan) for plan in ("separate", "albert"))
    >>> applied_parameters(shared) == num_parameters(alone)
    True
    """
    total = num_outer_parameters(config)
    for c in config.layer_stacks.values():
        total += _weighted(c.layer, c.plan.num_applications)
        total -= inactive_parameters(c.width, c.ffn) * c.num_layers
    return total


def parameters_by_uses(config: ModelConfig) -> dict[int, int]:
    """How many layers use a parameter group -> parameters of all groups used that often, ascending.

    Embeddings and output heads are left out.

    >>> cycle = ModelConfig(num_layers=5, sharing="cycle:2")
    >>> layer = sum(sublayer_parameters(cycle.layer).values())
    >>> parameters_by_uses(cycle) == {2: layer, 3: layer}
    True
    """
    uses: collections.Counter[tuple[str, str, str, int]] = collections.Counter()
    sizes: dict[tuple[str, str, str, int], int] = {}
    owned = owned_stacks(config)
    for stack, c in config.layer_stacks.items():
        for sublayer, shapes in sublayer_shapes(c.layer).items():
            groups = [g for g in c.plan[sublayer] if isinstance(g, int)]
            # Weight by weight: an encoder that shares deltas has none of cross-attention.
            for (name, weight), group in itertools.product(shapes.items(), groups):
                key = stack if stack in owned else "layers", sublayer, name, group
                uses[key] += 1
                sizes[key] = _size(weight)
    found: collections.Counter[int] = collections.Counter()
    for key, count in uses.items():
        found[count] += sizes[key]
    return dict(sorted(found.items()))


def sublayer_parameters(layer: LayerSpec) -> dict[str, int]:
    """Sublayer -> parameters of one of its groups, norms included.

    >>> from attnlab.heads import Standard
    >>> from attnlab.models.specs import FFN
    >>> sublayer_parameters(LayerSpec(heads=Standard(width=6, num_heads=2), ffn=FFN(width=5)))
    {'attention': 156, 'ffn': 83}
    """
    return {name: _size(shapes) for name, shapes in sublayer_shapes(layer).items()}


@functools.lru_cache(maxsize=512)
def sublayer_shapes(layer: LayerSpec) -> Params:
    """Sublayer -> shapes of the weights of one of its groups, as `init_layer` makes them."""
    inits = init_layer(layer)
    shapes: Params = jax.eval_shape(
        lambda key: {name: init(key) for name, init in inits.items()}, jax.random.key(0)
    )
    return shapes


def _check_config(function: str, config: object) -> None:
    """Raises TypeError for a head layout, which a function of the same name takes."""
    if not isinstance(config, ModelConfig):
        name = type(config).__name__
        raise TypeError(f"{function} takes a ModelConfig, not {name}; see attnlab.heads.{function}")


def _size(shapes: PyTree) -> int:
    return sum(a.size for a in jax.tree.leaves(shapes))


def _weighted(layer: LayerSpec, counts: Mapping[str, int]) -> int:
    sizes = sublayer_parameters(layer)
    return sum(sizes[name] * count for name, count in counts.items())


# FLOPs --------------------------------------------------------------------------------------------


def flops_per_token(config: ModelConfig, length: int) -> int:
    """Forward FLOPs per token of texts of `length` tokens; sharing parameters does not change it.

    Of the weights as they are (order "factored"), whatever order a run uses. With an encoder: of
    one source token and one target token together.

    Args:
      config: the model.
      length: T, tokens of a text; each attends to all T keys, or all T of the source.

    Raises:
      ValueError: `length` is less than 1.

    >>> shared = ModelConfig(sharing="albert")
    >>> flops_per_token(shared, 64) == flops_per_token(ModelConfig(), 64)
    True
    """
    _check_config("flops_per_token", config)
    stacks = config.layer_stacks.values()
    layers = sum(sum(sublayer_flops(stack, length).values()) for stack in stacks)
    return layers + outer_flops(config)


def sublayer_flops(config: ModelConfig, length: int) -> dict[str, int]:
    """Sublayer -> forward FLOPs per token of all layers of one of the `layer_stacks`.

    >>> sublayer_flops(ModelConfig(), 64)
    {'attention': 196608, 'ffn': 262144}
    """
    layer, plan, length = config.layer, config.plan, as_count("length", length, 1)

    def attention(num_new: int) -> int:
        return heads.call_flops(layer.heads, 1, length, length, num_new=num_new)

    # A layer that attends to the keys and values of an earlier one does not compute its own.
    reusing = sum(plan.reuses_kv)
    total = attention(length) * (plan.num_layers - reusing) + attention(0) * reusing
    flops = {"attention": total // length, "ffn": 0}
    if layer.ffn.width:
        flops["ffn"] = plan.num_layers * ffn_flops(layer.heads.width, layer.ffn)
    if layer.cross is not None:
        cross = heads.call_flops(layer.cross, 1, length, length, cross=True)
        flops["cross"] = plan.num_layers * cross // length
    return flops


def outer_flops(config: ModelConfig) -> int:
    """Forward FLOPs per token outside the layers.

    >>> outer_flops(ModelConfig(vocab_size=256, width=64)) == 2 * 64 * 256
    True
    """
    c, e, d = config, config.embedding.width or config.width, config.width
    texts, is_each = 1 if c.encoder is None else 2, c.output.pooler == "each"
    read = e if c.output.transform else d  # by the LM head
    counts = [
        c.vocab_size * e if c.embedding.images is not None else 0,  # features, not token ids
        e * d * texts if c.embedding.width is not None else 0,
        d * e if c.output.transform and (c.output.kind != "none" or is_each) else 0,
        read * c.vocab_size if c.output.kind != "none" else 0,
        (e if c.output.transforms_classes else d) * c.output.num_classes if is_each else 0,
    ]
    return 2 * sum(counts)


def weight_flops(config: ModelConfig) -> int:
    """FLOPs that one forward pass spends on making the weights of its layers, however many tokens.

    A low-rank delta costs r multiply-adds per number of a matrix; 0 under plans without deltas.

    >>> weight_flops(ModelConfig(num_layers=6, width=8, sharing="cycle:3"))
    0
    """
    return sum(
        2 * c.num_layers * _delta_products(sublayer_shapes(c.layer).get("delta"))
        for c in config.layer_stacks.values()
    )


def _delta_products(delta: PyTree) -> int:
    """Multiply-adds of all products down [rows, r] up [r, columns]."""
    if not isinstance(delta, dict):
        return 0
    down, up = delta.get("down"), delta.get("up")
    if isinstance(down, jax.ShapeDtypeStruct) and isinstance(up, jax.ShapeDtypeStruct):
        return int(down.size) * int(up.shape[1])
    return sum(map(_delta_products, delta.values()))


# Cache --------------------------------------------------------------------------------------------


def cache_bytes_per_token(config: ModelConfig, bytes_per_number: int = 4) -> int:
    """What the cache of all layers keeps of a token, in bytes; 0 for an encoder.

    Layers that attend to the keys and values of an earlier layer keep none.

    Args:
      config: the model.
      bytes_per_number: 4 for float32, 2 for bfloat16.

    >>> [cache_bytes_per_token(ModelConfig(sharing=plan)) for plan in ("separate", "cla:2")]
    [2048, 1024]
    """
    total = 0
    for c in config.stacks.values() if config.kind != "encoder" else ():
        used = heads.cost.form(c.layout, c.attention.order or heads.cost.FACTORED)
        one = heads.cache_bytes_per_token(used, bytes_per_number, rotary=c.positions.is_rotary)
        total += (max(c.plan.kv_indices) + 1) * one
    return total
