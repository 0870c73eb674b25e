"""Chat templates: messages -> the text a model was trained on.

Neither is trusted. The template comes from a model file, so it runs in a sandbox with a budget. The messages come from
users and from what they paste, so text in them that spells a special token (``<|im_end|>``) must stay text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from localspec.errors import TemplateError, UsageError
from localspec.model_files.vocab import CONTROL, UNKNOWN, Vocab

if TYPE_CHECKING:
    from localspec.prompts.template_sandbox import SandboxedTemplate


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# What templates call an answer's thinking; the first that one knows is used.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")

MAX_SHARED = 200  # Longest special text [characters] whose beginning is compared together with others

_MARK_OPEN, _MARK_CLOSE = "\ue0f0", "\ue0f1"

_TURN_MARK = re.compile(r"<\|[\w-]{2,40}\|>|<(?:start|end)_of_turn>")  # Marks of turns that no ordinary text has


class ChatTemplate:
    """One model's chat format: Jinja ``source``, or ChatML where the file had none (``is_fallback``).

    ``special_texts`` are those that the tokenizer would read as special tokens; a message cannot forge them.
    """

    def __init__(
        self, source: str | None, bos_text: str = "", eos_text: str = "", special_texts: Iterable[str] = ()
    ) -> None:
        self.is_fallback = not (source and source.strip())
        self.source = CHATML if self.is_fallback or source is None else source
        self._variables = {"bos_token": bos_text, "eos_token": eos_text}
        self._guard = _Guard(special_texts)
        self._thought = next((name for name in _THOUGHTS if re.search(rf"""[.'"]{name}\b""", self.source)), None)

    @classmethod
    def for_vocab(cls, source: str | None, vocab: Vocab) -> ChatTemplate:
        # The tokenizer reads user-defined tokens in any text, so keeping them apart would change nothing, except those
        # that end a turn: engines make control tokens of them.
        ids = [i for i, kind in enumerate(vocab.types.tolist()) if kind in (CONTROL, UNKNOWN)]
        special = {vocab.token_text(i) for i in (*ids, *vocab.eog)}
        bos, eos = ("" if i is None else vocab.token_text(i) for i in (vocab.bos, vocab.eos))
        return cls(source, bos, eos, special)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
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

        Where no message spells a special token there is one piece. Where one does, a random mark is put inside the
        spelling before rendering, and the text is cut there afterwards: the piece is (text, False). A template that
        deletes characters in the middle of a content could still build a special token; no known one does.

        Args:
            messages: mappings with ``role`` and ``content`` (a string, or a list of ``{"type": "text", "text": …}``);
                ``reasoning_content`` goes to templates that know it under this or another name.
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

    def turn_marks(self) -> list[str]:
        """The marks with which the template begins and ends a turn; empty where it fails on a turn."""
        try:
            turns = [{"role": "user", "content": "localspec-one"}, {"role": "assistant", "content": "localspec-two"}]
            text = self.render(turns, add_generation_prompt=False)
        except (TemplateError, UsageError):
            return []
        before, _, rest = text.partition("localspec-one")
        between, _, after = rest.partition("localspec-two")
        return list(dict.fromkeys(found for part in (between, after, before) for found in _TURN_MARK.findall(part)))

    def _with_thought(self, message: dict[str, Any]) -> dict[str, Any]:
        thought = message.get("reasoning_content")
        # gpt-oss's template refuses a call that has both.
        if not thought or self._thought is None or (message.get("tool_calls") and message["content"]):
            return message
        return {self._thought: thought} | message

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        template, wants_parts = self._compiled
        if wants_parts:
            messages = [
                message | {"content": [{"type": "text", "text": content}]}
                if isinstance(content := message.get("content"), str)
                else message
                for message in messages
            ]
        return template.run({"messages": messages} | self._variables | dict(variables))

    @cached_property  # several threads may do this at once, with the same result
    def _compiled(self) -> tuple[SandboxedTemplate, bool]:
        """The template, and whether it knows contents only as lists of parts: it then loses a string."""
        from localspec.prompts.template_sandbox import SandboxedTemplate  # jinja2 takes 0.1 s to import

        template, word = SandboxedTemplate(self.source), "localspecprobe"
        for content in (word, [{"type": "text", "text": word}]) if "content" in self.source else ():
            messages = [{"role": "user", "content": content}]
            variables = self._variables | {"messages": messages, "add_generation_prompt": True, "tools": None}
            with suppress(TemplateError):
                if word in template.run(variables):
                    return template, content != word
        return template, False


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain dicts, contents as strings. Raises ``UsageError``: they are malformed; says which and how."""
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
        self._texts = sorted({text.lower() for text in special_texts if text})
        self._most = max(map(len, self._texts), default=0)

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        """Matches, with nothing, wherever a special text begins, also within another; its group is the longest."""
        return re.compile(f"(?=({_any_of(self._texts)}))", re.IGNORECASE)

    def mark(self, value: Any, mark: str) -> Any:
        """A copy in which every special text, in every string, has the mark after its first character."""
        if isinstance(value, str):
            cuts = [match.start() + 1 for match in self._spelled.finditer(value)] if self._texts else []
            bounds = [0, *cuts, len(value)]
            return mark.join(value[a:b] for a, b in pairwise(bounds)) if cuts else value
        if isinstance(value, Mapping):
            return {self.mark(key, mark): self.mark(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, mark) for item in value]
        return value

    def cut(self, text: str, mark: str) -> list[tuple[str, bool]]:
        first, *rest = text.split(mark)
        pieces: list[tuple[str, bool]] = [(first, True)]
        for part in rest:
            before, special = pieces[-1]
            # The character before the mark belongs to the spelled token, and so does the beginning of what follows.
            found = self._spelled.match(before[-1] + part[: self._most]) if before and self._texts else None
            if found and special:
                n = len(found[1])
                pieces[-1:] = [(before[:-1], True), (before[-1] + part[: n - 1], False), (part[n - 1 :], True)]
            else:
                pieces.append((part, True))
        joined: list[tuple[str, bool]] = []
        for readable, run in groupby((piece for piece in pieces if piece[0]), key=itemgetter(1)):
            texts = [text for text, _ in run]
            joined += [(text, True) for text in texts] if readable else [("".join(texts), False)]
        return joined


def _any_of(texts: Sequence[str]) -> str:
    """An expression that matches the longest of several texts, with common beginnings factored out."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if len(text) > MAX_SHARED:
            by_first.setdefault(text, [""])  # not taken apart character by character
        elif text:
            by_first.setdefault(text[0], []).append(text[1:])
    branches = [
        re.escape(first) + _any_of(rests) for first, rests in sorted(by_first.items(), key=lambda b: -len(b[0]))
    ]
    if not branches:
        return ""
    whole = branches[0] if len(branches) == 1 and "" not in texts else f"(?:{'|'.join(branches)})"
    return f"{whole}?" if "" in texts else whole
