"""Run the command line of `naranhi.planning`."""

import signal
import sys

from naranhi.planning.cli import main

if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # behind `| head` end without a word, as other programs do
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
