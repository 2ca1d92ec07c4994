"""Records of many cases -> which backend is fastest where, and in which order to try them."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from attnlab.nested import JSON
from experiments.benchmarks.attention import OURS
from experiments.benchmarks.measure import Interval, interval

Record: TypeAlias = JSON


def able(record: Record) -> dict[str, JSON]:
    """The rows that have times, by name."""
    return {row["name"]: row for row in record["rows"] if row["seconds"]}


def ours(record: Record) -> dict[str, JSON]:
    """Of `able` those of attnlab, by backend (in a layer: by order of contraction and backend)."""
    return {
        name.removeprefix(OURS).strip(): row for name, row in able(record).items() if row["ours"]
    }


def peers(record: Record) -> dict[str, JSON]:
    """Of `able` those of others."""
    return {name: row for name, row in able(record).items() if not row["ours"]}


def fastest(rows: dict[str, JSON]) -> str | None:
    """The name of the row with the least median time."""
    return min(rows, key=lambda name: rows[name]["milliseconds"], default=None)


def chosen(record: Record) -> str:
    """What implementation=None took: the first row."""
    return record["rows"][0]["name"].removeprefix(OURS).strip()


def ratio(above: JSON, below: JSON) -> Interval:
    """How many times as long one row takes as another, within rounds."""
    both = np.asarray(above["seconds"]) / np.asarray(below["seconds"])
    return interval(both, np.random.default_rng(0))


def of(records: Iterable[Record], **about: object) -> list[Record]:
    """Those of these sizes that have a row with times."""
    return [
        r
        for r in records
        if able(r) and all(r["about"].get(name) == value for name, value in about.items())
    ]


class Order(NamedTuple):
    """Backends in the order in which they are tried: the first that can run does."""

    names: tuple[str, ...]
    mean: float
    """Geometric mean over cases of the time it takes / that of the fastest backend."""
    worst: float


def cost(names: Sequence[str], records: Sequence[Record]) -> Order | None:
    """What an order of backends costs in these cases; None where one has no backend that can."""
    over = []
    for record in records:
        rows = ours(record)
        first = next((name for name in names if name in rows), None)
        if first is None:
            return None
        best = min(row["milliseconds"] for row in rows.values())
        over.append(rows[first]["milliseconds"] / best)
    mean = math.exp(sum(map(math.log, over)) / len(over))
    return Order(tuple(names), mean, max(over))


MOST_BACKENDS = 7


def best_order(records: Sequence[Record]) -> Order | None:
    """Of all orders of the backends that ran the one with the least mean, without those that it
    never comes to; None where nothing ran. Above `MOST_BACKENDS` those are left out that are
    fastest least often."""
    wins: dict[str, int] = {name: 0 for r in records for name in ours(r)}
    for record in records:
        wins[fastest(ours(record)) or ""] += 1
    names = sorted(wins, key=lambda name: -wins[name])[:MOST_BACKENDS]
    orders = [cost(some, records) for some in itertools.permutations(names)]
    best = min((o for o in orders if o), key=lambda o: (o.mean, o.worst), default=None)
    if best is None:
        return None
    firsts = {next(n for n in best.names if n in ours(r)) for r in records}
    return best._replace(names=tuple(n for n in best.names if n in firsts))
