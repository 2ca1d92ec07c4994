"""Rows of tables to small drawings: which part of x a head reads, which layer uses which weights."""
