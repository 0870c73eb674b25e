"""``Session``: one conversation on a loaded pair, which can be saved and go on after a restart."""

from __future__ import annotations

import asyncio
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from localspec.errors import SessionFileError, UsageError
from localspec.runtime import session_file
from localspec.runtime.arguments import RequestOptions, checked_params
from localspec.runtime.asking import Asking
from localspec.runtime.jobs import Job
from localspec.runtime.saved_state import SavedContext, restore_contexts, save_contexts
from localspec.runtime.stream import Reply, Submit
from localspec.sampling.sampling import SamplingParams
from localspec.system.home import printable

if TYPE_CHECKING:
    from localspec.llm import LLM
    from localspec.runtime.pair import Pair

Message = dict[str, Any]


class Session(Asking[str]):
    """One conversation: it remembers its turns, and asks the next question with all of them.

    Several sessions share a pair. What the models hold of each is kept while others speak, within
    ``LLM.prefix_cache_bytes``, so going back to one reads nothing again. Questions of one session are answered in
    order; sessions take turns.

    >>> session = llm.session(system="You are terse.")
    >>> session.chat("Name a river.").text
    >>> session.chat("Another one.").text
    >>> session.save("rivers.session")
    >>> llm.load_session("rivers.session").chat("Which is longer?").text  # after a restart, nothing is read again

    Asked like an ``LLM``: ``rounds``, ``stream``, ``chat``, ``arounds``, ``astream`` and ``achat`` take the next
    question. It and its answer become part of the conversation when the answer ends. One that was cancelled counts as
    far as it came; where it has no token, or the request failed, the conversation stays as it was.

    Made by ``LLM.session`` and ``LLM.load_session``.

    Attributes:
        params: sampling parameters of questions that bring none; None is greedy.
        notes: what a program wants to keep with the conversation, as JSON has it; saved and loaded with it.
        notice: one line that says why a saved memory could not be used, so that the first answer reads everything
            again; None if it could, or if the session is new.
    """

    def __init__(
        self,
        llm: LLM,
        system: str | None = None,
        params: SamplingParams | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if system is not None and not isinstance(system, str):
            raise UsageError(f"system must be a text, not {type(system).__name__}")
        if params is not None:
            checked_params(params)
        self._llm = llm
        self._conversation = object()
        self.params = params
        self.messages = [{"role": "system", "content": system}] if system else []
        self.messages += [dict(message) for message in messages]
        self.notes: dict[str, Any] = {}
        self.notice: str | None = None

    @property
    def system(self) -> str | None:
        """The system prompt; None where the conversation has none. May be changed between questions."""
        return str(self.messages[0]["content"]) if self.messages and self.messages[0].get("role") == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        said = self.messages[self.system is not None :]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *said]

    @property
    def messages(self) -> list[Message]:
        """The turns so far, for the chat template; may be edited, or replaced by another sequence, between turns."""
        return self._messages

    @messages.setter
    def messages(self, messages: Iterable[Message]) -> None:
        # A list stays the one that was given; of anything else one is made, as answers are appended to it.
        self._messages = messages if isinstance(messages, list) else list(messages)

    def undo(self) -> bool:
        """Take the last question and its answer back; whether there was one."""
        for i in range(len(self.messages) - 1, -1, -1):
            if self.messages[i]["role"] == "user":
                del self.messages[i:]
                return True
        return False

    def save(self, path: str | Path, *, memory: bool = True) -> None:
        """Save the conversation, and what the models hold of it, so that ``LLM.load_session`` goes on without reading.

        Waits for the questions asked before. The file is complete under its name or is not there; what the name held
        before stays until then. What the models hold is left out where it was dropped meanwhile, or where the engine
        cannot give it.

        Args:
            path: the file.
            memory: False saves the text alone, in kilobytes; loaded again, it has to be read again.

        Raises:
            SessionFileError: it cannot be written, or the name belongs to something else.
            Closed: the LLM was closed.
        """
        llm, file = self._llm, _file(path)

        def take(pair: Pair) -> tuple[list[Message], list[SavedContext]]:
            messages = [dict(message) for message in self.messages]
            if not messages or not memory:
                return messages, []
            return messages, save_contexts(pair, llm.encode(messages, add_generation_prompt=False))

        messages, memories = llm.run(take, conversation=self._conversation)
        session_file.write(file, to_text(self) | {"messages": messages}, memories)

    async def asave(self, path: str | Path, *, memory: bool = True) -> None:
        """As ``save``, for asyncio."""
        await asyncio.to_thread(self.save, path, memory=memory)

    def submitter(self, question: str, params: SamplingParams | None, **options: Unpack[RequestOptions]) -> Submit:
        if not isinstance(question, str):
            raise UsageError("a session is asked with a text; earlier turns are remembered")
        if "conversation" in options:
            raise UsageError("a session is a conversation of its own")
        asked: Message = {"role": "user", "content": question}
        # Made when its turn comes: what was asked before may still be waiting for its answer.
        submit = self._llm.submitter(
            lambda: [*self.messages, asked],
            self.params if params is None else params,
            **(options | {"conversation": self._conversation}),
        )

        def with_memory(deliver: Callable[[Any], Any]) -> Job:
            def settle(item: Any) -> None:
                if isinstance(item, Reply) and item.token_ids:
                    # What was thought is kept beside the answer; the template says whether the model sees it again.
                    thought = {"reasoning_content": item.thinking} if item.thinking else {}
                    self.messages += [asked, {"role": "assistant", "content": item.text} | thought]
                deliver(item)

            return submit(settle)

        return with_memory


def _file(path: str | Path) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise UsageError(f"a session is kept in a file; {path!r} is no path") from None


def to_text(session: Session) -> dict[str, Any]:
    """The text part of a session's file, as the session is now."""
    return {
        "model": printable(session._llm.model_name),
        "messages": [dict(message) for message in session.messages],
        "params": _params_as_json(session.params),
        "notes": session.notes,
    }


def from_text(llm: LLM, text: Mapping[str, Any], name: str) -> Session:
    """A session of what the text part of its file says; ``name`` is for what is raised.

    Raises:
        SessionFileError: it is not a conversation.
    """
    try:
        messages = [dict(message) for message in text["messages"]]
        session = Session(llm, None, _params_from_json(text["params"]), messages)
        session.notes = dict(text.get("notes", {}))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise SessionFileError(f"{name} is damaged: its text is not a conversation") from None
    return session


def load(llm: LLM, path: str | Path, *, memory: bool = True) -> Session:
    """See ``LLM.load_session``."""
    path = _file(path)
    text, memories, damage = session_file.read(path, memory=memory)
    session = from_text(llm, text, str(path))
    if not memory:
        return session
    reason: str | None = damage or llm.run(lambda pair: restore_contexts(pair, memories))
    if reason and session.messages:
        session.notice = f"{reason}; the conversation will be read again"
    return session


def _params_as_json(params: SamplingParams | None) -> dict[str, Any] | None:
    if params is None:
        return None
    default = SamplingParams()
    values = {f.name: _plain(getattr(params, f.name)) for f in fields(params)}
    changed = {name: value for name, value in values.items() if value != getattr(default, name)}
    if "logit_bias" in changed:
        changed["logit_bias"] = {str(token): _plain(bias) for token, bias in params.logit_bias.items()}
    if "stop" in changed:
        changed["stop"] = list(params.stop)
    return changed


def _plain(value: Any) -> Any:
    """A number as JSON can have it: NumPy's, and others, are numbers too."""
    if isinstance(value, numbers.Integral):
        return value if isinstance(value, bool) else int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _params_from_json(values: dict[str, Any] | None) -> SamplingParams | None:
    if values is None:
        return None
    if "logit_bias" in values:
        values["logit_bias"] = {int(token): float(bias) for token, bias in values["logit_bias"].items()}
    return replace(SamplingParams(), **values)
