"""The parts of ``localspec bench``: questions, arms, turns, the machine's counters, and the laws of its intervals."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from localspec.commands.bench import schedule
from localspec.commands.bench.arms import PLAIN, Arm, parse_arm, parse_arms
from localspec.commands.bench.compare import comparison
from localspec.commands.bench.record import Engine, ModelFile, Record, Sample, Settings, Sitting
from localspec.commands.bench.results import analyse
from localspec.commands.bench.schedule import (
    DEFAULT,
    QUICK,
    Block,
    Clock,
    affordable_tokens,
    blocks,
    is_tight,
    take_turns,
    turns,
)
from localspec.commands.bench.statistics import (
    estimate,
    estimate_quotient,
    middle,
    order_statistics,
    range_level,
    reliability,
    wilson,
)
from localspec.commands.questions import Question, in_turns
from localspec.errors import UsageError

# -- arms and turns ----------------------------------------------------------------------------------------------------


def test_arms_are_read() -> None:
    assert parse_arm("auto") == Arm("auto", None, "auto")
    assert parse_arm("4") == Arm("4", None, 4)
    assert parse_arm("model:4") == Arm("model:4", "model", 4)
    assert parse_arm("ngram:auto") == Arm("ngram:auto", "ngram", "auto")
    assert parse_arm("model2:1").source == "model2"
    assert [arm.name for arm in parse_arms(["auto, 4", "4", "plain"])] == ["plain", "auto", "4"]


@pytest.mark.parametrize("text", ["", "0", "65", "model", "model:", "model:0", "draft:3", "-1", "auto:3", "plain:1"])
def test_other_arms_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_arm(text)


def test_an_arm_says_which_drafter_it_lacks() -> None:
    PLAIN.check([])
    parse_arm("model:2").check(["ngram", "model"])
    with pytest.raises(UsageError, match="no drafter 'model' is loaded"):
        parse_arm("model:2").check(["ngram"])
    with pytest.raises(UsageError, match="needs a drafter"):
        parse_arm("auto").check([])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_arm_is_in_every_place_equally_often(n: int) -> None:
    question = Question("q", "c", ("x",))
    order = [turns(n, Block(repeat, index, question, True)) for repeat in range(2) for index in range(4 * n)]
    for place in range(n):
        assert set(Counter(each[place] for each in order).values()) == {8}
    # And each pair of arms as often in one order as in the other: what drifts cancels.
    before = Counter((a, b) for each in order for i, a in enumerate(each) for b in each[i + 1 :])
    assert set(before.values()) == {4 * n}


def test_a_cycle_ends_when_every_category_had_its_turn() -> None:
    questions = in_turns([Question(f"{c}{i}", c, ("x",)) for c, n in (("a", 3), ("b", 2), ("c", 1)) for i in range(n)])
    plan = list(blocks(questions, 2))
    assert [(b.question.id, b.ends_cycle) for b in plan[:6]] == [
        ("a0", False), ("b0", False), ("c0", True), ("a1", False), ("b1", True), ("a2", True),
    ]  # fmt: skip
    assert [b.repeat for b in plan] == [0] * 6 + [1] * 6


def test_a_quick_run_asks_for_answers_that_it_has_time_for() -> None:
    fast, slow = affordable_tokens(QUICK, 110, 2, 50.0), affordable_tokens(QUICK, 110, 2, 6.0)
    assert fast == QUICK.max_tokens
    assert schedule.LEAST_TOKENS <= slow < fast
    # So many questions then fit, reading included.
    assert 2 * slow / 6.0 * QUICK.least_answers < 110
    assert affordable_tokens(QUICK, 110, 2, 0.1) == schedule.LEAST_TOKENS
    assert affordable_tokens(DEFAULT, 1, 9, 0.1) == DEFAULT.max_tokens


def test_a_budget_ends_a_run_before_it_is_used_up() -> None:
    clock = Clock(0.0, 100.0, 50)
    assert clock.has_time(99.0), "the first block is always begun"
    for _ in range(4):
        clock.add(20.0)
    assert clock.has_time(79.0)
    assert not clock.has_time(81.0)
    assert clock.left(60.0, 48) == 40.0
    assert Clock(0.0, None, 5).left(10.0, 0) is None


class Talker:
    """An answer of so many tokens, in rounds of a given length."""

    def __init__(self, n: int, per_round: int) -> None:
        self.n, self.per_round, self.n_tokens, self.finish_reason = n, per_round, 0, None

    def advance(self, n_tokens: int | None) -> None:
        until = self.n if n_tokens is None else self.n_tokens + n_tokens
        while self.finish_reason is None and self.n_tokens < until:
            self.n_tokens = min(self.n, self.n_tokens + self.per_round)
            self.finish_reason = "length" if self.n_tokens == self.n else None


def test_slices_keep_all_answers_as_far() -> None:
    answers, order = [Talker(40, 1), Talker(40, 5), Talker(12, 1)], []
    for i in take_turns(answers, 8):
        order.append(i)
        going = [each.n_tokens for each in answers if each.finish_reason is None]
        assert not going or max(going) - min(going) <= 8 + 4
    assert order[:3] == [0, 1, 2]
    assert [each.finish_reason for each in answers] == ["length"] * 3
    assert [order.count(i) for i in range(3)] == [5, 4, 2]


def test_whole_answers_come_one_after_the_other() -> None:
    answers = [Talker(40, 1), Talker(9, 5)]
    assert list(take_turns(answers, 0)) == [0, 1]
    assert all(each.finish_reason for each in answers)


def test_tight_is_what_every_arm_is() -> None:
    near = {str(i): [1.5 + 0.001 * i] for i in range(12)}
    far = {str(i): [1.0 + 0.2 * i] for i in range(12)}
    few = {str(i): [1.5] for i in range(5)}
    assert is_tight([near, near], 0.03)
    assert not is_tight([near, far], 0.03)
    assert not is_tight([few], 0.03), "five questions promise no 95 %"
    assert not is_tight([{}], 0.03)
    assert not is_tight([], 0.03)


# -- intervals ---------------------------------------------------------------------------------------------------------


def drawn(rng: np.random.Generator, n: int, repeats: int, centre: float = 0.3) -> dict[str, list[float]]:
    """Speed-ups as they are: skewed between questions, noisy between repeats; their median is exp(centre)."""
    logs = rng.normal(centre, 0.35, (n, 1)) + rng.normal(0.0, 0.08, (n, repeats))
    return {str(i): list(map(float, row)) for i, row in enumerate(np.exp(logs))}


@pytest.mark.parametrize(("n", "repeats", "level"), [(6, 1, 0.95), (8, 3, 0.95), (13, 1, 0.98), (34, 2, 0.95)])
def test_intervals_cover_the_true_median_as_often_as_they_say(n: int, repeats: int, level: float) -> None:
    """At least at their level, for any law, and not by being boundless. 800 runs: a true coverage of the level is 3.7
    standard deviations short with probability 1e-4; how wide they are is limited apart."""
    rng = np.random.default_rng(20)
    hits, widths = 0, []
    for _ in range(800):
        values = drawn(rng, n, repeats)
        found = estimate(values, level)
        assert found is not None
        assert found.level == level
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= np.exp(0.3) <= found.high
        medians = [statistics.median(each) for each in values.values()]
        widths.append((found.high - found.low) / (max(medians) - min(medians)))
    assert hits / 800 > level - 3.7 * np.sqrt(level * (1 - level) / 800)
    if n > 12:
        assert statistics.median(widths) < 0.8


def test_order_statistics_are_those_of_the_sign_test_s_table() -> None:
    values = list(range(1, 31))
    assert order_statistics(values[:6], 0.95) == (1, 6)
    assert order_statistics(values[:8], 0.95) == (1, 8)
    assert order_statistics(values[:9], 0.95) == (2, 8)
    assert order_statistics(values[:20], 0.95) == (6, 15)
    assert order_statistics(values, 0.99) == (8, 23)
    assert order_statistics(values[:3], 0.95) == (1, 3)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_the_range_of_few_questions_covers_as_often_as_it_says(n: int) -> None:
    """1 - 2^(1-n) exactly; 3000 runs, within 4 standard deviations (false alarm 6e-5)."""
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(3000):
        found = estimate(drawn(rng, n, 1))
        assert found is not None
        assert not found.is_firm
        assert found.level == range_level(n)
        hits += found.low <= np.exp(0.3) <= found.high
    level = range_level(n)
    assert abs(hits / 3000 - level) < 4 * np.sqrt(level * (1 - level) / 3000)


def test_one_question_has_no_interval_and_none_no_estimate() -> None:
    one = estimate({"a": [1.0, 3.0, 2.0]})
    assert one is not None
    assert (one.median, one.low, one.high, one.level) == (2.0, None, None, None)
    assert not one.is_firm
    assert estimate({}) is None
    assert estimate_quotient({}, {"a": [1.0]}) is None


def test_a_question_counts_once_however_often_it_was_asked() -> None:
    values = {"often": [9.0] * 50, "a": [1.0], "b": [1.2]}
    assert middle(values) == 1.2


def test_a_quotient_of_medians_covers_too() -> None:
    """Groups of 20, 500 runs: at least 95 % less 3.7 standard deviations (false alarm 1e-4), and not boundless."""
    rng = np.random.default_rng(5)
    hits, widths = 0, []
    for _ in range(500):
        found = estimate_quotient(drawn(rng, 20, 1, 0.5), drawn(rng, 20, 1, 0.3))
        assert found is not None
        hits += found.low <= np.exp(0.2) <= found.high
        widths.append(found.high / found.low)
    assert hits / 500 > 0.95 - 3.7 * np.sqrt(0.95 * 0.05 / 500)
    assert statistics.median(widths) < 3
    few = estimate_quotient(drawn(rng, 4, 1), drawn(rng, 20, 1))
    assert few is not None
    assert few.low is None


def test_calibration_error_by_hand() -> None:
    judged = [(0.25, True), (0.25, False), (0.85, True), (0.85, True), (1.0, True)]
    found = reliability(judged)
    assert found is not None
    assert [(each.low, each.n, each.observed) for each in found.bins] == [(0.2, 2, 0.5), (0.8, 2, 1.0), (0.9, 1, 1.0)]
    assert found.expected_calibration_error == pytest.approx((2 * 0.25 + 2 * 0.15 + 0) / 5)
    assert reliability([]) is None


def test_wilson_is_the_textbook_s() -> None:
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(0, 0) == (0.0, 1.0)


# -- what a record says ------------------------------------------------------------------------------------------------

SETTINGS = Settings(
    model="m", draft=[], backends=["reference"], draft_backend=None, arms=["plain", "auto"], questions="own:report",
    categories=[], questions_sha256="0" * 64, max_tokens=10, sampling={}, ignore_eos=False, system=None, ctx=None,
    threads=None, gpu_layers=None, kv_cache="f16", light_draft=True, mode="default",
)  # fmt: skip


def answer(question: str, arm: str, speed: float, repeat: int = 0, category: str = "code", **changes: object) -> Sample:
    """An answer of 10 tokens at a speed."""
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
    return Engine("reference", version, "cpu", 1, 64, models, [], {"1": ms}, {}, "now")


def sitting(**changes: object) -> Sitting:
    return replace(Sitting(0.0, 1.0, "0", "3", "c"), **changes)


def run_of(samples: list[Sample], **changes: object) -> Record:
    usual = {"machine": {"cpu": "x", "cores": 2}, "settings": SETTINGS, "engines": [engine()], "sessions": [sitting()],
             "ended": "complete", "samples": samples}  # fmt: skip
    return Record(**(usual | changes))


def test_speedups_divide_by_plain_of_the_same_question_and_repeat() -> None:
    samples = [
        answer("a", "plain", 10.0), answer("a", "auto", 20.0),
        answer("a", "plain", 20.0, 1), answer("a", "auto", 20.0, 1),
        answer("b", "plain", 10.0, category="chat"), answer("b", "auto", 5.0, category="chat"),
        answer("c", "auto", 99.0, category="chat"),  # nothing to compare it with
    ]  # fmt: skip
    results = analyse(run_of(samples))
    row = results.row("all", "reference", "auto")
    assert row is not None
    assert row.speedup is not None
    assert row.speedup.median == pytest.approx(statistics.median([statistics.median([2.0, 1.0]), 0.5]))
    assert (row.speedup.n, row.n_slower, row.worst_question, row.worst_speedup) == (2, 1, "b", 0.5)
    assert row.tokens_per_second.median == pytest.approx(20.0)
    chat = results.row("chat", "reference", "auto")
    assert chat is not None
    assert chat.speedup is not None
    assert (chat.speedup.median, chat.speedup.low) == (0.5, None)


def test_counts_add_up_over_answers() -> None:
    drafted = {
        "num_rounds": 4, "num_draft_tokens": 6, "num_accepted_tokens": 5, "drafted_per_position": [4, 2],
        "accepted_per_position": [4, 1], "by_source": {"ngram": {"num_draft_tokens": 6, "num_accepted_tokens": 5}},
    }  # fmt: skip
    samples = [answer("a", "plain", 10.0), answer("a", "auto", 10.0, **drafted), answer("b", "plain", 10.0),
               answer("b", "auto", 10.0, token_sha256="b", **drafted)]  # fmt: skip
    row = analyse(run_of(samples)).row("all", "reference", "auto")
    assert row is not None
    assert row.mean_acceptance_length == 20 / 8
    assert row.acceptance_rate == 10 / 12
    assert [each.rate for each in row.by_position] == [1.0, 0.5]
    assert (row.by_source["ngram"].drafted, row.by_source["ngram"].accepted) == (12, 10)
    assert (row.n_same, row.n_compared) == (1, 2)


REMARKS: dict[str, tuple[Callable[[list[Sample]], Record], str]] = {
    "busy": (lambda samples: run_of([replace(s, others_share=0.5) for s in samples]), "The machine was busy"),
    "hot": (lambda samples: run_of(samples, sessions=[sitting(throttled=True)]), "by heat"),
    "battery": (lambda samples: run_of(samples, sessions=[sitting(on_battery=True)]), "battery"),
    "governor": (lambda samples: run_of(samples, sessions=[sitting(slow_clock="it is")]), "slow"),
    "interrupted": (lambda samples: run_of(samples, ended="interrupted"), "interrupted"),
    "skipped": (lambda samples: run_of(samples, skipped=["x", "y"]), "2 questions (x, y)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REMARKS)
def test_what_makes_figures_doubtful_is_said(name: str) -> None:
    samples = [answer(str(i), arm, 10.0, started=float(i)) for i in range(9) for arm in ("plain", "auto")]
    change, said = REMARKS[name]
    assert not any(said in remark for remark in analyse(run_of(samples)).remarks)
    assert any(said in remark for remark in analyse(change(samples)).remarks)


def test_a_machine_that_slows_down_is_noticed_by_plain_s_own_speed() -> None:
    speeds = [10.0 - 0.2 * i for i in range(12)]
    samples = [answer(str(i), "plain", speed, started=float(i)) for i, speed in enumerate(speeds)]
    results = analyse(run_of(samples))
    (drift,) = results.drift
    assert drift.change == pytest.approx(statistics.median(speeds[-4:]) / statistics.median(speeds[:4]) - 1, abs=1e-4)
    assert any("slower in the last third" in remark for remark in results.remarks)
    steady = [answer(str(i), "plain", 10.0 + 0.1 * (i % 2), started=float(i)) for i in range(12)]
    assert not analyse(run_of(steady)).remarks


# -- comparing ---------------------------------------------------------------------------------------------------------


def noisy(rng: np.random.Generator, faster: float, n: int = 24, machine: float = 1.0) -> Record:
    samples = []
    for i in range(n):
        usual = 10 * machine * float(np.exp(rng.normal(0, 0.05)))
        gain = faster * float(np.exp(0.3 + 0.3 * np.sin(i) + rng.normal(0, 0.05)))
        category = "ab"[i % 2]
        samples += [
            answer(str(i), "plain", usual, category=category),
            answer(str(i), "auto", usual * gain, category=category),
        ]
    return run_of(samples)


def test_two_runs_that_do_not_differ_get_no_verdict() -> None:
    """Any verdict at all has a probability under 2 × 5 %; of 40 pairs over 11 with one have under 1e-3."""
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(40):
        found = comparison(noisy(rng, 1.0), noisy(rng, 1.0), ("a", "b"))
        alarms += any(line.verdict.startswith("B is") for line in found.lines)
    assert alarms <= 11


def test_a_difference_is_found_where_it_is() -> None:
    rng = np.random.default_rng(4)
    found = comparison(noisy(rng, 1.0), noisy(rng, 1.2, machine=0.5), ("a", "b"))
    verdicts = {(line.figure, line.category, line.arm): line for line in found.lines}
    better = verdicts["speed-up", "all", "auto"]
    assert better.verdict == "B is higher"
    assert better.paired
    assert better.ratio.median == pytest.approx(1.2, rel=0.05)
    assert verdicts["tok/s", "all", "plain"].verdict == "B is lower"
    assert verdicts["tok/s", "all", "plain"].ratio.median == pytest.approx(0.5, rel=0.05)
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
    better = next(line for line in apart.lines if (line.figure, line.category) == ("speed-up", "all"))
    assert better.verdict == "B is higher"
    c = replace(b, samples=[replace(s, category="another") for s in b.samples])
    with pytest.raises(UsageError, match="in common"):
        comparison(a, c, ("a", "b"))


def test_what_is_not_the_same_in_two_runs_is_listed() -> None:
    rng = np.random.default_rng(8)
    a = replace(noisy(rng, 1.0), engines=[engine("1" * 64, "v1")])
    b = replace(noisy(rng, 1.0), engines=[engine("2" * 64, "v2")], settings=replace(SETTINGS, max_tokens=99))
    differences = "\n".join(comparison(a, b, ("a", "b")).differences)
    for part in ("engine: v1 / v2", "max tokens: 10 / 99", "models: m.gguf (11111111) / m.gguf (22222222)"):
        assert part in differences
