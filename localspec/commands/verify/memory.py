"""The target's memory after rollbacks: nothing of what was rejected may be left in it, and nothing else be missing.

Two comparisons, on the running system's own context:

* A row computed right after a rollback against the same row of the path, in a memory that never saw one: equal up to
  the noise of the pass width. The rollbacks are those of a round (a few rejected guesses), of an edited question (back
  into the middle of the answer, of the prompt) and of a new conversation (back to nothing). Where the engine can save a
  memory, one is saved, written over and put back, which must give the same row too.
* The same rollback twice, with different rejected guesses: what they were must not change a single bit of the rows that
  follow. That has no noise at all, where the engine computes the rows of a pass independently of one another; so that
  is looked at first, in fresh memories. Where it does not hold (mixtures of experts group tokens by expert), only the
  first comparison counts.

``sensitivity`` measures what the first comparison is worth on this very model: memories that lack their last token, or
hold a rejected one in its place, are made on purpose, and the deviation is what a defect of that kind would show.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localspec.backends.base import Context, FloatArray, Model
from localspec.commands.verify.findings import Defect, Observation, Path, Run, Stopped
from localspec.commands.verify.paths import SLACK, Check, feed
from localspec.commands.verify.rows import Deviation, digest_of
from localspec.errors import line_of
from localspec.sampling.sampling import SamplingParams, edit_logits

ARM = "rollback"


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """What the probes found.

    Attributes:
        run: its observations are judged with all others.
        n_rollbacks: how many were made.
        n_restored: how many states were saved, and put back over another text.
        bitwise: whether equality to the bit could be demanded of rollbacks with different rejected guesses.
        n_pairs: such comparisons.
        defects: broken ones among them.
    """

    run: Run
    n_rollbacks: int
    n_restored: int
    bitwise: bool
    n_pairs: int
    defects: list[Defect]


def probe(context: Context, path: Path, params: SamplingParams, reach: int, check: Check) -> MemoryCheck:
    """Roll the running context back in every way that decoding does, and look at the rows that follow.

    Args:
        context: the running system's target context; left with some prefix of the path in it.
        path: at least two tokens long.
        params: penalties and biases.
        reach: longest draft.
        check: see ``paths.Check``.
    """
    run = Run(ARM, path.name)
    model, rng = context.model, random.Random(7)
    n_rollbacks = n_restored = n_pairs = 0
    defects: list[Defect] = []

    def observe(position: int, row: FloatArray) -> None:
        edited = edit_logits(row, path.before(position), params)
        run.observations.append(Observation(path, position, path.rows[position].compared(edited)))
        run.n_tokens += 1

    def rejected(n: int) -> list[int]:
        return [rng.randrange(model.n_vocab) for _ in range(n)]

    bitwise = rows_are_independent(model, path, check)
    try:
        last = len(path.answer) - 1
        for n_guesses, share in ((1, 0.25), (3, 0.5), (reach, 0.75), (reach, 1.0)):
            position = max(1, int(last * share))
            digests = []
            # The first try leaves its cells behind; the two that are compared then find the same memory.
            for _ in range(3):
                check()
                row = _after_rejection(context, path.before(position), rejected(n_guesses), check)
                n_rollbacks += 1
                digests.append(digest_of(row))
                observe(position, row)
            n_pairs += 1
            if bitwise and digests[1] != digests[2]:
                evidence = (
                    f"after {n_guesses} rejected guesses were taken back, the next row depends on what they were: "
                    "two rollbacks that should leave the same memory give rows that are not equal to the bit"
                )
                defects.append(Defect("memory", ARM, evidence, path.name, position, {"guesses": n_guesses}))
        for kept in (len(path.prompt) + last // 2, max(1, len(path.prompt) // 2), 0):
            check()
            text = path.before(last)
            context.truncate(min(kept, context.n_past))
            n_rollbacks += 1
            context.reuse(text[:-1])
            feed(context, text[context.n_past : -1], check)
            observe(last, context.decode(text[-1:], "last").logits[0])
        if model.capabilities.saves_state:
            check()
            text = path.before(last)
            context.reuse(text[:-1])
            feed(context, text[context.n_past : -1], check)
            state = context.export_state()
            context.truncate(0)
            context.decode(rejected(reach), "none")
            context.import_state(state)
            n_restored += 1
            observe(last, context.decode(text[-1:], "last").logits[0])
        run.complete = True
    except Stopped:
        raise
    except Exception as error:
        defects.append(Defect("engine", ARM, f"a rollback broke off: {line_of(error)}", path.name))
    return MemoryCheck(run, n_rollbacks, n_restored, bitwise, n_pairs, defects)


def _after_rejection(context: Context, text: Sequence[int], guesses: list[int], check: Check) -> FloatArray:
    """The row behind ``text``, computed right after guesses in place of its last token were rejected."""
    context.reuse(text[:-2])
    feed(context, text[context.n_past : -2], check)
    context.decode([text[-2], *guesses])
    context.truncate(len(text) - 1)
    return np.array(context.decode(text[-1:], "last").logits[0])


def rows_are_independent(model: Model, path: Path, check: Check) -> bool:
    """Whether, in fresh memories, a row is the same to the bit whatever follows it in its pass."""
    digests = []
    for seed in (1, 2):
        rng = random.Random(seed)
        with model.new_context(len(path.prompt) + SLACK) as context:
            feed(context, path.prompt[:-1], check)
            tokens = [path.prompt[-1], *(rng.randrange(model.n_vocab) for _ in range(4))]
            digests.append(digest_of(context.decode(tokens).logits[0]))
    return digests[0] == digests[1]


def sensitivity(model: Model, path: Path, params: SamplingParams, check: Check) -> list[Deviation]:
    """How far rows move when the memory is wrong on purpose; every fourth position, two ways each."""
    rng, found = random.Random(11), []
    with model.new_context(len(path.prompt) + len(path.answer) + SLACK) as context:
        for position in range(2, len(path.answer), 4):
            check()
            text = path.before(position)
            for spoiled in (text[:-2], [*text[:-2], rng.randrange(model.n_vocab)]):
                context.reuse(spoiled)
                feed(context, spoiled[context.n_past :], check)
                row = np.array(context.decode(text[-1:], "last").logits[0])
                found.append(path.rows[position].compared(edit_logits(row, text, params)))
    return found
