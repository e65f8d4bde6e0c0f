"""Ctrl-C that is deferred: it comes at the end of the block, whatever ends the block."""

import os
import signal
import threading

import pytest

from naranhi.world.interrupts import deferred


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_it_comes_at_the_end_of_the_block():
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred():
        press()
        reached.append(True)
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_block_can_let_it_through_while_it_waits():
    with pytest.raises(KeyboardInterrupt), deferred() as check:
        press()
        check()
        pytest.fail("went on")


def test_an_error_of_the_block_does_not_swallow_it():
    with pytest.raises(KeyboardInterrupt) as raised, deferred():
        press()
        raise ValueError("meanwhile")
    assert str(raised.value.__cause__) == "meanwhile"


def test_an_error_without_it_stays_that_error():
    with pytest.raises(ValueError, match="alone"), deferred():
        raise ValueError("alone")


def test_on_another_thread_nothing_is_deferred():
    ended = []

    def work():
        with deferred() as check:
            check()
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [True]
