"""What the rows of passes that answers shared were for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class PassCounts:
    """Since the pair was loaded; counted on the worker's thread, and read on any.

    Attributes:
        passes: of the target.
        answers: how many had rows in each of them, in all; a prompt that is read counts as one.
        own: rows of answers' next tokens.
        drafts: rows of draft tokens.
        prompts: rows of prompts.
    """

    passes: int = 0
    answers: int = 0
    own: int = 0
    drafts: int = 0
    prompts: int = 0

    def add(self, rows: int, *, decodes: bool) -> None:
        """A pass has so many rows of an answer, which is decoding, or reads its prompt."""
        self.answers += 1
        if decodes:
            self.own, self.drafts = self.own + 1, self.drafts + rows - 1
        else:
            self.prompts += rows

    def as_dict(self) -> dict[str, Any]:
        """As ``/v1/localspec/stats`` says it."""
        mean = round(self.answers / self.passes, 3) if self.passes else 0.0
        rows = {"answers": self.own, "drafts": self.drafts, "prompts": self.prompts}
        return {"passes": self.passes, "mean_answers": mean, "rows": rows}
