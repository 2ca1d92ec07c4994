"""What `experiments.bench` times: one file per subject."""
