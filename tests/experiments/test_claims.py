"""What was expected beside what came, from arm folders written by hand."""

import json

from written_arms import ARMS, write_arm

from experiments import report
from experiments.reporting import claims
from experiments.reporting.results import read
from experiments.running.claims import Claim, Drawing, Expect


def known(*expects, kind="bars", **drawing):
    """A claim about the arms of `three`."""
    return Claim("Is it so?", "A and B 2020", expects, Drawing(kind, "What is seen.", **drawing))


def three(folder, claim):
    """Three arms with scores near 2.8, 2.9 and 3.1, and what was expected of them."""
    titles = {}
    for (layout, plan), (loss, count) in ARMS.items():
        write_arm(folder / layout, layout, plan, loss, count)
        titles[layout] = f"{layout} heads"
    record = {"arms": {n: {} for n in titles}, "titles": titles, "claim": claim.record()}
    record["environment"] = {"config": "experiments/configs/known.py"}
    (folder / "config.json").write_text(json.dumps(record))
    return read([folder])


def test_a_report_says_first_what_did_not_come(tmp_path):
    """Every seed counts, and the worst of them; a ratio is of means."""
    met = Expect("wide heads", "at most", 2.82, "wide has {most:.3f}")
    missed = Expect("wide heads", "at most", 2.80, "wide has {most:.3f}")
    ratio = Expect("narrow heads", "at least", 1.1, "{ratio:.2f} times", of="wide heads")
    absent = Expect("none", "at least", 0, "")
    [panel] = three(tmp_path, known(met, missed, ratio, absent))
    most = f"{panel.complete[0].heldout.max():.3f}"
    assert claims.answer(panel) == (
        f"**Not as expected:** wide has {most} (asked: at most 2.8). **As expected in the rest:** "
        f"wide has {most} (asked: at most 2.82); 1.11 times (asked: at least 1.1). No result, so "
        "no answer: none. The expectation is of A and B 2020."
    )
    report.write([tmp_path])
    told = (tmp_path / "report.md").read_text().split("\n\n")
    assert told[0] == "# Is it so?"
    assert told[2].startswith("**Not as expected:**")
    assert told[3:5] == ["![Is it so?](figures/1-width-claim.svg)", "What is seen."]
    assert "predicts best" not in "".join(told)
    svg = (tmp_path / "figures/1-width-claim.svg").read_text()
    assert all(f"{name} heads" in svg for name in ("wide", "standard", "narrow"))
