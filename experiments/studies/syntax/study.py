"""Does a head attend along syntactic dependencies? `attnlab.interpret.syntax` for runs and folders.

`python -m experiments.roles` is the command; Clark et al. 2019 (arXiv 1906.04341) the method.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attnlab.atomic import check_new_file, write_atomic
from attnlab.interpret import SyntaxScore, Tree, read_trees, syntax, treebank_parts
from attnlab.lab.text_table import columns
from attnlab.load import LONGEST, LoadedModel, open_run, seeds_of
from attnlab.sharing import Params
from attnlab.training.step import smallest_inputs

TRAIN, CHOOSING, JUDGING = "train", "dev", "test"


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
    labels = syntax.frequent_labels(*trees, least=least)
    if not labels:
        raise ValueError(
            f"no relation has {least} words in both parts; of {len(splits[0])} and "
            f"{len(splits[1])} sentences the model can read {len(trees[0])} and {len(trees[1])}, "
            "others are too long: raise --sentences, lower --least or take a model of a larger "
            "max_len"
        )
    if len(trees[1]) < 2:
        raise ValueError("the model can read 1 sentence to judge by; an interval needs two or more")

    def study(opened: LoadedModel, params: Params) -> list[SyntaxScore]:
        tallies = [
            syntax.count_correct(
                some,
                syntax.head_predictions(opened.config, params, [text for _, text in part]),
                labels,
            )
            for some, part in zip(trees, kept, strict=True)
        ]
        return syntax.evaluate_heads(*tallies)

    found = {name: study(one, one.params) for name, one in models.items()}
    if untrained:
        one = smallest_inputs(first.config)
        found |= {f"{name}, untrained": study(m, m.initial(one)) for name, m in models.items()}
    sizes = (len(trees[0]), len(trees[1]))
    return Study(found, sizes, sum(map(len, splits)) - sum(sizes))


def readable(
    opened: LoadedModel, trees: Sequence[Tree]
) -> list[tuple[Tree, tuple[np.ndarray, np.ndarray]]]:
    """The sentences that the model can read whole, with the input of `head_predictions`."""
    found = []
    for tree in trees:
        tokens, spans = opened.split(tree.text)
        shares = syntax.token_word_overlap(spans, tree.spans)
        if len(tokens) <= min(opened.config.max_len, LONGEST) and shares.any(0).all():
            found.append((tree, (tokens, shares)))
    return found


def open_seeds(folder: Path, seed: int | None) -> dict[str, LoadedModel]:
    """Every seed of a run by its name, or the one that is asked for."""
    first = open_run(folder, seed)
    seeds = seeds_of(folder)
    if seed is not None:
        return {f"seed {seed}": first}
    return {f"seed {s}": first if s == seeds[0] else open_run(folder, s) for s in seeds}


def read_parts(path: Path) -> list[list[Tree]]:
    """The sentences to choose in and those to judge in."""
    if path.is_file():
        trees = read_trees(path)
        return [trees[::2], trees[1::2]]
    if not path.is_dir():
        raise FileNotFoundError(f"no treebank {path}; give a folder or a .conllu file")
    return [read_trees(_part(path, name)) for name in (CHOOSING, JUDGING)]


def _part(path: Path, name: str) -> Path:
    parts = treebank_parts(path)
    if name not in parts:
        raise ValueError(
            f"{path} holds no file *-{name}.conllu (or .conllu.gz); give a folder as Universal "
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
    heading = ("relation", "words", "offset", "right", "longest", "head", "right", "gain")
    rows = [(*heading, *others)]
    for i, one in enumerate(study.found[first]):
        beside = (study.found[name][i] for name in others)
        rows.append(
            (
                one.label,
                f"{one.cases:,}",
                f"{one.offset:+d}",
                _percent(one.by_offset),
                _percent(one.by_longest),
                f"{one.layer}.{one.head} {one.direction}",
                _right(one),
                f"{_percent(one.gain, '+')} ({_percent(one.low, '+')} to "
                f"{_percent(one.high, '+')})",
                *map(_right, beside),
            )
        )
    left = f"; {study.left_out} more cannot be read whole" if study.left_out else ""
    note = (
        f"Chosen in {study.sentences[0]:,} sentences, judged in {study.sentences[1]:,} others"
        f"{left}.\n"
        "right: percent; longest: right by the longest word; head: layer.head, counted from 0;\n"
        "gain: over the better of both, with its 95 % interval, of all rows at once; *: above 0."
    )
    return "\n\n".join([f"{first}:", columns(rows), note, "\n".join(outcome(study.found))])


def outcome(found: dict[str, list[SyntaxScore]]) -> list[str]:
    """What follows for each model, in a sentence."""
    lines, every = [], len(next(iter(found.values())))
    for name, some in found.items():
        won = [one.label for one in some if one.is_significant]
        lines.append(
            f"{name}: its best head is better than both baselines in {len(won)} of {every} rows "
            f"({', '.join(won)})."
            if won
            else f"{name}: no head is better than both baselines in any of {every} rows."
        )
    return lines


def _right(one: SyntaxScore) -> str:
    return _percent(one.by_head) + ("*" if one.is_significant else " ")


def _percent(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.1f}"


def write_table(study: Study, out: Path) -> None:
    """A row a model and relation."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(("model", *SyntaxScore._fields))
    for name, some in study.found.items():
        writer.writerows((name, *one) for one in some)
    write_atomic(out, file.getvalue().encode())
