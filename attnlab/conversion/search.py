"""The shortest way from one spec to another through `maps.MAPS`."""

import heapq
import itertools
from typing import Any

import numpy as np

from attnlab.conversion.factors import Refused
from attnlab.conversion.maps import MAPS
from attnlab.conversion.measure import Situation
from attnlab.conversion.specs import settled
from attnlab.heads.old.maps import Weights
from attnlab.heads.old.spec import HeadSpec


class Node:
    """A spec on the way, its weights made when they are first needed."""

    def __init__(self, spec: HeadSpec, weights: Weights | None, before: Any = None, name: str = ""):
        self.spec, self.before, self.name, self._weights = spec, before, name, weights

    @property
    def weights(self) -> Weights:
        """Those of the node before it, through the map that leads here."""
        if self._weights is None:
            made = MAPS[self.name].weights(self.before.weights, self.before.spec, self.spec)
            self._weights = {n: np.asarray(a, np.float64) for n, a in made.items()}
        return self._weights

    @property
    def maps(self) -> tuple[str, ...]:
        """The names of those that led here."""
        return (*self.before.maps, self.name) if self.before else ()


BESIDE = ("gate", "sink", "ties", "extra_keys", "qk_norm_bias")


def keeps(spec: HeadSpec, reached: HeadSpec, changes: tuple[str, ...]) -> bool:
    """Are the fields beside the row as they were, but for those? A row may lack a place for one."""
    return all(f in changes or getattr(spec, f) == getattr(reached, f) for f in BESIDE)


def search(
    w: Weights, source: HeadSpec, target: HeadSpec, situation: Situation
) -> tuple[Node | None, dict[str, Node], list[str]]:
    """(the target or None, the first node of each layout, what refused). Dijkstra's search."""
    goal, order = settled(target), itertools.count()
    queue = [(0, 0, next(order), Node(settled(source), w))]
    done: dict[HeadSpec, Node] = {}
    refused = []
    while queue:
        structured, length, _, node = heapq.heappop(queue)
        if node.spec in done:
            continue
        try:
            if node.name and MAPS[node.name].conditional:
                _ = node.weights
        except Refused as reason:
            refused.append(f"{node.name}: {reason}")
            continue
        done[node.spec] = node
        if node.spec == goal:
            return node, {}, []
        for name, row in MAPS.items():
            if node.spec.ties and "ties" not in row.changes:
                continue
            reached = [a for a in row.reach(node.spec, goal) if keeps(node.spec, a, row.changes)]
            if broken := " and ".join(situation.forbids(row.breaks, node.spec)):
                refused += [
                    f"{name}: not with {broken}" for a in reached if a.layout == goal.layout
                ]
                continue
            for spec in reached:
                if spec not in done:
                    cost = structured + row.conditional, length + 1
                    heapq.heappush(queue, (*cost, next(order), Node(spec, None, node, name)))
    first: dict[str, Node] = {}
    for spec, node in done.items():
        first.setdefault(spec.layout, node)
    return None, first, refused
