"""The families of published models, a file for each or for a few alike; `registry` finds them."""
