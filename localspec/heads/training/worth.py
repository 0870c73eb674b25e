"""What a head is worth here: tokens per second with it and without it, on questions it was not trained on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from localspec.heads.trained import heads_for
from localspec.llm import LLM
from localspec.measuring.statistics import Values, estimate
from localspec.measuring.subject import (
    PLAIN,
    SLICE_TOKENS,
    Arm,
    EngineUnderTest,
    Sample,
    blocks,
    measure,
    places,
)
from localspec.model_files.catalog import Catalog
from localspec.prompts.questions import in_turns, own_questions
from localspec.sampling.sampling import SamplingParams
from localspec.system.files import is_same_file

_FEWEST = 6  # questions that are asked whatever time is left

_N_CTX = 4096


@dataclass(frozen=True, slots=True)
class Worth:
    """Tokens per second, all questions together, greedy."""

    plain: float  # without drafting
    without: float  # with the drafters that there are without the head, another head of the target included
    head: float  # with the head added; what --draft auto does once it is kept
    gain: float  # speed with the head over the better of the two without it, the median over the questions
    n_questions: int
    drafters: tuple[str, ...]  # those there are without the head, by name
    interval: tuple[float, float] | None = None  # of the gain, at 95 %; None where too few questions were asked

    @property
    def pays(self) -> bool:
        """Whether answers are faster with the head by more than chance may give."""
        return self.interval is not None and self.interval[0] > 1

    @property
    def is_unclear(self) -> bool:
        return self.interval is None or self.interval[0] <= 1 <= self.interval[1]


def measure_worth(
    target: Path,
    head: Path,
    *,
    backend: str,
    n_threads: int | None,
    n_questions: int,
    max_tokens: int,
    seconds: float,
    report: Callable[[str, float | None], None],
    stop: threading.Event,
) -> Worth:
    """Ask questions in three ways of decoding that take turns, for about so many ``seconds``; six in any case.

    Raises:
        Cancelled: it was stopped.
        LocalspecError: the pair cannot be loaded.
    """
    began, draft = time.monotonic(), Catalog.load().draft_for(target)
    heads = [path for path in heads_for(target)[:1] if not is_same_file(path, head)]
    others = ["ngram", *(f"head:{path}" for path in heads), *([str(draft)] if draft is not None else [])]
    options = {"backend": backend, "n_threads": n_threads, "n_ctx": _N_CTX, "idle": False, "remember": False}
    with LLM(target, [*others, f"head:{head}"], prefix_cache_bytes=0, progress=report, cancel=stop, **options) as llm:  # type: ignore[arg-type]
        common = ("ngram", "model") if draft is not None else ("ngram",)
        without = Arm("without", (*common, "head") if heads else common, "auto")
        auto = Arm("auto", (*common, "head2" if heads else "head"), "auto")
        subject = EngineUnderTest(llm, [without, auto], stop, in_slices=True)
        try:
            subject.warm_up()
            questions = in_turns(own_questions("tuning"), short_first=True)[:n_questions]
            params, samples = SamplingParams(max_tokens=max_tokens), list[Sample]()
            for block in blocks(questions, 1):
                if block.index >= _FEWEST and time.monotonic() - began > seconds:
                    break
                report("measuring what the head is worth", block.index / len(questions))
                wanted = places([subject], block)
                samples += measure(block, wanted, params, SLICE_TOKENS, lambda answer, fraction: None)
        finally:
            subject.restore()
        names = tuple(Path(name).stem for name in others)
    speeds = {arm: _speed(samples, arm) for arm in (PLAIN.name, without.name, auto.name)}
    gains = {
        question: [_speed(mine, auto.name) / max(_speed(mine, PLAIN.name), _speed(mine, without.name))]
        for question in dict.fromkeys(sample.question for sample in samples)
        for mine in [[sample for sample in samples if sample.question == question]]
    }
    gain, interval = gain_of(gains)
    return Worth(speeds["plain"], speeds["without"], speeds["auto"], gain, len(gains), names, interval)


def gain_of(gains: Values) -> tuple[float, tuple[float, float] | None]:
    """The median gain over the questions and its interval at 95 %; None in its place for fewer than six questions."""
    found = estimate(gains)
    assert found is not None
    if not found.is_firm or found.low is None or found.high is None:
        return found.median, None
    return found.median, (found.low, found.high)


def _speed(samples: Sequence[Sample], arm: str) -> float:
    mine = [sample for sample in samples if sample.arm == arm]
    return sum(sample.tokens for sample in mine) / sum(sample.seconds for sample in mine)
