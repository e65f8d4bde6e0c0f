"""The log of a training where a file system tells late that the disk is full."""

import errno
import os

from naranhi.train.log import Log


def test_a_disk_that_is_full_at_the_close_does_not_end_the_training(tmp_path, capsys, monkeypatch):
    """As on NFS, which keeps what is written until the file is closed."""
    path, close = tmp_path / "log.jsonl", os.close

    def full(file):
        close(file)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with Log(path) as log:
        log.write(step=0)
        monkeypatch.setattr(os, "close", full)
        log.close()
        monkeypatch.undo()
        log.write(step=1)
    assert capsys.readouterr().err == (
        f"the log {path} may lack its last lines (Disk quota exceeded); the training goes on\n"
    )
    assert path.read_text() == '{"step": 0}\n'
