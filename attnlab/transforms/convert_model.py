"""`convert_model`: a whole model with other heads, every parameter group converted and measured."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.heads import Layout, Params
from attnlab.heads.weights import without
from attnlab.models.config import ModelConfig
from attnlab.models.params import check_params, head_layouts
from attnlab.sharing import PyTree
from attnlab.transforms.convert import Conversion, NotEquivalent, Undecided, convert, error_bound
from attnlab.transforms.resharing import output_difference

ROWS, LONGEST = 4, 16
"""Random tokens on which the outputs are compared."""
LARGEST_ERROR = 1e-3
"""Bound of `ModelConversion.logits_error`; at least `error_bound` of the dtypes of the parameters
and of the computation."""


@dataclasses.dataclass(frozen=True)
class ModelConversion:
    """The same model with other heads.

    Attributes:
      config, params: of the new model.
      errors: (stack, sublayer, parameter group) -> its relative forward and gradient error, as
        those of `Conversion`.
      logits_error: `output_difference` on random tokens, or random images, in the dtype in which
        the model computes; below `LARGEST_ERROR`.
    """

    config: ModelConfig
    params: PyTree
    errors: Mapping[tuple[str, str, int], tuple[float, float]]
    logits_error: float


def convert_model(
    config: ModelConfig, params: PyTree, *, heads: Layout, key: Array | None = None
) -> ModelConversion | NotEquivalent | Undecided:
    """The model with other heads that computes the same function.

    Every parameter group of every sublayer with heads is converted by `convert`. New heads and
    columns can learn.

    Args:
      config, params: the model.
      heads: the heads of the new model, without a width.
      key: for new weights and measurements; None is `jax.random.key(0)`.

    Returns:
      `ModelConversion`, or the answer of the first group that is not converted, which its reason
      names. `Undecided` too if the outputs of the whole models differ.

    Raises:
      ValueError: layers share keys and values or have low-rank deltas; another number of heads
        where these have relative positions or ALiBi; or the model cannot have these heads.

    >>> from attnlab.heads import Standard, Wide
    >>> config = ModelConfig(width=8, num_layers=2, heads=Standard(num_heads=2))
    >>> params = config.build().init(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> found = convert_model(config, params, heads=Wide(num_heads=2))
    >>> found.params["layers"]["attention"]["q"].shape, found.logits_error < 1e-5
    ((2, 8, 2, 8), True)
    """
    params = check_params(config, params)
    key = jax.random.key(0) if key is None else key
    to = dataclasses.replace(config, heads=heads)
    new, made, errors = head_layouts(to), dict(params), {}
    for (stack, name), layout in head_layouts(config).items():
        target, positions = new[stack, name], config.layer_stacks[stack].positions
        if name not in params.get(stack, ()) or layout == target:
            continue
        group, names = params[stack][name], list(layout.shapes)
        if name == "kv" or not set(names) <= set(group) or "delta" in params[stack]:
            raise ValueError(f"{stack} has the sublayer 'kv' or 'delta': first use change_plan")
        is_self = name != "cross"
        of_heads = is_self and (positions.is_relative or positions.name == "alibi")
        if of_heads and target.num_heads != layout.num_heads:
            raise ValueError(
                f"positions {positions.name!r} differ between heads, so {layout.num_heads} heads "
                f"cannot become {target.num_heads}; give `heads` num_heads={layout.num_heads}"
            )
        converted = []
        for g in range(len(group[names[0]])):
            found = convert(
                {n: group[n][g] for n in names}, layout, target, key=jax.random.fold_in(key, g),
                rotary=positions.is_rotary and is_self,
            )  # fmt: skip
            if not isinstance(found, Conversion):
                return dataclasses.replace(
                    found, reason=f"{stack}/{name}, group {g}: {found.reason}"
                )
            converted.append(found.params)
            errors[stack, name, g] = found.forward_error, found.gradient_error
        made[stack] = made[stack] | {name: with_heads(group, layout, converted)}
    with jax.default_matmul_precision("highest"):
        error = output_difference((config, params), (to, made), random_inputs(config, key))
    dtypes = {config.compute.dtype, *(str(a.dtype) for a in jax.tree.leaves(params))}
    bound = max(LARGEST_ERROR, *(error_bound(jnp.dtype(dtype)) for dtype in dtypes))
    if error < bound:  # NaN is not
        return ModelConversion(to, made, errors, error)
    reason = f"each group is exact, but outputs of the models differ by {error:.2g} of the largest"
    return Undecided(f"{reason}, more than {bound:.2g}", error)


def random_inputs(config: ModelConfig, key: Array) -> Int[Array, "B T"] | Float[Array, "B H W C"]:
    """Ids or, for a model of images, pixels, on which two models are compared."""
    images = config.embedding.images
    if images is not None:
        return jax.random.normal(key, (ROWS, images.height, images.width, images.channels))
    return jax.random.randint(key, (ROWS, min(config.longest_text, LONGEST)), 0, config.vocab_size)


def with_heads(sublayer: PyTree, layout: Layout, groups: Sequence[Params]) -> PyTree:
    """The stacked parameters of a sublayer with other heads in place of those of `layout`; its norm
    stays."""
    stacked = {name: jnp.stack([group[name] for group in groups]) for name in groups[0]}
    return without(sublayer, *layout.shapes) | stacked
