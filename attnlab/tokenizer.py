"""Temporary: `attnlab.data.tokenizer` under its old path, until no caller is left."""

from attnlab.data.tokenizer import FILE, Encoded, ModelText, Tokenizer, make_tokenizer, num_tokens

__all__ = ["FILE", "Encoded", "ModelText", "Tokenizer", "make_tokenizer", "num_tokens"]
