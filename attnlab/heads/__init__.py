"""Attention heads: how q, k and v are computed and how heads become one output."""
