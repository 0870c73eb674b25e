"""``make fuzz MINUTES=10``: the targets in turns, with random cases, until the time is up.

Failing cases are shrunk and printed, with the error; ``.fuzz/`` keeps them, to be tried first the next time. Exit
status 1 if there were any.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

BATCH = 100  # Cases between two looks at the clock; each batch has a seed of its own


class TimeUp(BaseException):
    """The target's share of the time is spent."""


def fuzz(target: Target, seconds: float, first_seed: int) -> tuple[int, set[str]]:
    """Try cases for a while; returns how many, and the defects, which are printed as they are found."""
    end = time.monotonic() + seconds
    n_cases, failures, batch, failed = 0, set[str](), 0, False
    with tempfile.TemporaryDirectory() as scratch, target.opened(Path(scratch)) as check:
        while time.monotonic() < end and len(failures) < 10:

            @seed(first_seed + batch)
            @settings(
                max_examples=BATCH,
                deadline=None,
                database=DirectoryBasedExampleDatabase(".fuzz"),
                suppress_health_check=list(HealthCheck),
                phases=[*([] if batch else [Phase.reuse]), Phase.generate, Phase.shrink],
                print_blob=False,
            )
            @given(target.cases)
            def run(case: Any) -> None:
                nonlocal n_cases, failed
                if time.monotonic() > end and not failed:  # what failed is shrunk first
                    raise TimeUp
                n_cases += 1
                try:
                    check(case)
                except Exception:
                    failed = True
                    raise

            batch, failed = batch + 1, False
            try:
                run()
            except TimeUp:
                break
            except Exception as error:
                what = f"{type(error).__name__}: {error}"[:120]
                if what not in failures:  # the same defect may be met again by every batch
                    failures.add(what)
                    traceback.print_exception(error)  # hypothesis notes the case there
    return n_cases, failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", action="append", choices=sorted(TARGETS), help="this target alone; repeatable")
    parser.add_argument("--seed", type=int, help="of the first batch; chosen at random otherwise")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    n_defects = 0
    with tempfile.TemporaryDirectory() as home:
        os.environ["LOCALSPEC_HOME"] = home
        targets = [TARGETS[name] for name in arguments.only or TARGETS]
        for target in targets:
            if (reason := target.missing()) is not None:
                print(f"{target.name}: left out: {reason}", flush=True)
        runnable = [target for target in targets if target.missing() is None]
        first_seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
        for target in runnable:
            n_cases, failures = fuzz(target, arguments.minutes * 60 / len(runnable), first_seed)
            n_defects += len(failures)
            print(f"{target.name}: {n_cases} cases, {len(failures)} defects", flush=True)
    print(f"together {n_defects} defects, seed {first_seed}")
    return 1 if n_defects else 0


if __name__ == "__main__":
    sys.exit(main())
