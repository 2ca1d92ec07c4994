"""The report, from arm folders written by hand: nothing is trained here."""

import csv
import json
import math
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from experiments import report
from experiments.reporting import document, figures, findings, results
from experiments.reporting.page import to_html
from experiments.reporting.statistics import paired_difference
from experiments.running.workdir import PACKAGES, WorkdirError

ARMS = {
    ("wide", "separate"): (2.80, 400_000),
    ("standard", "separate"): (2.90, 200_000),
    ("narrow", "albert"): (3.10, 60_000),
}
NOISE = (0.0, 0.011, -0.006)
"""Of the seeds, the same in every arm, so that pairs differ by little."""


BITS = {"name": "bits_per_byte", "unit": "bits per byte", "better": "lower", "digits": 3}


def write_arm(folder, layout, plan, loss, parameters, **changes):
    """An arm as it is left on disk; `changes` are of result.json, or of the corpus."""
    seeds = changes.pop("seeds", [0, 1, 2])
    rate = changes.pop("learning_rate", 0.003)
    match = changes.pop("match", "")
    source = {
        "name": changes.pop("data", "a <script>alert('text')</script> & more"),
        "sha256": changes.pop("sha256", "ab12"),
        "facts": {"bytes": 1_000_000, "held-out bytes": 100_000, "training tokens": 900_000},
    }
    wobble = changes.pop("wobble", 0.001)
    heldout = [loss + NOISE[i] + wobble * math.sin(parameters + i) for i in range(len(seeds))]
    train = {
        "optimizer": "adamw",
        "schedule": "cosine",
        "steps": 800,
        "batch_size": 16,
        "length": 8,
        "warmup_steps": 50,
        "curve_windows": 256,
        "eval_windows": 2048,
        "learning_rate": rate,
        "final_learning_rate": rate / 10,
        "seeds": seeds,
    }
    model = {
        "kind": "decoder",
        "num_layers": 2,
        "width": 64,
        "num_heads": 3,
        "dtype": "float32",
        "layout": layout,
        "plan": plan,
        "ffn_width": 256,
    }
    environment = {"device": "1 x cpu", "machine": "x86_64", "cores": 2}
    environment |= dict.fromkeys(("python", "commit", *PACKAGES), "1.0")
    record = {
        "config": {"task": "causal_lm", "model": model, "train": train},
        "source": source,
        "environment": environment,
    }
    result = {
        "name": folder.name,
        "layout": layout,
        "plan": plan,
        "match": match,
        "model": model,
        "seeds": seeds,
        "steps": 800,
        "length": 8,
        "learning_rate": rate,
        "unique_parameters": parameters,
        "applied_parameters": 400_000,
        "flops_per_token": 2 * parameters,
        "metrics": changes.pop("metrics", [BITS]),
        "yardsticks": {"bits_per_byte": {"unigram entropy": 4.765, "gzip -9": 1.894}},
        "attention": {
            "order": {"factored": 1, "absorbed": 2},
            "chosen": {"order": "factored"},
            "implementation": {"dense": "chosen", "cudnn": "needs a GPU"},
        },
        "status": "complete",
        "heldout_bits_per_byte": heldout,
        "train_bits_per_byte": [x - 0.1 for x in heldout],
        "tokens_per_second": 12345.6,
        "wall_seconds": 60.0,
    }
    if changes.pop("diverged", False):
        for name in (
            "heldout_bits_per_byte",
            "train_bits_per_byte",
            "tokens_per_second",
            "wall_seconds",
        ):
            del result[name]
        result |= {
            "status": "diverged",
            "message": "the loss of seed 1 is not finite at step 50",
        }
    folder.mkdir(parents=True)
    if changes.pop("curves", True):
        rows = [
            {
                "step": s,
                "eval/bits_per_byte": [x + 100 / s for x in heldout],
                "train/loss": 1,
            }
            for s in (200, 400, 800)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if changes.pop("maps", True) and result["status"] == "complete":
        probs = np.tril(np.ones((2, 3, 8, 8))) / np.arange(1, 9)[:, None]
        tokens = np.frombuffer(b"if a:\n <", np.uint8)
        np.savez_compressed(
            folder / "maps.npz",
            probs=probs.astype(np.float16),
            tokens=tokens,
            written_tokens=r"if a:\n <",
            step=800,
            seed=seeds[0],
        )
    (folder / "result.json").write_text(json.dumps(result | changes))
    (folder / "config.json").write_text(json.dumps(record))


def write_sweep(folder, arms=ARMS, **changes):
    for (layout, plan), (loss, parameters) in arms.items():
        write_arm(folder / f"{layout}-{plan}", layout, plan, loss, parameters, **changes)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A sweep with nothing unusual: its folder, report.md and report.html."""
    folder = write_sweep(tmp_path_factory.mktemp("plain"))
    return folder, *written(folder)


@pytest.fixture
def undrawn(monkeypatch):
    """For tests of words and tables: figures take half a second a report."""
    monkeypatch.setattr(figures, "of_panel", lambda panel, name: [])
    monkeypatch.setattr(figures, "maps", lambda panels: [])


def written(*folders):
    report.write(list(folders))
    return [(folders[0] / f"report.{kind}").read_text() for kind in ("md", "html")]


class Page(HTMLParser):
    """What a browser would load, and the texts of all cells and paragraphs."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        loading = ("src", "href", "xlink:href", "srcset", "data", "action", "poster")
        self.loads += [value for name, value in attrs if name in loading]

    def handle_data(self, data):
        self.text.append(data)


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
        "less than standard · separate, the next of 3. That lead is more than what seeds do"
        in markdown
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
    assert findings.verdict(run, difference, 0.06) == "cannot tell (not after Holm)"
    assert findings.verdict(run, difference, 0.04) == "**wide · albert is better**"


def test_seeds_pair_by_number_not_by_place(tmp_path):
    write_sweep(tmp_path, dict(list(ARMS.items())[:2]), wobble=0.0)
    path = tmp_path / "wide-separate" / "result.json"
    result = json.loads(path.read_text())
    for name in ("seeds", "heldout_bits_per_byte", "train_bits_per_byte"):
        result[name] = result[name][::-1]
    path.write_text(json.dumps(result))
    [(_, _, difference, _)] = findings.compare(results.read([tmp_path])[0])
    np.testing.assert_allclose(difference[1:4], 0.1, atol=1e-9)


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


# What can go wrong


def test_a_diverged_arm_is_shown_as_such(tmp_path):
    write_sweep(tmp_path)
    write_arm(tmp_path / "lost", "narrow", "separate", 3.0, 90_000, diverged=True)
    for text in written(tmp_path):
        assert "the loss of seed 1 is not finite at step 50" in text
    markdown = (tmp_path / "report.md").read_text()
    assert "| ~~narrow · separate~~ | diverged | – | 90,000 |" in markdown
    assert "Diverged: narrow · separate." in markdown


def test_all_arms_diverged(tmp_path):
    markdown, _ = written(write_sweep(tmp_path, diverged=True, curves=False))
    assert "there is nothing to compare: every arm diverged" in markdown


def test_one_seed_gives_no_interval(tmp_path):
    markdown, _ = written(write_sweep(tmp_path, seeds=[4]))
    assert "One seed gives no interval" in markdown
    assert "| cannot tell (one seed) |" in markdown
    assert "±" not in markdown.split("## At equal width")[0]


def test_without_metrics_and_maps(tmp_path):
    markdown, _ = written(write_sweep(tmp_path, curves=False, maps=False))
    assert "Learning curves" not in markdown
    assert "Attention maps" not in markdown
    assert markdown.count("![") == 3


def test_one_run_alone(tmp_path):
    write_arm(tmp_path / "run", "wide", "albert", 2.9, 1000)
    markdown, _ = written(tmp_path / "run")
    assert "there is no other arm to compare it with" in markdown


@pytest.mark.usefixtures("undrawn")
def test_several_folders_are_several_panels(tmp_path):
    first = write_sweep(tmp_path / "first")
    second = write_sweep(tmp_path / "equal", match="parameters")
    markdown, _ = written(first, second)
    titles = re.findall(r"^## (.*)", markdown, flags=re.MULTILINE)
    assert titles[:2] == ["At equal width", "At equal parameters"]
    assert not (second / "report.md").exists()
    assert len((first / "results.csv").read_text().splitlines()) == 1 + 18


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("source", "sha256"), "cd34", "were not trained on the same data"),
        (("environment", "cores"), 8, "environments: cores is 8 or 2"),
        (("config", "train", "steps"), 900, "differ in train.steps (900 or 800)"),
    ],
)
def test_warns_of_what_cannot_be_compared(tmp_path, path, value, message):
    write_sweep(tmp_path)
    assert results.warnings(results.read([tmp_path])) == []
    file = tmp_path / "narrow-albert" / "config.json"
    record = part = json.loads(file.read_text())
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    file.write_text(json.dumps(record))
    for text in written(tmp_path):
        assert message in text


@pytest.mark.usefixtures("undrawn")
def test_unfinished_arms_are_named(tmp_path):
    write_sweep(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"arms": {"wide-separate": {}, "wide-albert": {}}, "environment": {}})
    )
    markdown, _ = written(tmp_path)
    assert "not finished, so not shown: wide-albert." in markdown


def test_no_result_leaves_all_as_it_was(tmp_path):
    write_sweep(tmp_path / "first")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkdirError, match="empty holds no result"):
        report.write([tmp_path / "first", tmp_path / "empty"])
    assert not (tmp_path / "first" / "report.md").exists()


def test_command_line(tmp_path):
    """It fails in one line, and what it imports to say so is light."""
    code = (
        "import runpy, sys, atexit;"
        "atexit.register(lambda: print([m in sys.modules for m in ('matplotlib', 'scipy.stats')]));"
        "runpy.run_module('experiments.report', run_name='__main__', alter_sys=True)"
    )
    flag = f"--workdir={tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", code, flag], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path} holds no result.json")
    assert done.stdout == "[False, False]\n"


def test_the_report_says_how_attention_was_computed(plain):
    _, text, _ = plain
    for layout in ("standard", "wide"):
        assert f"{layout} heads in the order factored, backend dense (cudnn: needs a GPU)" in text


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
