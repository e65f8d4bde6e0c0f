"""ipyparallel's controller with a lifeline to its notebook, and the tidying up after both."""

import os
import shutil

from naranhi._ranks import lifeline

FOLDER = "NARANHI_FOLDER"


def main():
    """Become the controller. Called once, in a process of its own."""
    folder = os.environ[FOLDER]
    lifeline.hold({}, on_lost=lambda: shutil.rmtree(folder, ignore_errors=True))
    from ipyparallel.controller.app import main as controller

    controller()


if __name__ == "__main__":
    main()
