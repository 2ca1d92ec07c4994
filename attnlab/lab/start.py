"""Parameters that a run starts from: of a published folder, of a run, or drawn in a special way."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import pretrained, runs, transforms
from attnlab.models import ModelConfig, identical_heads, to_json
from attnlab.models.config import sharing_name
from attnlab.nested import differences, flatten
from attnlab.sharing import Params
from attnlab.training.checkpoint import digest
from attnlab.training.objectives.objective import Inputs, Model
from attnlab.training.step import InitParams, new_params

NOISE = 2**31
"""Folded into the key of a seed for the noise between heads."""
MAY_DIFFER = (
    "sharing", "encoder.shares_decoder", "delta_rank", "compute", "attention.order",
    "attention.implementation", "init", "dropout", "metadata",
)  # fmt: skip
"""What a run may choose: how parameters are shared, computed with and dropped."""


@dataclasses.dataclass(frozen=True)
class HeadInit:
    """How the heads of new parameters start.

    Attributes:
      values: names of values, with commas between, that are initially equal in all heads: those of
        the first head. "outputs" makes heads equal, "probs" their attention probabilities, "q,k"
        their queries and keys; "": heads differ.
      noise: relative size of the random difference between heads that `values` makes equal.
      first_of: N' > N: the heads are initially the first N of a layer with N' heads; 0: they are
        initialized on their own.

    Start with equal attention probabilities in all heads, but for noise of 1 %:

        lab.Experiment(head_init=lab.HeadInit(values="probs", noise=0.01))
    """

    values: str = ""
    noise: float = 0.0
    first_of: int = 0


class Start(NamedTuple):
    """What a run starts from."""

    config: ModelConfig
    params: Params
    digest: str
    """Of the parameters."""
    data_digest: str | None
    """Of the data that they were trained on, where that is known."""
    description: str


def init_function(model: ModelConfig, head_init: HeadInit) -> InitParams | None:
    """Makes parameters that start as `head_init` says; None where it says nothing.

    Raises:
      ValueError: before any parameter is made, for what cannot be.
    """
    if head_init == HeadInit():
        return None
    if head_init.noise < 0 or (head_init.noise and not head_init.values):
        raise ValueError(
            f"head_init.noise {head_init.noise} must be 0 or more, and needs head_init.values"
        )
    many = with_more_heads(model, head_init.first_of) if head_init.first_of else model

    def make(key: jax.Array, inputs: Inputs) -> Params:
        params: Params = many.build().init(key, **inputs)["params"]
        if head_init.first_of:
            shapes = jax.eval_shape(model.build().init, key, **inputs)["params"]
            params = jax.tree.map(lambda a, like: a[tuple(map(slice, like.shape))], params, shapes)
        if head_init.values:
            key = jax.random.fold_in(key, NOISE)
            names = head_init.values.split(",")
            params = identical_heads(model, params, names, noise=head_init.noise, key=key)
        return params

    jax.eval_shape(lambda key: make(key, smallest_inputs(model)), jax.random.key(0))
    return make


def input_names(model: ModelConfig) -> tuple[str, ...]:
    """The texts that a model reads."""
    return ("source", "tokens") if model.kind == "encoder_decoder" else ("tokens",)


def smallest_inputs(model: ModelConfig) -> Inputs:
    """One token of each text."""
    return dict.fromkeys(input_names(model), jnp.zeros((1, 1), jnp.int32))


def with_more_heads(model: ModelConfig, count: int) -> ModelConfig:
    """`model` with `count` heads as wide as its own. Raises ValueError where it has as many."""
    if count <= model.heads.num_heads:
        raise ValueError(
            f"head_init.first_of {count} must be more than model.heads.num_heads "
            f"{model.heads.num_heads}"
        )
    known = {field.name for field in dataclasses.fields(model.heads)}
    widths = {name: model.layout.size(name) for name in known & {"head_dim", "value_dim"}}
    heads = dataclasses.replace(model.heads, **{"num_heads": count, **widths})  # type: ignore[arg-type]
    return dataclasses.replace(model, heads=heads)


def initial_params(
    model: Model, params: Params | InitParams | None, seed: int, inputs: Inputs
) -> Params:
    """The parameters of a seed at step 0, as `fit` makes them of `FitOptions.params`."""
    if isinstance(params, dict):
        return params
    return params(jax.random.key(seed), inputs) if params else new_params(model, seed, inputs)


def check_start(model: ModelConfig, folder: str) -> None:
    """Raises ValueError that names every field of `model` which the parameters of `folder` forbid.

    A part "{seed}" of the path stands for a seed; any that is there is looked at.
    """
    before, seed, after = folder.partition("{seed}")
    if seed:
        outer = Path(before).parent
        found = sorted(outer.glob(f"{Path(before).name}*{after}")) if outer.is_dir() else []
        if not found:
            raise ValueError(f"no folder {folder} of any seed")
        folder = str(found[0])
    if runs.is_run(folder):
        stored = runs.read_run(folder, ()).config
    else:
        stored = pretrained.load_config(folder)
    changed = differences(_fixed_fields(model), _fixed_fields(stored))
    if wrong := [f"model.{path}={ours!r} (there {theirs!r})" for path, ours, theirs in changed]:
        raise ValueError(
            f"the parameters of {folder} make another model than {', '.join(wrong)}; leave these "
            "fields as the folder has them, or start=''"
        )


def _fixed_fields(config: ModelConfig) -> dict[str, object]:
    """Path -> value of every field that makes other parameters or computes otherwise."""
    fields = flatten(json.loads(to_json(config))["model"])
    return {path: value for path, value in fields.items() if not path.startswith(MAY_DIFFER)}


def load_start(folder: str, seed: int) -> Start:
    """The parameters that a seed starts from: of a run those of the same seed at its newest
    checkpoint; of a published folder the same for all seeds.

    Raises:
      ValueError: there are none, or the run has no such seed.
    """
    folder = folder.replace("{seed}", str(seed))
    if not runs.is_run(folder):
        model, params = pretrained.load(folder)
        return Start(model.config, params, params_digest(params), None, folder)
    try:
        found = runs.read_run(folder, [seed])
    except ValueError as error:
        raise ValueError(f"seed n starts from seed n of {folder}: {error}") from None
    params = found.params[seed]
    data = found.record.get("source", {}).get("sha256")
    description = f"seed {seed} of {folder} after {found.steps:,} steps"
    return Start(found.config, params, params_digest(params), data, description)


def params_digest(params: Params) -> str:
    """Of all arrays and their names."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    lines = [f"{jax.tree_util.keystr(path)} {digest(leaf)}" for path, leaf in leaves]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def with_plan_of(
    config: ModelConfig, params: Params, model: ModelConfig, tokens: np.ndarray | jax.Array
) -> tuple[Params, str]:
    """Parameters under the sharing plan of another model.

    Args:
      config: of the model that `params` are of.
      params: its parameters.
      model: gives the plan, the rank of deltas, and whether encoder and decoder share.
      tokens: whose outputs are compared.

    Returns:
      The parameters, and in words what was changed and what that does to the outputs.
    """
    changed, new, changes = config, params, []
    shared, wanted = (c.encoder is not None and c.encoder.shares_decoder for c in (config, model))
    if shared and not wanted:
        changed, new = transforms.untie_encoder(changed, new)
        changes.append("encoder and decoder part")
    ranked = dataclasses.replace(changed, delta_rank=model.delta_rank)
    if model.plan != changed.plan or ("delta" in model.plan and ranked != changed):
        changes.append(f"plan {sharing_name(changed)} -> {sharing_name(model)}")
        # A name is the plan of both stacks; an encoder that has a plan of its own keeps it.
        own = changed.encoder is not None and changed.encoder.sharing is not None
        changed, new = transforms.change_plan(ranked, new, model.plan if own else model.sharing)
    if wanted and not shared:
        changed, new = transforms.tie_encoder(changed, new)
        changes.append("encoder and decoder become one")
    if not changes:
        return new, f"its plan, {sharing_name(config)}, is kept"
    difference = transforms.output_difference((config, params), (changed, new), tokens)
    return new, f"{', '.join(changes)}: outputs differ by {difference:.3g} of the largest"
