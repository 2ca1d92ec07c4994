"""The site: sphinx-build -W docs docs/_build

Pages are those of this folder, the notebooks of colab/ as they were run, and the docstrings. All
of them are also read elsewhere (GitHub, Colab), so what only the site needs is done here: links
that leave the folder become links inside the site.
"""

import ast
import html
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import desc_annotation
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from docstrings import as_rst  # noqa: E402

project, author, copyright = "attnlab", "the attnlab authors", "the attnlab authors, Apache-2.0"
html_title = "attnlab"
root_doc = "index"
exclude_patterns = ["_build"]
extensions = ["myst_nb", "sphinx.ext.autodoc"]

nb_execution_mode = "off"  # outputs are committed; tests/test_notebooks.py runs them
nb_merge_streams = True
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
REPOSITORY = "https://github.com/attnlab/attnlab"
html_theme_options = {
    "top_of_page_buttons": [],
    "footer_icons": [{"name": "GitHub", "url": REPOSITORY, "html": "GitHub", "class": ""}],
}
pygments_style, pygments_dark_style = "default", "github-dark"
highlight_language = "none"  # where a block does not say

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 500  # of classes whose fields have no room in four lines
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

# The notebooks lie beside this folder; Sphinx reads what is in it.
for notebook in (HERE.parent / "colab").glob("*.ipynb"):
    (HERE / "colab").mkdir(exist_ok=True)
    shutil.copyfile(notebook, HERE / "colab" / notebook.name)

ARRAY_LIKE = "Array | ndarray | bool | number | bool | int | float | complex"
CODE = f"{REPOSITORY}/blob/main"
COLAB = "https://colab.research.google.com/github/attnlab/attnlab/blob/main/colab"
BADGE = r"\[!\[Open In Colab\]\([^)]*\)\]"
LINKS = (
    (rf"{BADGE}", "[Open in Colab, to run and change it]"),  # a picture from the net
    (rf"(?<!change it\])\({COLAB}/", "({colab}"),
    (rf"{CODE}/docs/", "{docs}"),
    (r"\]\((?:\.\./|docs/)*CONTRIBUTING\.md", "]({docs}contributing.md"),
    (r"\]\((?:\.\./)+colab/", "]({colab}"),
)


def stay_inside(app: Sphinx, page: str, source: list[str]) -> None:
    """Links between what lies in this folder and what was copied into it."""
    docs = "../" * page.count("/")
    places = {"docs": docs, "colab": "" if page.startswith("colab/") else f"{docs}colab/"}
    for pattern, link in LINKS:
        source[0] = re.sub(pattern, link.format(**places), source[0])


def finish(app: Sphinx, page: nodes.document, name: str) -> None:
    """A drawing becomes a part of its page, whose colour of ink it takes, light or dark; cells of
    tables that hold a sentence or a word, and tables whose last column explains the row, are
    marked."""
    for image in [i for i in page.findall(nodes.image) if i["uri"].endswith(".svg")]:
        text = (HERE / image["uri"]).read_text()
        if "currentColor" in text:
            text = re.sub("<style>.*?</style>", "", text, flags=re.DOTALL)
            if 'role="img"' not in text.partition(">")[0]:  # drawings have a title
                label = html.escape(image.get("alt", ""), quote=True)
                about = f'class="figure" role="img" aria-label="{label}"'
                text = text.replace("<svg ", f"<svg {about} ", 1)
            image.replace_self(nodes.raw("", text, format="html"))
    for cell in page.findall(nodes.entry):
        size = len(cell.astext())
        cell["classes"] += ["long"] if size > 30 else ["short"] if size <= 12 else []
    for head in page.findall(nodes.thead):
        last = head.children[0].children[-1]  # explains the row, so it has no name
        head.parent.parent["classes"] += [] if last.astext() else ["fields"]


def one_signature(app: Sphinx) -> None:
    """Overloads are for type checkers; a reader wants the function itself."""
    for path in (HERE.parent / "attnlab").rglob("*.py"):
        if "@overload" in path.read_text():
            module = ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
            analyzer = ModuleAnalyzer.for_module(module)
            analyzer.analyze()
            analyzer.overloads.clear()


def plain(app: Sphinx, what: str, name: str, of: Any, options: Any, said: str, gives: str) -> Any:
    """Signatures without what Flax adds to every module. Types stand where they fit in four lines:
    the descriptions of arguments say them too, as shapes."""
    said = said and re.sub(r",\s*parent: .*, name: str \| None = None", "", said)
    said = said and said.replace(ARRAY_LIKE, "ArrayLike").replace("~", "")
    if said and (what in ("function", "method") or len(said) > 250):
        tree = ast.parse(re.sub(r"= <.*?>+(?=[,)])", "= ...", f"def f{said}: pass"))
        for argument in (node for node in ast.walk(tree) if isinstance(node, ast.arg)):
            argument.annotation = None
        said = f"({ast.unparse(tree.body[0].args)})"
    return said, gives


def short(app: Sphinx, domain: str, kind: str, content: nodes.Element) -> None:
    """Types by the names that the code has; values of constants that fit in a line or two."""
    for value in [v for v in content.parent.findall(desc_annotation) if len(v.astext()) > 200]:
        value.parent.remove(value)
    for text in [t for t in content.parent.findall(nodes.Text) if "jaxlib._jax." in t]:
        text.parent.replace(text, nodes.Text(text.replace("jaxlib._jax.", "")))


def setup(app: Sphinx) -> None:
    app.connect("source-read", stay_inside)
    app.connect("doctree-resolved", finish)
    app.connect("builder-inited", one_signature)
    app.connect("autodoc-process-signature", plain)
    app.connect("object-description-transform", short)
    app.connect("autodoc-process-docstring", as_rst)
