"""A draft: tokens that are proposed to the target together, as a chain or as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from localspec.sampling.sampling import Distribution


@dataclass(frozen=True, slots=True)
class DraftToken:
    """One token of a draft.

    Attributes:
        id: token id.
        source: the drafter that made it, e.g. ``"model"`` or ``"ngram"``.
        prob: the drafter's own confidence in [0, 1]; a model's probability, an n-gram's estimate.
        dist: the distribution the token was *sampled* from; None when it was chosen deterministically (a point mass).
        expected: the controller's calibrated probability that it is accepted, given that the ones before it were.
    """

    id: int
    source: str
    prob: float
    dist: Distribution | None = None
    expected: float = 0.0


class Draft(Sequence[DraftToken]):
    """The draft tokens of one round; empty means plain decoding.

    A draft is a chain, each token behind the one before it, unless it is made to branch: then it is a tree, of which
    the target accepts one path. A token comes after the one that it follows, and no two that follow the same are alike.

    Args:
        tokens: the draft tokens.
        parents: which of them each follows, as for ``append``; None is a chain.
    """

    __slots__ = ("_parents", "_tokens")

    def __init__(self, tokens: Sequence[DraftToken] = (), parents: Sequence[int] | None = None) -> None:
        self._tokens: list[DraftToken] = [] if parents is not None else list(tokens)
        self._parents: list[int] | None = None  # of a chain nothing is kept
        for token, parent in zip(tokens, parents or (), strict=parents is not None):
            self.append(token, parent)

    def first(self, n: int) -> Draft:
        """The first n draft tokens."""
        if n >= len(self):
            return self
        return Draft(self._tokens[:n], None if self._parents is None else self._parents[:n])

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self._tokens]

    @property
    def branches(self) -> bool:
        """Whether it is a tree, and no chain."""
        return self._parents is not None

    @property
    def parents(self) -> list[int]:
        """For each draft token the index of the one that it follows; -1 is the last settled token."""
        return list(range(-1, len(self._tokens) - 1)) if self._parents is None else self._parents

    @property
    def depths(self) -> list[int]:
        """For each draft token how many come before it on its path."""
        if self._parents is None:
            return list(range(len(self._tokens)))
        depths: list[int] = []
        for parent in self._parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def children(self, index: int) -> Sequence[int]:
        """The draft tokens that follow a draft token, or with -1 the last settled one: indices, in order."""
        if self._parents is None:
            return range(index + 1, min(index + 2, len(self._tokens)))
        return [i for i, parent in enumerate(self._parents) if parent == index]

    def path(self, index: int) -> list[int]:
        """The draft tokens from the first one down to this: indices; none for -1."""
        if self._parents is None:
            return list(range(index + 1))
        path: list[int] = []
        while index >= 0:
            path.append(index)
            index = self._parents[index]
        return path[::-1]

    def append(self, token: DraftToken, parent: int | None = None) -> None:
        """Add a draft token.

        Args:
            token: the draft token.
            parent: index of the draft token that it follows; -1 is the last settled token, None the last draft token.

        Raises:
            ValueError: there is no such draft token, or what follows it already is the same token.
        """
        last = len(self._tokens) - 1
        if parent is not None and parent != last and self._parents is None:
            self._parents = self.parents
        if self._parents is not None:
            parent = last if parent is None else parent
            if not -1 <= parent <= last:
                raise ValueError(f"no draft token {parent} to follow: there are {last + 1}")
            if any(self._tokens[child].id == token.id for child in self.children(parent)):
                raise ValueError(f"token {token.id} follows draft token {parent} already")
            self._parents.append(parent)
        self._tokens.append(token)

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[DraftToken]:
        return iter(self._tokens)

    def __getitem__(self, index: Any) -> Any:
        return self._tokens[index]
