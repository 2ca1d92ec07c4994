"""Suite train: a training step beside its peers, and what stacks of layers cost to compile."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import training
from attnlab.heads import Standard
from attnlab.models import FFN, Compute, ModelConfig, OutputHead, flops_per_token
from attnlab.sharing import Params, plan_names
from experiments.benchmarks.measure import Case, Entry, compile_program, entry_with_state, tried
from experiments.benchmarks.peers import decoders

SMALL_DECODER = ModelConfig(
    vocab_size=256,
    max_len=256,
    width=256,
    num_layers=6,
    heads=Standard(num_heads=8, biases=("q", "k", "v", "o")),
    ffn=FFN(width=1024, activation="gelu_tanh"),
    output=OutputHead(kind="own"),
    compute=Compute(remat=False),  # as the peers
)
TRAINS = training.TrainConfig(batch_size=16, length=256, seeds=(0,))
TINY_DECODER = dataclasses.replace(
    SMALL_DECODER,
    vocab_size=11,
    max_len=8,
    width=8,
    num_layers=2,
    heads=dataclasses.replace(SMALL_DECODER.heads, num_heads=2),
    ffn=dataclasses.replace(SMALL_DECODER.ffn, width=16),
)
TINY_TRAINS = training.TrainConfig(
    batch_size=4, length=8, schedule=training.ScheduleConfig(warmup_steps=1), seeds=(0,)
)
GROUPS = 4
"""Parameter groups of the plans that take a number."""


def cases(tiny: bool) -> Iterator[Case]:
    """A step of the small decoder; then the compilation of a deeper one under every plan."""
    config, trains = (TINY_DECODER, TINY_TRAINS) if tiny else (SMALL_DECODER, TRAINS)
    yield step_case("training step of the small decoder", config, trains)
    wide = dataclasses.replace(config, width=512, ffn=dataclasses.replace(config.ffn, width=2048))
    deep = config if tiny else wide
    for plan in plan_names(GROUPS):
        yield compile_case(deep, plan, depths=(4, 8) if tiny else (24, 2, 12, 48, 96))


def step_case(
    name: str, config: ModelConfig, trains: training.TrainConfig, loop: bool = True
) -> Case:
    """One optimizer step, from equal weights, on one batch. `loop`: also beside Linen with a Python
    loop over layers, entered twice."""
    tokens = trains.batch_size * trains.length
    build = functools.partial(_step_entries, config, trains, loop)
    return Case(name, tokens, build, _about(config, trains, tokens))


def seeds_case(config: ModelConfig, trains: training.TrainConfig, count: int) -> Case:
    """`count` seeds in one program, beside as many steps of one seed."""
    tokens = count * trains.batch_size * trains.length
    build = functools.partial(_seeds_entries, config, trains, count)
    return Case(f"{count} seeds at once", tokens, build, _about(config, trains, tokens))


def _about(config: ModelConfig, trains: training.TrainConfig, tokens: int) -> dict[str, object]:
    """With FLOPs of 3 forward passes, as `sweep` counts."""
    sizes = {"D": config.width, "L": config.num_layers, "T": trains.length}
    flops = 3.0 * tokens * flops_per_token(config, trains.length)
    return sizes | {"dtype": config.compute.dtype, "word": "training", "flops": flops}


def _tokens(config: ModelConfig, trains: training.TrainConfig, *first: int) -> np.ndarray:
    size = (*first, trains.batch_size, trains.length + 1)
    return np.random.default_rng(0).integers(0, config.vocab_size, size, np.int32)


def _step_of(config: ModelConfig, trains: training.TrainConfig) -> tuple[Callable, Callable]:
    """start(tokens, seed) -> state, and step(state, tokens, seed) -> (state, loss)."""
    model, optimizer = config.build(), training.make_optimizer(trains).transform
    objective = training.OBJECTIVES["causal_lm"]

    def start(tokens, seed):
        return training.init_state(model, objective, optimizer, {"tokens": tokens}, seed)

    def step(state, tokens, seed):
        state = state._replace(window={"loss": jnp.zeros(())})
        state = training.train_step(model, objective, optimizer, state, {"tokens": tokens}, seed)
        return state, state.window["loss"]

    return start, step


def _seeds_entries(config: ModelConfig, trains: training.TrainConfig, count: int) -> list[Entry]:
    start, step = _step_of(config, trains)
    tokens, seeds = _tokens(config, trains, count), jnp.arange(count)
    states = jax.jit(jax.vmap(functools.partial(start, tokens[0])))(seeds)
    many = entry_with_state(training.map_over_seeds(step), states, tokens, seeds)
    first = jax.tree.map(lambda a: a[0], states)
    alone = entry_with_state(step, first, tokens[0], seeds[0])
    # Seed 0 has the same weights and tokens in both.
    np.testing.assert_allclose(many.run()[0], alone.run(), rtol=1e-3)
    in_turn = lambda: [alone.run() for _ in range(count)][-1]
    return [
        many._replace(name=f"{count} seeds in one program", ours=True),
        alone._replace(name=f"1 seed, {count} times", run=in_turn, ours=True),
    ]


def _step_entries(config: ModelConfig, trains: training.TrainConfig, loop: bool) -> list[Entry]:
    start, ours = _step_of(config, trains)
    tokens, optimizer = _tokens(config, trains), training.make_optimizer(trains).transform
    state = jax.jit(start)(tokens, 0)

    def of_linen(scan: bool) -> Entry:
        peer = decoders.LinenDecoder(config, scan=scan)
        weights = decoders.linen_params(state.params, peer)
        assert _count(weights) == _count(state.params), "the numbers of parameters differ"
        step = functools.partial(decoders.linen_step, peer, optimizer)
        return entry_with_state(step, (weights, optimizer.init(weights)), tokens)

    def of_torch() -> Entry:
        run, count = decoders.torch_step(config, trains, state.params, tokens)
        assert count == _count(state.params), "the numbers of parameters differ"
        return Entry("", run)

    makers: dict[str, Callable[[], Entry]] = {
        "attnlab": lambda: entry_with_state(ours, state, tokens, 0),
        "Linen, nn.scan": lambda: of_linen(scan=True),
    }
    if loop:
        makers["Linen, loop"] = makers["Linen, loop, again"] = lambda: of_linen(scan=False)
    made: list[Entry] = []
    first: list[float] = []
    for name, make in (makers | {"torch, eager": of_torch}).items():
        learns = functools.partial(learning, make, first)
        made += tried(name, learns, ours=name == "attnlab", again="again" in name)
    return made


def learning(make: Callable[[], Entry], first: list[float], steps: int = 3) -> Entry:
    """The entry, if its losses fall, and as those of the entry before it.

    The losses also depend on gradients, optimizer, schedule and clipping.

    Args:
      first: losses of the first entry that runs; if there are none, those of this one are added.

    Raises:
      AssertionError: other losses, or losses that do not fall.
    """
    entry = make()
    losses = [float(entry.run()) for _ in range(steps)]
    if not first:
        first.extend(losses)
    np.testing.assert_allclose(losses, first, 1e-3)
    assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
    return entry


def _count(params: Params) -> int:
    return sum(a.size for a in jax.tree.leaves(params))


def compile_case(config: ModelConfig, plan: str, depths: tuple[int, ...]) -> Case:
    """The loss of a decoder and its gradient, traced and compiled anew in every call: the first
    depth with and without remat and beside Linen's `nn.scan`, then the other depths."""

    def build() -> list[Entry]:
        tokens = jax.ShapeDtypeStruct((4, config.max_len), jnp.int32)

        def entry(name: str, model: Any) -> Entry:
            def loss(params, tokens):
                logits = model.apply({"params": params}, tokens)
                return jnp.mean(jnp.square(getattr(logits, "logits", logits)))

            params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
            anew = functools.partial(compile_program, jax.value_and_grad(loss), params, tokens)
            return Entry(name, lambda: anew()[0], ours="attnlab" in name, numbers=anew()[1])

        def sized(depth: int, remat: bool = False) -> ModelConfig:
            sharing = plan.replace(f":{GROUPS}", f":{min(GROUPS, depth)}")
            compute = Compute(remat=remat)
            return dataclasses.replace(config, num_layers=depth, sharing=sharing, compute=compute)

        depth, *others = depths
        made = [entry(f"attnlab, {depth} layers", sized(depth).build())]
        made.append(entry(f"attnlab, {depth} layers, remat", sized(depth, remat=True).build()))
        if plan == "separate":
            linen = decoders.LinenDecoder(sized(depth), scan=True)
            made.append(entry(f"Linen, nn.scan, {depth} layers", linen))
        deeper = [entry(f"attnlab, {other} layers", sized(other).build()) for other in others]
        return made + [one._replace(same_work=False) for one in deeper]

    about = {"word": "compile", "D": config.width, "T": config.max_len, "L": depths[0]}
    name = f"compile {depths[0]} layers, plan {plan}"
    return Case(name, 4 * config.max_len, build, about, most_seconds=0.0, warm=False)
