"""The search for a chain of conversion steps from one layout to another."""

import heapq
import itertools
from typing import NamedTuple

import numpy as np

from attnlab.heads import Layout, weight_shapes
from attnlab.transforms.forms import Goal, canonical
from attnlab.transforms.measure import Weights
from attnlab.transforms.steps import STEPS, Step, rewrite
from attnlab.transforms.steps_structured import STRUCTURED

LONGEST = 16
"""Steps of the longest chain that is tried, twice that of any known conversion."""
WIDEST = 4
"""The largest axis of a layout on the way, in units of the largest of the source and the goal."""


class State(NamedTuple):
    """A layout that a search reached."""

    layout: Layout
    params: Weights
    steps: tuple[str, ...] = ()
    """Names of the steps that lead to it."""


def search(w: Weights, layout: Layout, goal: Goal) -> State | None:
    """The shortest chain of steps to the goal: Dijkstra's algorithm over layouts.

    A step of `STRUCTURED` costs more than any number of others: it is tried only if there is
    no chain without it. Steps run lazily, when they are taken from the queue. `LONGEST` and
    `WIDEST` bound the search, so it ends whatever the steps are.
    """
    order = itertools.count()
    start = State(canonical(layout), w)
    queue: list[tuple[int, int, int, State, Step | None]] = [(0, 0, next(order), start, None)]
    done: set[Layout] = set()
    widest = WIDEST * max(_largest_axis(start.layout), _largest_axis(goal.untied))
    while queue:
        structured, length, _, state, step = heapq.heappop(queue)
        reached = state if step is None else _after(state, step, goal)
        if reached is None or reached.layout in done or _largest_axis(reached.layout) > widest:
            continue
        done.add(reached.layout)
        if reached.layout == goal.tied:
            return reached
        tied = bool(getattr(reached.layout, "tie", ""))
        steps = (STEPS[:1], ()) if tied else (STEPS, STRUCTURED)
        for cost, choices in enumerate(steps if length < LONGEST else ()):
            for following in choices:
                entry = (structured + cost, length + 1, next(order), reached, following)
                heapq.heappush(queue, entry)
    return None


def _largest_axis(layout: Layout) -> int:
    return max(size for shape in weight_shapes(layout).values() for size in shape)


def _after(state: State, step: Step, goal: Goal) -> State | None:
    """The state after a step; None if the step does not apply."""
    with np.errstate(all="ignore"):
        try:
            made = step(state.params, state.layout, goal)
        except np.linalg.LinAlgError:  # of weights near the largest float
            return None
    if made is None:
        return None
    layout = canonical(made[0])
    shapes = {n: np.shape(a) for n, a in made[1].items()}
    if shapes != weight_shapes(layout):  # a step that does not know a layout or extra from outside
        return None
    name = step.__name__
    if step is rewrite:
        untied = type(layout) is type(state.layout)
        name = "untie" if untied else f"to {layout.name}"
    return State(layout, made[1], (*state.steps, name))
