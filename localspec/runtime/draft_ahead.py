"""Whether drafters go on while the target verifies: only where the two do not take each other's time."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from localspec.backends.base import Context, Model
from localspec.spec_decode.ahead import DraftAhead


class AheadChoice:
    """What drafts ahead of the verdict, where draft model and target are on devices of their own."""

    def __init__(self) -> None:
        self._made: tuple[Context, DraftAhead] | None = None

    def of(self, target: Context, drafts: Sequence[Model]) -> DraftAhead | None:
        """What drafts ahead of a target; the same one while the context stays, as it learns whether it pays.

        Args:
            target: the target's context.
            drafts: the draft models that read the text.
        """
        if not any(are_apart(target.model, draft) for draft in drafts):
            return None
        if self._made is None or self._made[0] is not target:
            self._made = target, DraftAhead()
        return self._made[1]


def are_apart(target: Model, draft: Model) -> bool:
    """Whether one is on the CPU alone and the other on a GPU alone: two on one device only slow each other down.

    RPC servers count as a GPU, those on this machine as its CPU (``ServerFacts.is_near``). The devices of a Mac read
    their weights from one memory, which is what their passes wait for.
    """
    return {target.capabilities.device, draft.capabilities.device} == {"cpu", "gpu"} and sys.platform != "darwin"
