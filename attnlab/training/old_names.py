"""Temporary: old names and import paths of attnlab.data and attnlab.training, until no caller is
left. Imported by `attnlab.training`."""

# mypy: ignore-errors
import functools
import sys
import types

import attnlab.training as training
from attnlab import data
from attnlab.data import (
    batching,
    dataset,
    endpoints,
    files,
    generated,
    graph,
    labelled,
    pairs,
    random_access,
    recall,
    text,
    vectors,
)
from attnlab.training import fit as _fit
from attnlab.training import in_memory, memory, objectives, optimizers, sharding, step
from attnlab.training.objectives import (
    classification,
    language,
    objective,
    sequences,
)

fit_module = sys.modules["attnlab.training.fit"]


def renamed(function, names):
    """`function` with old keywords."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **{names.get(k, k): v for k, v in kwargs.items()})

    return call


def alias(name, module, **names):
    """A module under its old path, with old names."""
    old = types.ModuleType(name)
    old.__dict__.update({k: v for k, v in vars(module).items() if not k.startswith("__")})
    old.__dict__.update(names)
    sys.modules[name] = old
    parent, _, last = name.rpartition(".")
    setattr(sys.modules[parent], last, old)
    return old


OF_DATASET = {
    "draw": "generate", "resident": "device_arrays", "write": "decode", "yardsticks": "baselines",
}  # fmt: skip
OF_OBJECTIVE = {
    "asks": "description", "kinds": "model_kinds", "needs": "required_arrays", "reads": "output",
    "symbols": "special_tokens", "closing": "final_metrics", "answer": "predict",
}  # fmt: skip
for cls, table in [
    (dataset.Dataset, OF_DATASET),
    (objective.Objective, OF_OBJECTIVE),
    (fit_module.FitResult, {"watched": "measured"}),
    (in_memory.InMemoryFit, {"rows": "records"}),
    (text.Corpus, {"validated": "with_validation"}),
]:
    for before, now in table.items():
        setattr(cls, before, property(lambda self, now=now: getattr(self, now)))

Source = renamed(dataset.Dataset, OF_DATASET)
Parts = renamed(random_access.Splits, OF_DATASET)
Task = renamed(objective.Objective, OF_OBJECTIVE)
common = dict(
    Source=Source,
    Sizes=data.DataSizes,
    Data=data.DataConfig,
    SOURCES=data.DATASETS,
    Batch=data.Batch,
)
sources = alias("attnlab.training.sources", data, **common)
alias("attnlab.training.sources.source", dataset, **common)
alias("attnlab.training.sources.dataset", random_access, Parts=Parts, **common)
alias("attnlab.training.sources.drawn", generated)
alias("attnlab.training.sources.endpoints", endpoints, cases=endpoints.examples)
alias("attnlab.training.sources.files", files, lines_of=files.split_lines)
alias("attnlab.training.sources.graph", graph)
alias("attnlab.training.sources.labelled", labelled)
alias("attnlab.training.sources.pairs", pairs)
alias(
    "attnlab.training.sources.rows", batching, drawn=batching.epoch_indices,
    spaced=batching.evenly_spaced, padded=batching.pad_rows,
)  # fmt: skip
alias("attnlab.training.sources.synthetic", recall, draw_recall=recall.generate_recall)
alias(
    "attnlab.training.sources.text", text, source_of=text.dataset_of_corpus,
    write_bytes=text.decode_bytes,
)  # fmt: skip
alias(
    "attnlab.training.sources.vectors", vectors, draw_farthest=vectors.generate_farthest,
    draw_maxima=vectors.generate_maxima,
)  # fmt: skip
of_task = dict(
    Task=Task, TASKS=objectives.OBJECTIVES, abstract_inputs=objectives.input_shapes,
    written=objectives.decode_tokens, unexplained=objectives.unexplained_variance,
)  # fmt: skip
alias("attnlab.training.tasks", objectives, **of_task)
alias("attnlab.training.tasks.task", objective, **of_task)
alias("attnlab.training.tasks.classes", classification, ROWS=classification.CLASSIFICATION)
alias("attnlab.training.tasks.language", language, ROWS=language.LANGUAGE)
alias(
    "attnlab.training.tasks.regression",
    sys.modules["attnlab.training.objectives.regression"],
    ROWS=objectives.REGRESSION,
)
alias(
    "attnlab.training.tasks.sequences", sequences, ROWS=sequences.SEQUENCES,
    ROWS_AT_ONCE=sequences.GENERATED_ROWS, exact=sequences.exact_match,
    write_target=sequences.sequence_to_sequence,
)  # fmt: skip


def Cut(axes=None, over_data=False):
    """`StateSharding`."""
    return sharding.StateSharding(axes, over_data)


alias(
    "attnlab.training.shard", sharding, Cut=Cut, places=sharding.state_shardings,
    of_seeds=sharding.with_seed_axis, put=sharding.place, spread=sharding.shard_batch,
    whole=sharding.replicated, rows=sharding.shard_rows,
)  # fmt: skip


def fit(*args, mesh=None, params=None, cut=None, watch=None, options=None, **kwargs):
    """`fit` with the keywords of before."""
    options = options or training.FitOptions(mesh, cut or sharding.StateSharding(), params, watch)
    return _fit(*args, options=options, **kwargs)


def trial(*args, params=None, watch=None, **kwargs):
    """`fit_in_memory` with the keywords of before."""
    options = training.FitOptions(params=params, measure=watch)
    return in_memory.fit_in_memory(*args, options=options, **kwargs)


def step_all(model, task, transform, config, source, mesh, state, batch, seeds, resident):
    """`TrainStep`."""
    made = optimizers.Optimizer(transform, None)
    one = fit_module.TrainStep(model, task, made, config, source, mesh)
    return one(state, batch, seeds, resident)


fit_module.step_all = step_all
fit_module.fit = fit
training.fit = fit
training.trial = trial
training.Trial = in_memory.InMemoryFit
training.Result = fit_module.FitResult
training.frozen = optimizers.frozen_mask
training.over_seeds = step.over_seeds = step.map_over_seeds
optimizers.decays = optimizers.weight_decay_mask
optimizers.Row = renamed(optimizers.OptimizerEntry, {"make": "build"})
memory.need, memory.there, memory.check = (
    memory.step_memory, memory.device_memory, memory.check_fits
)  # fmt: skip
