"""Functions on (layout, params) and (config, params): conversion, sharing, pruning, merging."""
