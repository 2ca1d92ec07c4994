"""Plans are literal tuples."""

import pytest

from attnlab import (
    ModelConfig,
    Plan,
    applied_parameters,
    flops_per_token,
    plan_names,
    unique_parameters,
)
from attnlab.model.accounting import parameters_by_uses
from attnlab.model.outer import count_outer
from attnlab.sharing.named import name_of, named
from attnlab.sharing.plan import GROUP_RULES, groups, inner_groups, kv_map


def test_named_plans():
    literal = {
        "separate": Plan(attention=(0, 1, 2), ffn=(0, 1, 2)),
        "albert": Plan(attention=(0, 0, 0), ffn=(0, 0, 0)),
        "attention_only": Plan(attention=(0, 0, 0), ffn=(0, 1, 2)),
        "ffn_only": Plan(attention=(0, 1, 2), ffn=(0, 0, 0)),
        "sandwich": Plan(attention=(0, 1, 2), ffn=(0, 1, 2)),
    }
    assert {name: named(name, 3) for name in plan_names()} == literal


@pytest.mark.parametrize(
    ("name", "slots"),
    [  # Takase and Kiyono 2021, figure 2, and Subformer, of 6 layers
        ("sequence:3", (0, 0, 1, 1, 2, 2)),
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
def test_plans_with_a_number_of_slots(name, slots):
    assert named(name, 6) == Plan(attention=slots, ffn=slots)


def test_plans_with_parts_of_their_own():
    six = (0, 1, 2, 3, 4, 5)
    keys = (0, None, 1, None, 2, None)  # CLA2: neighbours two by two
    assert named("cla:3", 6) == Plan(attention=six, kv=keys, ffn=six)
    loops = (0, 1, 0, 1, 0, 1)
    assert named("relaxed:2", 6) == Plan(attention=loops, ffn=loops, delta=six)


def test_who_reads_which_keys():
    """Two layers share weights for keys that each makes anew; the others reuse."""
    plan = Plan(attention=(0, 0, 0, 0, 0), kv=(0, None, 1, 0, None))
    assert plan.reuses == (False, True, False, False, True)
    assert plan.memories == (0, 0, 1, 2, 2)
    assert plan.indices("kv") == (0, 0, 1, 0, 0)
    assert plan.num_slots == {"attention": 1, "kv": 2}
    assert plan.num_applied == {"attention": 5, "kv": 3}
    plain = Plan(attention=(0, 0))
    assert (plain.reuses, plain.memories) == ((False, False), (0, 1))


def test_pointers_to_any_layer_before():
    """@1 follows to 0; keys lie in as few places as hold those that are still to be read."""
    plan = Plan(attention=(0,) * 7, kv=(0, "@0", 1, "@1", 2, "@2", "@4"))
    assert plan["kv"] == (0, None, 1, "@0", 2, "@2", None)
    assert plan.reads == (0, 0, 2, 0, 4, 2, 4)
    assert plan.memories == (0, 0, 1, 0, 2, 1, 2)
    assert plan.indices("kv") == (0, 0, 1, 0, 2, 1, 2)
    assert plan.places == (0, 0, 1, 0, 0, 1, 0)
    assert plan.num_applied["kv"] == 3
    assert max(named("cla:4", 12).places) == max(named("separate", 12).places) == 0


def test_the_nine_maps_of_keys_and_values():
    """Wu et al. 2024 (arXiv 2410.14442), Table 1, by the layer that each layer reads, of 9 layers
    of which 4, of groups 3, make keys; what reads a later layer is refused.
    """
    maps = {
        ("pizza", "bottom", 4): "012333333",
        ("pizza", "middle", 4): "012555555",
        ("pizza", "top", 4): "012888888",
        ("sandwich", "bottom", 4): "012222228",
        ("sandwich", "middle", 4): "014444448",
        ("sandwich", "top", 4): "017777778",
        ("lasagna", "bottom", 3): "000333666",
        ("lasagna", "middle", 3): "111444777",
        ("lasagna", "top", 3): "222555888",
    }
    for (partition, target, count), reads in maps.items():
        slots = kv_map(partition, target, 9, count)
        made = [j for j, slot in enumerate(slots) if isinstance(slot, int)]
        assert [slots[j] for j in made] == list(range(count))
        got = [j if isinstance(slot, int) else int(slot[1:]) for j, slot in enumerate(slots)]
        assert "".join(map(str, got)) == reads
        text = f"attention=0..8 kv={','.join(map(str, slots))} ffn=0..8"
        if target == "bottom":
            assert "".join(map(str, named(text, 9).reads)) == reads
        else:
            with pytest.raises(ValueError, match="not made yet: that takes several passes"):
                named(text, 9)
    assert named("pizza_bottom:4", 9).reads == (0, 1, 2, 3, 3, 3, 3, 3, 3)
    assert named("sandwich_bottom:4", 9).reads == (0, 1, 2, 2, 2, 2, 2, 2, 8)
    # As the authors write them for 22 layers: LCKV, its middle, YOCO (github.com/whyNLP/LCKV).
    assert kv_map("sandwich", "top", 22, 3)[:2] == (0, "@20")
    assert kv_map("sandwich", "middle", 22, 3)[1::9] == ("@10", 1, "@10")
    assert named("pizza_bottom:12", 22).reads == (*range(11), *[11] * 11)
    with pytest.raises(ValueError, match="no map 'pasta' 'top'; known: pizza, sandwich, lasagna"):
        kv_map("pasta", "top", 4, 2)
    with pytest.raises(ValueError, match="from 1 to 4 layers make keys and values, not 5"):
        kv_map("pizza", "bottom", 4, 5)


@pytest.mark.parametrize("text", ["0,1,2,3,4,5,4,5,6..10", "4/(2)x2/5"])
def test_layers_in_the_middle_come_again(text):
    """11 layers' parameters, 13 layers' FLOPs."""
    plan = named(text, 13)
    assert plan["attention"] == plan["ffn"] == (0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 10)
    sizes = dict(width=6, num_heads=3, ffn_width=5, vocab_size=7)
    loop = ModelConfig(num_layers=13, plan=text, **sizes)
    eleven, thirteen = (ModelConfig(num_layers=n, **sizes) for n in (11, 13))
    assert unique_parameters(loop) == unique_parameters(eleven)
    assert applied_parameters(loop) == unique_parameters(thirteen)
    assert flops_per_token(loop, 8) == flops_per_token(thirteen, 8)


def test_parameters_by_how_often_they_are_used():
    """Once each they are those that are unique, times their uses those that are applied; what
    stands outside the layers is neither."""
    sizes = dict(width=6, num_heads=3, ffn_width=5, vocab_size=7)
    both = dict(kind="encoder_decoder", encoder_layers=5, **sizes)
    for config, uses in (
        (ModelConfig(num_layers=13, plan="4/(2)x2/5", **sizes), {1, 2}),
        (ModelConfig(num_layers=6, plan="cla:2", **sizes), {1}),
        (ModelConfig(num_layers=4, plan="cycle:2", **both), {2, 3}),
        (ModelConfig(num_layers=5, plan="separate", share_encoder=True, **both), {1, 2}),
        (ModelConfig(num_layers=6, kinds="2(plan=albert) 1(head_dim=4)", **sizes), {1, 4}),
    ):
        found = parameters_by_uses(config)
        assert set(found) == uses
        assert sum(found.values()) == unique_parameters(config) - count_outer(config)
        met = sum(r * n for r, n in found.items())
        assert met == applied_parameters(config) - count_outer(config)


def test_the_last_round_alone_goes_backwards():
    assert named("cycle_rev:3", 9)["ffn"] == (0, 1, 2, 0, 1, 2, 2, 1, 0)


def test_the_three_rules_for_groups_differ_where_floats_do():
    """Google's rule even where the groups divide the layers, Hugging Face's only where not."""
    exact, hf, google = (named(f"groups{r}:22", 22)["ffn"] for r in ("", "_hf", "_google"))
    assert exact == hf == tuple(range(22))
    assert google[14] == google[15] == 14
    assert max(google) == 20  # the slot that never comes to exist leaves no gap
    layer, of_18 = 9, GROUP_RULES["hf"](9, 18, 14)
    assert (of_18, GROUP_RULES["exact"](layer, 18, 14)) == (6, 7)
    for layers in range(1, 97):
        for count in range(1, layers + 1):
            if layers % count == 0:
                assert groups(layers, count, "hf") == groups(layers, count)


def test_inner_groups():
    """6 layers, 3 groups, inner 2: calls 0,0,1,1,2,2, so 12 blocks applied from 6 sets."""
    slots = inner_groups(6, 3, 2)
    assert slots == (0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cycel:2", "unknown plan 'cycel:2'; known: separate, "),
        ("albert:2", "plan 'albert' takes no count"),
        ("cycle", "needs a number of slots from 1 to the 6 layers, as in 'cycle:2'"),
        ("cycle:7", "from 1 to the 6 layers"),
        ("groups:0", "from 1 to the 6 layers"),
        ("cycle:-1", "from 1 to the 6 layers"),
        ("cla", "needs a number of slots from 1 to the 6 layers, as in 'cla:2'"),
        ("attention=0,x ffn=0,0", "is not read; write it as 'attention=0,0,1 ffn=0,1,2'"),
        ("2/(2)x2", "is not read"),
        ("0,1,1..", "is not read"),
    ],
)
def test_impossible_names(name, message):
    with pytest.raises(ValueError, match=message):
        named(name, 6)


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
        ({"attention": (0, None)}, "reuse is for the part 'kv' alone"),
        ({"attention": (0, 1), "kv": (None, 0)}, "reuses keys and values that none has made"),
        ({"attention": (0, 1, 2), "kv": (0, None, 2)}, "without gaps"),
        ({"attention": (0, 1), "kv": ("@1", 0)}, "application 0 reads the keys and values of 1"),
        ({"attention": (0, 1), "kv": (0, "@2")}, "'@2' is no application; write '@0' to '@0'"),
        ({"attention": (0, 1), "kv": (0, "one")}, "'one' is no application"),
        ({"attention": (0, 1, 2), "kv": (0, "@2", 1)}, "reads the keys and values of 2, which are"),
        ({"attention": (0, "@0"), "ffn": (0, 0)}, "reuse is for the part 'kv' alone"),
    ],
)
def test_impossible_plans(parts, message):
    with pytest.raises(ValueError, match=message):
        Plan(**parts)


@pytest.mark.parametrize("layers", [1, 4, 6])
def test_every_plan_gets_a_name_back(layers):
    names = plan_names(min(2, layers))
    plans = [named(name, layers) for name in names]
    plans.append(Plan(attention=(0, 1, 1, 2, 0), kv=(0, None, 0, 1, "@0"), ffn=(0, 0, 1, 1, 1)))
    for plan in plans:
        assert named(name_of(plan), plan.num_layers) == plan
    assert name_of(plans[0]) == "separate"
    assert name_of(plans[-1]) == "attention=0,1,1,2,0 kv=0,-,0,1,@0 ffn=0,0,1,1,1"
