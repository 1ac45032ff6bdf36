"""``python -m dmuon_core``: plan a training before it runs, and measure a machine for that."""

import sys

from dmuon_core.planning.cli import main

if __name__ == "__main__":
    sys.exit(main())
