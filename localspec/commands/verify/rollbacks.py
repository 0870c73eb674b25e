"""The target's context after rollbacks: nothing of what was rejected may be left in it, and nothing else be missing.

Two comparisons, on the running system's own context:

* A row computed right after a rollback against the same row of the plain answer: equal up to the noise of the pass
  width. The rollbacks are those of a round (a few rejected tokens), of an edited question (back into the middle of the
  answer, of the prompt) and of a new conversation (back to nothing). Where the engine can save a state, one is saved,
  written over and put back, which must give the same row too.
* The same rollback twice, with different rejected tokens: what they were must not change a single bit of the rows that
  follow. That has no noise at all, where the engine computes the rows of a pass independently of one another; so that
  is looked at first, in fresh contexts. Where it does not hold (mixtures of experts group tokens by expert), only the
  first comparison counts.

``sensitivity`` measures what the first comparison is worth on this very model: contexts that lack their last token, or
hold a rejected one in its place, are made on purpose, and the deviation is what a defect of that kind would show.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from localspec.backends.base import Context, FloatArray, Model
from localspec.commands.verify.plain import SLACK, Check, Deviation, PlainAnswer, digest_of, feed, row_behind
from localspec.commands.verify.result import AuditLog, Defect, Observation

ARM = "rollback"


@dataclass(slots=True)
class Rollbacks:
    """Figures of the probes: ``memory`` in ``result``.

    Attributes:
        rollbacks: how many were made.
        restored: how many states were saved, and put back over another text.
        pairs: rollbacks that were made twice, with different rejected tokens.
        bitwise: whether equality to the bit could be demanded of those.
        largest_deviation: of a row, in logits.
    """

    rollbacks: int = 0
    restored: int = 0
    pairs: int = 0
    bitwise: bool = True
    largest_deviation: float = 0.0

    def probe(self, context: Context, plain: PlainAnswer, reach: int, log: AuditLog, check: Check) -> None:
        """Roll the running context back in every way that decoding does, for drafts of up to ``reach`` tokens, and look
        at the rows that follow; ``plain`` is at least two tokens long."""
        rng, last = random.Random(7), len(plain.tokens) - 1

        def rejected(n: int) -> list[int]:
            return [rng.randrange(context.model.n_vocab) for _ in range(n)]

        def observe(position: int, row: FloatArray) -> None:
            deviation = plain.compared(position, row)
            self.largest_deviation = max(self.largest_deviation, deviation.rms)
            log.observations.append(Observation(ARM, plain, position, deviation))

        independent = rows_are_independent(context.model, plain, check)
        self.bitwise &= independent
        for n_draft, share in ((1, 0.25), (3, 0.5), (reach, 0.75), (reach, 1.0)):
            position = max(1, int(last * share))
            text, digests = plain.before(position), []
            # The first try leaves its cells behind; the two that are compared then find the same memory.
            for _ in range(3):
                feed(context, text[:-2], check)
                context.decode([text[-2], *rejected(n_draft)])
                row = np.array(row_behind(context, text, check))
                digests.append(digest_of(row))
                observe(position, row)
                self.rollbacks += 1
            self.pairs += 1
            if independent and digests[1] != digests[2]:
                evidence = (
                    f"after {n_draft} rejected guesses were taken back, the next row depends on what they were: "
                    "two rollbacks that should leave the same memory give rows that are not equal to the bit"
                )
                log.defects.append(Defect("memory", ARM, plain.name, position, evidence, {"guesses": n_draft}))
        text = plain.before(last)
        for kept in (len(plain.prompt) + last // 2, max(1, len(plain.prompt) // 2), 0):
            context.truncate(min(kept, context.n_past))
            observe(last, row_behind(context, text, check))
            self.rollbacks += 1
        if context.model.capabilities.saves_state:
            feed(context, text[:-1], check)
            state = context.export_state()
            context.truncate(0)
            context.decode(rejected(reach), "none")
            context.import_state(state)
            observe(last, row_behind(context, text, check))
            self.restored += 1


def rows_are_independent(model: Model, plain: PlainAnswer, check: Check) -> bool:
    """Whether, in fresh contexts, a row is the same to the bit whatever follows it in its pass."""
    digests = set()
    for seed in (1, 2):
        rng = random.Random(seed)
        with model.new_context(len(plain.prompt) + SLACK) as context:
            feed(context, plain.prompt[:-1], check)
            tokens = [plain.prompt[-1], *(rng.randrange(model.n_vocab) for _ in range(4))]
            digests.add(digest_of(context.decode(tokens).logits[0]))
    return len(digests) == 1


def sensitivity(model: Model, plain: PlainAnswer, check: Check) -> list[Deviation]:
    """How far rows move when the context is wrong on purpose; every fourth position, two ways each."""
    rng, found = random.Random(11), []
    with model.new_context(len(plain.prompt) + len(plain.tokens) + SLACK) as context:
        for position in range(2, len(plain.tokens), 4):
            text = plain.before(position)
            for spoiled in (text[:-2], [*text[:-2], rng.randrange(model.n_vocab)]):
                found.append(plain.compared(position, row_behind(context, [*spoiled, text[-1]], check)))
    return found
