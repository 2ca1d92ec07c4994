"""The report, from arm folders written by hand: nothing is trained here."""

import csv
import json
import re
from html import unescape
from xml.etree import ElementTree

import numpy as np
import pytest
from written_arms import ARMS, BITS, Page, undrawn, write_arm, write_sweep, written

from experiments import report
from experiments.reporting import document, pairs, results
from experiments.reporting.page import to_html
from experiments.reporting.statistics import paired_difference

__all__ = ["undrawn"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A sweep with nothing unusual: its folder, report.md and report.html."""
    folder = write_sweep(tmp_path_factory.mktemp("plain"))
    return folder, *written(folder)


@pytest.mark.usefixtures("undrawn")
def test_csv(tmp_path):
    write_sweep(tmp_path)
    write_arm(tmp_path / "lost", "narrow", "separate", 3.0, 90_000, diverged=True)
    report.write([tmp_path])
    text = (tmp_path / "results.csv").read_text()
    assert text.startswith(
        "layout,plan,seed,unique_parameters,applied_parameters,flops_per_token,"
        "heldout_bits_per_byte,train_bits_per_byte,tokens_per_second,wall_seconds,status,"
    )
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == 4 * 3
    wide = [r for r in rows if r["layout"] == "wide"]
    saved = json.loads((tmp_path / "wide-separate" / "result.json").read_text())
    assert [int(r["seed"]) for r in wide] == [0, 1, 2]
    assert [float(r["heldout_bits_per_byte"]) for r in wide] == saved["heldout_bits_per_byte"]
    assert {(r["tokens_per_second"], r["wall_seconds"]) for r in wide} == {("12345.6", "20.0")}
    lost = [r for r in rows if r["status"] == "diverged"]
    assert [r["seed"] for r in lost] == ["0", "1", "2"]
    assert {
        r[c] for r in lost for c in ("heldout_bits_per_byte", "train_bits_per_byte", "wall_seconds")
    } == {""}


def test_answer_names_the_best_and_is_sure_where_it_may_be(plain):
    _, markdown, _ = plain
    assert "**wide · separate predicts best: 2.80" in markdown
    assert (
        "less than standard · separate, the next of 3, with 2.00 times its parameters and 2.00 "
        "times its FLOPs. That lead is more than what seeds do" in markdown
    )
    assert "It is clearly better than 2 of the 2 other arms." in markdown
    assert "| wide · separate | standard · separate | **wide · separate is better** |" in markdown


@pytest.mark.usefixtures("undrawn")
def test_cannot_tell_where_the_interval_holds_zero(tmp_path):
    for layout, losses in (("wide", [2.8, 2.9, 3.0]), ("narrow", [2.9, 2.8, 3.2])):
        folder = tmp_path / layout
        write_arm(folder, layout, "albert", 0, 1000, heldout_bits_per_byte=losses)
    markdown, _ = written(tmp_path)
    assert "we cannot tell: its 95 % interval −" in markdown
    assert re.search(r"\| cannot tell \| \d\.\d{3} \| −\d\.\d{3} to \d\.\d{3} \|", markdown)
    assert "is better**" not in markdown


def test_cannot_tell_where_only_holm_objects():
    difference = paired_difference([0.0, 0.0, 0.0], [1.0, 1.1, 1.3], 0.95)
    run = results.Run(None, {"layout": "wide", "plan": "albert", "status": "complete"}, {})
    assert not difference.holds_zero
    one = pairs.Pair(run, run, difference, 0.06, difference, 0.06, of=15)
    assert one.verdict == "cannot tell (too few seeds for 15 comparisons)"
    assert one._replace(fixed_p=0.04).verdict == "**wide · albert is better**"
    assert one._replace(fixed_p=0.04, smallest=3.0).verdict == "equal within 3"
    assert one._replace(fixed_p=0.04, grows=True).verdict == one.verdict
    worse = difference._replace(low=-2.0, high=0.5)  # over the seeds that both have
    assert one._replace(fixed=worse, smallest=1.0).verdict == "cannot tell"


def test_seeds_pair_by_number_not_by_place(tmp_path):
    write_sweep(tmp_path, dict(list(ARMS.items())[:2]), wobble=0.0)
    path = tmp_path / "wide-separate" / "result.json"
    result = json.loads(path.read_text())
    for name in ("seeds", "heldout_bits_per_byte", "train_bits_per_byte"):
        result[name] = result[name][::-1]
    path.write_text(json.dumps(result))
    [pair] = pairs.compare(results.read([tmp_path])[0])
    np.testing.assert_allclose(pair.fixed[1:4], 0.1, atol=1e-9)


def test_one_learning_rate_is_not_a_verdict(plain):
    for text in plain[1:]:
        assert "one learning rate for all arms, not a verdict" in text


@pytest.mark.usefixtures("undrawn")
def test_of_swept_learning_rates_the_best_stands(tmp_path):
    for rate, worse in ((0.001, 0.3), (0.003, 0.0), (0.01, 0.1)):
        for (layout, plan), (loss, parameters) in ARMS.items():
            folder = tmp_path / f"{layout}-{plan}-{rate:g}"
            lost = layout == "wide" and rate == 0.01
            write_arm(
                folder,
                layout,
                plan,
                loss + worse,
                parameters,
                learning_rate=rate,
                diverged=lost,
            )
    markdown, _ = written(tmp_path)
    assert "not a verdict" not in markdown
    assert "best of its learning rates (0.001, 0.003 and 0.01) by mean held-out" in markdown
    assert "favours every arm alike" in markdown
    assert re.search(
        r"\| wide · separate \| 3\.10\S* ± \S+ \| \*\*2\.80.*\*\* \| diverged \|",
        markdown,
    )
    assert len(results.read([tmp_path])[0].arms) == 3


@pytest.mark.usefixtures("undrawn")
def test_some_learning_rates_missing_is_not_a_verdict(tmp_path):
    write_sweep(tmp_path)
    write_arm(tmp_path / "more", "wide", "separate", 2.7, 400_000, learning_rate=0.01)
    markdown, _ = written(tmp_path)
    assert "not each at all of them: not a verdict" in markdown


def test_budgets_and_yardsticks_stand_in_the_table_best_first(plain):
    _, markdown, _ = plain
    rows = [
        line.split(" | ")
        for line in markdown.splitlines()
        if "| 256 |" in line or "| 4.765" in line
    ]
    assert [row[0].strip("| *") for row in rows] == [
        "wide · separate",
        "standard · separate",
        "narrow · albert",
        "unigram entropy",
    ]
    assert rows[0][3:8] == ["400,000", "400,000", "800,000", "12,346", "60.0"]
    assert "| *gzip -9* | 1.894 |" in markdown


def test_html_loads_nothing_and_escapes_all(plain):
    _, _, html = plain
    page = Page(html)
    assert page.loads
    assert [u for u in page.loads if not u.startswith(("#", "data:"))] == []
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    style = html[html.index("<style>") : html.index("</style>")]
    assert not re.search(r"url\(|@import|@font-face", style)
    assert "http" not in re.sub(r"data:image/png;base64,[\w+/=\s]+", "", html)
    assert "a <script>alert('text')</script> & more" in "".join(page.text)
    assert page.tags.count("svg") == 4 + 3
    assert html.count("&nbsp;· separate") > 4


def test_markdown_and_html_say_the_same(plain):
    _, markdown, html = plain
    text = re.sub(r"\s+", " ", "".join(Page(html).text).replace("\xa0", " "))
    plain = re.sub(r"^> \[!\w+\]$", "", markdown, flags=re.MULTILINE)
    plain = re.sub(r"\*\*|`|~~|^[#>-] ?", "", plain, flags=re.MULTILINE)
    plain = re.sub(r"^\| \*(.+?)\*", r"| \1", plain, flags=re.MULTILINE)
    plain = plain.replace("&lt;", "<")
    lines = [line for line in plain.splitlines() if line and line[0] not in "|!#-" and line]
    assert len(lines) > 20
    cells = [
        c.strip()
        for line in plain.splitlines()
        if line.startswith("| ") and "---" not in line
        for c in line.strip("| ").split(" | ")
    ]
    assert [x for x in [*lines, *cells] if x.strip("# sh") not in text] == []


AWKWARD = [
    "a*b*c", "_a_ a_b __c", "[a](b)", "![a](b)", "a | b", "1. a", "- a", "> a", "# a", "~~a~~",
    "a\\b", "<b>a</b>", "&lt; &", "a * b *", "`*a* | <b>`", "a\n\nb", "a`b", "---", "===", "-0.3",
]  # fmt: skip


def test_what_texts_hold_is_shown_as_it_is():
    """Names of arms, of files and of papers are no Markdown."""
    rows = [[text, text] for text in AWKWARD]
    blocks = [document.Heading(2, text) for text in AWKWARD]
    blocks += [document.Paragraph(text, "warning") for text in AWKWARD]
    blocks += [document.Bullets(AWKWARD), document.Paragraph("between")]
    blocks += [document.Table("caption", ["a", "b"], rows, ["bad"] * len(rows), words=2)]
    page = to_html(document.to_markdown(blocks, "figures"), {}, "title")
    wanted = [" ".join(text.split()).replace("`*", "*").replace(">`", ">") for text in AWKWARD]
    for around in ("<h2>", '<blockquote class="warning">', "<li>", '<th scope="row">', "<td>"):
        end = around.split()[0].replace("<", "</").rstrip(">") + ">"
        found = re.findall(f"{around}(.*?){end}", page, flags=re.DOTALL)
        shown = [unescape(re.sub("</?(p|s|code)>|\n", "", text)) for text in found]
        assert shown == wanted


def test_figures_of_markdown_are_there(plain):
    folder, markdown, _ = plain
    links = re.findall(r"!\[.+\]\((.+)\)", markdown)
    assert len(links) == 7
    for link in links:
        ElementTree.fromstring((folder / link).read_text())


def test_maps_say_what_model_they_are_of(plain):
    folder, _, html = plain
    loss = json.loads((folder / "wide-separate" / "result.json").read_text())
    text = "".join(Page(html).text)
    found = loss["heldout_bits_per_byte"][0]
    assert f"after 800 steps, seed 0, {found:.3f} bits per byte held out" in text
    assert "if a:\\n <" in text


def test_how_it_was_made(plain):
    folder, markdown, _ = plain
    for fact in (
        "1,000,000 bytes",
        "`ab12`",
        "2,048 evenly spaced held-out rows",
        "jax 1.0",
        "2 cores",
    ):
        assert fact in markdown
    assert f"python -m experiments.report --workdir={folder}" in markdown


def test_the_report_says_how_attention_was_computed(plain):
    _, text, _ = plain
    for layout in ("standard", "wide"):
        assert f"{layout} heads in the order factored, backend dense" in text
    assert text.count("cudnn: needs a GPU") == 1


@pytest.mark.usefixtures("undrawn")
def test_losses_are_named_after_what_they_are_means_over(tmp_path):
    write_sweep(tmp_path)
    seq2seq = tmp_path / "narrow-albert"
    result, record = (json.loads((seq2seq / f"{n}.json").read_text()) for n in ("result", "config"))
    for part in ("heldout", "train"):
        result[f"{part}_bits_per_target_token"] = result.pop(f"{part}_bits_per_byte")
    record["config"]["task"] = "span_corruption"
    target = BITS | {"name": "bits_per_target_token", "unit": "bits per target token"}
    (seq2seq / "result.json").write_text(json.dumps(result | {"metrics": [target]}))
    (seq2seq / "config.json").write_text(json.dumps(record))
    markdown, _ = written(tmp_path)
    assert "different questions** (causal_lm, span_corruption)" in markdown
    assert "held-out bits per target token or bits per byte" in markdown
    assert "gzip" not in markdown
    with (tmp_path / "results.csv").open() as f:
        for row in csv.DictReader(f):
            per_byte = [row[f"{p}_bits_per_byte"] for p in ("heldout", "train")]
            per_token = [row[f"{p}_bits_per_target_token"] for p in ("heldout", "train")]
            full, empty = (per_byte, per_token)
            if row["arm"] == "narrow-albert":
                full, empty = empty, full
            assert all(full)
            assert not any(empty)


ACCURACY = {"name": "accuracy", "unit": "% of texts right", "better": "higher", "digits": 2}


def write_classes(folder):
    """A sweep of classifiers: the more are right the better, and each also has bits."""
    arms = {("wide", "separate"): (70.0, 400_000), ("standard", "albert"): (76.5, 200_000)}
    for (layout, plan), (loss, parameters) in arms.items():
        arm = folder / layout
        write_arm(arm, layout, plan, loss, parameters, metrics=[ACCURACY, BITS], maps=False)
        result = json.loads((arm / "result.json").read_text())
        for part in ("heldout", "train"):
            result[f"{part}_accuracy"] = result[f"{part}_bits_per_byte"]
            result[f"{part}_bits_per_byte"] = [0.5, 0.6, 0.7]
        result["yardsticks"] = {"accuracy": {"majority class": 50.0}}
        (arm / "result.json").write_text(json.dumps(result))
        rows = (arm / "metrics.jsonl").read_text().replace("bits_per_byte", "accuracy")
        (arm / "metrics.jsonl").write_text(rows)
    return folder


def test_the_best_is_what_the_direction_says(tmp_path):
    markdown, _ = written(write_classes(tmp_path))
    assert "**standard · albert predicts best: 76.50 ± 0.01 % of texts right**" in markdown
    assert "6.50 more than wide · separate" in markdown
    assert "Every score is in % of texts right, held out; more is better." in markdown
    assert "| *majority class* | 50.00 |" in markdown
    assert "Yardsticks, which need no model: majority class." in markdown
    rows = [line.split(" | ") for line in markdown.splitlines() if "| 256 |" in line]
    assert [row[0].strip("| *") for row in rows] == ["standard · albert", "wide · separate"]
    assert rows[0][3] == "0.600"  # the held-out bits, in a column of their own
    assert "| held-out % of texts right | train % of texts right | held-out bits per byte |" in (
        markdown
    )
    assert re.search(r"albert is better\*\* \| 6\.50\d \| 6\.\d+ to 6\.\d+ \|", markdown)
    assert "held-out % of texts right" in (tmp_path / "figures/1-width-curves.svg").read_text()
    with (tmp_path / "results.csv").open() as f:
        [first, *_] = csv.DictReader(f)
    assert float(first["heldout_accuracy"]) > 70
    assert first["heldout_bits_per_byte"] == "0.5"


@pytest.mark.usefixtures("undrawn")
def test_the_report_names_the_optimizer_that_ran(tmp_path):
    write_sweep(tmp_path)
    for path in tmp_path.glob("*/config.json"):
        record = json.loads(path.read_text())
        record["config"]["train"] |= {"optimizer": "lamb", "schedule": "inverse_sqrt"}
        path.write_text(json.dumps(record))
    markdown, _ = written(tmp_path)
    assert "LAMB, inverse sqrt, warm-up 50 steps" in markdown
    assert "AdamW" not in markdown
