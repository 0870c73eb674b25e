"""Work that nobody waits for steps aside while another process of ours answers; a lock that many share."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from localspec import LLM
from localspec.system import process as process_module
from localspec.system.process import Courtesy, SharedLock, another_answers, answering
from tests.conftest import TinyFiles
from tests.support.waiting import PATIENCE, Brake, wait_until

ANSWERING = """
import sys
from localspec.system.files import home
from localspec.system.process import answering

with answering(home()):
    print("now", flush=True)
    sys.stdin.readline()
print("done", flush=True)
sys.stdin.readline()
"""


@contextmanager
def another_process() -> Iterator[subprocess.Popen[str]]:
    """One that answers until it is told a line."""
    command = [sys.executable, "-c", ANSWERING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "now\n"
        yield process
        process.kill()


def tell(process: subprocess.Popen[str]) -> None:
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def test_another_process_that_answers_is_seen_until_it_ends_or_is_killed(isolated_home: Path) -> None:
    isolated_home.mkdir()
    assert not another_answers()
    with another_process() as process:
        assert another_answers()
        tell(process)
        assert not another_answers()
    with another_process() as process:
        Courtesy(lambda waiting: None, lambda: True)()  # does not keep what is stopped
        process.kill()
        process.wait()
        assert list((isolated_home / "answering").iterdir())
        assert not another_answers()
        assert not list((isolated_home / "answering").iterdir())


def test_ones_own_answers_do_not_count_and_leave_nothing(isolated_home: Path) -> None:
    with answering(isolated_home):  # a home that is not there is not made
        pass
    assert not isolated_home.exists()
    isolated_home.mkdir()
    with answering(isolated_home):
        assert [path.name for path in (isolated_home / "answering").iterdir()] == [str(os.getpid())]
        assert not another_answers()
    assert not list((isolated_home / "answering").iterdir())


def test_an_llm_answers_while_it_answers(tiny: TinyFiles, measured_home: Path) -> None:
    mark = measured_home / "answering" / str(os.getpid())
    with LLM(tiny.quick.target, draft=None, backend="reference", n_ctx=128, idle=False) as llm:
        with Brake(llm, after=2) as brake:
            rounds = llm.rounds("la la la")
            next(rounds)
            brake.wait()
            assert mark.exists()
            rounds.close()
        llm.run(lambda pair: None)
        assert llm.run(lambda pair: mark.exists())
    assert not mark.exists()


def test_courtesy_waits_until_it_was_quiet_for_a_while(isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolated_home.mkdir()
    monkeypatch.setattr(process_module, "_POLL_SECONDS", 0.0)
    heard: list[bool] = []
    moments = iter(range(10_000))

    class Steps:
        """A clock on which every look at it is a second, so that the test takes none."""

        @staticmethod
        def monotonic() -> float:
            return float(next(moments))

        @staticmethod
        def sleep(seconds: float) -> None:
            if looks and not looks.pop():
                tell(process)

    monkeypatch.setattr(process_module, "time", Steps)
    looks: list[bool] = []
    courtesy = Courtesy(heard.append, lambda: False)
    courtesy()
    assert heard == []
    with another_process() as process:
        looks += [False, True, True, True]  # in the fourth pause the other's answer ends
        courtesy()
        assert not looks
    assert heard == [True, False]
    assert courtesy.seconds > process_module.QUIET_SECONDS


def test_many_share_a_lock_and_who_wants_it_alone_goes_before_later_ones() -> None:
    lock, order = SharedLock(), list[str]()

    def take(held: AbstractContextManager[None], name: str) -> threading.Thread:
        def work() -> None:
            with held:
                order.append(name)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    with lock.shared():
        take(lock.shared(), "shared").join(PATIENCE)
        alone = take(lock.alone(), "alone")
        wait_until(lambda: lock._n_alone, "it waits to have it alone")
        later = take(lock.shared(), "later")
        assert order == ["shared"]
    for thread in (alone, later):
        thread.join(PATIENCE)
    take(lock.alone(), "again").join(PATIENCE)
    assert order == ["shared", "alone", "later", "again"]
