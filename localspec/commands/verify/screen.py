"""An audit's report, as a person reads it: what was checked, how surely, what was found, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from localspec.commands.verify.betting import FALSE_ALARM, Bets
from localspec.commands.verify.findings import Defect, numbers_text
from localspec.commands.verify.memory import ARM as ROLLBACK
from localspec.commands.verify.report import Report
from localspec.commands.verify.width_noise import FALSE_ALARM as SECOND_LOOKS
from localspec.terminal.sheet import Sheet, Status

_NAMES = 34
"""Columns for who drafted."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row under a heading; see ``sheet.MarkedRow``."""

    status: Status
    name: str
    text: str
    advice: str | None = None


class AuditScreen(Sheet):
    """Prints a ``Report``.

    Args:
        file: standard output by default.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        super().__init__(file, label=12)

    def report(self, report: Report) -> None:
        """All of it; the verdict is the last line, however long."""
        settings = report.settings
        self.section(f"{report.model} · {report.engine} · draft: {' + '.join(report.draft) or 'none'}")
        self.prose(
            f"{_count(settings['prompts'], 'prompt')}, answers of up to {settings['tokens']} tokens. Right is what the "
            "target says alone: in a fresh memory, one token a pass, nothing ever taken back."
        )
        self._answers(report)
        self.section("Checks", list(_checks(report)))
        differences = list(_differences(report))
        if differences:
            self.section("Said otherwise than by the target alone, and why: rounding", differences)
        if report.defects:
            self.section("Defects", list(_defects(report.defects)))
        self._console.print()
        if self._console.is_terminal:
            self.prose(report.verdict, "bold", indent=0)
        else:
            self._console.print(self._text(report.verdict), soft_wrap=True)  # one line for scripts

    def _answers(self, report: Report) -> None:
        arms = report.arms()
        ties: dict[str, int] = {}
        for tie in report.ties:
            ties[tie.run.arm] = ties.get(tie.run.arm, 0) + 1
        columns = ["answers", "tokens", "guesses", "right", "widest", "ties", "off by"]
        temperature = report.settings["sampling"]["temperature"]
        for sampled, title in ((False, "Greedy answers"), (True, f"Answers at temperature {temperature:g}")):
            chosen = [arm for arm in arms if arm["sampled"] == sampled]
            if chosen:
                self.section(title)
                n = len(columns) - 2 * sampled
                self.table(["", *columns[:n]], [_figures(arm, ties)[: n + 1] for arm in chosen], names=_NAMES)
        widths = sorted(set().union(*(arm["widths"] for arm in arms)))
        rejected = sorted(set().union(*(arm["rejected_at"] for arm in arms)))
        places = f"; rejections at places {numbers_text(rejected)} of a draft" if rejected else ""
        if widths:
            self.prose(f"passes over {numbers_text(widths)} tokens{places}", "dim")


def _figures(arm: Mapping[str, Any], ties: Mapping[str, int]) -> list[str]:
    share = f"{arm['accepted'] / arm['drafted']:.0%}" if arm["drafted"] else ""
    deviation = arm["largest_deviation"]
    return [
        arm["arm"],
        str(arm["answers"]),
        str(arm["tokens"]),
        str(arm["drafted"] or ""),
        share,
        str(max(arm["widths"], default="")),
        str(ties.get(arm["arm"], 0) or ""),
        "" if deviation is None else f"{deviation:.2g}",
    ]


# -- checks ------------------------------------------------------------------------------------------------------------


def _checks(report: Report) -> Iterator[Line]:
    """One line for each claim of the package's docstring: what it was held against, and how it came out."""
    broken = {(defect.kind, defect.arm == ROLLBACK) for defect in report.defects}

    def status(*kinds: str, rollback: bool = False) -> Status:
        return "fail" if any((kind, rollback) in broken for kind in kinds) else "ok"

    yield from _noise(report, status("kernel"))
    if n_rounds := sum(run.n_rounds for run in report.runs):
        n_tokens = sum(run.n_tokens for run in report.runs)
        text = f"{n_tokens} tokens: each the argmax of the row computed for it, or what its seed draws from that row"
        yield Line(status("decision"), "decisions", text)
        mark = status("memory")
        held = (
            "held what was settled, and nothing else" if mark == "ok" else "was to hold what was settled, and did not"
        )
        yield Line(mark, "memory", f"after each of {_count(n_rounds, 'round')} the context {held}")
        yield _rows(report, status("row"))
    if status("engine") == "fail" or status("engine", rollback=True) == "fail":
        yield Line("fail", "engine", "a pass failed")
    yield from _rollbacks(report, status("memory", "row", "engine", rollback=True))
    yield from _laws(report)
    looks = "none possible" if report.exact else f"{SECOND_LOOKS:.0%} of sound systems have a row computed again"
    yield Line("info", "false alarms", f"rows: {looks}; decisions and memory: none possible; each law: {FALSE_ALARM:g}")


def _noise(report: Report, status: Status) -> Iterator[Line]:
    noise = report.noise
    if not noise.get("rows"):
        yield Line("note", "width noise", "not measured")
        return
    what = f"{noise['rows']} rows of one text in passes of {numbers_text(noise['widths'])} tokens against 1"
    if report.exact:
        yield Line(
            status, "width noise", f"{what}: equal to the bit, as this engine claims" if status == "ok" else what
        )
        return
    bound = "too few for a bound" if noise["bound"] is None else f"so the bound is {noise['bound']:.2g}"
    text = (
        f"{what}: median {noise['median']:.2g}, largest {noise['largest']:.2g} logits, {bound}; "
        f"{noise['mean_kl']:.2g} nats on average, where a wrong kernel shows over {noise['mean_kl_limit']:g}"
    )
    yield Line(status if noise["bound"] is not None else "note", "width noise", text)


def _rows(report: Report, status: Status) -> Line:
    n_rows = sum(len(run.observations) for run in report.runs)
    largest = max((run.largest for run in report.runs), default=0.0)
    text = f"{n_rows} rows against those of the target alone: largest deviation {largest:.2g} logits"
    if report.noise.get("bound"):
        text += f", bound {report.noise['bound']:.2g}"
    if report.n_rechecked:
        text += f"; {report.n_rechecked} computed anew at several widths, {report.n_explained} of them rounding"
    return Line(status, "rows", text)


def _rollbacks(report: Report, status: Status) -> Iterator[Line]:
    memory = report.memory_dict()
    if memory is None:
        yield Line("note", "rollbacks", "not reached")
        return
    saved = f", {_count(memory['restored'], 'saved state')}" if memory["restored"] else ""
    text = (
        f"{memory['rollbacks']}, of rejected guesses, an edited question, a new conversation{saved}; against fresh "
        f"memories: largest deviation {memory['largest_deviation']:.2g} logits"
    )
    if memory["bitwise"] and status == "ok":
        text += f"; in {memory['pairs']} pairs what was rejected left no trace, to the bit"
    advice = None
    if made := report.sensitivity_dict():
        share = "" if made["found"] is None else f", {made['found']:.0%} of them over the bound"
        advice = (
            f"{made['tries']} memories made wrong by one token on purpose: median {made['median']:.2g} logits{share}"
        )
    yield Line(status, "rollbacks", text, advice)


def _laws(report: Report) -> Iterator[Line]:
    temperature = f"{report.settings['sampling']['temperature']:g}"
    if law := report.verification_law:
        text = f"{law.n_draws} drafts drawn on the model's own distributions at temperature {temperature}: "
        advice = f"{_power(law.bets)}, and any error of a probability over {law.detectable:.2f}"
        yield Line("fail" if law.rejected else "ok", "verification", text + _evidence(law.bets), advice)
    else:
        yield Line("note", "verification", "its law was not reached")
    if bets := report.decoding_law:
        text = f"{bets.n_tokens} tokens at temperature {temperature}, drafter and decoder included: {_evidence(bets)}"
        yield Line("fail" if bets.rejected else "ok", "decoding", text, _power(bets))
    else:
        yield Line("note", "decoding", "its law was not reached")


def _evidence(bets: Bets) -> str:
    """How much speaks against a law."""
    if bets.impossible:
        return "a token was said that has no probability"
    return f"{max(0.0, bets.evidence):.1f} nats of evidence against the law, where {bets.threshold:.1f} prove a defect"


def _power(bets: Bets) -> str:
    """How many of the suspected defects would have shown."""
    power = bets.power().values()
    return f"would be found with 99%: {sum(value > 0.99 for value in power)} of {len(power)} suspected defects"


# -- differences -------------------------------------------------------------------------------------------------------


def _differences(report: Report) -> Iterator[Line]:
    """Float ties; those that several answers share are one line."""
    shared: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for tie in report.tie_texts:
        key = (tie["prompt"], tie["position"], tie["plain"]["id"], tie["speculative"]["id"])
        shared.setdefault(key, []).append(tie)
    for (prompt, position, _, _), ties in shared.items():
        said, alone, gap = ties[0]["speculative"]["text"], ties[0]["plain"]["text"], ties[0]["gap"]
        text = f"token {position}: {said!r} for {alone!r}, {gap:.2g} logits apart alone"
        if report.noise.get("gap_bound"):
            text += f" (rounding bridges {report.noise['gap_bound']:.2g})"
        arms = [tie["arm"] for tie in ties]
        counts = {arm: arms.count(arm) for arm in arms}
        text += ", in " + ", ".join(arm + (f" (of {n} answers)" if n > 1 else "") for arm, n in counts.items())
        yield Line("info", prompt, text)


def _defects(defects: Sequence[Defect]) -> Iterator[Line]:
    """What several answers show in the same way is one line."""
    shared: dict[tuple[Any, ...], list[str]] = {}
    for defect in defects:
        place = None if defect.position is None or "token" in defect.evidence else defect.position
        shared.setdefault((defect.kind, defect.prompt, place, defect.evidence), []).append(defect.arm)
    for (kind, prompt, place, evidence), arms in shared.items():
        where = [
            *dict.fromkeys(arms),
            *([prompt] if prompt else []),
            *([f"token {place}"] if place is not None else []),
        ]
        yield Line("fail", kind, f"{', '.join(where)}: {evidence}")


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")
