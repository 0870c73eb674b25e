"""``verify``: healthy pairs pass, every seeded defect is found, and the statistics behind it keep their promises."""

from __future__ import annotations

import json
import math
import random
import re
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
from localspec.backends.llama import rollback
from localspec.backends.llama.model import LlamaContext
from localspec.backends.reference import ReferenceContext
from localspec.commands.options import Watch
from localspec.commands.verify.audit import Audit, AuditOptions
from localspec.commands.verify.command import QUICK, report_of
from localspec.commands.verify.drafters import Adversary
from localspec.commands.verify.law import SUSPICIONS, Bets, DrawnSamples
from localspec.commands.verify.rows import AuditResult, Deviation, KeptRow, tail_bound
from localspec.commands.verify.several import SeveralFigures, audit_several
from localspec.report.model import Findings
from localspec.sampling.sampling import Distribution, Noise, distribution
from localspec.spec_decode import decoder, verification
from localspec.spec_decode.detokenizer import ThinkingReader
from localspec.spec_decode.drafters import draft_model
from localspec.spec_decode.drafters.base import Plan, Proposer, proposed
from localspec.spec_decode.rounds import Draft, DraftToken, Verdict
from tests.conftest import TinyFiles, open_backend
from tests.support.endless import write_endless
from tests.support.ggufs import write_glm
from tests.support.heads import write_random_head
from tests.support.interrupting import interrupted
from tests.support.program import localspec
from tests.support.published_heads import write_dflash, write_eagle3
from tests.support.thinkers import thinking_pair

pytestmark = pytest.mark.usefixtures("measured_home")

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


PUBLISHED: dict[str, Callable[[Path, Path], tuple[Path, str | Path]]] = {
    "mtp": lambda target, folder: (write_glm(folder / "mtp.gguf"), "mtp"),
    "eagle3": lambda target, folder: (target, write_eagle3(target, folder / "eagle3.gguf")),
    "dflash": lambda target, folder: (target, write_dflash(target, folder / "dflash.gguf")),
}
"""Heads that models are published with: target and drafter."""


@contextmanager
def opened(tiny: TinyFiles, backend: str, kind: str = "pair") -> Iterator[LLM]:
    """Tiny models on an engine: a pair (the reference gets one that takes a tenth of a millisecond a token), a target
    with a head and an early exit, or one whose memory cannot simply be cut."""
    open_backend(backend)
    pair, draft = (tiny.quick if backend == "reference" else tiny.pair), ["ngram"]
    target = pair.target if kind in ("pair", "heads", *PUBLISHED) else getattr(tiny, kind)
    if kind == "pair":
        draft.append(str(pair.draft))
    elif kind in PUBLISHED:
        folder = tiny.folder / "audited"  # not beside the target, where ``auto`` would find them
        folder.mkdir(exist_ok=True)
        target, head = PUBLISHED[kind](target, folder)
        draft.append(str(head))
    elif kind == "heads":
        head = write_random_head(target, tiny.folder / f"audited-{target.stem}-head.gguf", taps=("layer:0",))
        draft += [f"head:{head}", "early-exit:1"]
    with LLM(target, draft=draft, backend=backend, n_ctx=2048, light_draft=False, idle=kind != "heads") as llm:
        yield llm


def audited(tiny: TinyFiles, backend: str, kind: str = "pair", options: AuditOptions = SMALL) -> AuditResult:
    with opened(tiny, backend, kind) as llm:
        return audit(llm, options)


def audit(llm: LLM, options: AuditOptions = SMALL) -> AuditResult:
    report = llm.run(lambda pair: Audit(llm, pair, options, Watch(lambda what, done: None)).run())
    json.dumps(report.as_dict(), allow_nan=False, default=sorted)
    return report


def found(report: AuditResult) -> set[str]:
    """The kinds of defects; the verdict has to say so too."""
    assert (report.lossless is False) == bool(report.defects)
    assert report.verdict.startswith("NOT lossless here" if report.defects else "lossless here")
    return {defect.kind for defect in report.defects}


def test_the_reference_is_equal_to_the_bit(tiny: TinyFiles) -> None:
    report = audited(tiny, "reference")
    assert found(report) == set()
    assert (report.noise["bound"], report.largest_deviation, report.ties) == (0.0, 0.0, [])
    assert (report.memory["bitwise"], report.sensitivity["found"], report.decoding_law["tokens"]) == (True, 1.0, 40)
    everything = {arm.arm: arm for arm in report.arms}
    adversary, branches = everything["adversary ×16"], everything["branches"]
    assert len(adversary.rejected_at) >= 3
    assert branches.accepted > branches.rounds
    assert (max(adversary.widths), max(branches.widths)) == (17, 19)
    assert all(arm.answers == arm.complete for arm in everything.values())


def test_fast_engines_stay_under_their_noise(tiny: TinyFiles, fast_backend: Any) -> None:
    report = audited(tiny, fast_backend.name)
    assert found(report) == set(), report.verdict
    assert report.largest_deviation <= report.noise["bound"] or report.rechecked["explained"]
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


def test_a_target_alone_is_audited_and_penalties_are_part_of_what_is_compared(tiny: TinyFiles) -> None:
    chain = {"repeat_penalty": 1.3, "presence_penalty": 0.5}
    options = replace(
        SMALL, greedy=SamplingParams(**chain), sampled=SamplingParams(temperature=0.8, **chain), draft_length=5
    )
    with LLM(tiny.quick.target, draft=None, backend="reference", n_ctx=2048) as llm:
        reports = [audit(llm), audited(tiny, "reference", options=options)]
    assert [found(report) for report in reports] == [set(), set()], [report.verdict for report in reports]
    arms = {"plain", "adversary ×16", "near misses ×2", "branches"}
    assert {arm.arm for arm in reports[0].arms if not arm.sampled} == arms
    assert any(arm.arm.endswith("×5") for arm in reports[1].arms)


@pytest.mark.parametrize("backend", ["reference", "llama-cpp", "ik-llama"])
def test_heads_are_audited_too(tiny: TinyFiles, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ik-llama in contexts that take branches, which round in their own way."""
    monkeypatch.setattr("localspec.engine.fit.FLAT_ROW", 1e9)
    with opened(tiny, backend, "heads") as llm:
        assert backend != "ik-llama" or llm.inspect().context.can_branch
        report = audit(llm, replace(NO_LAW, n_prompts=3, n_tokens=16))
    assert found(report) == set(), report.verdict
    drafted = {arm.arm: arm.drafted for arm in report.arms}
    assert min(drafted["head ×8"], drafted["hot early-exit ×3"]) > 0


@pytest.mark.parametrize("kind", ["recurrent", "sliding", *PUBLISHED])
def test_memories_that_cannot_simply_be_cut_and_published_heads_are_sound(tiny: TinyFiles, kind: str) -> None:
    report = audited(tiny, "llama-cpp", kind, NO_LAW)
    assert found(report) == set(), report.verdict
    drafted = sum(arm.drafted for arm in report.arms if arm.arm.startswith(("mtp", "head")))
    assert (drafted > 0) == (kind in PUBLISHED)


Patch = Callable[[pytest.MonkeyPatch], None]

TRUNCATE, DECODE = Context.truncate, Context.decode


def rows_of_early_exits_stay(patch: pytest.MonkeyPatch) -> None:
    """Draft tokens that went through some layers only are left in the target's memory, and nobody looks."""
    propose = decoder.SpeculativeDecoder.propose

    def staying(self: decoder.SpeculativeDecoder) -> decoder.TargetPass:
        with patch.context() as inner:
            inner.setattr(self.target, "truncate", lambda n: None)
            return propose(self)

    patch.setattr(decoder.SpeculativeDecoder, "propose", staying)
    patch.setattr(Context, "_partial", property(lambda self: None, lambda self, given: None), raising=False)


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    """One settled token too many is forgotten."""
    patch.setattr(Context, "truncate", lambda self, n: TRUNCATE(self, n - 1 if 1 < n < self.n_past else n))


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


def never(owner: Any, name: str) -> Patch:
    """What an engine is asked for is not done."""
    return lambda patch: patch.setattr(owner, name, lambda *given: None)


rows_left_in_the_engine = never(LlamaContext, "_truncate")
state_not_put_back = never(LlamaContext, "_import")
branch_kept_wrongly = never(ReferenceContext, "_keep")
checkpoint_not_restored = never(rollback, "restore")


@pytest.mark.parametrize(
    ("backend", "models", "defect", "kinds"),
    [
        ("reference", "pair", off_by_one, {"memory"}),
        ("reference", "pair", branch_kept_wrongly, {"row", "memory"}),
        ("reference", "heads", rows_of_early_exits_stay, {"memory", "row", "engine"}),
        ("llama-cpp", "pair", stale_row, {"row"}),
        ("llama-cpp", "pair", rows_left_in_the_engine, {"engine"}),
        ("llama-cpp", "pair", a_trace, {"memory"}),
        ("llama-cpp", "pair", wrong_wide_rows, {"kernel"}),
        ("llama-cpp", "recurrent", checkpoint_not_restored, {"row", "engine"}),
        ("ik-llama", "pair", state_not_put_back, {"row"}),
    ],
)
def test_a_defect_of_the_memory_is_found(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, backend: str, models: str, defect: Patch, kinds: set[str]
) -> None:
    """As one of these kinds at least."""
    with opened(tiny, backend, models) as llm, monkeypatch.context() as patch:
        defect(patch)
        report = audit(llm, replace(NO_LAW, n_prompts=3 if models == "heads" else 1))
    assert found(report) & kinds


VERIFY = verification.verify


def verifying(faulty: Callable[..., Verdict]) -> Patch:
    """A defect from a verification of chains, for which they are written."""

    def of_chains(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any, ids: Any = None) -> Verdict:
        if draft.branches:
            return VERIFY(draft, logits, tokens, params, noise, ids)
        assert ids is None
        return faulty(draft, logits, tokens, params, noise)

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(decoder, "verify", of_chains)
        patch.setattr(verification, "verify", of_chains)

    apply.__name__ = faulty.__name__
    return apply


@verifying
def bonus_from_the_wrong_row(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any) -> Verdict:
    verdict = VERIFY(draft, logits, tokens, params, noise)
    if verdict.kind != "bonus":
        return verdict
    known = [*tokens, *draft.ids]
    p = distribution(logits[len(draft) - 1], known, params)
    return Verdict(len(draft), p.sample(noise, len(known), verification.STREAM_TARGET), "bonus")


@verifying
def accepted_on_q(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any) -> Verdict:
    """A sampled guess is accepted with its own probability under the draft."""
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


def no_residual(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Distribution, "minus", lambda self, other: self)


@verifying
def relaxed_at_first(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any) -> Verdict:
    """Only the first guess of a draft is let off, and only by a tenth of a logit."""
    verdict = VERIFY(draft, logits, tokens, params, noise)
    rejected = params.greedy and len(draft) > 0 and verdict.n_accepted == 0
    if rejected and logits[0].max() - logits[0][draft[0].id] < 0.1:
        return Verdict(1, int(np.argmax(logits[1])), "bonus" if len(draft) == 1 else "recovered")
    return verdict


@verifying
def looks_behind_a_rejection(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any) -> Verdict:
    """One wrong guess is forgiven if the next one is right."""
    verdict = VERIFY(draft, logits, tokens, params, noise)
    at = verdict.n_accepted + 1
    if params.greedy and at < len(draft) and int(np.argmax(logits[at])) == draft[at].id:
        return Verdict(at + 1, int(np.argmax(logits[at + 1])), "recovered")
    return verdict


@verifying
def noise_one_place_off(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any) -> Verdict:
    """Half a defect: the law is right, but a seed does not give the same text with and without drafting."""
    return VERIFY(draft, logits, [*tokens, 0] if len(draft) else tokens, params, noise)


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
    ("defect", "kinds"),
    [
        (bonus_from_the_wrong_row, {"decision", "law"}),
        (accepted_on_q, {"law"}),
        (no_residual, {"law"}),
        (relaxed_at_first, {"decision"}),
        (looks_behind_a_rejection, {"decision"}),
        (noise_one_place_off, {"decision"}),
    ],
)
def test_a_defect_of_verification_is_found(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, defect: Patch, kinds: set[str]
) -> None:
    with opened(tiny, "reference") as llm:
        defect(monkeypatch)
        report = audit(llm, SMALL if "law" in kinds else NO_LAW)
    assert found(report) == kinds


def test_penalties_blind_to_the_draft_are_found(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy, length = verification.greedy_token, list[int]()

    @verifying
    def blind(draft: Draft, logits: Any, tokens: Any, params: Any, noise: Any) -> Verdict:
        length[:] = [len(tokens[-params.repeat_last_n :])]
        return VERIFY(draft, logits, tokens, params, noise)

    blind(monkeypatch)
    monkeypatch.setattr(verification, "greedy_token", lambda row, seen, *more: greedy(row, seen[: length[0]], *more))
    options = replace(NO_LAW, greedy=SamplingParams(repeat_penalty=1.5))
    assert "decision" in found(audited(tiny, "reference", options=options))


@pytest.mark.parametrize("defect", [lying_draft, accepted_on_q])
def test_the_law_is_tested_through_the_whole_decoder(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, defect: Patch
) -> None:
    """Drawing from verification alone is switched off: what is left sees the tokens of real answers only."""
    with opened(tiny, "reference") as llm:
        defect(monkeypatch)
        report = audit(llm, replace(NO_LAW, n_prompts=4, n_tokens=64))
    arms = {defect.arm for defect in report.defects}
    assert arms - {"samples of drafters"} == {"decoding at a temperature"}, report.verdict
    assert ("samples of drafters" in arms) == (defect is lying_draft)


def test_a_drafter_that_throws_samples_away_is_found(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias that ``drafters/base.py`` warns of; verification itself is right.

    Some 400 samples; false alarm 1e-6. Bets on the tokens of answers alone do not see it.
    """

    def dropping(*given: Any) -> list[DraftToken]:
        draft = proposed(*given)
        return [] if draft and draft[0].dist is not None and draft[0].prob < 0.3 else draft

    with opened(tiny, "reference") as llm:
        monkeypatch.setattr(draft_model, "proposed", dropping)
        report = audit(llm, replace(NO_LAW, n_prompts=5, n_tokens=48))
    assert [defect.arm for defect in report.defects] == ["samples of drafters"], report.verdict
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


@pytest.mark.parametrize("least", [0.05, 0.3])
def test_samples_left_out_for_their_probability_are_found(least: float) -> None:
    """With 150 draws, of whatever seed among five."""
    assert all(drawn_and_sent(150, seed, lambda prob, chance: prob >= least).rejected for seed in range(5))


def test_budgets_for_thinking_are_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses dropped behind the opening of a block were accepted, and are judged again with the same noise: found."""
    with LLM(thinking_pair(tmp_path, "deepseek").target, draft="ngram", backend="reference", n_ctx=2048) as llm:
        sound = audit(llm, NO_LAW)
        monkeypatch.setattr(ThinkingReader, "draft_ends", frozenset(), raising=False)
        wrong = audit(llm, NO_LAW)
    assert (found(sound), sound.thinking["closed"] > 0) == (set(), True), sound.verdict
    assert "decision" in found(wrong)
    assert any("tokens of thinking" in defect.arm for defect in wrong.defects)


def several_audited(tiny: TinyFiles, backend: str, spoil: Callable[[], None] = lambda: None) -> list[str]:
    """The kinds of defects that several answers at a time show."""
    open_backend(backend)
    target = (tiny.quick if backend == "reference" else tiny.pair).target
    prompts = [(f"prompt {n}", [5 + (n + 3 * i) % 200 for i in range(20 + 17 * n)]) for n in range(4)]
    with LLM(target, draft=["ngram"], backend=backend, n_ctx=512, parallel=3, idle=False) as llm:
        spoil()
        figures, defects, _ = audit_several(llm, prompts, 16, [3, 8], Watch(lambda what, done: None))
    assert figures.sequences == 3
    if figures.bound is not None:  # the audit came to its end
        assert (figures.answers, figures.drafted > 0) == (8, True)
    return [defect.kind for defect in defects]


@pytest.mark.parametrize("backend", ["reference", "llama-cpp", "ik-llama"])
def test_several_answers_at_a_time_are_the_target_s(tiny: TinyFiles, backend: str) -> None:
    assert several_audited(tiny, backend) == []


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

    assert "row" in several_audited(tiny, backend, spoil)


def bets_on(draw: Callable[[Distribution, Distribution, Noise], int], n: int, seed: int) -> Bets:
    """Bets on tokens of a target's laws over 30 tokens, where drafts have laws that are alike but not the same."""
    bets, before, params = Bets(), None, SamplingParams(temperature=1.0)
    for i in range(n):
        rng = np.random.default_rng(i % 40)
        row = rng.normal(0, 2, 30).astype(np.float32)
        p = distribution(row, (), params)
        q = distribution((row + rng.normal(0, 1, 30)).astype(np.float32), (), params)
        bets.observe(p, draw(p, q, Noise(seed * 100_003 + i)), q, before)
        before = p
    return bets


def test_what_is_fair_gives_no_evidence() -> None:
    """Ville: a stake reaches 20 with probability under 1/20; of 100 games at most 15 may (false alarm 1e-4)."""
    for game in (  # samples left out by chance, and tokens of their law
        lambda seed: drawn_and_sent(150, seed, lambda prob, chance: chance < 0.6),
        lambda seed: bets_on(lambda p, q, noise: p.sample(noise, 0), 30, seed),
    ):
        assert sum(game(seed).evidence > math.log(20) for seed in range(100)) <= 15


def test_a_defect_gives_the_evidence_that_was_promised() -> None:
    """A token from the draft now and then: found, and the evidence grows as its power says (4 standard deviations)."""

    def followed(p: Distribution, q: Distribution, noise: Noise) -> int:
        return (q if noise.uniform(0, 5) < 0.5 else p).sample(noise, 0)

    bets = bets_on(followed, 1500, 1)
    assert (bets.rejected, bets.strongest) == (True, SUSPICIONS["followed (sampled)"])
    bettor = bets._bettors["followed (sampled)"]
    assert abs(bettor.log_stake - bettor.expected) < 4 * math.sqrt(bettor.variance)
    assert bets.power()["followed (sampled)"] > 0.99
    assert bets_on(followed, 10, 1).power()["followed (sampled)"] < 0.5
    bets = Bets()  # an impossible token is proof
    bets.observe(Distribution(np.array([1, 2]), np.array([0.5, 0.5])), 3, None, None)
    assert (bets.rejected, bets.figures()["evidence_nats"]) == (True, None)


@pytest.mark.parametrize("law", ["exponential", "normal"])
def test_the_tail_bound_holds_as_often_as_it_says(law: str) -> None:
    """500 rows measured, 2000 tested, at a false-alarm rate of 0.05: of 300 audits at most 30 cross it (p < 1e-4)."""
    rng, crossed = np.random.default_rng(3), 0
    for _ in range(300):
        values = np.abs(getattr(rng, law)(size=2500))
        crossed += values[500:].max() > tail_bound(values[:500], 2000, 0.05)
    assert crossed <= 30
    assert tail_bound([0.0] * 50, 1000) == 0.0


def test_rows_are_compared_up_to_a_common_shift_and_ranked_by_id_where_equal() -> None:
    row = np.random.default_rng(1).normal(0, 3, 1000).astype(np.float32)
    kept, moved = KeptRow.of(row), row.copy()
    assert kept.best == int(np.argmax(row))
    assert kept.compared(row.copy()) == Deviation()
    assert 0 < kept.compared(row + np.float32(0.5)).rms < 1e-5
    moved[kept.ids[3]] += 2.0
    assert kept.compared(moved).swing == pytest.approx(2.0, abs=1e-5)
    second = int(kept.ids[1])
    assert kept.gap(second) == pytest.approx(float(row.max() - row[second]))
    assert kept.gap(int(np.argmin(row))) == pytest.approx(float(kept.logits[0] - kept.logits[-1]))
    flat = np.zeros(200, dtype=np.float32)
    flat[[150, 20, 90]] = 5.0
    assert KeptRow.of(flat).ids[:6].tolist() == [20, 90, 150, 0, 1, 2]


def test_the_adversary_rejects_at_every_position() -> None:
    """Over a cycle, the errors fall on every position of a draft, and whole drafts are right too."""
    adversary, answer, firsts = Adversary(1000, 16), list(range(2000, 2100)), set()
    adversary.know([1, 2, 3], answer, [7] * 100)
    for _ in range(3 * 17):
        adversary.begin([1, 2, 3])
        guesses = [token.id for token in adversary.draft([1, 2, 3], Plan(16), None)]  # type: ignore[arg-type]
        assert adversary.draft([1, 2, 3], Plan(16), None) == []  # type: ignore[arg-type]
        right = next((i for i, (a, b) in enumerate(zip(guesses, answer, strict=False)) if a != b), len(guesses))
        firsts.add((right, right == len(guesses)))
    assert firsts == {(n, False) for n in range(16)} | {(n, True) for n in range(17)}


Verify = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verify(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Exit status, standard output, standard error."""
    monkeypatch.setitem(QUICK, "n_draws", 20)
    options = ["--draft", "ngram", "--draft", tiny.quick.draft, "--backend", "reference", "--quick"]

    def call(*arguments: str) -> tuple[int, str, str]:
        done = localspec("verify", tiny.quick.target, *options, *arguments)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return call


def test_the_command_says_so_in_one_sentence(verify: Verify) -> None:
    status, out, errors = verify("--prompts", "1")
    assert (status, "prompt 1 of 1" in errors) == (0, True)
    assert re.match(r"lossless here: .* each of them the model's own, to the bit\n", out)
    short, _, details = out.partition("Greedy answers")
    assert not any(word in short for word in ("nats", "argmax", "law", "logits", "adversary"))
    assert ("3 answers at a time" in short, "adversary" in details) == (True, True)
    greedy, _, sampled = details.partition("Answers at temperature")
    assert ("ties" in greedy, "ties" in sampled) == (True, False)  # of a sample there is none


def test_the_json_object_has_the_documented_fields(verify: Verify) -> None:
    status, out, _ = verify("--prompts", "1", "--seed", "5", "--temperature", "0.7", "--json")
    found = json.loads(out)
    assert (status, found["format"], found["version"], found["lossless"]) == (0, "localspec-audit", 1, True)
    assert found["settings"]["sampling"]["temperature"] == 0.7
    schema = files("localspec.commands.verify").joinpath("SCHEMA.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)", schema, re.MULTILINE)
    assert {*found} == {*rows, "format", "version", "backend", "engine", "draft"}  # those share a row, or have none
    parts = [found[name] for name in ("noise", "memory", "decoding_law", "samples", "several")]
    for name in (*found["arms"][0], *(name for part in parts for name in part)):
        assert name in schema, name


def test_a_defect_is_exit_status_1(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    looks_behind_a_rejection(monkeypatch)
    status, out, _ = verify("--prompts", "1")
    assert (status, out.startswith("NOT lossless here: ")) == (1, True)
    assert any(line.split()[:2] == ["✗", "decision"] for line in out.splitlines())


def test_what_was_not_measured_has_no_tick_and_is_said_once(tiny: TinyFiles) -> None:
    report = audited(tiny, "reference", options=NO_LAW)
    report.noise["rows"], report.interrupted = 0, True
    for reason, said in (("no memory for it", "no memory for it"), (None, "too few tokens")):
        report.several = asdict(SeveralFigures(sequences=3, reason=reason, bound=None))
        rows = [row for part in report_of(report).parts if isinstance(part, Findings) for row in part.rows]
        status = {row.name: row.status for row in rows}
        assert (status["words"], status["engine"], status["several"]) == ("ok", "note", "note")
        assert [said in row.text for row in rows].count(True) == 1


def test_ctrl_c_prints_what_was_checked(tmp_path: Path) -> None:
    model = write_endless(tmp_path / "endless.gguf")
    line = ["verify", model, "--backend", "reference", "--ctx", "4000", "--draft", "ngram", "--json"]
    out, _ = interrupted("said prompt 2", line)
    report = json.loads(out)
    assert (report["interrupted"], report["lossless"], bool(report["arms"])) == (True, None, True)
    assert report["verdict"].startswith("interrupted; no defect so far: ")


def test_bad_usage(verify: Verify) -> None:
    for name, value in (("--prompts", "0"), ("--max-tokens", "3"), ("--ctx", "64")):
        status, out, errors = verify(name, value)
        assert (status, out, name in errors.splitlines()[-1]) == (2, "", True), errors


@pytest.mark.real
@pytest.mark.parametrize("backend", ["llama-cpp", "ik-llama"])
def test_a_real_model_is_lossless_and_a_wrong_memory_is_found(
    real_model: Callable[[str], Path], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_backend(backend)
    with LLM(real_model("smollm2-135m"), draft="ngram", backend=backend, n_ctx=1024) as llm:
        sound = audit(llm, replace(SMALL, n_prompts=3, n_tokens=24, n_draws=100))
        stale_row(monkeypatch)
        wrong = audit(llm, replace(NO_LAW, n_prompts=2, n_tokens=24))
        monkeypatch.undo()
    assert found(sound) == set(), sound.verdict
    assert sound.largest_deviation > 0
    assert "row" in found(wrong)
