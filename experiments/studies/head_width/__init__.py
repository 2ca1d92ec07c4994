"""The head-width study; README.md of this folder."""
