"""How one arm runs, and how many do."""
