"""Plans are literal tuples."""

import numpy as np
import pytest

from attnlab import Plan, plan_names
from attnlab.sharing import grouped, parse_plan
from attnlab.sharing.plan import GROUP_RULES, cycled, cycled_reversed, plan_name

ONE, EACH = (0,) * 6, (0, 1, 2, 3, 4, 5)
NAMED = {
    "separate": (EACH, EACH),
    "albert": (ONE, ONE),
    "attention_only": (ONE, EACH),
    "ffn_only": (EACH, ONE),
    # Takase and Kiyono 2021, figure 2, and Subformer, of 6 layers
    "groups:3": ((0, 0, 1, 1, 2, 2),) * 2,
    "cycle:3": ((0, 1, 2, 0, 1, 2),) * 2,
    "cycle_rev:3": ((0, 1, 2, 2, 1, 0),) * 2,
    "cycle_rev:2": ((0, 1, 0, 1, 1, 0),) * 2,
    "sandwich": ((0, 1, 1, 1, 1, 2),) * 2,
    "groups:4": ((0, 0, 1, 2, 2, 3),) * 2,
    "cycle:6": (EACH, EACH),
    "groups:1": (ONE, ONE),
    # the layers in the middle are repeated
    "0,1,2,1..3": ((0, 1, 2, 1, 2, 3),) * 2,
    "1/(2)x2/1": ((0, 1, 2, 1, 2, 3),) * 2,
    "attention=0,1,0,1,0,1 ffn=0..2,0..2": ((0, 1, 0, 1, 0, 1), (0, 1, 2, 0, 1, 2)),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_plans(name):
    attention, ffn = NAMED[name]
    assert parse_plan(name, 6) == Plan(attention=attention, ffn=ffn)


def test_keys_and_values_of_earlier_layers():
    """Two layers share projections; @1 follows to 0; buffers hold what is still to be read."""
    plan = Plan(attention=(0,) * 7, kv=(0, "@0", 1, "@1", 1, "@2", "@4"))
    assert plan["kv"] == (0, "@0", 1, "@0", 1, "@2", "@4")
    assert plan.kv_sources == (0, 0, 2, 0, 4, 2, 4)
    assert plan.reuses_kv == (False, True, False, True, False, True, True)
    assert plan.indices("kv") == (0, 0, 1, 0, 1, 1, 1)
    assert plan.kv_indices == (0, 0, 1, 0, 2, 1, 2)
    assert plan.kv_buffers == (0, 0, 1, 0, 0, 1, 0)
    assert plan.num_groups == {"attention": 1, "kv": 2}
    assert plan.num_applications == {"attention": 7, "kv": 3}
    assert max(parse_plan("cla:4", 12).kv_buffers) == 0


def test_cross_layer_attention():
    """Brandon et al. 2024; Wu et al. 2024 (arXiv 2410.14442), Table 1, by the layer each reads."""
    assert parse_plan("cla:3", 9)["kv"] == (0, "@0", "@0", 1, "@3", "@3", 2, "@6", "@6")
    plan = parse_plan("attention=0..8 kv=0,1,2,@2,@2,@2,@2,@2,3 ffn=0..8", 9)
    assert plan.kv_sources == (0, 1, 2, 2, 2, 2, 2, 2, 8)


def test_the_three_rules_for_groups_differ_where_floats_do():
    """Google's rule even where the groups divide the layers, Hugging Face's only where not."""
    exact, hf, google = (parse_plan(f"groups{r}:22", 22)["ffn"] for r in ("", "_hf", "_google"))
    assert exact == hf == tuple(range(22))
    assert google[14] == google[15] == 14
    assert max(google) == 20  # the group that the rule skips leaves no gap
    layer, of_18 = 9, GROUP_RULES["hf"](9, 18, 14)
    assert (of_18, GROUP_RULES["exact"](layer, 18, 14)) == (6, 7)
    for layers in range(1, 97):
        for count in range(1, layers + 1):
            if layers % count == 0:
                assert grouped(layers, count, "hf") == grouped(layers, count)


@pytest.mark.parametrize("rule", [grouped, cycled, cycled_reversed])
def test_the_number_of_groups_fits_the_layers(rule):
    for count in (0, 5):
        with pytest.raises(ValueError, match="groups"):
            rule(4, count)


@pytest.mark.parametrize(
    "name",
    ["cycel:2", "albert:2", "cycle", "cycle:7", "groups:0", "cycle:-1", "cla", "2/(2)x2", "0,1,1..",
     "attention=0,x ffn=0,0", "attention=0,1,2 kv=0,-,@0 ffn=0,1,2",
     "attention=0,0 attention=0,1"],
)  # fmt: skip
def test_invalid_names(name):
    with pytest.raises(ValueError, match="plan"):
        parse_plan(name, 6)


EMPTY = {}, {"attention": (), "ffn": ()}, {"attention": (0, 1), "ffn": (0,)}
INVALID = [
    *((plan, "every sublayer") for plan in EMPTY),
    ({"attention": 2}, "attention"),
    *(({"attention": (0, group)}, "attention") for group in (2, -1, True, 1.0, None, "@0")),
    *(({"attention": (0, 1), "kv": (group, 0)}, "kv") for group in (None, "@0")),
    *(({"attention": (0, 1), "kv": (0, group)}, "kv: layer 1") for group in ("@1", "one", "@²")),
    ({"attention": (0, 1, 2), "kv": (0, "@0", 2)}, "kv"),
]


@pytest.mark.unchecked
@pytest.mark.parametrize(("sublayers", "field"), INVALID)
def test_invalid_plans(sublayers, field):
    """Of groups that JAX would clamp, or of keys of a later layer."""
    with pytest.raises(ValueError, match=field):
        Plan(**sublayers)


@pytest.mark.parametrize("layers", [1, 4, 6])
def test_every_plan_gets_a_name_back(layers):
    plans = [parse_plan(name, layers) for name in plan_names(min(2, layers))]
    plans.append(Plan(attention=(0, 1, 1, 2, 0), kv=(0, "@0", 0, 1, "@0"), ffn=(0, 0, 1, 1, 1)))
    for plan in plans:
        assert parse_plan(plan_name(plan), plan.num_layers) == plan
    assert plan_name(plans[0]) == "separate"
    assert plan_name(plans[-1]) == "attention=0,1,1,2,0 kv=0,@0,0,1,@0 ffn=0,0,1,1,1"


def test_a_plan_is_a_hashable_mapping():
    plan = Plan(attention=np.array([0, 1, 0]), ffn=range(3))
    assert dict(plan.items()) == {"attention": (0, 1, 0), "ffn": (0, 1, 2)}
    assert hash(plan) == hash(Plan(ffn=(0, 1, 2), attention=(0, 1, 0)))
    assert plan != Plan(attention=(0, 0, 1), ffn=(0, 1, 2))
    assert eval(repr(plan)) == plan
