"""Sharing parameters across layers: plans, and one scan that runs a stack of layers under any plan.

`attnlab.transforms` changes the plan of a model that has its parameters already.
"""

from attnlab.sharing.deltas import add_delta, delta_shapes, fit_delta, init_delta, layer_params
from attnlab.sharing.plan import (
    GROUP_RULES,
    PLANS,
    Group,
    Groups,
    NamedPlan,
    Plan,
    all_shared,
    as_plan,
    cycled,
    cycled_reversed,
    grouped,
    inner_groups,
    kv_sharing,
    parse_plan,
    plan_name,
    plan_names,
    renumber,
    sandwich,
    separate,
)
from attnlab.sharing.scan import (
    Params,
    PyTree,
    Stack,
    init_stacked,
    init_sublayer,
    repeating_pattern,
    run_stack,
    run_stacks,
    select_params,
)

__all__ = [
    "GROUP_RULES", "PLANS", "Group", "Groups", "NamedPlan", "Params", "Plan", "PyTree", "Stack",
    "add_delta", "all_shared", "as_plan", "cycled", "cycled_reversed", "delta_shapes", "fit_delta",
    "grouped", "init_delta", "init_stacked", "init_sublayer", "inner_groups", "kv_sharing",
    "layer_params", "parse_plan", "plan_name", "plan_names", "renumber", "repeating_pattern",
    "run_stack", "run_stacks", "sandwich", "select_params", "separate",
]  # fmt: skip
