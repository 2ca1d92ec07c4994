"""Studies: each folder has its plan's runs in code and one command."""
