"""Work in stages, each a program of its own: what is done is kept, and a later run goes on with what is missing.

Any Python from 3.7 on runs this, without anything installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

DONE, FAILED, SKIPPED, INTERRUPTED, LATE = "done", "FAILED", "skipped", "interrupted", "no time left"


@dataclass
class Stage:
    """One step.

    Attributes:
        name: as it is asked for.
        title: what it does, in a few words.
        command: the program and its arguments; empty for what cannot be done here.
        needs: stages that must have been done; else it is skipped.
        skip: why it cannot be done here.
        minutes: about how long it takes at most; it is not begun where less is left.
        environment: variables that it gets besides.
    """

    name: str
    title: str
    command: list[str] = field(default_factory=list)
    needs: Sequence[str] = ()
    skip: str = ""
    minutes: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What became of a stage.

    Attributes:
        status: ``DONE`` or one of the others.
        seconds: that it took.
        note: why it was skipped, or how it failed.
        key: of what it was done with; that of another state is done again.
    """

    name: str
    status: str
    seconds: float = 0.0
    note: str = ""
    key: str = ""


class Stages:
    """Stages in order, and a folder that keeps their outcomes and what they printed.

    Args:
        stages: all there are.
        folder: made when needed; holds ``state.json`` and a ``NAME.log`` for each.
        key: of the program and its settings; what was done with others counts as not done.
        cwd: where the programs run.
    """

    def __init__(self, stages: Sequence[Stage], folder: Path, key: str, cwd: Path) -> None:
        self.stages = list(stages)
        self.folder, self.key, self.cwd = folder, key, cwd
        self.outcomes: dict[str, Outcome] = {}
        try:
            stored = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            self.outcomes = {each["name"]: Outcome(**each) for each in stored}
        except (OSError, ValueError, TypeError, KeyError):
            pass  # none yet, or none that can be read: all is done anew

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def is_done(self, name: str) -> bool:
        found = self.outcomes.get(name)
        return found is not None and found.status == DONE and found.key == self.key

    def run(self, only: Sequence[str] = (), again: bool = False, minutes: float | None = None) -> bool:
        """Do what is missing.

        Args:
            only: names; empty is all.
            again: do what was done too.
            minutes: time for all; a stage that would take longer than what is left is left to the next run.

        Returns:
            Whether none failed, and none was interrupted.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        wanted = [stage for stage in self.stages if not only or stage.name in only]
        for stage in wanted:
            if self.is_done(stage.name) and not again:
                say(f"{stage.name}: done already")
                continue
            missing = [name for name in stage.needs if not self.is_done(name)]
            left = None if minutes is None else minutes - (time.monotonic() - began) / 60
            if stage.skip or missing:
                outcome = Outcome(stage.name, SKIPPED, note=stage.skip or f"needs {', '.join(missing)}")
            elif left is not None and left < stage.minutes:
                outcome = Outcome(stage.name, LATE, note=f"{left:.1f} of about {stage.minutes:g} minutes were left")
            else:
                outcome = self._do(stage)
            outcome.key = self.key
            self.outcomes[stage.name] = outcome
            self._keep()
            say(f"{stage.name}: {outcome.status}{f' ({outcome.note})' if outcome.note else ''}")
            if outcome.status == INTERRUPTED:
                break
        return not any(
            self.outcomes[stage.name].status in (FAILED, INTERRUPTED) for stage in wanted if stage.name in self.outcomes
        )

    def _do(self, stage: Stage) -> Outcome:
        say(f"{stage.name}: {stage.title}{f', {stage.minutes:g} minutes at most' if stage.minutes else ''}")
        environment = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONIOENCODING="utf-8")
        environment.update(stage.environment)
        began = time.monotonic()
        with self.log(stage.name).open("wb") as log:
            try:
                child = subprocess.Popen(
                    stage.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    env=environment, cwd=str(self.cwd),
                )  # fmt: skip
            except OSError as error:
                return Outcome(stage.name, FAILED, note=str(error))
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    log.write(line)
                    log.flush()
                    sys.stderr.write("    " + line.decode("utf-8", "replace").rstrip("\r\n") + "\n")
                status = child.wait()
            except KeyboardInterrupt:  # the stage got it too
                try:
                    child.wait(30)
                except (KeyboardInterrupt, subprocess.TimeoutExpired):
                    child.kill()
                    child.wait()
                return Outcome(stage.name, INTERRUPTED, time.monotonic() - began)
            finally:
                child.stdout.close()
        seconds = round(time.monotonic() - began, 1)
        return Outcome(stage.name, DONE if status == 0 else FAILED, seconds, f"status {status}" if status else "")

    def _keep(self) -> None:
        part = self.folder / "state.json.part"
        part.write_text(json.dumps([asdict(each) for each in self.outcomes.values()], indent=1), encoding="utf-8")
        os.replace(str(part), str(self.folder / "state.json"))

    # -- what is shown ------------------------------------------------------------------------------------------------

    def table(self) -> str:
        """All stages, in Markdown."""
        lines = ["| stage | what | outcome | seconds |", "|---|---|---|--:|"]
        for stage in self.stages:
            found = self.outcomes.get(stage.name)
            if found is None or found.key != self.key:
                found = Outcome(stage.name, "not run")
            outcome = f"{found.status} ({found.note})" if found.note else found.status
            lines.append(f"| {stage.name} | {stage.title} | {outcome} | {found.seconds:.0f} |")
        return "\n".join(lines) + "\n"

    def output(self, name: str, most_lines: int = 400) -> str:
        """The end of what a stage printed."""
        try:
            lines = self.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        left_out = len(lines) - most_lines
        head = [f"[{left_out} lines left out]"] if left_out > 0 else []
        return "\n".join(head + lines[-most_lines:])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def commit(root: Path) -> str:
    """The checkout's commit, with a plus where files differ from it; empty where Git is not."""

    def ask(*arguments: str) -> str:
        try:
            command = ["git", "-C", str(root), *arguments]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except OSError:
            return ""
        return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else ""

    found = ask("rev-parse", "--short=12", "HEAD")
    return found + ("+" if found and ask("status", "--porcelain", "--untracked-files=no") else "")
