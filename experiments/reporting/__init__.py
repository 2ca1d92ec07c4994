"""Pages of benchmarks and of the study of head widths, and runs of small experiments."""
