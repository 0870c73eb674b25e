"""A lock that many share and one has alone."""

from __future__ import annotations

import threading

from localspec.system.process import SharedLock
from tests.support.waiting import PATIENCE, wait_until


def test_many_share_it_and_who_wants_it_alone_waits_for_them_and_goes_before_later_ones() -> None:
    lock, order = SharedLock(), list[str]()
    leave = threading.Event()
    met = threading.Barrier(3)

    def share() -> None:
        with lock.shared():
            met.wait(PATIENCE)  # all are within it at once
            assert leave.wait(PATIENCE)
            order.append("shared")

    def alone() -> None:
        with lock.alone():
            order.append("alone")

    def share_later() -> None:
        with lock.shared():
            order.append("later")

    sharing = [threading.Thread(target=share) for _ in range(2)]
    for thread in sharing:
        thread.start()
    met.wait(PATIENCE)
    wanting = threading.Thread(target=alone)
    wanting.start()
    wait_until(lambda: lock._n_alone, "it waits to have it alone")
    later = threading.Thread(target=share_later)
    later.start()
    assert order == []
    leave.set()
    for thread in (*sharing, wanting, later):
        thread.join(PATIENCE)
    assert order == ["shared", "shared", "alone", "later"]
    with lock.alone():
        pass
    with lock.shared():
        pass
