"""``localspec verify``: is it lossless, here, with these kernels?"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from localspec.commands.options import RunOptions, Watch
from localspec.commands.verify.audit import SAMPLED_LENGTH, Audit, AuditOptions, tie_of
from localspec.commands.verify.law import FALSE_ALARM
from localspec.commands.verify.rows import ARM as ROLLBACK
from localspec.commands.verify.rows import FALSE_ALARM as SECOND_LOOKS
from localspec.commands.verify.rows import AuditResult, Defect, Figures, counted
from localspec.commands.verify.several import ARM as SEVERAL
from localspec.commands.verify.several import SEQUENCES, SeveralFigures, audit_several, enough
from localspec.errors import EngineError, EngineMismatch, UnsupportedModel, UsageError
from localspec.report.model import Finding, Findings, Part, Report, Status, Table, Text
from localspec.report.renderers import Screen
from localspec.sampling.sampling import SamplingParams
from localspec.system.process import on_interrupt
from localspec.system.terminal import Progress

if TYPE_CHECKING:
    from localspec.llm import LLM


# The report: the verdict, what was checked in plain words, then how and how surely.


def report_of(result: AuditResult) -> Report:
    title = f"{result.model} · {result.engine} · draft: {' + '.join(result.draft) or 'none'}"
    how = (
        f"{counted(result.settings['prompts'], 'prompt')}, answers of up to {result.settings['tokens']} tokens, in "
        f"{result.seconds:.0f} s. Right is what the model says alone: in a fresh memory, one token a pass, nothing "
        "ever taken back."
    )
    parts: list[Part] = [Findings("What is wrong", list(_defects(result.defects)))] if result.defects else []
    parts += [Findings("What was checked", list(_in_short(result))), *_answers(result)]
    parts += [Findings("How it was checked, and how surely", list(_checks(result))), Text(how, "muted")]
    if ties := list(_ties(result)):
        parts.append(Findings("Said otherwise than by the model alone, and why: rounding", ties))
    return Report("verify", title, parts)


def _in_short(result: AuditResult) -> Iterator[Finding]:
    """What a user wants to know, without figures that need explanation."""
    broken = {defect.kind for defect in result.defects if defect.arm != SEVERAL}
    drafted = any(arm.drafted for arm in result.arms)
    rounded = ", up to rounding" if result.ties else ""
    closed = result.thinking["closed"] if result.thinking else 0
    for name, kinds, there, text in (
        ("words", {"decision", "row"}, drafted,
         f"every token is the one that the model itself would choose{rounded}"),
        ("memory", {"memory", "engine"}, result.memory, "wrong guesses leave no trace in what the model remembers"),
        ("engine", {"kernel"}, result.noise["rows"],
         "checking several tokens at once computes what one at a time does"),
        ("chance", {"law"}, result.decoding_law,
         "at a temperature guesses do not change how probable any token is"),
        ("thinking", {"decision"}, result.thinking,
         f"budgets for thinking ended {closed} blocks where they should"),
    ):  # fmt: skip
        if there or name != "thinking":
            status: Status = "fail" if broken & kinds else "ok" if there else "note"
            absent = "not reached" if result.interrupted else "not checked here"
            yield Finding(status, name, text if there else absent)
    if several := result.several:
        bad, known = any(defect.arm == SEVERAL for defect in result.defects), several["bound"] is not None
        text = f"{several['sequences']} answers at a time, as the server makes them, are each the model's own{rounded}"
        if not (bad or known):
            why = several["reason"] or "too few tokens to measure rounding"
            text = f"several answers at a time were not checked: {why}"
        yield Finding("fail" if bad else "ok" if known else "note", "several", text)


def _answers(result: AuditResult) -> Iterator[Table]:
    ties = Counter(tie["arm"] for tie in result.ties)
    head = ["", "answers", "tokens", "guesses", "right", "widest"]
    temperature = result.settings["sampling"]["temperature"]
    for sampled, title in ((False, "Greedy answers"), (True, f"Answers at temperature {temperature:g}")):
        rows, widths, rejected = [], set[int](), set[int]()
        for arm in (arm for arm in result.arms if arm.sampled == sampled):
            share = f"{arm.accepted / arm.drafted:.0%}" if arm.drafted else ""
            figures = [arm.answers, arm.tokens, arm.drafted or "", share, max(arm.widths, default="")]
            off = [] if arm.largest_deviation is None else [ties[arm.arm] or "", f"{arm.largest_deviation:.2g}"]
            rows.append([arm.arm, *map(str, [*figures, *off])])
            widths |= arm.widths
            rejected |= arm.rejected_at
        places = f"; rejections at places {_spans(rejected)} of a draft" if rejected else ""
        if rows:
            columns = head if sampled else [*head, "ties", "off by"]
            yield Table(title, columns, rows, f"passes over {_spans(widths)} tokens{places}" if widths else "")


def _checks(result: AuditResult) -> Iterator[Finding]:
    """A line for each claim: what it was compared with, and how it came out."""
    broken = {(defect.kind, defect.arm == ROLLBACK) for defect in result.defects}

    def status(*kinds: str, rollback: bool = False) -> Status:
        return "fail" if any((kind, rollback) in broken for kind in kinds) else "ok"

    yield _noise(result, status("kernel"))
    if n_rounds := sum(arm.rounds for arm in result.arms):
        n_tokens = sum(arm.tokens for arm in result.arms)
        text = f"{n_tokens} tokens: each the argmax of the row computed for it, or what its seed draws from that row"
        yield Finding(status("decision"), "decisions", text)
        text = f"after each of {counted(n_rounds, 'round')} the context is to hold what was settled, and nothing else"
        yield Finding(status("memory"), "memory", text)
        text = f"{result.noise['tested']} rows against those of the target alone: "
        text += _deviation(result.largest_deviation, result.noise["bound"])
        if n := result.rechecked["rows"]:
            text += f"; {n} computed anew at several widths, {result.rechecked['explained']} of them rounding"
        yield Finding(status("row"), "rows", text)
    if "fail" in (status("engine"), status("engine", rollback=True)):
        yield Finding("fail", "engine", "a pass failed")
    yield _rollbacks(result, status("memory", "row", "engine", rollback=True))
    yield from _laws(result)
    if (several := result.several) and not several["reason"]:  # which is said above
        text = (
            f"{counted(several['answers'], 'answer')}, {several['sequences']} at a time in {several['passes']} passes, "
            f"{several['tokens']} tokens, {several['accepted']} of {several['drafted']} guesses right: "
            f"{_deviation(several['largest_deviation'], several['bound'])}"
        )
        yield Finding("info", SEVERAL, text)
    looks = "none possible" if result.exact else f"{SECOND_LOOKS:.0%} of sound systems have a row computed again"
    text = f"rows: {looks}; decisions and memory: none possible; each law: {FALSE_ALARM:g}"
    yield Finding("info", "false alarms", text)


def _noise(result: AuditResult, status: Status) -> Finding:
    noise = result.noise
    if not noise["rows"]:
        return Finding("note", "width noise", "not measured")
    what = f"{noise['rows']} rows of one text in passes of {_spans(noise['widths'])} tokens against 1"
    if result.exact:
        what += ": equal to the bit, as this engine claims" if status == "ok" else ""
        return Finding(status, "width noise", what)
    few = noise["bound"] is None
    text = (
        f"{what}: median {noise['median']:.2g}, largest {noise['largest']:.2g} logits, "
        + ("too few for a bound" if few else f"so the bound is {noise['bound']:.2g}")
        + f"; {noise['mean_kl']:.2g} nats on average, where a wrong kernel shows over {noise['mean_kl_limit']:g}"
    )
    return Finding("note" if few else status, "width noise", text)


def _rollbacks(result: AuditResult, status: Status) -> Finding:
    probes, made = result.memory, result.sensitivity
    if probes is None:
        return Finding("note", "rollbacks", "not reached")
    saved = f", {counted(probes['restored'], 'saved state')}" if probes["restored"] else ""
    text = (
        f"{probes['rollbacks']}, of rejected guesses, an edited question, a new conversation{saved}; against fresh "
        f"memories: {_deviation(probes['largest_deviation'])}"
    )
    if probes["bitwise"] and status == "ok":
        text += f"; in {probes['pairs']} pairs what was rejected left no trace, to the bit"
    advice = None
    if made:
        advice = f"{made['tries']} memories made wrong by one token on purpose: median {made['median']:.2g} logits"
        advice += "" if made["found"] is None else f", {made['found']:.0%} of them over the bound"
    return Finding(status, "rollbacks", text, advice)


def _laws(result: AuditResult) -> Iterator[Finding]:
    broken = {defect.arm for defect in result.defects if defect.kind == "law"}
    at = f"at temperature {result.settings['sampling']['temperature']:g}"
    if law := result.verification_law:
        text = f"{law['draws']} drafts drawn on the model's own distributions {at}: {_evidence(law)}"
        advice = f"{_power(law)}, and any error of a probability over {law['detectable_error']:.2f}"
        yield Finding("fail" if "verification" in broken else "ok", "verification", text, advice)
    else:
        yield Finding("note", "verification", "its law was not reached")
    if law := result.decoding_law:
        text = f"{law['tokens']} tokens {at}, drafter and decoder included: {_evidence(law)}"
        yield Finding("fail" if "decoding at a temperature" in broken else "ok", "decoding", text, _power(law))
    else:
        yield Finding("note", "decoding", "its law was not reached")
    if law := result.samples:
        text = f"{law['drawn']} drawn by drafters, {law['sent']} of them sent: {_evidence(law)}"
        error = law["detectable_error"]
        advice = "too few to find an error" if error is None else f"would be found with 99%: a share off by {error:.2f}"
        yield Finding("fail" if "samples of drafters" in broken else "ok", "samples", text, advice)


def _deviation(largest: float, bound: float | None = None) -> str:
    return f"largest deviation {largest:.2g} logits" + (f", bound {bound:.2g}" if bound else "")


def _evidence(law: Figures) -> str:
    if law["evidence_nats"] is None:
        return "a token was taken that has no probability"
    evidence, threshold = max(0.0, law["evidence_nats"]), law["threshold_nats"]
    return f"{evidence:.1f} nats of evidence against the law, where {threshold:.1f} prove a defect"


def _power(law: Figures) -> str:
    power = law["power"].values()
    return f"would be found with 99%: {sum(value > 0.99 for value in power)} of {len(power)} suspected defects"


def _ties(result: AuditResult) -> Iterator[Finding]:
    """Ties; those that several answers share are one line."""
    shared: dict[tuple[str, str], list[str]] = {}
    bound = result.noise["gap_bound"]
    for tie in result.ties:
        text = (
            f"token {tie['position']}: {tie['speculative']['text']!r} for {tie['plain']['text']!r}, {tie['gap']:.2g} "
            "logits apart alone" + (f" (rounding bridges {bound:.2g})" if bound and tie["arm"] != SEVERAL else "")
        )
        shared.setdefault((tie["prompt"], text), []).append(tie["arm"])
    for (prompt, text), arms in shared.items():
        where = (arm + (f" (of {n} answers)" if n > 1 else "") for arm, n in Counter(arms).items())
        yield Finding("info", prompt, f"{text}, in {', '.join(where)}")


def _defects(defects: Iterable[Defect]) -> Iterator[Finding]:
    """Defects; what several answers show in the same way is one line."""
    shared: dict[tuple[str, str, str], list[str]] = {}
    for defect in defects:
        place = f", {defect.prompt}" if defect.prompt else ""
        place += "" if defect.position is None or "token" in defect.evidence else f", token {defect.position}"
        shared.setdefault((defect.kind, place, defect.evidence), []).append(defect.arm)
    for (kind, place, evidence), arms in shared.items():
        yield Finding("fail", kind, f"{', '.join(dict.fromkeys(arms))}{place}: {evidence}")


def _spans(numbers: Iterable[int]) -> str:
    """``2-5, 8``."""
    runs = groupby(enumerate(sorted(numbers)), lambda placed: placed[1] - placed[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


USUAL = {"n_prompts": 8, "n_tokens": 32, "n_draws": 1000, "n_windows": 4}
QUICK = {"n_prompts": 2, "n_tokens": 16, "n_draws": 200, "n_windows": 2}
LEAST_TOKENS = 16
LONG = 8  # draft tokens of several answers at a time, where they are asked for a second time
TOP_K = 256  # default of sampled answers: the tail of a large vocabulary only costs time
CHECK_FAILED, INTERRUPTED = 1, 130
PENALTIES = ("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty")
FILTERS = ("temperature", "top_k", "top_p", "min_p", "seed")


def verify_command(
    options: RunOptions, *, prompts: int | None = None, quick: bool = False, as_json: bool = False
) -> int:
    """Audit a pair and print the report; returns 0 (lossless), 1 (a defect was found) or 130 (interrupted before).

    ``--max-tokens`` is the longest answer; penalties apply to all answers, temperature and filters to the sampled ones;
    stop strings are ignored.
    """
    if prompts is not None and prompts < 1:
        raise UsageError(f"--prompts must be at least 1, not {prompts}")
    if options.sampling.get("max_tokens", LEAST_TOKENS) < LEAST_TOKENS:
        raise UsageError(f"--max-tokens must be at least {LEAST_TOKENS} for verify")
    with options.opened(chats=False) as llm, Progress() as progress:
        audited, watch = audit_options(options, llm, prompts, quick), Watch(_shown_on(progress))
        with on_interrupt(watch.stopped.set):
            audit = llm.run(lambda pair: Audit(llm, pair, audited, watch))
            result = llm.run(lambda pair: audit.run())
    if not result.interrupted:
        with Progress() as progress:
            _several(options, audit, result, progress)
    if as_json:
        print(json.dumps(result.as_dict(), allow_nan=False, default=sorted))
    else:
        screen = Screen()
        screen.sentence(result.verdict)
        screen.report(report_of(result))
    if result.defects:
        return CHECK_FAILED
    return INTERRUPTED if result.interrupted else 0


def _several(options: RunOptions, audit: Audit, result: AuditResult, progress: Progress) -> None:
    """Load the pair for several answers at a time, and add what they show to the result."""
    watch = Watch(lambda what, fraction: progress.report(f"{SEQUENCES} answers at a time: {what}", fraction))
    try:
        load = replace(options.load, parallel=SEQUENCES, idle=False, remember=False)
        with on_interrupt(watch.stopped.set), replace(options, load=load).open(progress.report) as llm:
            lengths = [SAMPLED_LENGTH] if audit.options.is_quick else [audit.options.draft_length, LONG]
            lengths = lengths if llm.draft_names else [0]
            figures, defects, ties = audit_several(llm, enough(audit.prompts), audit.options.n_tokens, lengths, watch)
    except KeyboardInterrupt:
        result.interrupted = True
        return
    except (EngineError, UnsupportedModel, EngineMismatch, UsageError) as error:
        result.several = asdict(SeveralFigures(reason=str(error)))
        return
    result.several = asdict(figures)
    result.defects += defects
    result.ties += [tie_of(seen, llm.vocab.display) for seen in ties]


def audit_options(options: RunOptions, llm: LLM, prompts: int | None, quick: bool) -> AuditOptions:
    defaults, given = llm.chat_defaults, options.sampling
    penalties = {name: value for name, value in (defaults | dict(given)).items() if name in PENALTIES}
    chain: dict[str, Any] = {"top_k": TOP_K} | {name: given[name] for name in FILTERS if name in given}
    chain["temperature"] = chain.get("temperature") or 1.0
    asked = {"n_prompts": prompts, "n_tokens": given.get("max_tokens")}
    return AuditOptions(
        greedy=SamplingParams(**penalties),
        sampled=SamplingParams(**penalties, **chain),
        draft_length=options.length(),
        system=options.system,
        is_quick=quick,
        **(QUICK if quick else USUAL) | {name: n for name, n in asked.items() if n},
    )


def _shown_on(progress: Progress) -> Callable[[str, float | None], None]:
    """Shows an audit's progress and the time left; without a terminal, a line for each prompt."""
    started = time.monotonic()

    def show(what: str, fraction: float | None) -> None:
        done = fraction or 0.0
        seconds = (time.monotonic() - started) * (1 - done) / max(done, 1e-9)
        left = f", about {seconds:.0f} s left" if done > 0.02 else ""
        if progress.live:
            progress.report(what + left, done)
        else:
            progress.report(what.partition(":")[0], None)

    return show
