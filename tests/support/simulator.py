"""A world with known costs and a known text, in which a policy's rate can be computed exactly and fast.

At every position i of the text each source has a confidence and a fact: whether its guess there is right, given that
all before it were. Drafting from position n then reveals (confidence, right) of n, n+1, … until the first wrong one.
Policies that draft differently so meet the same text, and their rates can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from localspec.controllers.cost_model import PassTimes
from localspec.spec_decode.drafters.base import Controller
from localspec.spec_decode.rounds import Draft, DraftToken, EmittedToken, Round, Verdict

LLAMA_CPP = {1: 50.0, 2: 82.5, 3: 120, 4: 125, 5: 170, 6: 200, 7: 300, 8: 370, 10: 400, 12: 420, 16: 430, 24: 640}
IK_LLAMA = {1: 52.0, 2: 58.2, 3: 68.1, 4: 87.9, 5: 110, 6: 106, 7: 115, 8: 124, 10: 150, 12: 172, 16: 234, 24: 350}
GPU_LIKE = {1: 10.0, 2: 10.2, 3: 10.4, 4: 10.6, 5: 11, 6: 11, 7: 11.2, 8: 11.5, 10: 12, 12: 12.5, 16: 13, 24: 16}
LINEAR = {w: 20.0 * w for w in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24)}
CURVES = {"llama.cpp": LLAMA_CPP, "ik": IK_LLAMA, "gpu": GPU_LIKE, "linear": LINEAR}


@dataclass
class Source:
    """Guesses of one drafter along a text: confidence [n] and right [n]; NaN confidence is no guess."""

    confidence: np.ndarray
    right: np.ndarray
    step_ms: float = 0.0  # time of one draft step; 0 guesses for nothing
    prefill_ms: float = 0.0  # time per token of catching up
    times: dict[int, float] | None = None  # all pass times by width instead of these two [ms]


def stationary(rng: np.random.Generator, n: int, mean: float, sharpness: float = 1.2, honesty: float = 1.0) -> Source:
    """Acceptance near ``mean``; confidences spread around it (Beta), honest when ``honesty`` is 1."""
    confidence = rng.beta(max(0.05, mean * sharpness * 2), max(0.05, (1 - mean) * sharpness * 2), n)
    truth = honesty * confidence + (1 - honesty) * mean
    return Source(confidence, rng.random(n) < truth)


def switching(rng: np.random.Generator, n: int, means: tuple[float, ...], length: int) -> Source:
    """Stationary pieces of ``length`` tokens, one mean after the other."""
    parts = [stationary(rng, length, means[i % len(means)]) for i in range(-(-n // length))]
    return Source(np.concatenate([p.confidence for p in parts])[:n], np.concatenate([p.right for p in parts])[:n])


def adversarial(rng: np.random.Generator, n: int) -> Source:
    """Always sure of itself; right only while that keeps a learner drafting, then wrong for a long while."""
    right = np.zeros(n, dtype=bool)
    for start in range(0, n, 120):
        right[start : start + 20] = True
    return Source(np.full(n, 0.97), right)


def row_of(certainty: float) -> np.ndarray:
    """Logits whose most probable token has this probability."""
    n_rest = int(1 / certainty) + 1
    return np.log(np.array([certainty, *[max((1 - certainty) / n_rest, 1e-9)] * n_rest]))


@dataclass
class World:
    """Costs and a text."""

    curve: dict[int, float]  # the target's t(w) [ms]
    sources: dict[str, Source]  # the drafters by name, in the order they are asked
    noise: float = 0.03  # relative spread of every measured time
    seed: int = 0
    other_ms: float = 0.3
    slowdown: Callable[[int], float] = field(default=lambda position: 1.0)
    n_prompt: int = 0  # tokens before the text, which a draft model has to read
    # how much longer than otherwise the first reading of over 32 tokens takes, as another program has the CPU
    burst: float = 1.0
    # the target's probability for its most probable token, along the text; None is unknown
    certainty: np.ndarray | None = None

    def true_times(self) -> PassTimes:
        return PassTimes(dict(self.curve))

    def draft_times(self) -> dict[str, PassTimes]:
        return {
            name: PassTimes(s.times or {1: s.step_ms, 2: s.step_ms + s.prefill_ms, 65: s.step_ms + 64 * s.prefill_ms})
            for name, s in self.sources.items()
            if s.step_ms > 0
        }

    def run(self, controller: Controller, n_tokens: int) -> float:
        """Tokens per millisecond of a policy over the text, drafting included."""
        rng = np.random.default_rng(self.seed)
        times, draft_times = self.true_times(), self.draft_times()
        caught_up = dict.fromkeys(self.sources, -self.n_prompt)
        position, total, burst = 0, 0.0, self.burst
        while position < n_tokens:
            factor = self.slowdown(position)
            plan = controller.plan(room=n_tokens - position, n_past=position)
            draft, ms_draft, alive = Draft(), 0.0, True
            right: list[bool] = []
            while alive and plan.room > 0:
                at = position + len(draft)
                for name in self.sources:
                    source = self.sources[name]
                    pending = at + 1 - caught_up[name] if source.step_ms else 0
                    if at >= len(source.confidence):
                        continue
                    if np.isnan(source.confidence[at]):
                        plan.nothing(name)
                        continue
                    if not plan.more(name, pending):
                        continue
                    if pending:
                        ms = draft_times[name](pending) * factor * rng.normal(1, self.noise)
                        if pending > 32:
                            ms, burst = ms * burst, 1.0
                        plan.spent(name, pending, ms)
                        ms_draft += ms
                        caught_up[name] = at + 1
                    expected = plan.keep(name, float(source.confidence[at]))
                    if expected is None:
                        continue
                    draft.append(DraftToken(0, name, float(source.confidence[at]), None, expected))
                    right.append(bool(source.right[at]))
                    break
                else:
                    alive = False
            accepted = right.index(False) if False in right else len(right)
            ms_verify = times(len(draft) + 1) * factor * rng.normal(1, self.noise)
            emitted = min(accepted + 1, n_tokens - position)
            round_ = Round(
                0,
                draft,
                Verdict(accepted, 0, "plain"),
                [EmittedToken(0, "plain")] * emitted,
                ms_draft=ms_draft,
                ms_verify=ms_verify,
                ms_other=self.other_ms,
            )
            certain = None if self.certainty is None else row_of(self.certainty[position + emitted - 1])
            controller.observe(round_, certain)
            controller.learn(round_)
            position += emitted
            for name in caught_up:
                caught_up[name] = min(caught_up[name], position)
            total += ms_draft + ms_verify + self.other_ms
        return n_tokens / total

    def plain_rate(self) -> float:
        return 1.0 / (self.true_times()(1) + self.other_ms)
