"""Engines that behave as if a device computed their passes: what can be done meanwhile is done before they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from localspec.backends.base import Context, Forward
from localspec.backends.llama.model import LlamaContext
from localspec.backends.reference import ReferenceContext


def overlap(patch: pytest.MonkeyPatch, log: Callable[[str, Context], None] = lambda what, context: None) -> None:
    """Contexts of the reference and the llama.cpp engines overlap; each pass is logged, as it begins and ends."""
    for kind in (LlamaContext, ReferenceContext):
        patch.setattr(kind, "overlaps", property(lambda self: True, lambda self, value: None), raising=False)

    feed = Context._feed

    def fed(self: Context, tokens: Any, compute: Callable[[], Forward]) -> Forward:
        def computed() -> Forward:
            log("begins", self)
            if self.meanwhile is not None:
                self.meanwhile()
            return compute()

        forward = feed(self, tokens, computed)
        log("ends", self)
        return forward

    patch.setattr(Context, "_feed", fed)
