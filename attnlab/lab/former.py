"""Records of earlier versions, read as those of this one."""

from attnlab.nested import JSON

TRAIN_FIELDS = {
    "optimizer": "optimizer.name",
    "learning_rate": "optimizer.learning_rate",
    "beta1": "optimizer.beta1",
    "beta2": "optimizer.beta2",
    "epsilon": "optimizer.epsilon",
    "weight_decay": "optimizer.weight_decay",
    "base_fan_in": "optimizer.base_fan_in",
    "clip_norm": "optimizer.clip_norm",
    "frozen": "optimizer.frozen",
    "schedule": "schedule.name",
    "final_learning_rate": "schedule.final_learning_rate",
    "warmup_steps": "schedule.warmup_steps",
    "decay_share": "schedule.decay_share",
    "eval_every": "evaluation.every",
    "eval_batch_size": "evaluation.batch_size",
    "eval_windows": "evaluation.windows",
    "curve_windows": "evaluation.curve_windows",
}
"""Field of `TrainConfig` before it was nested -> its place now."""


def train_fields(fields: JSON) -> JSON:
    """The fields of a `TrainConfig` as `TrainConfig.from_dict` reads them, from before it was
    nested too.

    >>> train_fields({"steps": 9, "optimizer": "lion", "eval_every": 3})
    {'steps': 9, 'optimizer': {'name': 'lion'}, 'evaluation': {'every': 3}}
    """
    if not isinstance(fields.get("optimizer"), str):
        return fields
    nested: JSON = {}
    for name, value in fields.items():
        part, _, inner = TRAIN_FIELDS.get(name, name).rpartition(".")
        (nested.setdefault(part, {}) if part else nested)[inner] = value
    return nested


def spec_fields(record: JSON) -> JSON:
    """A spec.json as this version writes it, from before `TrainConfig` was nested too."""
    config = record["config"]
    return record | {"config": config | {"train": train_fields(config["train"])}}


RESULT_FIELDS = {
    "scores": ("heldout", "train", "validation", "baselines"),
    "timing": ("seconds", "tokens_per_second"),
    "provenance": ("environment", "start", "attention"),
}
"""Record of a `RunResult` -> its fields, which results of version 1 and 2 have beside it."""


def result_fields(fields: JSON) -> JSON:
    """The fields of a result of version 1 or 2 as those of version 3."""
    new = dict(fields)
    for record, names in RESULT_FIELDS.items():
        new[record] = {name: new.pop(name) for name in names if name in new}
    task = {"description": new.pop("task", "")}
    new["task"] = task | {name: new.pop(name) for name in ("metrics", "curves") if name in new}
    return new


def moved(path: str) -> str:
    """Where a field of an experiment is now, for an error: " (now train.optimizer.name)", or "".

    >>> moved("train.learning_rate"), moved("train.steps")
    (' (now train.optimizer.learning_rate)', '')
    """
    outer, _, name = path.rpartition(".")
    return f" (now train.{TRAIN_FIELDS[name]})" if outer == "train" and name in TRAIN_FIELDS else ""
