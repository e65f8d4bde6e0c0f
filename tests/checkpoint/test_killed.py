"""Killed while it saves: what was committed is whole, and is there."""

import itertools
import json
import subprocess
import sys

import killed
import pytest

KILLS = 20


@pytest.mark.ranks
def test_killed_while_saving_it_always_has_a_whole_checkpoint(tmp_path):
    """Each life looks at all checkpoints that the one before has left; see `killed.rank`."""
    command = [sys.executable, killed.__file__, tmp_path / "run", str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lives = json.loads(done.stdout)
    assert len(lives) == KILLS + 1
    assert lives[0][0] == 0
    for (_, saved, left), (found, *_) in itertools.pairwise(lives):
        whole = [int(name[5:]) for name in left if name[5:].isdecimal()]
        # The last one may have been committed when its rank had not yet told.
        assert found in (saved, saved + 1) and found == max(whole, default=0)
        assert len(whole) <= 3 and (found < 2 or len(whole) >= 2)
    in_the_middle = [name for *_, left in lives for name in left if not name[5:].isdecimal()]
    assert len(in_the_middle) >= KILLS // 4, "of a save"
    assert lives[-1][0] > KILLS // 2
