"""Ways of decoding that are measured against each other: ``plain``, ``auto``, and drafters with a fixed length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.errors import UsageError
from localspec.runtime.arguments import DraftLength
from localspec.spec_decode.drafters.free import FREE_DRAFTERS

_SOURCE = "|".join((*FREE_DRAFTERS, r"model\d*", r"head\d*", "early-exit", "mtp", r"corpus\d*"))
_PATTERN = re.compile(rf"(?:(?P<sources>(?:{_SOURCE})(?:\+(?:{_SOURCE}))*):)?(?P<length>auto|\d{{1,4}})")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding.

    Attributes:
        name: as it was asked for.
        sources: the drafters that take part (``ngram``, ``head``, ``head2``, ``model``, …); None: all that are loaded.
        length: draft tokens a round, or ``auto``; 0 is plain decoding.
    """

    name: str
    sources: tuple[str, ...] | None
    length: DraftLength

    @property
    def is_plain(self) -> bool:
        return self.length == 0

    def among(self, sources: Sequence[str]) -> list[str]:
        """The drafters that take part, of those loaded."""
        return [] if self.is_plain else [each for each in sources if self.sources is None or each in self.sources]

    def check(self, sources: Sequence[str]) -> None:
        """Raise ``UsageError`` where a drafter is wanted that is not among those loaded."""
        if not self.is_plain and not sources:
            raise UsageError(f"--arm {self.name} needs a drafter, and none is loaded: name one with --draft")
        for wanted in self.sources or ():
            if wanted not in sources:
                advice = f"add --draft {wanted}" if wanted in FREE_DRAFTERS else "name one with --draft"
                raise UsageError(f"--arm {self.name}: no drafter {wanted!r} is loaded ({', '.join(sources)}); {advice}")


PLAIN = Arm("plain", None, 0)


def parse_arm(text: str) -> Arm:
    """``plain``, ``auto``, ``N``, ``ngram:N``, ``head+model:N`` (also with ``auto``) -> an arm.

    Raises:
        UsageError: none of these.
    """
    from localspec.controllers.fixed import MAX_FIXED_DRAFT

    if text == "plain":
        return PLAIN
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise UsageError(f"no arm {text!r}: plain, auto, N, or ngram:N, head+model:N (N: guesses a round, or auto)")
    sources = tuple(dict.fromkeys(found["sources"].split("+"))) if found["sources"] else None
    if found["length"] == "auto":
        return Arm(text, sources, "auto")
    length = int(found["length"])
    if not 1 <= length <= MAX_FIXED_DRAFT:
        raise UsageError(f"--arm {text}: the draft length must be in 1..{MAX_FIXED_DRAFT}; plain drafts nothing")
    return Arm(text, sources, length)


def parse_arms(texts: Sequence[str]) -> list[Arm]:
    """Arms as named on the command line, also several in one text with commas; ``plain`` is always among them."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    arms = [PLAIN, *map(parse_arm, names)]
    return list({arm.name: arm for arm in arms}.values())
