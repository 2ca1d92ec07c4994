"""Systems that have no config.json, or none with a model_type: their names of weights."""
