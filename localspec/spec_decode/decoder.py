"""Speculative decoding: one round, on one screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from localspec.backends.base import Context
from localspec.errors import EngineError, PromptTooLong, UsageError
from localspec.sampling.logprobs import token_logprobs
from localspec.sampling.sampling import Noise, NotNumbers, SamplingParams
from localspec.spec_decode.controller import Controller
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Drafter
from localspec.spec_decode.drafters.group import DrafterGroup
from localspec.spec_decode.proposer import SamplingProposer
from localspec.spec_decode.rounds import EmittedToken, FinishReason, Round, TokenKind
from localspec.spec_decode.verification import verify

if TYPE_CHECKING:
    from localspec.sampling.structured.constraint import Constraint

PREFILL_CHUNK = 128
"""Prompt tokens fed between two looks at the cancel flag: about a second on a slow laptop."""


class SpeculativeDecoder:
    """Decodes with a target context and any number of drafters.

    Between calls the target context holds a prefix of everything said so far, so a prompt that continues it costs only
    what is new. Plain decoding is the same loop with an empty draft.

    Args:
        target: the target's context.
        drafters: in the order they are asked.
        controller: decides how far to draft.
        lost: takes a drafter that failed, and why; the answer goes on without it.
    """

    def __init__(
        self,
        target: Context,
        drafters: Sequence[Drafter],
        controller: Controller,
        lost: Callable[[Drafter, str], None] = lambda drafter, why: None,
    ) -> None:
        self.target = target
        self.drafters = DrafterGroup(drafters, self._without)
        self.controller = controller
        self._lost = lost

    def _without(self, drafter: Drafter, why: str) -> None:
        self.controller.lose(drafter.source)
        self._lost(drafter, why)

    def prefill(self, prompt: Sequence[int], cancelled: Callable[[], bool]) -> int:
        """Bring the target up to all of the prompt but its last token.

        Returns:
            How many prompt tokens were in the memory already.

        Raises:
            UsageError: the prompt is empty.
            PromptTooLong: it leaves no room for an answer.
        """
        if not prompt:
            raise UsageError("the prompt is empty: there is nothing to continue")
        if len(prompt) >= self.target.n_ctx:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens and the context holds {self.target.n_ctx}, "
                "answer included; shorten it or raise --ctx"
            )
        reused = self.target.reuse(prompt[:-1])
        for start in range(reused, len(prompt) - 1, PREFILL_CHUNK):
            if cancelled():
                break
            chunk = prompt[start : min(start + PREFILL_CHUNK, len(prompt) - 1)]
            self.target.decode(chunk, "none")
            self.drafters.process(chunk, None)
        return reused

    def rounds(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        text: TextAssembler,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        n_logprobs: int | None = None,
        constraint: Constraint | None = None,
    ) -> Iterator[Round]:
        """Decode round by round until an end token, a stop string, the budget or the cancel flag.

        Invariant at the top of the loop: ``tokens`` is everything settled, and the target holds all of it but the last.

        Args:
            prompt: token ids, already prefilled.
            params: the sampling parameters.
            text: turns settled tokens into text and watches for stop strings.
            cancelled: polled once a round.
            n_logprobs: judge every emitted token by the target's row, naming that many alternatives; None does not.
            constraint: the grammar that the answer follows, at its beginning.

        Yields:
            One ``Round`` per target pass; the last one carries ``finish_reason``.
        """
        tokens, noise = list(prompt), Noise(params.seed)
        proposer = SamplingProposer(params, noise, constraint, self.target.model.n_vocab)
        end_tokens = frozenset() if params.ignore_eos else self.target.model.vocab.eog
        budget = min(params.max_tokens or self.target.n_ctx, self.target.n_ctx - len(tokens))
        self.drafters.begin(tokens)
        self.controller.begin(params, len(tokens))
        index = 0
        while not cancelled():
            started = time.perf_counter()
            plan = self.controller.plan(room=budget - 1, n_past=self.target.n_past)
            draft = self.drafters.draft(tokens, plan, proposer, end_tokens)
            drafted = time.perf_counter()
            forward = self.target.decode([tokens[-1], *draft.ids])
            passed = time.perf_counter()
            masked = constraint.rows(forward.logits, draft.ids, params) if constraint else forward.logits
            try:
                verdict = verify(draft, masked, tokens, params, noise)
            except NotNumbers:
                model = self.target.model
                raise EngineError(f"{model.engine} computes logits of {model.path.name} that are not numbers") from None
            self.controller.watch(forward.logits[verdict.n_accepted])
            self.drafters.process([tokens[-1], *draft.ids], forward)
            rows = forward.logits  # a rollback may decode again and overwrite them
            if n_logprobs is not None and self.target.model.capabilities.rollback == "replay":
                rows = rows.copy()
            self.target.truncate(len(tokens) + verdict.n_accepted)

            kinds: list[tuple[int, TokenKind, str]] = [
                (guess.id, "accepted", guess.source) for guess in draft[: verdict.n_accepted]
            ]
            kinds.append((verdict.next_token, verdict.kind, "target"))
            emitted, spans, finish = [], [], None
            for i, (token, kind, source) in enumerate(kinds):
                budget -= 1
                ends = token in end_tokens
                if not ends:
                    spans += text.push(token, kind, source)
                whole = constraint.settle(token) if constraint else False
                logprobs = None if n_logprobs is None else token_logprobs(rows[i], token, n_logprobs)
                emitted.append(EmittedToken(token, kind, source, "" if ends else text.token_text, logprobs))
                finish = _finish_reason(ends or whole or text.stopped, budget)
                if finish:
                    spans += text.finish()
                    if text.stopped:  # complete before, but a longer one might still have come
                        finish = "stop"
                    break
            settled = [token.id for token in emitted]
            tokens += settled
            if self.target.n_past >= len(tokens):  # cut at an end: the target had gone further
                self.target.truncate(len(tokens) - 1)
            self.drafters.accept(settled)
            round_ = Round(
                index=index,
                draft=draft,
                verdict=verdict,
                emitted=emitted,
                ms_draft=(drafted - started) * 1e3,
                ms_verify=(passed - drafted) * 1e3,
                n_past=len(tokens) - len(settled) - 1,
                spans=spans,
                finish_reason=finish,
            )
            self.controller.update(round_)
            round_.ms_other = (time.perf_counter() - passed) * 1e3
            yield round_
            if finish:
                return
            index += 1


def _finish_reason(ended: bool, budget: int) -> FinishReason | None:
    if ended:
        return "stop"
    return "length" if budget <= 0 else None
