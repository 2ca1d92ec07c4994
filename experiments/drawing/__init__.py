"""Rows of tables to small drawings: what a head reads, which layer uses which weights."""
