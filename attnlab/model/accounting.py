"""Parameters and FLOPs of a model, counted from what makes its weights.

FLOPs count the forward pass of matrix products, 2 for a multiply-add: every weight that is
applied, the scores and the value product over all keys (a causal mask saves none here), the
readout. Biases, norms, softmax and embedding look-ups are left out (under 2 % at usual sizes), and
what is paid once a call, whatever the number of tokens, `making_flops`: sums of slots, deltas.
"""

import collections
import functools
import math
from collections.abc import Iterator

import jax

from attnlab.heads.old.cost import cache_bytes_per_token, call_flops, head_flops
from attnlab.model.block import BlockSpec, init_block
from attnlab.model.config import ModelConfig
from attnlab.model.outer import POSITIONS, count_outer
from attnlab.model.pointwise import feed_forward_shapes
from attnlab.sharing.low_rank_delta import delta_shapes
from attnlab.sharing.plan import Plan, mixtures


def model_cache_bytes(config: ModelConfig, bytes_per_number: int = 4) -> int:
    """What decoding stores per token in all layers; those that reuse keys store none, nor do
    encoders.

    >>> from attnlab import ModelConfig
    >>> [model_cache_bytes(ModelConfig(num_layers=4, plan=p)) for p in ("separate", "cla:2")]
    [2048, 1024]
    """
    total = 0
    for c in config.stacks.values() if config.kind != "encoder" else ():
        rotary, memories = POSITIONS[c.positions].rotary, max(c.layer_plan.kv_indices) + 1
        total += memories * cache_bytes_per_token(c.heads, bytes_per_number, rotary)
    return total


@functools.cache
def slot_sizes(block: BlockSpec) -> dict[str, int]:
    """part -> parameters of one slot, its norm included: of what `init_block` makes.

    >>> from attnlab import HeadSpec
    >>> slot_sizes(BlockSpec(HeadSpec("standard", width=6, num_heads=2), ffn_width=5))
    {'attention': 156, 'ffn': 83}
    """
    made = jax.eval_shape(
        lambda: {part: make(jax.random.key(0)) for part, make in init_block(block).items()}
    )
    return {part: sum(a.size for a in jax.tree.leaves(w)) for part, w in made.items()}


def part_parameters(config: ModelConfig, plan: Plan | None = None) -> dict[str, int]:
    """part -> parameters of one slot, its norm included; of the stack of `plan`."""
    plan = config.layer_plan if plan is None else plan
    sizes = slot_sizes(config.block_under(plan))
    return {part: sizes[part] for part in plan}


def unique_parameters(config: ModelConfig) -> int:
    """Numbers that are trained and stored: each slot once.

    >>> from attnlab import ModelConfig
    >>> alone, shared = (ModelConfig(num_layers=4, plan=p) for p in ("separate", "albert"))
    >>> layer = sum(part_parameters(alone).values())
    >>> unique_parameters(alone) - unique_parameters(shared) == 3 * layer
    True
    """
    total = count_outer(config)
    for c in config.stacks.values():
        pools = [(c, c.layer_plan)] if c.share_encoder else _plans(c)
        total += sum(_total(one, plan, plan.num_groups) for one, plan in pools)
    return total


def applied_parameters(config: ModelConfig) -> int:
    """Numbers that a token meets on its way: each slot as often as it is applied, of mixed slots
    one for each layer and its coefficients.

    >>> from attnlab import ModelConfig
    >>> alone, shared = (ModelConfig(num_layers=4, plan=p) for p in ("separate", "albert"))
    >>> applied_parameters(shared) == unique_parameters(alone)
    True
    """
    stacks = [one for c in config.stacks.values() for one in _plans(c)]
    return count_outer(config) + sum(_total(c, plan, plan.num_applications) for c, plan in stacks)


def parameters_by_uses(config: ModelConfig) -> dict[int, int]:
    """How often a slot of the layers is applied -> parameters of all slots that are, ascending.

    Their sum is what the layers have, the sum of uses times parameters what a token meets there.
    A slot that is mixed into all layers counts for those that begin with it.

    >>> from attnlab import ModelConfig
    >>> cycle = ModelConfig(num_layers=5, plan="cycle:2")
    >>> layer = sum(part_parameters(cycle).values())
    >>> parameters_by_uses(cycle) == {2: layer, 3: layer}
    True
    """
    found: collections.Counter[int] = collections.Counter()
    for c in config.stacks.values():
        pools = _plans(c)
        applied = [collections.Counter(_applied(plan)) for _, plan in pools]
        if c.share_encoder:
            applied, pools = [sum(applied, collections.Counter())], [(c, c.layer_plan)]
        for (one, pool), uses in zip(pools, applied, strict=True):
            sizes = part_parameters(one, pool)
            for (part, _), count in uses.items():
                found[count] += sizes[part]
    return dict(sorted(found.items()))


def _applied(plan: Plan) -> Iterator[tuple[str, int]]:
    return ((part, slot) for part, slots in plan.items() for slot in slots if isinstance(slot, int))


def flops_per_token(config: ModelConfig, length: int) -> int:
    """Forward FLOPs per token at sequences of `length`; sharing layers does not change it.

    Of the factored order of contraction, whatever order a run takes. With an encoder: of a token
    of the source and one of the target together. Pooler and classes are left out where they are
    computed once a text; with pooler "each" the classes count.

    >>> from attnlab import ModelConfig
    >>> flops_per_token(ModelConfig(plan="albert"), 64) == flops_per_token(ModelConfig(), 64)
    True
    """
    stacks = [one for c in config.stacks.values() for one in _plans(c)]
    c, total = config, sum(_stack_flops(*one, length) for one in stacks)
    e = c.embedding_width or c.width
    if c.cross == "merged":
        both = call_flops(c.heads, 1, length, length, num_source=length) // length
        total += c.num_layers * (both - head_flops(c.heads, length) + _mix_flops(c, length))
    texts = 2 if c.kind == "encoder_decoder" else 1
    total += 2 * e * c.width * texts if c.embedding_width else 0
    total += 2 * c.width * e if c.readout_transform else 0
    total += 2 * c.width * c.pooled_classes if c.pooler == "each" else 0
    read = e if c.readout_transform else c.width
    return total + (2 * read * c.vocab_size if c.readout != "none" else 0)


def _stack_flops(c: ModelConfig, plan: Plan, length: int) -> int:
    """Of all layers of one kind, or of one of two stacks."""
    shapes = feed_forward_shapes(c.width, c.ffn_width, c.activation).values()
    heads = head_flops(c.heads, length)
    cross = call_flops(c.heads, 1, length, length, cross=True) // length
    stored = heads - call_flops(c.heads, 1, length, length, num_new=0) // length
    flops = {
        "attention": heads + _mix_flops(c, length),
        "ffn": 2 * sum(map(math.prod, shapes)),
        "cross": cross,
    }
    total = sum(plan.num_layers * flops.get(part, 0) for part in plan)
    return total - stored * sum(plan.reuses_kv)


def _mix_flops(c: ModelConfig, length: int) -> int:
    return 4 * c.num_heads**2 * length if c.talking_heads else 0


def making_flops(config: ModelConfig) -> int:
    """FLOPs that a forward pass spends once, whatever it reads, to make the weights of its layers:
    S multiply-adds a number of what is mixed of S slots, r of a matrix with a delta of rank r.

    >>> from attnlab import ModelConfig
    >>> sizes = dict(num_layers=6, width=8, num_heads=2, norm_bias=False, attention_biases="")
    >>> maps, norm = 4 * 8 * 8, 8
    >>> making_flops(ModelConfig(plan="dictionary:3", **sizes)) == 6 * 2 * 3 * (maps + norm)
    True
    >>> making_flops(ModelConfig(plan="cycle:3", **sizes))
    0
    """
    total = 0
    for c in config.stacks.values():
        for its, plan in _plans(c):
            block, count = its.block_under(plan), plan.num_groups
            sums = sum(count[part] * slot_sizes(block)[part] for part in mixtures(plan))
            total += plan.num_layers * 2 * (sums + _products(block))
    return total


def _products(block: BlockSpec) -> int:
    """Multiply-adds of all down [rows, r] up [r, columns] of a layer's delta."""
    if block.delta_rank is None:
        return 0
    whole = init_block(block._replace(delta_rank=None, mixed=()))
    made = jax.eval_shape(lambda: {part: make(jax.random.key(0)) for part, make in whole.items()})
    total = 0
    for path, a in jax.tree_util.tree_leaves_with_path(made):
        shapes = delta_shapes(path[-1].key, a.shape, block.delta_rank)
        total += 0 if "whole" in shapes else math.prod(shapes["down"]) * shapes["up"][1]
    return total


def _total(config: ModelConfig, plan: Plan, counts: dict[str, int]) -> int:
    return sum(size * counts[part] for part, size in part_parameters(config, plan).items())


def _plans(config: ModelConfig) -> list[tuple[ModelConfig, Plan]]:
    """Of each stack that runs, with the config that has its heads."""
    both = config.kind == "encoder_decoder"
    encoder = [(config.as_encoder, config.encoder_layer_plan)] if both else []
    return [(config, config.layer_plan), *encoder]
