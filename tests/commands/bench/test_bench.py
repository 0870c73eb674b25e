"""What a record says: speed-ups, acceptance, calibration, remarks, and the comparison of two."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localspec.backends.placement import Placement
from localspec.commands.bench.compare import comparison
from localspec.commands.bench.record import Engine, ModelFile, Record, Settings, Sitting
from localspec.commands.bench.report import bench_report, speedup_plot
from localspec.commands.bench.results import Row, analyse, reliability, wilson
from localspec.commands.bench.runner import DEFAULT, LEAST_TOKENS, QUICK, BenchRequest, BenchRun, affordable_tokens
from localspec.commands.options import RunOptions
from localspec.engine.options import LoadOptions
from localspec.errors import UsageError
from localspec.measuring.subject import Sample
from localspec.prompts.questions import digest, own_questions
from localspec.report.model import KeyFigures, Table
from localspec.report.renderers import Screen, markdown
from localspec.system.terminal import Progress

SETTINGS = Settings(
    model="m", draft=[], backends=["reference"], draft_backend=None, arms=["plain", "auto"], questions="own:report",
    categories=[], questions_sha256="0" * 64, max_tokens=10, sampling={}, ignore_eos=False, system=None, ctx=None,
    threads=None, gpu_layers=None, kv_cache="f16", light_draft=True, mode="default",
)  # fmt: skip
DRAFTED = {
    "num_draft_tokens": 4, "num_accepted_tokens": 2, "drafted_per_position": [4], "accepted_per_position": [2],
    "by_source": {"ngram": {"num_draft_tokens": 4, "num_accepted_tokens": 2}},
}  # fmt: skip


def answer(question: str, arm: str, speed: float, repeat: int = 0, category: str = "code", **changes: object) -> Sample:
    sample = Sample(
        question=question, category=category, backend="reference", arm=arm, repeat=repeat, order=0, started=0.0,
        prompt_tokens=5, tokens=10, token_sha256="a", finish_reason="length", num_rounds=10, num_draft_tokens=0,
        num_accepted_tokens=0, drafted_per_position=[], accepted_per_position=[], by_source={}, seconds_prompt=1.0,
        seconds_draft=0.0, seconds_verify=10 / speed, seconds_other=0.0, time_to_first_token=1.1,
        rounds=[[0.0, 1e3 / speed, 0.0, 0, 0, 1]] * 10, judged=[],
    )  # fmt: skip
    return replace(sample, **changes)


def engine(sha256: str = "0" * 64, version: str = "v", ms: float = 100.0) -> Engine:
    models = [ModelFile("target", "m", "m.gguf", 1, sha256, 1)]
    return Engine("reference", version, "cpu", 1, 64, models, [], {1: ms}, {}, "now")


def sitting(**changes: object) -> Sitting:
    return replace(Sitting(0.0, 1.0, "0", "3", "c"), **changes)


def run_of(samples: list[Sample], **changes: Any) -> Record:
    usual = {"machine": {"cpu": "x", "cores": 2}, "settings": SETTINGS, "engines": [engine()], "sessions": [sitting()],
             "ended": "complete", "samples": samples}  # fmt: skip
    return Record(**(usual | changes))


def run_at(speeds: Sequence[float], mode: str = "default", **drafted: object) -> Record:
    """A run in which ``auto`` answered at these multiples of plain's speed."""
    samples = [answer(f"q{i}", "plain", 10.0) for i in range(len(speeds))]
    samples += [answer(f"q{i}", "auto", 10.0 * speed, **drafted) for i, speed in enumerate(speeds)]
    return run_of(samples, settings=replace(SETTINGS, mode=mode))


def row_of(record: Record, category: str = "all") -> Row:
    return analyse(record).row(category, "reference", "auto")


def text_of(record: Record) -> str:
    return markdown(bench_report(record, analyse(record)))


def test_a_quick_run_asks_for_answers_that_it_has_time_for() -> None:
    fast, slow = affordable_tokens(QUICK, 110, 2, 50.0), affordable_tokens(QUICK, 110, 2, 6.0)
    assert LEAST_TOKENS <= slow < fast == QUICK.max_tokens
    assert 2 * slow / 6.0 * QUICK.least_answers < 110, "so many questions then fit, reading included"
    assert affordable_tokens(QUICK, 110, 2, 0.1) == LEAST_TOKENS
    assert affordable_tokens(DEFAULT, 1, 9, 0.1) == DEFAULT.max_tokens


def test_plain_decoding_on_engines_of_which_one_has_no_answer_yet() -> None:
    settings = replace(SETTINGS, arms=["plain"], backends=["reference", "mlx"])
    engines = [engine(), replace(engine(), backend="mlx")]
    text = text_of(run_of([answer("q", "plain", 10.0)], settings=settings, engines=engines))
    assert ("Plain decoding · reference" in text, "Plain decoding · mlx" in text) == (True, False)


def test_a_resumed_run_is_measured_as_before_but_for_what_is_asked_besides() -> None:
    then = replace(
        SETTINGS, draft=["ngram"], arms=["plain", "4"], questions="own:tuning", ctx=512, threads=1, gpu_layers=0,
        kv_cache="q8_0", light_draft=False, sampling={"temperature": 0.8, "top_k": 40, "stop": ["x"]}, ignore_eos=True,
        system="Be brief.", slice_tokens=8, placement={"tensor_split": [3.0, 1.0]}, mode="full",
        questions_sha256=digest(own_questions("tuning")),
    )  # fmt: skip
    before = run_of([answer("a", "plain", 10.0)], settings=then)
    plan = BenchRun(BenchRequest(RunOptions()), Progress(), before)
    assert plan.settings == replace(then, backends=["reference"])
    assert (plan.options.load.n_ctx, plan.options.load.kv_cache_type) == (512, "q8_0")
    assert plan.options.load.placement == Placement(tensor_split=(3, 1))
    assert (plan.mode.name, plan.mode.max_tokens, plan.before) == ("full", then.max_tokens, before)
    said = RunOptions(load=LoadOptions(n_ctx=1024, n_threads=2), sampling={"temperature": 0.0}, system="Be rude.")
    other = BenchRun(BenchRequest(said, arms=["auto"], slice_tokens=0, minutes=1.0, quick=True), Progress(), before)
    assert (other.settings.ctx, other.settings.threads, other.settings.kv_cache) == (1024, 2, "q8_0")
    assert (other.settings.sampling["temperature"], other.settings.system) == (0.0, "Be rude.")
    assert (other.settings.arms, other.settings.slice_tokens) == (["plain", "auto"], 0)
    assert (other.mode.name, other.mode.minutes, other.mode.max_tokens) == ("quick", 1.0, then.max_tokens)


def test_calibration_error_by_hand_and_wilson_s_interval_by_the_textbook() -> None:
    found = reliability([(0.25, True), (0.25, False), (0.85, True), (0.85, True), (1.0, True)])
    assert [(each.low, each.n, each.observed) for each in found.bins] == [(0.2, 2, 0.5), (0.8, 2, 1.0), (0.9, 1, 1.0)]
    assert found.expected_calibration_error == pytest.approx((2 * 0.25 + 2 * 0.15 + 0) / 5)
    assert reliability([]) is None
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert (wilson(0, 10)[0], wilson(0, 0)) == (0.0, (0.0, 1.0))


def test_speedups_divide_by_plain_of_the_same_question_and_repeat() -> None:
    record = run_of([
        answer("a", "plain", 10.0), answer("a", "auto", 20.0),
        answer("a", "plain", 20.0, 1), answer("a", "auto", 20.0, 1),
        answer("b", "plain", 10.0, category="chat"), answer("b", "auto", 5.0, category="chat"),
        answer("c", "auto", 99.0, category="chat"),  # nothing to compare it with
    ])  # fmt: skip
    row, chat = row_of(record), row_of(record, "chat").speedup
    assert row.speedup.median == pytest.approx(statistics.median([statistics.median([2.0, 1.0]), 0.5]))
    assert (row.speedup.n, row.n_slower, row.worst_question, row.worst_speedup) == (2, 1, "b", 0.5)
    assert row.tokens_per_second.median == pytest.approx(20.0)
    assert (chat.median, chat.low) == (0.5, None)


def test_counts_add_up_over_answers() -> None:
    drafted = {
        "num_rounds": 4, "num_draft_tokens": 6, "num_accepted_tokens": 5, "drafted_per_position": [4, 2],
        "accepted_per_position": [4, 1], "by_source": {"ngram": {"num_draft_tokens": 6, "num_accepted_tokens": 5}},
    }  # fmt: skip
    row = row_of(run_of([
        answer("a", "plain", 10.0), answer("a", "auto", 10.0, **drafted),
        answer("b", "plain", 10.0), answer("b", "auto", 10.0, token_sha256="b", **drafted),
    ]))  # fmt: skip
    assert (row.mean_acceptance_length, row.acceptance_rate) == (20 / 8, 10 / 12)
    assert [each.rate for each in row.by_position] == [1.0, 0.5]
    assert (row.by_source["ngram"].drafted, row.by_source["ngram"].accepted) == (12, 10)
    assert (row.n_same, row.n_compared) == (1, 2)


FASTER, SLOWER, ALIKE = [1.2 + i / 100 for i in range(8)], [0.8 + i / 100 for i in range(8)], [0.97, 1.02] * 4


@pytest.mark.parametrize(
    ("speeds", "drafted", "figure", "words", "status"),
    [
        (FASTER, DRAFTED, "×1.23", "auto is faster: ×1.23", "ok"),
        (SLOWER, DRAFTED, "×0.84", "auto is slower: ×0.84", "fail"),
        (ALIKE, DRAFTED, "no difference", "no difference from plain can be told", "info"),
        (FASTER[:5], DRAFTED, "too few questions", "too few questions for a verdict; ×1.20 to ×1.24", "info"),
        (ALIKE, {}, "nothing drafted", "Nothing was drafted: no guess pays on reference here", "info"),
        (SLOWER, {}, "nothing drafted", "yet took longer: ×0.84", "fail"),
    ],
)
def test_no_figure_stands_without_a_verdict(
    speeds: list[float], drafted: dict[str, object], figure: str, words: str, status: str
) -> None:
    record = run_at(speeds, **drafted)
    report = bench_report(record, analyse(record))
    (key,) = next(part for part in report.parts if isinstance(part, KeyFigures)).figures
    assert (key.figure, key.status) == (figure, status)
    assert (words in key.text, "--backend" in key.text) == (True, False)
    styles = next(part for part in report.parts if isinstance(part, Table)).styles.values()
    assert bool({"strong", "bad"}.intersection(styles)) == (figure[0] == "×" or status == "fail")
    assert ("bad" in styles) == (status == "fail")


def test_the_report_says_how_it_was_sampled_and_for_few_questions_what_gives_a_verdict() -> None:
    sampling = {"temperature": 0.8, "top_k": 40, "stop": ["END", "|"]}
    text = text_of(replace(run_at([2.0], **DRAFTED), settings=replace(SETTINGS, sampling=sampling)))
    assert "temperature 0.8, top-k 40, stop ['END', '|']" in text
    assert "auto: one question is too few for a verdict." in text
    for mode, said in (("quick", True), ("default", False)):
        text = text_of(run_at(FASTER[:5], mode, **DRAFTED))
        assert ("Run without --quick for a verdict." in text) == said
        assert "Fewer than 6 questions: the range is shown instead of a 95 % interval." in text
    record = run_at(FASTER, "quick", **DRAFTED)  # enough over all, but not in each category
    record.samples = [replace(each, category="code" if i % 2 else "edit") for i, each in enumerate(record.samples)]
    (remark,) = (each for each in analyse(record).remarks if "range is shown" in each)
    assert remark == "Categories of fewer than 6 questions: the range is shown instead of a 95 % interval."


def test_another_engine_is_named_where_this_run_measured_that_it_pays() -> None:
    faster = [replace(each, backend="llama-cpp") for each in run_at(FASTER, **DRAFTED).samples]
    both = run_of(
        [*run_at(ALIKE).samples, *faster],
        settings=replace(SETTINGS, backends=["reference", "llama-cpp"]),
        engines=[engine(), replace(engine(), backend="llama-cpp")],
    )
    said = "no guess pays on reference here, so auto did the same work as plain. Try --backend llama-cpp."
    assert said in text_of(both)


@pytest.mark.parametrize(("gap", "said"), [(0.12, "7 of 8 ≈"), (3.0, "7 of 8")])
def test_answers_that_part_at_a_near_tie_are_marked(gap: float, said: str) -> None:
    record = run_at(FASTER, **DRAFTED)
    record.samples[-1] = replace(record.samples[-1], token_sha256="b", parted_at=3, parted_by=gap)
    text = text_of(record)
    assert any(line.rstrip("| ").endswith(f" {said}") for line in text.splitlines())
    assert ("1 answer part" in text) == (gap > 1)


def test_a_table_keeps_plain_speed_at_80_columns_and_an_axis_half_and_twice_of_it() -> None:
    record, out = run_at(ALIKE, **DRAFTED), io.StringIO()
    Screen(out).report(bench_report(record, analyse(record)))
    head = next(line for line in out.getvalue().splitlines() if line.split()[:2] == ["speed", "95"])
    assert head.split()[:6] == ["speed", "95", "%", "tok/s", "plain", "prompt"]
    assert "±" in out.getvalue()
    assert {"×0.5", "×2"} <= set(re.findall(r"×[0-9.]+", speedup_plot(record, analyse(record)).svg()))


def test_what_makes_figures_doubtful_is_said() -> None:
    arms = ("plain", "auto")
    samples = [answer(str(i), arm, 10.0 + 0.1 * (i % 2), started=float(i)) for i in range(9) for arm in arms]
    assert not analyse(run_of(samples)).remarks
    for changes, said in (
        ({"samples": [replace(sample, others_share=0.5) for sample in samples]}, "The machine was busy"),
        ({"sessions": [sitting(throttled=True)]}, "by heat"),
        ({"sessions": [sitting(on_battery=True)]}, "battery"),
        ({"sessions": [sitting(slow_clock="it is")]}, "slow"),
        ({"ended": "interrupted"}, "interrupted"),
        ({"skipped": ["x", "y"]}, "2 questions (x, y)"),
    ):
        (remark,) = analyse(run_of(**({"samples": samples} | changes))).remarks
        assert said in remark
    speeds = [10.0 - 0.2 * i for i in range(12)]
    results = analyse(run_of([answer(str(i), "plain", speed, started=float(i)) for i, speed in enumerate(speeds)]))
    assert results.drift[0].change == pytest.approx(
        statistics.median(speeds[-4:]) / statistics.median(speeds[:4]) - 1, abs=1e-4
    )
    assert any("slower in the last third" in remark for remark in results.remarks)


def noisy(rng: np.random.Generator, faster: float, n: int = 24, machine: float = 1.0) -> Record:
    samples = []
    for i in range(n):
        usual = 10 * machine * float(np.exp(rng.normal(0, 0.05)))
        gain = faster * float(np.exp(0.3 + 0.3 * np.sin(i) + rng.normal(0, 0.05)))
        for arm, speed in (("plain", usual), ("auto", usual * gain)):
            samples.append(answer(str(i), arm, speed, category="ab"[i % 2]))
    return run_of(samples)


def test_two_runs_that_do_not_differ_get_no_verdict() -> None:
    """Any verdict at all has a probability under 2 × 5 %; of 40 pairs over 11 with one have under 1e-3."""
    rng = np.random.default_rng(3)
    pairs = (comparison(noisy(rng, 1.0), noisy(rng, 1.0), ("a", "b")) for _ in range(40))
    assert sum(any(line.verdict.startswith("B is") for line in found.lines) for found in pairs) <= 11


def test_a_difference_is_found_where_it_is() -> None:
    rng = np.random.default_rng(4)
    lines = comparison(noisy(rng, 1.0), noisy(rng, 1.2, machine=0.5), ("a", "b")).lines
    for figure, verdict, ratio in (("speed-up", "B is higher", 1.2), ("tok/s", "B is lower", 0.5)):
        line = next(each for each in lines if (each.figure, each.category) == (figure, "all"))
        assert (line.verdict, line.paired) == (verdict, True)
        assert line.ratio.median == pytest.approx(ratio, rel=0.05)
    swapped = comparison(noisy(rng, 1.2), noisy(rng, 1.0), ("a", "b"))
    assert next(line for line in swapped.lines if line.figure == "speed-up").verdict == "B is lower"


def test_few_or_other_questions_are_told_apart() -> None:
    rng = np.random.default_rng(6)
    few = comparison(noisy(rng, 1.0, n=4), noisy(rng, 3.0, n=4), ("a", "b"))
    assert {line.verdict for line in few.lines} == {"too few questions"}
    a, b = noisy(rng, 1.0), noisy(rng, 2.0)
    b = replace(b, samples=[replace(s, question=f"other {s.question}") for s in b.samples])
    apart = comparison(a, b, ("a", "b"))
    assert not any(line.paired for line in apart.lines)
    assert next(line for line in apart.lines if line.figure == "speed-up").verdict == "B is higher"
    with pytest.raises(UsageError, match="in common"):
        comparison(a, replace(b, samples=[replace(s, category="another") for s in b.samples]), ("a", "b"))


def test_what_is_not_the_same_in_two_runs_is_listed() -> None:
    a = replace(run_at(ALIKE), engines=[engine("1" * 64, "v1")])
    b = replace(run_at(ALIKE), engines=[engine("2" * 64, "v2")], settings=replace(SETTINGS, max_tokens=99))
    assert comparison(a, b, ("a", "b")).differences == [
        "engine: v1 / v2", "models: m.gguf (11111111) / m.gguf (22222222)", "max tokens: 10 / 99",
    ]  # fmt: skip
