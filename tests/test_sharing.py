"""Plans are literal tuples."""

import pytest

from attnlab import PLANS, Plan


def test_named_plans():
    literal = {
        "separate": Plan(attention=(0, 1, 2), ffn=(0, 1, 2)),
        "albert": Plan(attention=(0, 0, 0), ffn=(0, 0, 0)),
        "attention_only": Plan(attention=(0, 0, 0), ffn=(0, 1, 2)),
        "ffn_only": Plan(attention=(0, 1, 2), ffn=(0, 0, 0)),
    }
    assert {name: plan(3) for name, plan in PLANS.items()} == literal


def test_a_plan_is_a_hashable_mapping():
    plan = Plan(attention=[0, 1, 0], ffn=range(3))
    assert dict(plan.items()) == {"attention": (0, 1, 0), "ffn": (0, 1, 2)}
    assert (list(plan), len(plan), plan["attention"]) == (["attention", "ffn"], 2, (0, 1, 0))
    assert (plan.num_layers, plan.num_slots) == (3, {"attention": 2, "ffn": 3})
    assert hash(plan) == hash(Plan(ffn=(0, 1, 2), attention=(0, 1, 0)))
    assert plan != Plan(attention=(0, 0, 1), ffn=(0, 1, 2))
    assert repr(plan) == "Plan(attention=(0, 1, 0), ffn=(0, 1, 2))"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"attention": (0, 1), "ffn": (0,)}, "one slot per application"),
        ({"attention": (), "ffn": ()}, "one slot per application"),
        ({}, "one slot per application"),
        ({"attention": (0, 2)}, "without gaps"),
        ({"attention": (0, -1)}, "without gaps"),
    ],
)
def test_impossible_plans(parts, message):
    with pytest.raises(ValueError, match=message):
        Plan(**parts)
