"""Chat templates: messages -> the text a model was trained on.

Neither is trusted. The template comes from a model file, so it runs in a sandbox with a budget. The messages come from
users and from what they paste, so text in them that spells a special token (``<|im_end|>``) must stay text.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from localspec.errors import TemplateError, UsageError
from localspec.system.forking import in_child

if TYPE_CHECKING:
    from localspec.model_files.vocab import Vocab
    from localspec.prompts.template_sandbox import SandboxedTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""What templates call the thinking of an answer; the first that one knows is used."""

_MARK_OPEN, _MARK_CLOSE = "\ue0f0", "\ue0f1"


class ChatTemplate:
    """One model's chat format.

    Args:
        source: Jinja source, or None for ChatML.
        bos_text: text of the begin-of-text token.
        eos_text: text of the end-of-text token.
        special_texts: texts that the tokenizer would read as special tokens; a message cannot forge them.

    Attributes:
        is_fallback: the file had no template, ChatML is used.
    """

    def __init__(
        self, source: str | None, bos_text: str = "", eos_text: str = "", special_texts: Iterable[str] = ()
    ) -> None:
        self.is_fallback = not (source and source.strip())
        self.source = CHATML if self.is_fallback or source is None else source
        self._variables = {"bos_token": bos_text, "eos_token": eos_text}
        self._guard = _Guard(special_texts)
        self._template: SandboxedTemplate | None = None
        self._wants_parts: bool | None = None
        self._thought = next((name for name in _THOUGHTS if re.search(rf"""[.'"]{name}\b""", self.source)), None)
        self._lock = threading.Lock()
        in_child(self, ChatTemplate._renounce)

    @classmethod
    def for_vocab(cls, source: str | None, vocab: Vocab) -> ChatTemplate:
        """A template whose special tokens are those of a vocabulary."""
        from localspec.model_files import vocab as kinds

        # The tokenizer reads user-defined tokens in any text, so keeping them apart would change nothing, except those
        # that end a turn: engines make control tokens of them.
        ids = [i for i, kind in enumerate(vocab.types.tolist()) if kind in (kinds.CONTROL, kinds.UNKNOWN)]
        special = {vocab.token_text(i) for i in (*ids, *vocab.eog)}
        bos, eos = ("" if i is None else vocab.token_text(i) for i in (vocab.bos, vocab.eos))
        return cls(source, bos, eos, special)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The conversation as one text; see ``render_segments``."""
        return "".join(text for text, _ in self.render_segments(messages, **variables))

    def render_segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> list[tuple[str, bool]]:
        """The conversation in pieces to tokenise one by one: (text, whether special tokens may be read in it).

        Where no message spells a special token there is one piece, so ordinary text is tokenised as a whole. Where one
        does, a random mark is put inside of what it spells before rendering, and the text is cut there afterwards: the
        piece is (text, False). A template that strips, slices or splits the content leaves the mark where it is. Upper
        and lower case are not told apart, as templates may change them. A template that deletes characters in the
        middle of a content could still be used to build a special token; no known one does.

        Args:
            messages: mappings with ``role`` and ``content`` (a string, or a list of ``{"type": "text", "text": …}``).
                An answer's ``reasoning_content`` is given to templates that know it, or know it by another name: they
                say which of it the model sees again.
            add_generation_prompt: end with the beginning of the assistant's turn.
            tools: JSON schemas of functions, for templates that know tools.
            continue_final_message: end with the text of the last message, as if it were still being written.
            extra: further variables of the template.

        Raises:
            UsageError: the messages are malformed.
            TemplateError: the template failed, refused the messages, or would not end.
        """
        checked = [self._with_thought(message) for message in checked_messages(messages)]
        variables = {"add_generation_prompt": add_generation_prompt, "tools": tools} | extra
        mark = f"{_MARK_OPEN}{secrets.randbelow(10**18):018}{_MARK_CLOSE}"
        marked = [self._guard.mark(message, mark) for message in checked]
        end = f"{_MARK_OPEN}{secrets.randbelow(10**18):018}e{_MARK_CLOSE}"
        if continue_final_message:
            variables["add_generation_prompt"] = False
            marked[-1] = marked[-1] | {"content": f"{marked[-1]['content'] or ''}{end}"}
        text = self._render(marked, self._guard.mark(variables, mark))
        if continue_final_message:
            text, found, _ = text.rpartition(end)
            if not found:
                raise TemplateError("the model's chat template leaves out the message that is to be gone on with")
        return self._guard.cut(text, mark)

    def _with_thought(self, message: dict[str, Any]) -> dict[str, Any]:
        thought = message.get("reasoning_content")
        # gpt-oss's template refuses a call that has both.
        if not thought or self._thought is None or (message.get("tool_calls") and message["content"]):
            return message
        return {self._thought: thought} | message

    def _renounce(self) -> None:
        """In a forked child: the lock may be held by a thread that only the parent has."""
        self._lock = threading.Lock()

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        with self._lock:
            if self._template is None:
                from localspec.prompts.template_sandbox import SandboxedTemplate  # jinja2 takes 0.1 s to import

                self._template = SandboxedTemplate(self.source)
            self._template.start([messages, variables])
            if self._wants_parts is None:
                self._wants_parts = self._probe(self._template)
            if self._wants_parts:
                messages = [
                    message | {"content": [{"type": "text", "text": message["content"]}]}
                    if isinstance(message.get("content"), str)
                    else message
                    for message in messages
                ]
            return self._template.run({"messages": messages} | self._variables | dict(variables))

    def _probe(self, template: SandboxedTemplate) -> bool:
        """Whether the template knows contents as lists of parts only: it then loses a string."""
        if "content" not in self.source:
            return False
        word = "localspecprobe"
        for content, verdict in ((word, False), ([{"type": "text", "text": word}], True)):
            messages = [{"role": "user", "content": content}]
            variables = self._variables | {"messages": messages, "add_generation_prompt": True, "tools": None}
            with suppress(TemplateError):
                if word in template.run(variables):
                    return verdict
        return False


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain dicts, contents as strings.

    Raises:
        UsageError: they are malformed; says which and how.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UsageError('messages must be a list of {"role": …, "content": …}')
    if not messages:
        raise UsageError("there are no messages")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f'message {i} must be {{"role": …, "content": …}}, not {type(message).__name__}')
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise UsageError(f"message {i}: role must be a word such as 'system' or 'user', not {role!r:.80}")
        kept = {name: value for name, value in message.items() if name != "tool_calls" or value}  # some ask for the key
        checked.append(kept | {"content": _content(message, i)})
    return checked


def _content(message: Mapping[str, Any], i: int) -> str | None:
    content = message.get("content")
    if content is None and (message.get("tool_calls") or message["role"] == "assistant"):
        return None if message.get("tool_calls") else ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UsageError(f"message {i}: content must be text, not {type(content).__name__}")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or (isinstance(part, Mapping) and part.get("type", "text") != "text"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UsageError(f"message {i}: only text parts can be used, not {kind!r:.80}")
        texts.append(text)
    return "".join(texts)


class _Guard:
    """Finds special tokens spelled out in what users wrote, and keeps them text."""

    def __init__(self, special_texts: Iterable[str]) -> None:
        self._sizes: dict[str, dict[int, set[str]]] = {}
        for text in special_texts:
            lowered = text.lower()
            if lowered:
                self._sizes.setdefault(lowered[0], {}).setdefault(len(lowered), set()).add(lowered)
        firsts = {variant for first in self._sizes for variant in (first, first.upper()) if len(variant) == 1}
        self._first = re.compile(f"[{re.escape(''.join(sorted(firsts)))}]") if firsts else None

    def _longest(self, text: str, start: int) -> int:
        """Length of the longest special text that begins here; 0 if none does."""
        sizes = self._sizes.get(text[start].lower(), {})
        return max((n for n, known in sizes.items() if text[start : start + n].lower() in known), default=0)

    def _spelled(self, text: str) -> Iterator[int]:
        if self._first is not None:
            for match in self._first.finditer(text):
                if self._longest(text, match.start()):
                    yield match.start()

    def mark(self, value: Any, mark: str) -> Any:
        """A copy in which every special text, in every string, has the mark after its first character."""
        if isinstance(value, str):
            cuts = [start + 1 for start in self._spelled(value)]
            bounds = [0, *cuts, len(value)]
            return mark.join(value[a:b] for a, b in pairwise(bounds)) if cuts else value
        if isinstance(value, Mapping):
            return {self.mark(key, mark): self.mark(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, mark) for item in value]
        return value

    def cut(self, text: str, mark: str) -> list[tuple[str, bool]]:
        """The rendered text in pieces: (text, whether special tokens may be read in it)."""
        first, *rest = text.split(mark)
        pieces: list[tuple[str, bool]] = [(first, True)]
        for part in rest:
            before, special = pieces[-1]
            # The character before the mark belongs to the spelled token, and so does the beginning of what follows.
            n = self._longest(before[-1:] + part, 0) if before else 0
            if n and special:
                pieces[-1:] = [(before[:-1], True), (before[-1] + part[: n - 1], False), (part[n - 1 :], True)]
            else:
                pieces.append((part, True))
        merged: list[tuple[str, bool]] = []
        for piece, special in pieces:
            if merged and not special and not merged[-1][1]:
                merged[-1] = (merged[-1][0] + piece, False)
            elif piece:
                merged.append((piece, special))
        return merged
