from __future__ import annotations

from collections.abc import Callable

from localspec.spec_decode.drafters.base import Drafter
from localspec.spec_decode.drafters.ngram import NgramDrafter

# Drafters that need no model file: what ``--draft NAME`` takes besides models.

FREE_DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
}
"""Name, which is the drafter's source -> what makes one."""
