"""Which copy of a draft model drafts faster: the published file, or a lighter one that agrees a little less?

Both read a text of ours next to the target. The share of positions at which a copy's most probable token is the
target's stands for its acceptance rate, and the copy with the larger predicted speed-up is used (see ``break_even``).
Measured once per target, draft and engine, and kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.backends.base import Model
from localspec.controllers.break_even import best_speedup
from localspec.controllers.cost_model import PassTimes
from localspec.system.steps import Steps

LENGTHS = range(1, 9)
"""Draft lengths of which the best counts. On ik-llama a pass over 9 tokens takes over three times one over a single."""

N_STEPS = 12
"""Draft steps of each copy that are timed, in turns; their median counts. The copies compared so far differ by 1.5
times and more."""

MAX_TOKENS = 400
"""Read of the text, which makes the standard error of an agreement of 0.75 two percent."""

_PIECE = 32

TEXT = """Here is a small helper that reads a settings file and falls back to defaults:

```python
import json
from pathlib import Path

DEFAULTS = {"theme": "light", "font_size": 12, "recent_files": []}

def load_settings(path: Path) -> dict:
    \"\"\"Return the user's settings, with defaults for what is missing.\"\"\"
    if not path.exists():
        return dict(DEFAULTS)
    with path.open(encoding="utf-8") as file:
        settings = json.load(file)
    for key, value in DEFAULTS.items():
        settings.setdefault(key, value)
    return settings
```

The function first checks whether the file exists. If it does not, a copy of the defaults is returned, so that
the caller can change it without changing the defaults themselves. Otherwise the file is read, and every
missing key is added.

To find the total cost, add the price of the tickets to the price of the meals. There are 4 tickets at 12
euros each, which makes 4 * 12 = 48 euros, and 3 meals at 9 euros each, which makes 3 * 9 = 27 euros. Together
that is 48 + 27 = 75 euros.

Thank you for your message. I am sorry to hear that the delivery was late. There are a few things you can do:
first, check the tracking page to see where the parcel is; second, call the carrier; and third, if it does not
arrive within a week, ask for a refund. Le musée est ouvert tous les jours sauf le lundi, et l'entrée est
gratuite pour les enfants.
"""


@dataclass(frozen=True, slots=True)
class DraftCopy:
    """A copy of the draft as measured.

    Attributes:
        agreement: share of positions at which its most probable token is the target's.
        step_ms: time of one draft token [ms].
        speedup: predicted, at the best fixed draft length.
    """

    agreement: float
    step_ms: float
    speedup: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def tokens_of(target: Model) -> list[int]:
    """The text in the target's tokens, which are the draft's."""
    return target.tokenize(TEXT, add_special=True)[:MAX_TOKENS]


def reading(model: Model, tokens: Sequence[int], n_vocab: int | None = None) -> Steps[npt.NDArray[np.int64]]:
    """The most probable token below ``n_vocab`` after every token of a text [n]; -1 where logits are not numbers."""
    tops = []
    with model.new_context(len(tokens)) as context:
        for start in range(0, len(tokens), _PIECE):
            logits = context.decode(tokens[start : start + _PIECE]).logits[:, :n_vocab]
            tops.append(np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), -1))
            yield
    return np.concatenate(tops)


def measuring(
    copies: Sequence[Model], tokens: Sequence[int], target_tops: npt.NDArray[np.int64], times: PassTimes, n_vocab: int
) -> Steps[list[DraftCopy]]:
    """Measure copies, a pass at a time; their steps in turns, so that they meet the same machine.

    Args:
        copies: the models.
        tokens: the text.
        target_tops: the target's most probable tokens on it [n].
        times: the target's t(w).
        n_vocab: how many token ids the target takes; a draft's logits can be wider.
    """
    agreements = []
    for model in copies:
        tops = yield from reading(model, tokens, n_vocab)
        agreements.append(float(((tops == target_tops) & (tops >= 0)).mean()))
    steps: list[list[float]] = [[] for _ in copies]
    with ExitStack() as stack:
        # Contexts that never handed out many rows; see FEW_ROWS.
        contexts = [stack.enter_context(model.new_context(_PIECE + N_STEPS)) for model in copies]
        for context in contexts:
            context.decode(tokens[:_PIECE], "none")
            yield
        for token in tokens[:N_STEPS]:
            for context, taken in zip(contexts, steps, strict=True):
                yield
                started = time.perf_counter()
                context.decode([token], "last")
                taken.append((time.perf_counter() - started) * 1e3)
    found = []
    for agreement, taken in zip(agreements, steps, strict=True):
        step_ms = statistics.median(taken)
        found.append(DraftCopy(agreement, step_ms, best_speedup(agreement, LENGTHS, times, step_ms)))
    return found
