"""``make fuzz MINUTES=10``: the targets in turns, with random cases, until the time is up.

Failing cases are shrunk and written to ``.fuzz/``, where they are also kept to be tried first the next time.
Exit status 1 if there were any.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

BATCH = 100  # Cases between two looks at the clock; each batch has a seed of its own


class TimeUp(BaseException):
    """The target's share of the time is spent."""


def fuzz(target: Target, seconds: float, folder: Path, first_seed: int) -> tuple[int, list[str]]:
    """Try cases for a while; returns how many, and the files of those that failed."""
    end = time.monotonic() + seconds
    n_cases, failures, batch = 0, dict[str, str](), 0
    with tempfile.TemporaryDirectory() as scratch, target.opened(Path(scratch)) as check:
        while time.monotonic() < end and len(failures) < 10:
            failing: list[Any] = []

            @seed(first_seed + batch)
            @settings(
                max_examples=BATCH,
                deadline=None,
                database=DirectoryBasedExampleDatabase(folder / "examples"),
                suppress_health_check=list(HealthCheck),
                phases=[*([] if batch else [Phase.reuse]), Phase.generate, Phase.shrink],
                print_blob=False,
            )
            @given(target.cases)
            def run(case: Any) -> None:
                nonlocal n_cases
                if time.monotonic() > end and not failing:  # noqa: B023
                    raise TimeUp
                n_cases += 1
                try:
                    check(case)
                except Exception:
                    failing[:] = [case]  # noqa: B023 - run ends before the next batch begins
                    raise

            batch += 1
            try:
                run()
            except TimeUp:
                break
            except Exception as error:
                what = f"{type(error).__name__}: {error}"[:120]
                if what not in failures:  # the same defect may be met again by every batch
                    failures[what] = _save(folder, target, failing, error, first_seed + batch - 1)
    return n_cases, list(failures.values())


def _save(folder: Path, target: Target, failing: list[Any], error: Exception, used: int) -> str:
    text = "\n".join([f"target: {target.name}", f"seed: {used}", f"case: {failing[-1:]!r}", ""])
    text += "".join(traceback.format_exception(error))
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).hexdigest()
    path = folder / f"{target.name.replace(' ', '-')}-{digest}.txt"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return str(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", action="append", choices=sorted(TARGETS), help="this target alone; repeatable")
    parser.add_argument("--seed", type=int, help="of the first batch; chosen at random otherwise")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(".fuzz")
    folder.mkdir(exist_ok=True)
    found, tried = [], Counter[str]()
    with tempfile.TemporaryDirectory() as home:
        os.environ["LOCALSPEC_HOME"] = home
        targets = {name: TARGETS[name] for name in arguments.only or TARGETS}
        missing = {name: reason for name, target in targets.items() if (reason := target.missing()) is not None}
        for name, reason in missing.items():
            print(f"{name}: left out: {reason}", flush=True)
        runnable = [target for name, target in targets.items() if name not in missing]
        first_seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
        for target in runnable:
            started = time.monotonic()
            n_cases, failures = fuzz(target, arguments.minutes * 60 / len(runnable), folder, first_seed)
            tried[target.name] = n_cases
            found += failures
            spent = time.monotonic() - started
            print(f"{target.name}: {n_cases} cases in {spent:.0f} s, {len(failures)} defects", flush=True)
            for path in failures:
                print(f"  {path}", flush=True)
    print(f"together: {sum(tried.values())} cases, {len(found)} defects, seed {first_seed}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
