"""Runs what is left of a sweep, as one of its workers: `python -m attnlab.lab WORKDIR`."""

import sys

from attnlab.lab.worker import main

if __name__ == "__main__":
    sys.exit(main())
