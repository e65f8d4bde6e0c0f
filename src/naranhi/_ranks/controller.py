"""ipyparallel's controller with a lifeline to its notebook, and the tidying up after both."""

import os
import shutil
import time

from naranhi._ranks import lifeline

FOLDER = "NARANHI_FOLDER"


def main():
    """Become the controller. Called once, in a process of its own."""
    folder = os.environ[FOLDER]
    lifeline.hold({}, on_lost=lambda: remove(folder))
    from ipyparallel.controller.app import main as controller

    controller()


def remove(folder):
    """Remove the World's folder; again where meanwhile the ranks' parent has left a note in it."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.01)


if __name__ == "__main__":
    main()
