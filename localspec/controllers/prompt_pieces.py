"""How much of the prompts that wait is read in a pass beside other answers.

A prompt's row takes the place of a draft token's, and makes everybody's next token later. Read in wide pieces a prompt
is read sooner, in narrow ones nobody's text stalls. So a pass mostly has as much of the prompts as keeps it under
``STALL`` plain ones, and now and then much more.

By ``benchmarks/prompt_pieces.py``, which has a simulated clock, with four clients: 8.6 s to the first token at the 95th
percentile instead of 10.5 with narrow pieces only that prompts share alike; 61 ms between two instead of 74; 37.5
tokens per second instead of 37.0. All of a prompt at once: 39.1 tokens per second, 5.0 s to the first, and three
seconds of silence. The constants below were tried there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

STALL = 2.4
"""A pass that somebody's next token is in takes no longer than so many plain passes because of prompts, mostly: three,
with what comes on top. With 2.75 it was 3.2 on ik-llama, at the 95th percentile of times between pieces of text."""

LONG_MS = 500.0
"""What the others may take. With 800 the 95th percentile of times to the first token is 6.9 s, at longer pauses."""

LONG_EVERY = 24
"""Of so many passes beside answers one may be a long one: 4 of 100, so that the 95th percentile of times between tokens
stays under ``STALL`` plain ones. With one of 12 and two that may come close together, 5 to 10 of 100 pieces of text
came after 350 to 450 ms with four or eight clients; simulated, 7 of 60 short runs were so, and none with 24."""

LEAST_ROWS = 4
"""Of prompts, in a pass: else they would never be read where every row costs as much as a pass."""

WIDE = 32
"""Rows from which on engines have other kernels, and cost something else than t(w) says."""

LEARNED = 0.25
"""Share of what a pass took that is believed of the next; set by hand."""


class PromptPieces:
    """See above.

    Args:
        times: t(w) of the passes [ms], as of rows with logits: those of prompts have none.
    """

    def __init__(self, times: Callable[[int], float]) -> None:
        self._times = times
        self._dearer = {False: 1.0, True: 1.0}  # what a prompt's rows cost, narrow pieces and wide ones, beside t(w)
        self._n_since = LONG_EVERY  # passes beside answers, after a long one
        self._is_long = False

    def divide(self, n_answers: int, unread: Sequence[int], priorities: Sequence[int], most: int) -> list[int]:
        """How many tokens of each prompt the next pass has.

        Of the rows one half is for the prompt that came first, the other for the shortest ones, which so are answered
        soon; those of a higher priority go first.

        Args:
            n_answers: rows that answers have in it.
            unread: of each prompt so many tokens, those first that came first.
            priorities: theirs.
            most: tokens in a pass.
        """
        rows, self._is_long = most, False
        if not unread:
            return []
        if n_answers:
            rows = self._rows_within(STALL * self._times(1), n_answers, most)
            if self._n_since >= LONG_EVERY and sum(unread) > rows:
                wide = self._rows_within(max(LONG_MS, STALL * self._times(1)), n_answers, most)
                rows, self._is_long = wide, wide > rows
        pieces = [0] * len(unread)
        first = priorities.index(max(priorities))
        by_length = sorted(range(len(unread)), key=lambda i: (-priorities[i], unread[i]))
        for i, share in [(first, -(-rows // 2)), *((i, rows) for i in by_length)]:
            n = max(0, min(share, unread[i] - pieces[i], rows))
            pieces[i] += n
            rows -= n
        return pieces

    def _rows_within(self, ms: float, n_answers: int, most: int) -> int:
        rows = most
        while rows > LEAST_ROWS and self._cost(n_answers, rows) > ms:
            rows = max(LEAST_ROWS, rows - max(1, rows // 8))
        return rows

    def _cost(self, n_answers: int, rows: int) -> float:
        without = self._times(n_answers)
        return without + self._dearer[rows >= WIDE] * (self._times(n_answers + rows) - without)

    def observe(self, n_answers: int, rows: int, ms: float) -> None:
        """A pass took so long that had so many rows of answers, and of prompts."""
        if n_answers:
            self._n_since += 1
        if rows and self._is_long:
            self._n_since, self._is_long = 0, False
        without = self._times(n_answers)
        expected = self._times(n_answers + rows) - without
        if rows and expected > 0:
            seen, known = min(4.0, max(0.25, (ms - without) / expected)), self._dearer[rows >= WIDE]
            self._dearer[rows >= WIDE] = known * (seen / known) ** LEARNED
