"""Equal seconds: the FFN width is solved from ratios, and what was measured is kept."""

import dataclasses
import json

import pytest

from attnlab import lab
from attnlab.lab import seconds
from attnlab.lab.policies import tuning_specs
from attnlab.lab.seconds import Ratio, equal_seconds, solve


def line(constant, slope):
    """Seconds of a step over those of the reference, without noise."""
    return lambda width: Ratio(width, constant + slope * width, 0, 0, 0, 0)


@pytest.mark.parametrize("first", [100, 512, 2000])
def test_a_width_of_equal_seconds_is_found(first):
    best = min(solve("wide", line(0.4, 0.002), first), key=lambda one: abs(one.ratio - 1))
    assert abs(best.ratio - 1) <= seconds.NEAR
    assert best.ffn_width == pytest.approx(300, abs=10)


def test_a_variant_that_is_too_slow_without_an_ffn_is_refused():
    with pytest.raises(ValueError, match="at ffn_width 1 a step still takes"):
        solve("wide", line(1.5, 0.001), 512)


def test_what_was_measured_is_kept(tmp_path):
    """Read on any machine; a workdir of other variants is refused."""
    specs = lab.product(layout=["standard", "wide"], seeds=[0, 1])
    match = lab.Match("parameters")
    with pytest.raises(ValueError, match=r"calibration\.json, .* is missing"):
        equal_seconds(specs, match, tmp_path, measures=False)
    asked = {
        spec.title: {"config": spec.config.to_dict(), "layout": "standard", "sharing": "separate"}
        for spec in specs
    }
    found = {title: {"ffn_width": 100 + i, "ratio": 1.0125} for i, title in enumerate(asked)}
    (tmp_path / seconds.FILE).write_text(json.dumps({"variants": asked, "found": found}))
    timed = equal_seconds(specs, match, tmp_path, measures=False)
    assert [spec.config.model.ffn.width for spec in timed] == [100, 100, 101, 101]
    assert {(s.config.matched, s.config.seconds_ratio) for s in timed} == {("seconds", 1.012)}
    with pytest.raises(ValueError, match="belongs to other variants"):
        equal_seconds(specs[:2], match, tmp_path, measures=False)
    alike = [dataclasses.replace(spec, tags={"a": 1}) for spec in specs]
    with pytest.raises(ValueError, match="'standard-seed0' and 'wide-seed0' have the title '1'"):
        equal_seconds(alike, match, tmp_path, measures=False)
    with pytest.raises(ValueError, match=r"have the tags \{'a': 1\} and different configs"):
        tuning_specs(alike, 3)
