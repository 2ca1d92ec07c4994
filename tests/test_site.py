"""The site is built without a warning, no link inside it is dead, and it is read offline."""

import inspect
import os
import re
import subprocess
import sys
from urllib.parse import unquote, urldefrag

import pytest
from conftest import ROOT
from written_page import Parsed

import attnlab

pytestmark = pytest.mark.slow


class Page:
    """The links, anchors and pictures of a page, and what a browser loads for it."""

    def __init__(self, text):
        tags = Parsed(text).tags
        self.links = [found["href"] for tag, found in tags if tag == "a" and found.get("href")]
        self.anchors = {found.get(name) or "" for _, found in tags for name in ("id", "name")}
        self.silent = [found for tag, found in tags if tag == "img" and not found.get("alt")]
        sources = [found.get({"link": "href"}.get(tag, "src")) for tag, found in tags]
        self.loads = [source for source in sources if source]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(package, reason='needs pip install -e ".[docs]"')
    folder = tmp_path_factory.mktemp("site") / "html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(folder)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}


def test_nothing_is_loaded_from_elsewhere_and_every_picture_has_a_text(pages):
    """A dead link is a warning, which fails the build; what the pages load is on the disk."""
    for path, page in pages.items():
        loads = [re.split(r"[?#]", load)[0] for load in page.loads if load[:5] != "data:"]
        missing = [load for load in loads if load and not (path.parent / unquote(load)).is_file()]
        assert (missing, page.silent) == ([], []), path


def test_every_page_is_one_click_from_the_first_and_found_by_the_search(site, pages):
    links = pages[site / "index.html"].links
    linked = {(site / unquote(urldefrag(link)[0])).resolve() for link in links}
    docs = ROOT / "docs"
    names = {p.relative_to(docs).with_suffix("").as_posix() for p in docs.rglob("*.md")}
    written = {name for name in names if not name.startswith(("_build", "colab"))} - {"index"}
    written |= {f"colab/{p.stem}" for p in (ROOT / "colab").glob("*.ipynb")}
    assert [name for name in written if site / f"{name}.html" not in linked] == []
    index = (site / "searchindex.js").read_text()
    assert [name for name in written if f'"{name}"' not in index] == []


def test_what_is_inside_is_not_linked_to_outside(pages):
    """But for the way of each notebook to Colab."""
    for path, page in pages.items():
        away = [link.partition("/blob/main/") for link in page.links if "/blob/main/" in link]
        assert [place for _, _, place in away if place.startswith("docs/")] == []
        notebooks = [place for _, _, place in away if place.startswith("colab/")]
        assert notebooks == [f"colab/{path.stem}.ipynb"] * (path.parent.name == "colab")


def test_every_public_name_has_an_entry_in_the_reference(site, pages):
    anchors = set().union(*(pages[p].anchors for p in (site / "reference").iterdir()))
    last = {anchor.rpartition(".")[2] for anchor in anchors}
    for module in (attnlab, attnlab.interpret, attnlab.training, attnlab.pretrained):
        public = dir(attnlab) if module is attnlab else module.__all__
        # Not tables of values, nor modules, which have pages.
        names = [n for n in public if not re.fullmatch("[A-Z_]+|__version__", n)]
        names = [n for n in names if not inspect.ismodule(getattr(module, n))]
        assert [n for n in names if n not in last] == []
    assert {"LAYOUTS", "PLANS", "BACKENDS"} <= last
