"""Suite train: a training step beside its peers, and what stacks of layers cost to compile."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attnlab import training
from attnlab.heads import Standard
from attnlab.models import FFN, Compute, ModelConfig, OutputHead, flops_per_token
from attnlab.sharing import Params, PyTree, plan_names
from experiments.benchmarks.measure import Case, Entry, compile_program, refuse, tried
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
    together = training.map_over_seeds(step)
    many = _jax_entry(f"{count} seeds in one program", together, states, tokens, seeds)
    first = jax.tree.map(lambda a: a[0], states)
    alone = _jax_entry(f"1 seed, {count} times", step, first, tokens[0], seeds[0])

    def in_turn() -> float:
        for _ in range(count):
            loss = alone.run()
        return loss

    # Seed 0 has the same weights and tokens in both.
    np.testing.assert_allclose(many.run()[0], alone.run(), rtol=1e-3)
    return [many._replace(ours=True), alone._replace(run=in_turn, ours=True)]


def _step_entries(config: ModelConfig, trains: training.TrainConfig, loop: bool) -> list[Entry]:
    start, ours = _step_of(config, trains)
    tokens, optimizer = _tokens(config, trains), training.make_optimizer(trains).transform
    params = jax.jit(start)(tokens, 0)
    counts = {"attnlab": _count(params.params)}

    def of_linen(name: str, scan: bool) -> Entry:
        peer = decoders.LinenDecoder(config, scan=scan)
        weights = decoders.linen_params(params.params, peer)
        counts[name] = _count(weights)
        step = functools.partial(decoders.linen_step, peer, optimizer)
        return _jax_entry(name, step, (weights, optimizer.init(weights)), tokens)

    def of_torch(name: str) -> Entry:
        run, counts[name] = decoders.torch_step(config, trains, params.params, tokens)
        return Entry(name, run)

    makers: dict[str, Callable[[str], Entry]] = {
        "attnlab": lambda name: _jax_entry(name, ours, params, tokens, 0),
        "Linen, nn.scan": functools.partial(of_linen, scan=True),
    }
    if loop:
        makers["Linen, loop"] = functools.partial(of_linen, scan=False)
        makers["Linen, loop, again"] = functools.partial(of_linen, scan=False)
    entries = [
        entry
        for name, make in (makers | {"torch, eager": of_torch}).items()
        for entry in tried(name, functools.partial(make, name), ours=name == "attnlab",
                           again="again" in name)
    ]  # fmt: skip
    assert len(set(counts.values())) == 1, f"numbers of parameters differ: {counts}"
    return check_learning(entries, steps=3)


def _count(params: Params) -> int:
    return sum(a.size for a in jax.tree.leaves(params))


def _jax_entry(name: str, step: Callable, state: PyTree, *given: ArrayLike) -> Entry:
    """`step` (state, *given) -> (state, loss), compiled, with its state given back to it."""
    # A copy, because the compiled step overwrites what it is given.
    state, given = jax.tree.map(jnp.array, state), jax.tree.map(jnp.asarray, given)
    program, numbers = compile_program(step, state, *given, donate=0)

    def run() -> Any:
        nonlocal state
        state, loss = program(state, *given)
        return np.asarray(jax.block_until_ready((state, loss))[1])

    return Entry(name, run, numbers=numbers)


def check_learning(entries: list[Entry], steps: int) -> list[Entry]:
    """The entries, those refused whose first losses are not those of the first entry.

    The losses also depend on gradients, optimizer, schedule and clipping. Raises AssertionError
    if the loss of the first entry does not fall.
    """
    checked: list[Entry] = []
    first: list[float] = []
    for entry in entries:
        try:
            losses = [] if entry.refusal else [float(entry.run()) for _ in range(steps)]
            first = first or losses
            np.testing.assert_allclose(losses, first if losses else [], 1e-3)
        except Exception as error:
            entry = refuse(entry.name, error, entry.ours)._replace(again=entry.again)
        checked.append(entry)
    assert first[-1] < first[0], f"the loss does not fall: {first}"
    return checked


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
            base, colon, _ = plan.partition(":")
            sharing = f"{base}:{min(GROUPS, depth)}" if colon else plan
            compute = Compute(remat=remat)
            return dataclasses.replace(config, num_layers=depth, sharing=sharing, compute=compute)

        depth, *others = depths
        made = [entry(f"attnlab, {depth} layers", sized(depth).build())]
        made.append(entry(f"attnlab, {depth} layers, remat", sized(depth, remat=True).build()))
        if plan == "separate":
            linen = decoders.LinenDecoder(sized(depth), scan=True)
            made.append(entry(f"Linen, nn.scan, {depth} layers", linen))
        return made + [entry(f"attnlab, {other} layers", sized(other).build()) for other in others]

    about = {"word": "compile", "D": config.width, "T": config.max_len, "L": depths[0]}
    name = f"compile {depths[0]} layers, plan {plan}"
    return Case(name, 4 * config.max_len, build, about, most_seconds=0.0, warm=False)
