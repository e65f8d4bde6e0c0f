"""Ctrl-C that is deferred: it comes at the end of the block, whatever ends the block."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from kernels import processes_of, wait_until

from naranhi.world import World, leftovers, output
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


@pytest.fixture
def one():
    world = World(1, timeout=8.0)
    yield world
    world.close()


def once_and_press(monkeypatch, method):
    """Let the next call of a World's method be followed by Ctrl-C."""
    plain = getattr(World, method)

    def pressed(self, *args):
        monkeypatch.undo()
        result = plain(self, *args)
        press()
        return result

    monkeypatch.setattr(World, method, pressed)


def test_at_the_end_of_a_start_nothing_is_left(monkeypatch):
    once_and_press(monkeypatch, "_join")
    with pytest.raises(KeyboardInterrupt):
        World(1, timeout=8.0)
    wait_until(lambda: not processes_of(os.getpid()), seconds=20)


def test_while_all_ends_nothing_is_left(monkeypatch):
    world = World(1, timeout=8.0)
    remove, removed = leftovers.remove, []

    def pressed(folder):
        press()
        remove(folder)
        removed.append(folder)

    monkeypatch.setattr(leftovers, "remove", pressed)
    with pytest.raises(KeyboardInterrupt):
        world.close()
    [folder] = removed
    assert not os.path.exists(folder)
    wait_until(lambda: not processes_of(os.getpid()), seconds=20)
    world.close()  # which does nothing now


def test_while_output_is_shown_all_have_answered(one, monkeypatch):
    one.execute("kept = 5")

    def show(printed):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "show", show)
    with pytest.raises(KeyboardInterrupt):
        one.execute("print(kept)")
    assert one["kept"] == [5]


def test_at_the_end_of_a_rebuild_what_is_lost_is_said_later(one, monkeypatch, capsys):
    one.execute("pair = dist.new_group([0])")
    one.execute("dist.destroy_process_group()")
    once_and_press(monkeypatch, "_join")
    with pytest.raises(KeyboardInterrupt):
        one.execute("pass")
    capsys.readouterr()
    one.execute("pass")
    assert "create again: pair" in capsys.readouterr().out


PLAIN = """
import torch
print(torch.get_num_threads())
"""


def test_the_notebooks_own_torch_keeps_its_threads():
    """Whose first import a World makes, beside processes that have one thread each."""
    environment = {name: v for name, v in os.environ.items() if name != "OMP_NUM_THREADS"}

    def threads(program):
        ran = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        return int(ran.stdout.split()[-1])

    with_world = "import naranhi\nworld = naranhi.World(1)\n" + PLAIN
    assert threads(with_world) == threads(PLAIN)
