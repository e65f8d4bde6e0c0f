"""Run the command line of `naranhi.planning`."""

import sys

from naranhi.planning.cli import main

if __name__ == "__main__":
    sys.exit(main())
