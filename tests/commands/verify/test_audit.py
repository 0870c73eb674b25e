"""``verify``: healthy pairs pass, every seeded defect is found, and the statistics behind it keep their promises."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, SamplingParams
from localspec.backends.base import Context, Forward, Piece, SequenceBatch
from localspec.backends.llama import model as model_module
from localspec.backends.llama.model import LlamaContext
from localspec.backends.reference import ReferenceContext
from localspec.commands.options import RunOptions
from localspec.commands.verify.audit import Audit, AuditOptions
from localspec.commands.verify.command import report_of, verify_command
from localspec.commands.verify.drafters import Adversary
from localspec.commands.verify.law import SUSPICIONS, Bets, VerificationLaw
from localspec.commands.verify.rows import AuditLog, AuditResult, Deviation, KeptRow, in_words, tail_bound
from localspec.commands.verify.samples import DrawnSamples
from localspec.commands.verify.several import SeveralFigures, audit_several
from localspec.engine.options import LoadOptions
from localspec.report.model import Findings
from localspec.sampling.sampling import Distribution, Noise, distribution
from localspec.spec_decode import decoder, verification
from localspec.spec_decode.detokenizer import ThinkingReader
from localspec.spec_decode.drafters import draft_model
from localspec.spec_decode.drafters.base import Plan, proposed
from localspec.spec_decode.proposer import Proposer
from localspec.spec_decode.rounds import Draft, DraftToken, Verdict
from tests.conftest import TinyFiles, open_backend
from tests.support.endless import write_endless
from tests.support.heads import write_random_head
from tests.support.interrupting import interrupted
from tests.support.program import localspec
from tests.support.thinkers import thinking_pair

pytestmark = pytest.mark.usefixtures("in_warm_home")

SMALL = AuditOptions(
    n_prompts=1,
    n_tokens=20,
    greedy=SamplingParams(),
    sampled=SamplingParams(temperature=1.0, top_k=256),
    n_windows=2,
    n_draws=150,
)
NO_LAW = replace(SMALL, n_windows=0)
"""Without the draws from verification alone, which take as long as all the rest."""


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.sampling.sampling.secrets.randbits", random.Random(5).getrandbits)


@contextmanager
def opened(tiny: TinyFiles, backend: str) -> Iterator[LLM]:
    """A tiny pair on an engine; the reference gets one that takes a tenth of a millisecond a token."""
    open_backend(backend)
    pair = tiny.quick if backend == "reference" else tiny.pair
    with LLM(pair.target, draft=["ngram", pair.draft], backend=backend, n_ctx=2048, light_draft=False) as llm:
        yield llm


def audit(llm: LLM, options: AuditOptions = SMALL) -> AuditResult:
    report = llm.run(lambda pair: Audit(llm, pair, options, lambda what, done: None, lambda: False).run())
    json.dumps(report.as_dict(), allow_nan=False)
    return report


def found(report: AuditResult) -> set[str]:
    """The kinds of defects; the verdict has to say so too."""
    assert (report.lossless is False) == bool(report.defects)
    assert report.verdict.startswith("NOT lossless here" if report.defects else "lossless here")
    return {defect.kind for defect in report.defects}


# -- healthy pairs -----------------------------------------------------------------------------------------------------


def test_the_reference_is_equal_to_the_bit(tiny: TinyFiles) -> None:
    with opened(tiny, "reference") as llm:
        report = audit(llm)
    assert found(report) == set()
    assert report.lossless is True
    assert (report.noise["bound"], report.largest_deviation, report.ties) == (0.0, 0.0, [])
    assert report.memory is not None
    assert report.memory["bitwise"]
    assert report.sensitivity is not None
    assert report.sensitivity["found"] == 1.0
    everything = {arm.arm: arm for arm in report.arms}
    adversary = everything["adversary ×16"]
    assert len(adversary.rejected_at) >= 3
    assert max(adversary.widths) == 17
    assert all(arm.answers == arm.complete for arm in everything.values())
    branches = everything["branches"]
    assert branches.accepted > branches.rounds
    assert max(branches.widths) == 19
    assert report.decoding_law is not None
    assert report.decoding_law["tokens"] == 40


def test_fast_engines_stay_under_their_noise(tiny: TinyFiles, fast_backend: Any) -> None:
    with opened(tiny, fast_backend.name) as llm:
        report = audit(llm)
    assert found(report) == set(), report.verdict
    assert report.largest_deviation <= report.noise["bound"] or report.rechecked["explained"]
    assert report.sensitivity is not None
    assert report.sensitivity["found"] > 0.9


def test_kernels_that_change_with_the_length_of_a_pass_are_no_defect(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sound engine may compute long passes otherwise than short ones, and what is cached remembers which it was."""
    original = LlamaContext._decode

    def decode(self: Any, tokens: Any, logits: Any) -> Any:
        kinds = [*getattr(self, "kinds", [])[: self.n_past], *[len(tokens) > 32] * len(tokens)]
        self.kinds = kinds
        forward = original(self, tokens, logits)
        for i, row in enumerate(forward.logits):
            n_long = sum(kinds[: len(kinds) - len(forward.logits) + i + 1])
            row += np.random.default_rng(n_long).normal(0, 0.05, len(row)).astype(np.float32)
        return forward

    with opened(tiny, "llama-cpp") as llm:
        monkeypatch.setattr(LlamaContext, "_decode", decode)
        report = audit(llm, replace(NO_LAW, n_prompts=3))
    assert found(report) == set(), report.verdict
    assert report.largest_deviation > 0.01


@pytest.fixture
def llama_cpp() -> None:
    open_backend("llama-cpp")


@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.parametrize("kind", ["recurrent", "sliding"])
def test_memories_that_cannot_simply_be_cut(tiny: TinyFiles, kind: str) -> None:
    with LLM(getattr(tiny, kind), draft="ngram", backend="llama-cpp", n_ctx=2048) as llm:
        report = audit(llm)
    assert found(report) == set(), report.verdict


def test_penalties_are_part_of_what_is_compared(tiny: TinyFiles) -> None:
    chain = {"repeat_penalty": 1.3, "presence_penalty": 0.5}
    options = replace(
        SMALL, greedy=SamplingParams(**chain), sampled=SamplingParams(temperature=0.8, **chain), draft_length=5
    )
    with opened(tiny, "reference") as llm:
        report = audit(llm, options)
    assert found(report) == set(), report.verdict
    assert any(arm.arm.endswith("×5") for arm in report.arms)


def test_a_target_alone_is_audited_too(tiny: TinyFiles) -> None:
    with LLM(tiny.quick.target, draft=None, backend="reference", n_ctx=2048) as llm:
        report = audit(llm)
    assert found(report) == set(), report.verdict
    arms = {"plain", "adversary ×16", "near misses ×2", "branches"}
    assert {arm.arm for arm in report.arms if not arm.sampled} == arms


@contextmanager
def opened_with_heads(tiny: TinyFiles, backend: str, folder: Path) -> Iterator[LLM]:
    open_backend(backend)
    target = tiny.quick.target if backend == "reference" else tiny.pair.target
    head = write_random_head(target, folder / "head.gguf", taps=("layer:0",))
    draft = ["ngram", f"head:{head}", "early-exit:1"]
    with LLM(target, draft=draft, backend=backend, n_ctx=2048, idle=False) as llm:
        yield llm


@pytest.mark.parametrize("backend", ["reference", "ik-llama", "llama-cpp"])
def test_heads_are_audited_too(tiny: TinyFiles, backend: str, tmp_path: Path) -> None:
    with opened_with_heads(tiny, backend, tmp_path) as llm:
        report = audit(llm, replace(SMALL, n_prompts=3))
    assert found(report) == set(), report.verdict
    drafted = {arm.arm: arm.drafted for arm in report.arms}
    assert drafted["head ×8"] > 0
    assert drafted["hot early-exit ×3"] > 0
    assert report.decoding_law is not None


def rows_of_early_exits_stay(patch: pytest.MonkeyPatch) -> None:
    """Draft tokens that went through some layers only are left in the target's memory, and nobody looks."""
    draft = decoder.SpeculativeDecoder._draft

    def staying(self: decoder.SpeculativeDecoder, *given: Any) -> Draft:
        with patch.context() as inner:
            inner.setattr(self.target, "truncate", lambda n: None)
            return draft(self, *given)

    patch.setattr(decoder.SpeculativeDecoder, "_draft", staying)
    patch.setattr(Context, "_check_whole", lambda self: None)


@pytest.mark.parametrize("backend", ["reference", "ik-llama"])
def test_a_defect_of_early_exits_is_found(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, backend: str, tmp_path: Path
) -> None:
    with opened_with_heads(tiny, backend, tmp_path) as llm, monkeypatch.context() as patch:
        rows_of_early_exits_stay(patch)
        report = audit(llm, replace(NO_LAW, n_prompts=3))
    assert found(report) & {"memory", "row", "engine"}


# -- seeded defects: of the memory -------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]

TRUNCATE, DECODE = Context.truncate, Context.decode


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    """One settled token too many is forgotten."""
    patch.setattr(Context, "truncate", lambda self, n: TRUNCATE(self, n - 1 if 1 < n < self.n_past else n))


def skipped(patch: pytest.MonkeyPatch) -> None:
    """Rejected guesses stay."""
    patch.setattr(Context, "truncate", lambda self, n: None if n else TRUNCATE(self, n))


def stale_row(patch: pytest.MonkeyPatch) -> None:
    """The books are right, but the last settled row is that of a rejected guess."""

    def sloppy(self: Context, n: int) -> None:
        if 1 < n < self.n_past:
            right, stale = self.tokens[n - 1], self.tokens[n]
            TRUNCATE(self, n - 1)
            DECODE(self, [stale], "none")
            self.tokens[-1] = right
        else:
            TRUNCATE(self, n)

    patch.setattr(Context, "truncate", sloppy)


def rows_left_in_the_engine(patch: pytest.MonkeyPatch) -> None:
    """The engine is never told of a rollback."""
    patch.setattr(LlamaContext, "_truncate", lambda self, n: None)


def a_trace(patch: pytest.MonkeyPatch) -> None:
    """Rejected guesses move later logits by a millionth: far under any noise bound."""
    original = LlamaContext._decode

    def leaky(self: Any, tokens: Any, logits: Any) -> Any:
        forward = original(self, tokens, logits)
        if getattr(self, "rejected", 0):
            forward.logits = forward.logits + np.float32(1e-6 * (self.rejected % 97))
        return forward

    def truncate(self: Any, n: int) -> None:
        if n < self.n_past:
            self.rejected = sum(self.tokens[n:])
        TRUNCATE(self, n)

    patch.setattr(LlamaContext, "_decode", leaky)
    patch.setattr(Context, "truncate", truncate)


def wrong_wide_rows(patch: pytest.MonkeyPatch) -> None:
    """Passes over more than eight tokens return their rows one place off."""
    original = LlamaContext._decode

    def shifted(self: Any, tokens: Any, logits: Any) -> Any:
        forward = original(self, tokens, logits)
        if len(tokens) > 8 and logits == "all":
            forward.logits = np.roll(forward.logits, 1, axis=0)
        return forward

    patch.setattr(LlamaContext, "_decode", shifted)


def state_not_put_back(patch: pytest.MonkeyPatch) -> None:
    """A saved state comes back in the books only."""
    patch.setattr(LlamaContext, "_import", lambda self, state: None)


@pytest.mark.parametrize(
    ("backend", "defect", "kind"),
    [
        ("reference", off_by_one, "memory"),
        ("reference", skipped, "memory"),
        ("reference", stale_row, "row"),
        ("llama-cpp", off_by_one, "memory"),
        ("llama-cpp", stale_row, "row"),
        ("llama-cpp", rows_left_in_the_engine, "engine"),
        ("llama-cpp", a_trace, "memory"),
        ("llama-cpp", wrong_wide_rows, "kernel"),
        ("ik-llama", state_not_put_back, "row"),
        ("ik-llama", stale_row, "row"),
        ("ik-llama", rows_left_in_the_engine, "row"),
    ],
)
def test_a_defect_of_the_memory_is_found(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, backend: str, defect: Patch, kind: str
) -> None:
    with opened(tiny, backend) as llm, monkeypatch.context() as patch:
        defect(patch)
        report = audit(llm, NO_LAW)
    assert kind in found(report)


def test_a_branch_that_is_kept_wrongly_is_found(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the rejected chain stay where those of the accepted branch belong."""
    monkeypatch.setattr(ReferenceContext, "_keep", lambda self, path: None)
    with opened(tiny, "reference") as llm:
        report = audit(llm, NO_LAW)
    assert found(report) & {"row", "memory"}


@pytest.mark.usefixtures("llama_cpp")
def test_a_checkpoint_that_is_not_restored_is_found(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny.recurrent, draft="ngram", backend="llama-cpp", n_ctx=2048) as llm, monkeypatch.context() as patch:
        patch.setattr(model_module, "restore_recurrent", lambda *arguments: None)
        report = audit(llm, NO_LAW)
    assert found(report) & {"row", "engine"}


# -- seeded defects: of verification and drafting ----------------------------------------------------------------------

VERIFY, MINUS = verification.verify, Distribution.minus


def patch_verify(patch: pytest.MonkeyPatch, faulty: Callable[..., Verdict]) -> None:
    def of_chains(draft: Draft, *rest: Any) -> Verdict:  # the defects are written for these
        return VERIFY(draft, *rest) if draft.branches else faulty(draft, *rest)

    patch.setattr(decoder, "verify", of_chains)
    patch.setattr(verification, "verify", of_chains)


def bonus_from_the_wrong_row(patch: pytest.MonkeyPatch) -> None:
    def faulty(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any) -> Verdict:
        verdict = VERIFY(draft, logits, tokens, params, noise)
        if verdict.kind != "bonus":
            return verdict
        known = [*tokens, *draft.ids]
        p = distribution(logits[len(draft) - 1], known, params)
        return Verdict(len(draft), p.sample(noise, len(known), verification.STREAM_TARGET), "bonus")

    patch_verify(patch, faulty)


def accepted_on_q(patch: pytest.MonkeyPatch) -> None:
    """A sampled guess is accepted with its own probability under the draft."""

    def faulty(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any) -> Verdict:
        for i, guess in enumerate(draft):
            if guess.dist is None:
                break
            p = distribution(logits[i], tokens, params)
            if noise.uniform(len(tokens) + i, verification.STREAM_ACCEPT) > guess.dist.prob(guess.id):
                token = p.minus(guess.dist).sample(noise, len(tokens) + i, verification.STREAM_RESIDUAL)
                return Verdict(i, token, "recovered")
        else:
            if len(draft):
                bonus = distribution(logits[-1], tokens, params)
                return Verdict(len(draft), bonus.sample(noise, len(tokens) + len(draft)), "bonus")
        return VERIFY(draft, logits, tokens, params, noise)

    patch_verify(patch, faulty)


def no_residual(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Distribution, "minus", lambda self, other: self)


def relaxed(patch: pytest.MonkeyPatch) -> None:
    """A guess within one logit of the best is good enough."""

    def faulty(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any) -> Verdict:
        if not params.greedy:
            return VERIFY(draft, logits, tokens, params, noise)
        for i, guess in enumerate(draft):
            if logits[i].max() - logits[i][guess.id] >= 1.0:
                return Verdict(i, int(np.argmax(logits[i])), "recovered")
        return Verdict(len(draft), int(np.argmax(logits[-1])), "bonus" if len(draft) else "plain")

    patch_verify(patch, faulty)


def relaxed_at_first(patch: pytest.MonkeyPatch) -> None:
    """Only the first guess of a draft is let off, and only by a tenth of a logit."""

    def faulty(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any) -> Verdict:
        verdict = VERIFY(draft, logits, tokens, params, noise)
        rejected = params.greedy and len(draft) > 0 and verdict.n_accepted == 0
        if rejected and logits[0].max() - logits[0][draft[0].id] < 0.1:
            return Verdict(1, int(np.argmax(logits[1])), "bonus" if len(draft) == 1 else "recovered")
        return verdict

    patch_verify(patch, faulty)


def looks_behind_a_rejection(patch: pytest.MonkeyPatch) -> None:
    """One wrong guess is forgiven if the next one is right."""

    def faulty(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any) -> Verdict:
        verdict = VERIFY(draft, logits, tokens, params, noise)
        at = verdict.n_accepted + 1
        if params.greedy and at < len(draft) and int(np.argmax(logits[at])) == draft[at].id:
            return Verdict(at + 1, int(np.argmax(logits[at + 1])), "recovered")
        return verdict

    patch_verify(patch, faulty)


def noise_one_place_off(patch: pytest.MonkeyPatch) -> None:
    """Half a defect: the law is right, but a seed does not give the same text with and without drafting."""

    def faulty(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any) -> Verdict:
        return VERIFY(draft, logits, [*tokens, 0] if len(draft) else tokens, params, noise)

    patch_verify(patch, faulty)


def lying_draft(patch: pytest.MonkeyPatch) -> None:
    """A guess is drawn evenly from the tokens of the law that is reported for it."""
    choose = Proposer.choose

    def liar(self: Proposer, position: int, **options: Any) -> tuple[int, Distribution | None]:
        token, dist = choose(self, position, **options)
        if dist is not None:
            token = int(dist.ids[int(self.noise.uniform(self._n_sampled, 9) * len(dist.ids))])
        return token, dist

    patch.setattr(Proposer, "choose", liar)


@pytest.mark.parametrize(
    ("backend", "defect", "kinds"),
    [
        ("reference", bonus_from_the_wrong_row, {"decision", "law"}),
        ("reference", accepted_on_q, {"law"}),
        ("reference", no_residual, {"law"}),
        ("reference", relaxed, {"decision"}),
        ("reference", relaxed_at_first, {"decision"}),
        ("reference", looks_behind_a_rejection, {"decision"}),
        ("reference", noise_one_place_off, {"decision"}),
        ("llama-cpp", bonus_from_the_wrong_row, {"decision", "law"}),
        ("llama-cpp", accepted_on_q, {"law"}),
    ],
)
def test_a_defect_of_verification_is_found(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, backend: str, defect: Patch, kinds: set[str]
) -> None:
    with opened(tiny, backend) as llm:
        defect(monkeypatch)
        report = audit(llm, SMALL if "law" in kinds else NO_LAW)
    assert found(report) == kinds


def test_penalties_blind_to_the_draft_are_found(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = verification.greedy_token
    length: list[int] = []

    def faulty(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any) -> Verdict:
        length[:] = [len(tokens[-params.repeat_last_n :])]
        return VERIFY(draft, logits, tokens, params, noise)

    patch_verify(monkeypatch, faulty)
    monkeypatch.setattr(verification, "greedy_token", lambda row, seen, *more: greedy(row, seen[: length[0]], *more))
    options = replace(NO_LAW, greedy=SamplingParams(repeat_penalty=1.5))
    with opened(tiny, "reference") as llm:
        assert "decision" in found(audit(llm, options))


@pytest.mark.parametrize("defect", [lying_draft, accepted_on_q])
def test_the_law_is_tested_through_the_whole_decoder(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, defect: Patch
) -> None:
    """Drawing from verification alone is switched off: what is left sees the tokens of real answers only."""
    options = replace(NO_LAW, n_prompts=4, n_tokens=64)
    with opened(tiny, "reference") as llm:
        defect(monkeypatch)
        report = audit(llm, options)
    arms = {defect.arm for defect in report.defects}
    assert arms - {"samples of drafters"} == {"decoding at a temperature"}, report.verdict
    assert ("samples of drafters" in arms) == (defect is lying_draft)


# -- what drafters draw ------------------------------------------------------------------------------------------------


def drops_unlikely_samples(patch: pytest.MonkeyPatch) -> None:
    """The bias that ``drafters/base.py`` warns of; verification itself is right."""

    def dropping(*given: Any) -> list[DraftToken]:
        found = proposed(*given)
        return [] if found and found[0].dist is not None and found[0].prob < 0.3 else found

    patch.setattr(draft_model, "proposed", dropping)


def test_a_drafter_that_throws_samples_away_is_found(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 400 samples; false alarm 1e-6. Bets on the tokens of answers alone do not see it."""
    options = replace(NO_LAW, n_prompts=5, n_tokens=48)
    with opened(tiny, "reference") as llm:
        drops_unlikely_samples(monkeypatch)
        report = audit(llm, options)
    assert [defect.arm for defect in report.defects] == ["samples of drafters"], report.verdict
    assert report.samples is not None
    assert report.samples["drawn"] > report.samples["sent"]


def drawn_and_sent(n: int, seed: int, keeps: Callable[[float, float], bool]) -> DrawnSamples:
    """Draws from laws over 50 tokens; ``keeps`` gets the probability of what came out and a number of chance."""
    rng, samples = np.random.default_rng(seed), DrawnSamples()
    for _ in range(n):
        probs = np.exp(rng.normal(0, 2, 50))
        law = Distribution(np.arange(50) * 3, probs / probs.sum())
        token = int(rng.choice(law.ids, p=law.probs))
        draft = [DraftToken(token, "audit", 0.5, law)] if keeps(law.prob(token), rng.random()) else []
        samples.observe([(token, law)], draft)
    return samples


def test_samples_left_out_by_chance_give_no_evidence() -> None:
    """Ville: a stake reaches 20 with probability under 1/20; of 100 games at most 15 may (false alarm 1e-4)."""
    games = (drawn_and_sent(150, seed, lambda prob, chance: chance < 0.6) for seed in range(100))
    assert sum(samples.evidence > math.log(20) for samples in games) <= 15


@pytest.mark.parametrize("least", [0.05, 0.3])
def test_samples_left_out_for_their_probability_are_found(least: float) -> None:
    """With 150 draws, of whatever seed among five."""
    games = [drawn_and_sent(150, seed, lambda prob, chance: prob >= least) for seed in range(5)]
    assert all(samples.rejected for samples in games)


# -- thinking ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def thinker(tmp_path: Path) -> Iterator[LLM]:
    with LLM(thinking_pair(tmp_path, "deepseek").target, draft="ngram", backend="reference", n_ctx=2048) as llm:
        assert llm.thinking is not None
        yield llm


def test_budgets_for_thinking_are_audited(thinker: LLM) -> None:
    report = audit(thinker, NO_LAW)
    assert found(report) == set(), report.verdict
    assert report.thinking is not None
    assert report.thinking["closed"] > 0


def test_guesses_dropped_behind_the_opening_of_a_block_are_found(thinker: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were accepted, and are judged again with the same noise."""
    monkeypatch.setattr(ThinkingReader, "draft_ends", frozenset(), raising=False)
    report = audit(thinker, NO_LAW)
    assert "decision" in found(report)
    assert any("tokens of thinking" in defect.arm for defect in report.defects)


# -- several answers at a time -----------------------------------------------------------------------------------------


def several_audited(tiny: TinyFiles, backend: str, draft: Sequence[str], spoil: Callable[[], None]) -> list[str]:
    """The kinds of defects that several answers at a time show."""
    open_backend(backend)
    target = (tiny.quick if backend == "reference" else tiny.pair).target
    log, prompts = AuditLog(), [(f"prompt {n}", [5 + (n + 3 * i) % 200 for i in range(20 + 17 * n)]) for n in range(4)]
    with LLM(target, draft=draft, backend=backend, n_ctx=512, parallel=3, idle=False) as llm:
        spoil()
        figures, judge = audit_several(
            llm, prompts, 16, [3, 8], log, lambda: False, lambda what: None, in_words(llm.vocab.display)
        )
    assert (figures.sequences, figures.answers) == (3, 8 if judge else figures.answers)
    assert figures.drafted > 0 or not judge
    return [defect.kind for defect in (*log.defects, *(judge.defects if judge else []))]


@pytest.mark.parametrize("backend", ["reference", "llama-cpp", "ik-llama"])
def test_several_answers_at_a_time_are_the_target_s(tiny: TinyFiles, backend: str) -> None:
    assert several_audited(tiny, backend, ["ngram"], lambda: None) == []


@pytest.mark.parametrize("backend", ["reference", "llama-cpp"])
def test_rows_of_another_answer_are_found(tiny: TinyFiles, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only passes that answers share have them: nothing else is wrong."""
    decode = SequenceBatch.decode

    def swapped(self: SequenceBatch, pieces: Sequence[Piece]) -> list[Forward]:
        forwards = decode(self, pieces)
        if len(forwards) > 1 and len(forwards[0]) == len(forwards[1]):
            forwards[0], forwards[1] = forwards[1], forwards[0]
        return forwards

    def spoil() -> None:
        monkeypatch.setattr(SequenceBatch, "decode", swapped)
        monkeypatch.setattr("localspec.commands.verify.several._deviations", lambda *_: [Deviation()] * 20)

    assert "row" in several_audited(tiny, backend, ["ngram"], spoil)


# -- the statistics ----------------------------------------------------------------------------------------------------


def laws(seed: int, n: int = 30) -> tuple[Distribution, Distribution]:
    """A target's law and a draft's, alike but not the same."""
    rng = np.random.default_rng(seed)
    row = rng.normal(0, 2, n).astype(np.float32)
    other = (row + rng.normal(0, 1, n)).astype(np.float32)
    params = SamplingParams(temperature=1.0)
    return distribution(row, (), params), distribution(other, (), params)


def bets_on(draw: Callable[[Distribution, Distribution, Noise], int], n: int, seed: int) -> Bets:
    bets, before = Bets(), None
    for i in range(n):
        p, q = laws(i % 40)
        bets.observe(p, draw(p, q, Noise(seed * 100_003 + i)), q, before)
        before = p
    return bets


def test_fair_tokens_give_no_evidence() -> None:
    """Ville: a stake reaches 20 with probability under 1/20; of 100 games at most 15 may (false alarm 1e-4)."""
    games = (bets_on(lambda p, q, noise: p.sample(noise, 0), 30, seed) for seed in range(100))
    assert sum(bets.evidence > math.log(20) for bets in games) <= 15


def test_a_defect_gives_the_evidence_that_was_promised() -> None:
    """A token from the draft now and then: found, and the evidence grows as its power says (4 standard deviations)."""

    def followed(p: Distribution, q: Distribution, noise: Noise) -> int:
        return (q if noise.uniform(0, 5) < 0.5 else p).sample(noise, 0)

    bets = bets_on(followed, 1500, 1)
    assert bets.rejected
    assert bets.strongest == SUSPICIONS["followed (sampled)"]
    bettor = bets._bettors["followed (sampled)"]
    assert abs(bettor.log_stake - bettor.expected) < 4 * math.sqrt(bettor.variance)
    assert bets.power()["followed (sampled)"] > 0.99
    assert bets_on(followed, 10, 1).power()["followed (sampled)"] < 0.5


def test_an_impossible_token_is_proof() -> None:
    bets = Bets()
    bets.observe(Distribution(np.array([1, 2]), np.array([0.5, 0.5])), 3, None, None)
    assert bets.rejected
    assert bets.figures()["evidence_nats"] is None


@pytest.mark.parametrize("law", ["exponential", "normal"])
def test_the_tail_bound_holds_as_often_as_it_says(law: str) -> None:
    """500 rows measured, 2000 tested, at a false-alarm rate of 0.05: of 300 audits at most 30 cross it (p < 1e-4)."""
    rng = np.random.default_rng(3)
    crossed = 0
    for _ in range(300):
        values = np.abs(getattr(rng, law)(size=2500))
        crossed += values[500:].max() > tail_bound(values[:500], 2000, 0.05)
    assert crossed <= 30


def test_a_bound_from_nothing_but_zeros_is_zero() -> None:
    assert tail_bound([0.0] * 50, 1000) == 0.0


def test_rows_are_compared_up_to_a_common_shift() -> None:
    row = np.random.default_rng(1).normal(0, 3, 1000).astype(np.float32)
    kept = KeptRow.of(row)
    assert kept.best == int(np.argmax(row))
    same = kept.compared(row.copy())
    assert (same.rms, same.swing, same.kl) == (0.0, 0.0, 0.0)
    shifted = kept.compared(row + np.float32(0.5))
    assert 0 < shifted.rms < 1e-5
    moved = row.copy()
    moved[kept.ids[3]] += 2.0
    assert kept.compared(moved).swing == pytest.approx(2.0, abs=1e-5)
    second = int(kept.ids[1])
    assert kept.gap(second) == pytest.approx(float(row.max() - row[second]))
    assert kept.gap(int(np.argmin(row))) == pytest.approx(float(kept.logits[0] - kept.logits[-1]))


def test_equal_logits_are_ranked_by_id() -> None:
    row = np.zeros(200, dtype=np.float32)
    row[[150, 20, 90]] = 5.0
    kept = KeptRow.of(row)
    assert kept.ids[:3].tolist() == [20, 90, 150]
    assert kept.ids[3:6].tolist() == [0, 1, 2]


def test_the_adversary_rejects_at_every_position() -> None:
    """Over a cycle, the errors fall on every position of a draft, and whole drafts are right too."""
    adversary, reach, answer = Adversary(1000, 16), 16, list(range(2000, 2100))
    adversary.know([1, 2, 3], answer, [7] * 100)
    firsts = set()
    for _ in range(3 * 17):
        adversary.begin([1, 2, 3])
        plan = Plan(reach)
        guesses = [token.id for token in adversary.draft([1, 2, 3], plan, None)]  # type: ignore[arg-type]
        assert adversary.draft([1, 2, 3], plan, None) == []  # type: ignore[arg-type]
        right = next((i for i, (a, b) in enumerate(zip(guesses, answer, strict=False)) if a != b), len(guesses))
        firsts.add((right, right == len(guesses)))
    assert {n for n, whole in firsts if not whole} == set(range(16))
    assert {n for n, whole in firsts if whole} == set(range(17))


def test_no_windows_are_no_error() -> None:
    law = VerificationLaw()
    law.examine([], SamplingParams(temperature=1.0), 10, lambda: False)
    assert not law.rejected


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.commands.verify.command.QUICK_DRAWS", 20)


def options_for(tiny: TinyFiles, **sampling: Any) -> RunOptions:
    pair = tiny.quick
    return RunOptions(
        str(pair.target), ("ngram", str(pair.draft)), load=LoadOptions("reference", n_ctx=2048), sampling=sampling
    )


FIELDS = (
    "format version lossless verdict interrupted model backend engine draft exact settings seconds noise arms memory "
    "sensitivity verification_law decoding_law samples thinking several ties rechecked defects"
)


def test_the_command_says_so_in_one_sentence(tiny: TinyFiles) -> None:
    rows_module = localspec("verify", tiny.quick.target, "--backend", "reference", "--draft", "ngram", "--quick",
                       "--prompts", "1")  # fmt: skip
    assert rows_module.returncode == 0, rows_module.stderr.decode()
    first = rows_module.stdout.decode().splitlines()[0]
    assert first.startswith("lossless here: ")
    assert first.endswith("each of them the model's own, to the bit")
    short, _, details = rows_module.stdout.decode().partition("Greedy answers")
    assert not any(word in short for word in ("nats", "argmax", "law", "logits", "adversary"))
    assert "3 answers at a time" in short
    assert "adversary" in details
    assert b"prompt 1 of 1" in rows_module.stderr


@pytest.mark.usefixtures("few_draws")
def test_the_json_object_has_the_documented_fields(tiny: TinyFiles, capsys: pytest.CaptureFixture[str]) -> None:

    assert verify_command(options_for(tiny, seed=5, temperature=0.7), prompts=1, quick=True, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == FIELDS.split()
    assert (found["format"], found["version"], found["lossless"]) == ("localspec-audit", 1, True)
    assert found["settings"]["sampling"]["temperature"] == 0.7
    schema = files("localspec.commands.verify").joinpath("SCHEMA.md").read_text(encoding="utf-8")
    parts = [found[name] for name in ("noise", "memory", "decoding_law", "samples", "several")]
    for name in (*found, *found["arms"][0], *(name for part in parts for name in part)):
        assert name in schema, name


@pytest.mark.usefixtures("few_draws")
def test_a_defect_is_exit_status_1(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    relaxed(monkeypatch)
    assert verify_command(options_for(tiny), prompts=1, quick=True) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("NOT lossless here: ")
    assert any(line.split()[:2] == ["✗", "decision"] for line in lines)


@pytest.mark.parametrize(("reason", "said"), [("no memory for it", "no memory for it"), (None, "too few tokens")])
def test_what_was_not_measured_has_no_tick_and_is_said_once(tiny: TinyFiles, reason: str | None, said: str) -> None:
    with opened(tiny, "reference") as llm:
        report = audit(llm, NO_LAW)
    report.several = asdict(SeveralFigures(sequences=3, reason=reason, bound=None))
    report.noise["rows"], report.interrupted = 0, True
    rows = [row for part in report_of(report).parts if isinstance(part, Findings) for row in part.rows]
    status = {row.name: row.status for row in rows}
    assert (status["words"], status["engine"], status["several"]) == ("ok", "note", "note")
    assert [said in row.text for row in rows].count(True) == 1


def test_ctrl_c_prints_what_was_checked(tmp_path: Path) -> None:
    model = write_endless(tmp_path / "endless.gguf")
    line = ["verify", model, "--backend", "reference", "--ctx", "4000", "--draft", "ngram", "--json"]
    out, _ = interrupted("said prompt 2", line)
    report = json.loads(out)
    assert report["interrupted"] is True
    assert report["lossless"] is None
    assert report["verdict"].startswith("interrupted; no defect so far: ")
    assert report["arms"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--prompts", "0"], "--prompts"),
        (["--max-tokens", "3"], "--max-tokens"),
        (["--ctx", "64"], "--ctx"),
        (["--draft-length", "x"], "draft length"),
    ],
)
def test_bad_usage(tiny: TinyFiles, arguments: list[str], part: str) -> None:
    rows_module = localspec("verify", tiny.quick.target, "--backend", "reference", "--draft", "ngram", *arguments)
    errors = rows_module.stderr.decode()
    assert rows_module.returncode == 2, errors
    assert part in errors.splitlines()[-1]
    assert rows_module.stdout == b""


@pytest.mark.real
@pytest.mark.parametrize("backend", ["llama-cpp", "ik-llama"])
def test_a_real_model_is_lossless(real_model: Callable[[str], Path], backend: str) -> None:
    open_backend(backend)
    with LLM(real_model("smollm2-135m"), draft="ngram", backend=backend, n_ctx=1024) as llm:
        report = audit(llm, AuditOptions(3, 24, SMALL.greedy, SMALL.sampled, n_windows=2, n_draws=100))
    assert found(report) == set(), report.verdict
    assert report.largest_deviation > 0


@pytest.mark.real
@pytest.mark.parametrize("backend", ["llama-cpp", "ik-llama"])
def test_a_wrong_memory_of_a_real_model_is_found(
    real_model: Callable[[str], Path], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_backend(backend)
    with LLM(real_model("smollm2-135m"), draft="ngram", backend=backend, n_ctx=1024) as llm:
        stale_row(monkeypatch)
        report = audit(llm, AuditOptions(2, 24, SMALL.greedy, SMALL.sampled, n_windows=1, n_draws=10))
        monkeypatch.undo()
    assert "row" in found(report)


def test_contexts_that_take_branches_round_in_their_own_way(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.engine.pair.FLAT_ROW", 1e9)
    with opened_with_heads(tiny, "ik-llama", tmp_path) as llm:
        assert llm.inspect().context.can_branch
        report = audit(llm, replace(SMALL, n_prompts=3))
    assert found(report) == set(), report.verdict
