"""Plans are literal tuples."""

import numpy as np
import pytest

from attnlab import (
    ModelConfig,
    Plan,
    applied_parameters,
    flops_per_token,
    num_parameters,
    plan_names,
)
from attnlab.heads import Standard
from attnlab.models import FFN, EncoderConfig, LayerOverrides, parameters_by_uses
from attnlab.models.params import num_outer_parameters
from attnlab.sharing.plan import (
    GROUP_RULES,
    PLANS,
    cycled,
    cycled_reversed,
    grouped,
    inner_groups,
    kv_sharing,
    parse_plan,
    plan_name,
)


def test_named_plans():
    assert repr(PLANS["albert"]) == "NamedPlan(takes_count=False)"
    literal = {
        "separate": Plan(attention=(0, 1, 2), ffn=(0, 1, 2)),
        "albert": Plan(attention=(0, 0, 0), ffn=(0, 0, 0)),
        "attention_only": Plan(attention=(0, 0, 0), ffn=(0, 1, 2)),
        "ffn_only": Plan(attention=(0, 1, 2), ffn=(0, 0, 0)),
        "sandwich": Plan(attention=(0, 1, 2), ffn=(0, 1, 2)),
    }
    assert {name: parse_plan(name, 3) for name in plan_names()} == literal


@pytest.mark.parametrize(
    ("name", "groups"),
    [  # Takase and Kiyono 2021, figure 2, and Subformer, of 6 layers
        ("groups:3", (0, 0, 1, 1, 2, 2)),
        ("cycle:3", (0, 1, 2, 0, 1, 2)),
        ("cycle_rev:3", (0, 1, 2, 2, 1, 0)),
        ("sandwich", (0, 1, 1, 1, 1, 2)),
        ("groups:4", (0, 0, 1, 2, 2, 3)),
        ("cycle:6", (0, 1, 2, 3, 4, 5)),
        ("groups:1", (0, 0, 0, 0, 0, 0)),
        ("attention=0,1,0,1,0,1 ffn=0,1,0,1,0,1", (0, 1, 0, 1, 0, 1)),
    ],
)
def test_plans_with_a_number_of_groups(name, groups):
    assert parse_plan(name, 6) == Plan(attention=groups, ffn=groups)


def test_plans_with_other_sublayers():
    six = (0, 1, 2, 3, 4, 5)
    keys = (0, None, 1, None, 2, None)  # CLA2: neighbours two by two
    assert parse_plan("cla:3", 6) == Plan(attention=six, kv=keys, ffn=six)
    loops = (0, 1, 0, 1, 0, 1)
    assert parse_plan("relaxed:2", 6) == Plan(attention=loops, ffn=loops, delta=six)


def test_kv_sources_and_indices():
    """Two layers share weights for keys that each makes anew; the others reuse."""
    plan = Plan(attention=(0, 0, 0, 0, 0), kv=(0, None, 1, 0, None))
    assert plan.reuses_kv == (False, True, False, False, True)
    assert plan.kv_indices == (0, 0, 1, 2, 2)
    assert plan.indices("kv") == (0, 0, 1, 0, 0)
    assert plan.num_groups == {"attention": 1, "kv": 2}
    assert plan.num_applications == {"attention": 5, "kv": 3}
    plain = Plan(attention=(0, 0))
    assert (plain.reuses_kv, plain.kv_indices) == ((False, False), (0, 1))


def test_kv_of_any_earlier_layer():
    """@1 follows to 0; keys lie in as few places as hold those that are still to be read."""
    plan = Plan(attention=(0,) * 7, kv=(0, "@0", 1, "@1", 2, "@2", "@4"))
    assert plan["kv"] == (0, None, 1, "@0", 2, "@2", None)
    assert plan.kv_sources == (0, 0, 2, 0, 4, 2, 4)
    assert plan.kv_indices == (0, 0, 1, 0, 2, 1, 2)
    assert plan.indices("kv") == (0, 0, 1, 0, 2, 1, 2)
    assert plan.kv_buffers == (0, 0, 1, 0, 0, 1, 0)
    assert plan.num_applications["kv"] == 3
    assert (
        max(parse_plan("cla:4", 12).kv_buffers) == max(parse_plan("separate", 12).kv_buffers) == 0
    )


def test_ways_to_share_keys_and_values():
    """Wu et al. 2024 (arXiv 2410.14442), Table 1, by the layer that each layer reads, of 9 layers;
    what reads a later layer is refused.
    """
    assert kv_sharing(9, 3) == (0, "@0", "@0", 1, "@3", "@3", 2, "@6", "@6")
    ways = {"0,1,2,3,-,-,-,-,-": "012333333", "0,1,2,-,-,-,-,-,3": "012222228"}
    for kv, reads in (ways | {"0,-,-,1,-,-,2,-,-": "000333666"}).items():
        plan = parse_plan(f"attention=0..8 kv={kv} ffn=0..8", 9)
        assert "".join(map(str, plan.kv_sources)) == reads
    with pytest.raises(ValueError, match=r"computed later \(that takes several passes"):
        parse_plan("attention=0..2 kv=@2,@2,0 ffn=0..2", 3)
    with pytest.raises(ValueError, match="num_kv_layers must be from 1 to the 4 layers, not 5"):
        kv_sharing(4, 5)


@pytest.mark.parametrize("text", ["0,1,2,3,4,5,4,5,6..10", "4/(2)x2/5"])
def test_repeated_middle_layers(text):
    """11 layers' parameters, 13 layers' FLOPs."""
    plan = parse_plan(text, 13)
    assert plan["attention"] == plan["ffn"] == (0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 10)
    sizes = dict(width=6, heads=Standard(num_heads=3), ffn=FFN(width=5), vocab_size=7)
    loop = ModelConfig(num_layers=13, sharing=text, **sizes)
    eleven, thirteen = (ModelConfig(num_layers=n, **sizes) for n in (11, 13))
    assert num_parameters(loop) == num_parameters(eleven)
    assert applied_parameters(loop) == num_parameters(thirteen)
    assert flops_per_token(loop, 8) == flops_per_token(thirteen, 8)


def test_parameters_by_how_often_they_are_used():
    """Once each they are those that are unique, times their uses those that are applied; what
    stands outside the layers is neither."""
    sizes = dict(width=6, heads=Standard(num_heads=3), ffn=FFN(width=5), vocab_size=7)
    both = dict(kind="encoder_decoder", **sizes)
    five, shared = EncoderConfig(num_layers=5), EncoderConfig(shares_decoder=True)
    wider = LayerOverrides(heads=Standard(num_heads=3, head_dim=4))
    types = ((2, LayerOverrides(sharing="albert")), (1, wider))
    for config, uses in (
        (ModelConfig(num_layers=13, sharing="4/(2)x2/5", **sizes), {1, 2}),
        (ModelConfig(num_layers=6, sharing="cla:2", **sizes), {1}),
        (ModelConfig(num_layers=4, sharing="cycle:2", encoder=five, **both), {2, 3}),
        (ModelConfig(num_layers=5, encoder=shared, **both), {1, 2}),
        (ModelConfig(num_layers=6, layer_types=types, **sizes), {1, 4}),
    ):
        found = parameters_by_uses(config)
        assert set(found) == uses
        assert sum(found.values()) == num_parameters(config) - num_outer_parameters(config)
        met = sum(r * n for r, n in found.items())
        assert met == applied_parameters(config) - num_outer_parameters(config)


def test_only_the_last_cycle_is_reversed():
    assert parse_plan("cycle_rev:3", 9)["ffn"] == (0, 1, 2, 0, 1, 2, 2, 1, 0)


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
        with pytest.raises(ValueError, match=f"from 1 to the 4 layers, not {count}"):
            rule(4, count)


def test_inner_groups():
    """6 layers, 3 groups, inner 2: calls 0,0,1,1,2,2, so 12 blocks applied from 6 sets."""
    groups = inner_groups(6, 3, 2)
    assert groups == (0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cycel:2", "unknown plan 'cycel:2': did you mean 'cycle'. known: separate, "),
        ("albert:2", "plan 'albert' takes no count"),
        ("cycle", "needs a number of groups from 1 to the 6 layers, as in 'cycle:2'"),
        ("cycle:7", "from 1 to the 6 layers"),
        ("groups:0", "from 1 to the 6 layers"),
        ("cycle:-1", "from 1 to the 6 layers"),
        ("cla", "needs a number of groups from 1 to the 6 layers, as in 'cla:2'"),
        (
            "attention=0,x ffn=0,0",
            "cannot parse the plan .*; write it as 'attention=0,0,1 ffn=0,1,2'",
        ),
        ("2/(2)x2", "cannot parse"),
        ("0,1,1..", "cannot parse"),
    ],
)
def test_invalid_names(name, message):
    with pytest.raises(ValueError, match=message):
        parse_plan(name, 6)


def test_a_plan_is_a_hashable_mapping():
    plan = Plan(attention=np.array([0, 1, 0]), ffn=range(3))
    assert dict(plan.items()) == {"attention": (0, 1, 0), "ffn": (0, 1, 2)}
    assert (list(plan), len(plan), plan["attention"]) == (["attention", "ffn"], 2, (0, 1, 0))
    assert (plan.num_layers, plan.num_groups) == (3, {"attention": 2, "ffn": 3})
    assert hash(plan) == hash(Plan(ffn=(0, 1, 2), attention=(0, 1, 0)))
    assert plan != Plan(attention=(0, 0, 1), ffn=(0, 1, 2))
    assert repr(plan) == "Plan(attention=(0, 1, 0), ffn=(0, 1, 2))"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"attention": (0, 1), "ffn": (0,)}, "one parameter group per layer"),
        ({"attention": (), "ffn": ()}, "one parameter group per layer"),
        ({}, "one parameter group per layer"),
        ({"attention": (0, 2)}, "without gaps"),
        ({"attention": (0, -1)}, "without gaps"),
        ({"attention": (0, True)}, "a whole number, not True"),
        ({"attention": (0, 1.0)}, "a whole number, not 1.0"),
        ({"attention": (0, None)}, "are for the sublayer 'kv' alone"),
        ({"attention": (0, 1), "kv": (None, 0)}, "no earlier keys and values to attend to"),
        ({"attention": (0, 1, 2), "kv": (0, None, 2)}, "without gaps"),
        ({"attention": (0, 1), "kv": ("@1", 0)}, "layer 0 cannot attend to the keys and values of"),
        ({"attention": (0, 1), "kv": ("@0", 0)}, "layer 0 cannot attend to the keys and values of"),
        ({"attention": (0, 1), "kv": (0, "@2")}, "'@2' names no layer; layer 1 takes a group"),
        ({"attention": (0, 1), "kv": (0, "one")}, "'one' names no layer"),
        ({"attention": (0, 1), "kv": (0, "0")}, "'0' names no layer"),
        ({"attention": (0, 1), "kv": (0, "@\N{SUPERSCRIPT TWO}")}, "names no layer"),
        ({"attention": 2}, "attention: give one group per layer, not 2"),
        (
            {"attention": (0, 1, 2), "kv": (0, "@2", 1)},
            "the keys and values of layer 2, which are",
        ),
        ({"attention": (0, "@0"), "ffn": (0, 0)}, "are for the sublayer 'kv' alone"),
    ],
)
def test_invalid_plans(parts, message):
    with pytest.raises(ValueError, match=message):
        Plan(**parts)


@pytest.mark.parametrize("layers", [1, 4, 6])
def test_every_plan_gets_a_name_back(layers):
    names = plan_names(min(2, layers))
    plans = [parse_plan(name, layers) for name in names]
    plans.append(Plan(attention=(0, 1, 1, 2, 0), kv=(0, None, 0, 1, "@0"), ffn=(0, 0, 1, 1, 1)))
    for plan in plans:
        assert parse_plan(plan_name(plan), plan.num_layers) == plan
    assert plan_name(plans[0]) == "separate"
    assert plan_name(plans[-1]) == "attention=0,1,1,2,0 kv=0,-,0,1,@0 ffn=0,0,1,1,1"
