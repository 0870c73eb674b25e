"""Drafts that branch."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.spec_decode.rounds import Draft, DraftToken


def draft_tree(tokens: Sequence[DraftToken], parents: Sequence[int]) -> Draft:
    """A draft whose token i follows the one at index ``parents[i]``, -1 being the last settled token."""
    draft = Draft()
    for token, parent in zip(tokens, parents, strict=True):
        draft.add(token, parent)
    return draft
