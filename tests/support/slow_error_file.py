"""Run a program whose error file takes a while: its launcher may want to end it meanwhile."""

import json
import runpy
import sys
import time

dump = json.dump


def slow(*args, **options):
    time.sleep(1.0)
    dump(*args, **options)


if __name__ == "__main__":
    json.dump = slow  # which torch's `record` calls once the file is open
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
