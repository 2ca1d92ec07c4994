"""Proofs by making texts larger: how do scores and values of the target grow, and the source's?"""

from collections.abc import Iterator

from attnlab.conversion.measure import MEASURABLE, difference, draw
from attnlab.conversion.question import Question, Witness
from attnlab.conversion.shares import shown
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.spec import HeadSpec


def normed(spec: HeadSpec, *runs: str) -> bool:
    """Does a norm other than `qk_norm` stand behind a map that one of these functions applies?"""
    return any(
        one.runs in runs and one.start == 1 and not one.drawn and "qk_norm" not in one.fields
        for one in spec.maps.values()
    )


def powers(spec: HeadSpec) -> tuple[int, ...]:
    """Of the size of the text, in queries, keys and values: 1 where they are linear, 2 where they
    are products of two maps, both where one of the two has a constant. A norm is not looked at.
    """
    if not LAYOUTS[spec.layout].products:
        return (1,)
    return (1, 2) if "a" in spec.biases else (2,)


def is_plain(spec: HeadSpec) -> bool:
    """Are scores bilinear in the two texts, and values linear?"""
    return powers(spec) == (1,) and not normed(spec, "query", "store", "read")


def value_scale(ask: Question) -> Iterator[Witness]:
    """The output moves with the values' text, and so with its size t, as t^p; or stays bounded."""
    x, context, values = draw(ask.source, ask.rng)
    zero, one, two = (ask.measure(x, context, t * values) for t in (0.0, 1.0, 2.0))
    bounded = [normed(spec, "store", "read") for spec in (ask.source, ask.target)]
    found, rule = 0.0, ""
    if bounded[1] and not bounded[0]:
        found = difference(zero, one)  # a polynomial that is not constant has no bound
        rule = "however large the values' text, the target's output stays bounded"
    elif not bounded[1] and len(powers(ask.target)) == 1:
        times = 2 ** powers(ask.target)[0]
        found = difference(two - zero - times * (one - zero) + one, one)
        rule = f"twice the values' text gives {times} times the output in the target"
    elif bounded[0] and not bounded[1]:
        found = difference(zero, one)
        rule = "the target's output is a polynomial of the size of the values' text"
    if found > MEASURABLE:
        yield Witness(
            "linearity",
            f"{rule}; the source differs by {found:.2g} of its largest output",
            "values of another size",
            found,
            0.0,
        )


def key_scale(ask: Question) -> Iterator[Witness]:
    """Queries of t x and keys of y/t are those of x and y in a product of two linear maps.

    Where a norm bounds the queries, keys of y/t leave even attention as t grows: a target with such
    a norm that is a source of plain scores would attend evenly at every t.
    """
    source, target = ask.source, ask.target
    if not (_scores_alone(source) and _scores_alone(target)):
        return
    linear_keys = powers(target) == (1,) and not normed(target, "store", "read")
    bounded = (normed(target, "query") and linear_keys) or (target.qk_norm and target.norm_eps > 0)
    x, context, values = draw(source, ask.rng)
    plain = ask.measure(x, context, values)
    found, rule = 0.0, ""
    if is_plain(target) and not target.qk_norm:
        t = 1024 if source.qk_norm else 2  # so that an epsilon shows
        found = difference(ask.measure(t * x, context / t, values), plain)
        rule = f"queries of {t} x and keys of y/{t} give the same output in the target"
    elif bounded and is_plain(source) and not source.qk_norm:
        found = difference(ask.measure(x, 0 * context, values), plain)
        rule = "as the target's queries are bounded, it can have these scores only where they are 0"
    if found > MEASURABLE:
        yield Witness(
            "linearity",
            f"{rule}; the source differs by {found:.2g} of its largest output",
            "queries and keys of another size",
            found,
            0.0,
        )


def _scores_alone(spec: HeadSpec) -> bool:
    """Does nothing else see the size of x, and is nothing added to q and k?"""
    return not (spec.gate or spec.extra_keys or {"q", "k"} & shown(spec))
