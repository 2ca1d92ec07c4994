"""What the README, the pages of docs/ and the docstrings show is what happens."""

import ast
import dataclasses
import doctest
import importlib
import re
from unittest import mock

import jax
import numpy as np
import pytest
from conftest import ROOT

import attnlab
from attnlab import pretrained
from attnlab.data import DATASETS, make_tokenizer
from attnlab.heads import HEAD_VALUES, Standard
from attnlab.interpret import STATISTICS
from attnlab.models import FFN, Experts, ModelConfig
from attnlab.models.ffn import ffn_values
from attnlab.models.layer import LAYER_VALUES
from attnlab.nested import flatten
from attnlab.training import OBJECTIVES, OPTIMIZERS, SCHEDULES
from experiments import reference
from experiments.configs import byte_lm

DOCS = sorted((ROOT / "docs").rglob("*.md"))
DOCS = [page for page in DOCS if not {"_build", "colab"} & {*page.relative_to(ROOT).parts[1:]}]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
INSIDE = "((?:(?!```).)*)"


def name_of(page):
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


BLOCKS = re.compile(f"```python\n{INSIDE}```\n```\n{INSIDE}```", re.DOTALL)
SHOWN = {name_of(page): BLOCKS.findall(page.read_text()) for page in PAGES}


LONG = {
    "howto/interpret.md", "howto/viewer.md", "reference/activations.md", "reference/plans.md",
    "reference/published.md",
    "attnlab.interpret.gates", "attnlab.interpret.importance", "attnlab.interpret.panels",
    "attnlab.interpret.residual", "attnlab.interpret.similarity", "attnlab.transforms.resharing",
}  # fmt: skip
"""Pages and modules whose examples make a model."""


def each(names):
    return [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in names]


@pytest.mark.parametrize("page", each(name for name, blocks in SHOWN.items() if blocks))
def test_code_prints_what_the_page_says(page, capsys):
    """Its blocks, one after the other."""
    names: dict = {}
    for code, printed in SHOWN[page]:
        with mock.patch.dict(attnlab.LAYOUTS):  # a page's own row
            exec(code, names)
        assert capsys.readouterr().out == printed


def test_the_table_of_names_is_that_of_the_code():
    page = (ROOT / "docs" / "reference" / "activations.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE))
    of_ffn = ffn_values(FFN()) | ffn_values(FFN(experts=Experts(num_experts=2)))
    assert rows == HEAD_VALUES | LAYER_VALUES | of_ffn


def test_the_table_of_statistics_is_that_of_the_code():
    page = (ROOT / "docs" / "howto" / "interpret.md").read_text().replace(r"\|", "!")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE)
    table = [(name, one.unit, one.formula.replace("|", "!")) for name, one in STATISTICS.items()]
    assert [row for row in rows if row[0] in STATISTICS] == table


REGISTRIES = [
    ("datasets.md", "| source |", DATASETS),
    ("optimizers.md", "| optimizer |", OPTIMIZERS),
    ("optimizers.md", "| schedule |", SCHEDULES),
]


@pytest.mark.parametrize(("page", "header", "registry"), REGISTRIES)
def test_tables_name_the_entries_of_a_registry(page, header, registry):
    """Of a dataset also its fields; together they name all tasks."""
    text = (ROOT / "docs" / "reference" / page).read_text()
    lines = text[text.index(header) :].split("\n\n")[0].splitlines()[2:]
    rows = [line.strip("|").split("|") for line in lines]
    table = [[re.findall(r"`(\w+)`", cell) for cell in row] for row in rows]
    own = [name for name, entry in registry.items() if entry.__module__.startswith("attnlab.")]
    assert [names for [names], *_ in table] == own
    if registry is DATASETS:
        for [name], _, fields, *_ in table:
            assert fields == [field.name for field in dataclasses.fields(DATASETS[name])]
        tasks = {task for _, _, _, some, _ in table for task in some}
        assert tasks == {name for name in OBJECTIVES if ":" not in name}  # no file of a test


FILES = r"(?<![\w/.~])(?:experiments|attnlab|tests|colab|docs)/[\w/]+\.(?:py|ipynb|md|csv|svg)\b"


def anchors(page):
    """Of the headings of a page, as GitHub and the site make them."""
    text = re.sub("```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_name_files_and_headings_that_exist(page):
    """Paths are from the root of the checkout, links from the page."""
    text = page.read_text()
    if page.name != "plan.md":  # registered: its paths are those of its commit
        assert [name for name in re.findall(FILES, text) if not (ROOT / name).exists()] == []
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_pages_made_from_the_code():
    made = reference.pages()
    stale = [name for name in made if (reference.PAGES / name).read_text() != made[name]]
    assert stale == [], "run python -m experiments.reference"


def test_every_field_of_a_config_is_on_its_page():
    text = (reference.PAGES / "config.md").read_text()
    fields = flatten(byte_lm.get_config().to_dict())
    # Other tests register extras.
    names = [re.sub(r"extras\.\w+\.\w+$", "extras.NAME.on", name) for name in fields]
    assert [name for name in names if f"`config.{name}" not in text] == []


def test_the_tutorial_on_gpt2_runs(tmp_path, capsys):
    """On a small GPT-2 with random weights in the place of the one of the hub."""
    config = ModelConfig(
        width=16, num_layers=2, vocab_size=300, max_len=256, ffn=FFN(activation="gelu_tanh"),
        heads=Standard(num_heads=2, biases=("q", "k", "v", "o")),
    )  # fmt: skip
    params = jax.jit(config.build().init)(jax.random.key(0), np.zeros((1, 4), int))["params"]
    pretrained.save(tmp_path, config.build(), params)
    (tmp_path / "tokenizer.json").write_bytes(make_tokenizer("bpe:260", ["low low low"]).content)
    page = (ROOT / "docs" / "tutorials" / "gpt2_heads.md").read_text()
    names: dict = {}
    for code in re.findall(f"```python\n{INSIDE}```", page, re.DOTALL):
        exec(code.replace('"openai-community/gpt2"', repr(str(tmp_path))), names)
    printed = capsys.readouterr().out
    assert "induction ['" in printed
    assert "the largest increase of the loss is that of head " in printed


def test_the_tutorial_on_sweeps_compares_with_one_variant():
    """Without training: the baseline's tags name one of the variants of its `lab.product`."""
    page = (ROOT / "docs" / "tutorials" / "own_sweep.md").read_text()
    code = re.findall(f"```python\n{INSIDE}```", page, re.DOTALL)[0]
    names: dict = {}
    exec(code.partition("results = ")[0], names)
    baseline = ast.literal_eval(re.search(r"baseline = (\{.*?\})", code)[1])
    variants = {tuple(spec.tags.items()) for spec in names["specs"]}
    assert len(variants) == 4
    assert len([v for v in variants if baseline.items() <= dict(v).items()]) == 1


MODULES = sorted(
    ".".join(p.relative_to(ROOT).with_suffix("").parts)
    for folder in ("attnlab", "experiments")
    for p in (ROOT / folder).rglob("[a-z]*.py")
    if ">>>" in p.read_text() and not p.name.startswith(("test_", "conftest"))
)


@pytest.mark.parametrize("name", each(MODULES))
def test_docstrings(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0
