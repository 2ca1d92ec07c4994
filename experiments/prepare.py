r"""Tokenizes texts into files that a run reads from disk; they may be larger than memory.

    python -m experiments.prepare --path=TEXTS --out=data/texts --tokenizer=bpe:16384
    python -m experiments.run --config=experiments/configs/byte_lm.py:data=tokens \
        --config.data.path=data/texts --config.model.vocab_size=16385 --workdir=runs/texts

--path is a text file or .jsonl (may be .gz), a .parquet, a folder of the package datasets (one
split), or a folder of these. It may be repeated.
"""

import shlex
from pathlib import Path

from absl import flags

from attnlab.data import PreparePlan, prepare
from experiments import app


def define_flags() -> None:
    """The flags of the command."""
    flags.DEFINE_multi_string("path", None, "A file or folder of texts.", required=True)
    flags.DEFINE_string("out", None, "The folder to write.", required=True)
    flags.DEFINE_string("tokenizer", "bytes", "bytes, bpe:N or the path of a tokenizer.json.")
    flags.DEFINE_float("heldout", 0.05, "The share of documents that are held out.")
    flags.DEFINE_string(
        "end_of_document",
        "",
        "The tokenizer's special token for the end of a document; left out: a new token.",
    )
    flags.DEFINE_integer(
        "shard_tokens", PreparePlan().shard_tokens, "Largest number of tokens in a file."
    )
    flags.DEFINE_string("column", "text", "Column or field of the text, in tables and JSON lines.")


def main() -> None:
    """Writes --out and prints what it holds."""
    given = flags.FLAGS
    plan = PreparePlan(
        tokenizer=given.tokenizer,
        heldout=given.heldout,
        end_of_document=given.end_of_document,
        shard_tokens=given.shard_tokens,
        column=given.column,
    )
    index = prepare([Path(path) for path in given.path], Path(given.out), plan, progress=True)
    for name, shards, documents in zip(
        ("training", "held-out"), (index.train, index.heldout), index.documents, strict=True
    ):
        tokens = sum(shard.tokens for shard in shards)
        print(f"{name}: {documents:,} documents, {tokens:,} tokens in {len(shards)} files")
    print(
        "train on them: python -m experiments.run "
        "--config=experiments/configs/byte_lm.py:data=tokens "
        f"--config.data.path={shlex.quote(given.out)} --config.model.vocab_size={index.vocab_size} "
        "--workdir=runs/texts"
    )


if __name__ == "__main__":
    define_flags()
    app.start(main)
