"""What the models of a pair hold of a conversation, to be kept in a file and given back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localspec.backends.base import Context, ContextState, Model
from localspec.backends.trust import fingerprint
from localspec.errors import EngineError
from localspec.system.home import printable

if TYPE_CHECKING:
    from localspec.runtime.pair import Pair


@dataclass(frozen=True, slots=True)
class SavedContext:
    """What one model held of a conversation.

    Attributes:
        maker: the model file, engine and cache type that can use it; see ``maker_of``.
        tokens: the conversation that it stands for.
        state: what the context held.
    """

    maker: Mapping[str, str]
    tokens: Sequence[int]
    state: ContextState


def maker_of(model: Model) -> dict[str, str]:
    """What a saved memory has to match to be used again: the file's digest, the engine's version, the cache's type."""
    return {
        "file": fingerprint(model.path),
        "name": printable(model.path.name),
        "engine": model.engine,
        "device": model.capabilities.device,
        "kv_type": model.kv_type,
    }


def fits(maker: Mapping[str, str], ours: Mapping[str, str]) -> bool:
    """Whether a model can use what another made: all but the file's name has to match."""
    return all(maker.get(key) == value for key, value in ours.items() if key != "name")


def described(maker: Mapping[str, str]) -> str:
    """The maker of a memory in a few words."""
    parts = [maker.get("name", "?"), maker.get("engine", "?"), maker.get("kv_type", ""), maker.get("file", "")[:8]]
    return " · ".join(part for part in parts if part)


def save_contexts(pair: Pair, tokens: Sequence[int]) -> list[SavedContext]:
    """What target and draft models hold of a conversation; less, or nothing, where that was dropped."""
    memories = []
    for context in pair.state.text_contexts:
        found = pair.prefix_cache.export(context, tokens)
        if found is not None:
            memories.append(SavedContext(maker_of(context.model), *found))
    return memories


def restore_contexts(pair: Pair, memories: Sequence[SavedContext]) -> str | None:
    """Make each model hold what it, or its like, held when the memories were taken.

    Returns:
        None if the target does; else one line that says why not. A draft model that cannot reads again, silently.
    """
    reasons = [_give(pair, context, memories) for context in pair.state.text_contexts]
    return reasons[0]


def _give(pair: Pair, context: Context, memories: Sequence[SavedContext]) -> str | None:
    model = context.model
    if not memories:
        return "what the model held was not saved"
    if not model.capabilities.saves_state:
        return f"{model.engine} cannot take a saved memory"
    maker = maker_of(model)
    fitting = [memory for memory in memories if fits(memory.maker, maker)]
    if not fitting:
        return f"its memory is from {described(memories[0].maker)}, and this is {described(maker)}"
    pair.prefix_cache.put_aside(context)
    try:
        pair.prefix_cache.restore(context, fitting[0].tokens, fitting[0].state)
    except EngineError as error:
        return str(error)
    return None
