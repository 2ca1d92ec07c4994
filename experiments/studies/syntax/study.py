"""Does a head attend along syntactic dependencies? Clark et al. 2019 on a treebank, for any model.

    python -m experiments.studies.syntax --workdir=RUN --treebank=PATH/ud_english_ewt --untrained
    python -m experiments.studies.syntax --path=FOLDER --treebank=PATH/ud_english_ewt --out=a.csv

Each row of the table is a relation: how often the word that a word attends to most ("to head"), or
the word that attends to it most ("from head"), is its syntactic head. Two baselines need no syntax:
the best fixed distance, and the longest word. All are chosen in the part dev and scored in the part
test, so the best of many heads has no advantage by chance; in a treebank of one file the sentences
alternate. All seeds of a run are included (--seed selects one), with --untrained also the untrained
model. The model reads each sentence alone; sentences longer than its max_len are left out. This
writes the text of the treebank, to train a model on:

    python -m experiments.studies.syntax --treebank=PATH/ud_english_ewt --raw=ewt.txt
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas

from attnlab.atomic import check_new_file, write_atomic
from attnlab.interpret import SyntaxScore, Tree, read_trees, syntax, treebank_parts
from attnlab.load import LoadedModel, open_run, seeds_of
from attnlab.sharing import Params
from attnlab.training.step import smallest_inputs

TRAIN, CHOOSING, JUDGING = "train", "dev", "test"
LONGEST = 1024
"""Tokens of the longest sentence."""


class Study(NamedTuple):
    """What was found, and in what."""

    found: dict[str, list[SyntaxScore]]
    """Name of a model -> a role for each label, the same labels for all"""
    sentences: tuple[int, int]
    """To choose in, and to judge in"""
    left_out: int
    """Sentences that the model cannot read"""


def evaluate(
    models: dict[str, LoadedModel], splits: Sequence[Sequence[Tree]], *, untrained: bool, least: int
) -> Study:
    """`syntax.evaluate_heads` for each seed of a model, and with `untrained` also before."""
    first = next(iter(models.values()))
    kept = [readable(first, trees) for trees in splits]
    trees = [[tree for tree, _ in part] for part in kept]
    sizes = (len(trees[0]), len(trees[1]))
    labels = syntax.frequent_labels(*trees, least=least)
    if not labels or sizes[1] < 2:
        raise ValueError(
            f"no relation has {least} words in both parts, or only one sentence is left to judge "
            f"by; of {len(splits[0])} and {len(splits[1])} sentences the model can read {sizes[0]} "
            f"and {sizes[1]}, others are too long: raise --sentences, lower --least or take a "
            "model of a larger max_len"
        )

    def study(opened: LoadedModel, params: Params) -> list[SyntaxScore]:
        tallies = []
        for some, part in zip(trees, kept, strict=True):
            found = syntax.head_predictions(opened.config, params, [text for _, text in part])
            tallies.append(syntax.count_correct(some, found, labels))
        return syntax.evaluate_heads(*tallies)

    found = {name: study(one, one.params) for name, one in models.items()}
    if untrained:
        one = smallest_inputs(first.config)
        found |= {f"{name}, untrained": study(m, m.initial(one)) for name, m in models.items()}
    return Study(found, sizes, sum(map(len, splits)) - sum(sizes))


def readable(
    opened: LoadedModel, trees: Sequence[Tree]
) -> list[tuple[Tree, tuple[np.ndarray, np.ndarray]]]:
    """The sentences that the model can read whole, with the input of `head_predictions`."""
    found = []
    for tree in trees:
        tokens, spans = opened.split(tree.text)
        shares = syntax.token_word_overlap(spans, tree.spans)
        if len(tokens) <= min(opened.config.longest_text, LONGEST) and shares.any(0).all():
            found.append((tree, (tokens, shares)))
    return found


def open_seeds(folder: Path, seed: int | None) -> dict[str, LoadedModel]:
    """Every seed of a run by its name, or the one that is asked for."""
    seeds = seeds_of(folder) if seed is None else [seed]
    return {f"seed {one}": open_run(folder, one) for one in seeds}


def read_parts(path: Path) -> list[list[Tree]]:
    """The sentences to choose in and those to judge in."""
    if path.is_file():
        trees = read_trees(path)
        return [trees[::2], trees[1::2]]
    return [read_trees(_part(path, name)) for name in (CHOOSING, JUDGING)]


def _part(path: Path, name: str) -> Path:
    parts = treebank_parts(path)
    if name not in parts:
        raise FileNotFoundError(
            f"no file {path}/*-{name}.conllu (or .conllu.gz); give a folder as Universal "
            "Dependencies publishes it, or one .conllu file"
        )
    return parts[name]


def write_raw(treebank: Path, out: Path) -> None:
    """The text that a model may be trained on, a sentence a line."""
    check_new_file(out, "raw")
    trees = read_trees(_part(treebank, TRAIN) if treebank.is_dir() else treebank)
    text = "".join(f"{tree.text}\n" for tree in trees)
    write_atomic(out, text.encode())
    print(f"{out}: {len(trees):,} sentences, {len(text.encode()):,} bytes")


def table(study: Study) -> str:
    """The first model in full, the others with what their own best heads find, and what follows."""
    first, *others = study.found
    rows = [["relation", "words", "offset", "right", "longest", "head", "right", "gain", *others]]
    for one, *same in zip(*study.found.values(), strict=True):
        head, gain = f"{one.layer}.{one.head} {one.direction}", f"{100 * one.gain:+.1f}"
        rows.append([
            one.label, f"{one.cases:,}", f"{one.offset:+d}", f"{100 * one.by_offset:.1f}",
            f"{100 * one.by_longest:.1f}", head, _right(one),
            f"{gain} ({100 * one.low:+.1f} to {100 * one.high:+.1f})", *map(_right, same),
        ])  # fmt: skip
    note = (
        f"Chosen in {study.sentences[0]:,} sentences, judged in {study.sentences[1]:,} others; "
        f"{study.left_out} more cannot be read whole.\n"
        "right: percent; longest: right by the longest word; head: layer.head, counted from 0;\n"
        "gain: over the better of both, with its 95 % interval, of all rows at once; *: above 0."
    )
    conclusions = [_conclusion(name, some) for name, some in study.found.items()]
    return "\n\n".join([f"{first}:", aligned(rows), note, "\n".join(conclusions)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _conclusion(name: str, found: Sequence[SyntaxScore]) -> str:
    won = [one.label for one in found if one.is_significant]
    if not won:
        return f"{name}: no head is better than both baselines in any of {len(found)} rows."
    rows = f"{len(won)} of {len(found)} rows ({', '.join(won)})"
    return f"{name}: its best head is better than both baselines in {rows}."


def _right(one: SyntaxScore) -> str:
    return f"{100 * one.by_head:.1f}" + ("*" if one.is_significant else " ")


def as_frame(study: Study) -> pandas.DataFrame:
    """A row a model and relation."""
    rows = [(name, *one) for name, some in study.found.items() for one in some]
    return pandas.DataFrame(rows, columns=["model", *SyntaxScore._fields])
