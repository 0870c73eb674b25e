"""Ways of decoding that are measured against each other: ``plain``, ``auto``, and drafters with a fixed length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.errors import UsageError
from localspec.runtime.arguments import DraftLength

_PATTERN = re.compile(r"(?:(?P<who>ngram|model\d*):)?(?P<length>auto|\d{1,4})")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding.

    Attributes:
        name: as it was asked for.
        source: the only drafter that may guess (``ngram``, ``model``, ``model2``, …); None: all that are loaded.
        length: guesses a round, or ``auto``; 0 is plain decoding.
    """

    name: str
    source: str | None
    length: DraftLength

    @property
    def is_plain(self) -> bool:
        return self.length == 0

    @property
    def is_auto(self) -> bool:
        """Whether the controller decides, so that its predictions can be judged."""
        return self.length == "auto"

    def check(self, sources: Sequence[str]) -> None:
        """Raise ``UsageError`` where a drafter is wanted that is not among those loaded."""
        if not self.is_plain and not sources:
            raise UsageError(f"--arm {self.name} needs a drafter, and none is loaded: name one with --draft")
        if self.source is not None and self.source not in sources:
            advice = "name one with --draft" if self.source.startswith("model") else "add --draft ngram"
            raise UsageError(
                f"--arm {self.name}: no drafter {self.source!r} is loaded ({', '.join(sources)}); {advice}"
            )


PLAIN = Arm("plain", None, 0)


def parse_arm(text: str) -> Arm:
    """``plain``, ``auto``, ``N``, ``ngram:N``, ``model:N`` (also with ``auto``) -> an arm.

    Raises:
        UsageError: none of these.
    """
    from localspec.controllers.fixed import MAX_FIXED_DRAFT

    if text == "plain":
        return PLAIN
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise UsageError(f"no arm {text!r}: plain, auto, N, or ngram:N, model:N (N: guesses a round, or auto)")
    if found["length"] == "auto":
        return Arm(text, found["who"], "auto")
    length = int(found["length"])
    if not 1 <= length <= MAX_FIXED_DRAFT:
        raise UsageError(f"--arm {text}: the draft length must be in 1..{MAX_FIXED_DRAFT}; plain drafts nothing")
    return Arm(text, found["who"], length)


def parse_arms(texts: Sequence[str]) -> list[Arm]:
    """Arms as named on the command line, also several in one text with commas; ``plain`` is always among them."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    arms = [PLAIN, *map(parse_arm, names)]
    return list({arm.name: arm for arm in arms}.values())
