"""Examples: the target writes prompts and answers them, many at a time, and what it computes is kept.

60 % of answers are greedy and 40 % drawn at temperature 0.8; prompts are always drawn, at 0.7 or 0.9. All that is
random is addressed by the seed and the passage's name, so a text does not depend on the others, but for what an
engine's kernels make of the width of a pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import resources
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from localspec.backends.base import FloatArray, Model, Piece, SequenceBatch
from localspec.engine.saved import messages_in
from localspec.errors import LocalspecError, TemplateError, UsageError
from localspec.heads.training.shards import Passage, as_states, likeliest
from localspec.prompts.prompts import Messages, PromptEncoder
from localspec.prompts.templates import ChatTemplate
from localspec.sampling.sampling import Noise, SamplingParams, distribution
from localspec.system.files import decoded

# How a target is brought to write what a user might ask, and then to answer it.
#
# A chat model that is given its chat template up to the user's turn, and nothing else, goes on as a user would (Magpie:
# Xu et al. 2024, arXiv:2406.08464). A base model continues a heading, and then itself.

NO_FIELD_SHARE = 0.15  # share of prompts without a field of life

_SENTENCE_END = re.compile(r"[.?!:;。？！](?=\s|$)|\n")
_MARK = "localspec users turn"


@cache
def fields() -> tuple[str, ...]:
    """Fields of life and work; never a kind of task, which is the target's own idea."""
    text = resources.files("localspec.heads.training").joinpath("fields.txt").read_text(encoding="utf-8")
    return tuple(text.split("\n")[:-1])


class PromptFormat:
    """What a target is fed; see ``format_of``. This one, of a base model: a heading, a few words that are drawn, and
    what follows them.

    Attributes:
        ends: tokens that end what a user says.
        longest_prompt: tokens of it at most.
    """

    longest_prompt = 24

    def __init__(self, encoder: PromptEncoder, model: Model) -> None:
        self._encoder = encoder
        self.ends = model.vocab.eog

    def opening(self, field: str | None) -> list[int]:
        """Tokens after which the target speaks as the user, of a field if one is named."""
        return self._encoder.tokenize(_heading(field), add_special=True) or [0]

    def asked(self, field: str | None, said: str, *, ended: bool) -> str | None:
        """The user's question in what the target said after ``opening``, to its end or not; None if there is none."""
        return _heading(field) + said if said.strip() else None

    def answering(self, messages: Messages) -> list[int]:
        """Tokens after which the target answers the last message; TemplateError if the template refuses them."""
        return self._encoder.tokenize(str(messages[-1]["content"]), add_special=True)

    def reading(self, messages: Messages) -> list[int]:
        """A conversation as the target reads it; TemplateError as above."""
        return self._encoder.tokenize(_joined(messages), add_special=True)


class ChatFormat(PromptFormat):
    longest_prompt = 128

    def __init__(self, encoder: PromptEncoder, model: Model) -> None:
        super().__init__(encoder, model)
        turn = encoder.template.render([{"role": "user", "content": _MARK}], add_generation_prompt=True)
        after = encoder.tokenize(turn.partition(_MARK)[2], parse_special=True)
        self.ends |= {token for token in after[:1] if model.vocab.is_control(token)}
        self._bos = model.vocab.bos if model.vocab.add_bos else None

    def opening(self, field: str | None) -> list[int]:
        turn = {"role": "user", "content": _MARK}
        system = {"role": "system", "content": f"You are a helpful assistant. The user asks about {field}."}
        render = partial(self._encoder.template.render, add_generation_prompt=False)
        try:
            text = render([turn] if field is None else [system, turn])
        except TemplateError:  # it knows no system prompt
            text = render([turn])
        tokens = self._encoder.tokenize(text.partition(_MARK)[0], parse_special=True)
        return tokens if self._bos is None or tokens[:1] == [self._bos] else [self._bos, *tokens]

    def asked(self, field: str | None, said: str, *, ended: bool) -> str | None:
        return (said if ended else _whole_sentences(said)).strip() or None

    def answering(self, messages: Messages) -> list[int]:
        return self._encoder.encode(messages)

    def reading(self, messages: Messages) -> list[int]:
        return self._encoder.encode(messages, add_generation_prompt=False)


def format_of(model: Model) -> PromptFormat:
    template = ChatTemplate.for_vocab(model.chat_template, model.vocab)
    encoder = PromptEncoder(model, template)
    return (PromptFormat if template.is_fallback else ChatFormat)(encoder, model)


def _heading(field: str | None) -> str:
    return "" if field is None else f"{field[0].upper()}{field[1:]}\n\n"


def _joined(messages: Messages) -> str:
    return "\n\n".join(str(message.get("content") or "") for message in messages)


def _whole_sentences(text: str) -> str:
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else ""


# What a head is trained on besides the target's own prompts: the user's prompts, texts and chats.
#
# Nothing that heads are tested with may be among it, nor among the prompts that the target writes: see ``Overlap``.

MOST_BYTES = 64 << 20  # of texts that are read [bytes]: about 15 million tokens, days of work on a laptop

_WORD = re.compile(r"\w+")
_N_WORDS = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """What the target is to answer: a unique name, a kind of work, and what the user says in each turn."""

    name: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """What the target is to read: a text, or messages for the chat template."""

    name: str
    category: str
    content: str | Sequence[dict[str, Any]]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else _joined(self.content)


@dataclass(frozen=True, slots=True)
class Material:
    """What heads are tested on, the user's own, and remarks on what of that was left out, a line each."""

    asked: Sequence[Asked] = ()
    read: Sequence[Read] = ()
    remarks: list[str] = field(default_factory=list)
    tests: Sequence[Asked] = ()


class Overlap:
    """Whether a text has eight words in a row in common with one of ``texts``; a shorter one, all of its words."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._known: dict[int, set[tuple[str, ...]]] = {}
        for words in map(_words, texts):
            n = min(_N_WORDS, len(words))
            if n:
                self._known.setdefault(n, set()).update(_runs(words, n))

    def __call__(self, text: str) -> bool:
        words = _words(text)
        return any(run in known for n, known in self._known.items() for run in _runs(words, n))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _runs(words: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    return zip(*(islice(words, i, None) for i in range(n)), strict=False)


def without(material: Material, overlap: Overlap) -> Material:
    """The material but for what heads are tested with; UsageError if nothing is left."""
    asked = [each for each in material.asked if not any(map(overlap, each.turns))]
    read = [each for each in material.read if not overlap(each.text)]
    n = len(material.asked) + len(material.read) - len(asked) - len(read)
    if n and not asked and not read:
        raise UsageError("all of these prompts and texts are among the questions that heads are tested with")
    left_out = [f"{n} prompts or texts are left out: they have words of the questions that heads are tested with"]
    return Material(asked, read, [*material.remarks, *left_out[: n > 0]])


def chat_in(path: Path) -> Read | None:
    """The chat that was saved in a file, as a text that the target reads as it did when it answered; None if it is no
    such file, or damaged."""
    messages = messages_in(path)
    if messages is None:
        return None
    return Read(hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16], "chat", messages)


def read_texts(paths: Sequence[Path]) -> Material:
    """The chats and other text files among paths and in folders, without hidden ones.

    Raises:
        UsageError: there is no such file or folder, or no text in any.
    """
    found: list[Read] = []
    remarks: list[str] = []
    room, n_other = MOST_BYTES, 0
    for path in _files(paths):
        if (chat := chat_in(path)) is not None:
            found.append(chat)
            continue
        try:
            with path.open("rb") as file:
                data = file.read(room + 1)
        except OSError as error:
            remarks.append(f"{path} cannot be read: {error.strerror or error}")
            continue
        if len(data) > room:
            remarks.append(f"of these texts the first {MOST_BYTES >> 20} MB are read")
            break
        try:
            text = decoded(data)
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            n_other += 1
        elif text.strip():
            room -= len(data)
            found.append(Read(hashlib.sha256(text.encode()).hexdigest()[:16], "text", text))
    if n_other:
        remarks.append(f"{n_other} files are no text in UTF-8")
    if not found:
        raise UsageError(f"there is no text to read in {', '.join(map(str, paths))}")
    return Material((), list({each.name: each for each in found}.values()), remarks)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            for folder, below, names in os.walk(path):
                below[:] = sorted(name for name in below if not name.startswith("."))
                yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        elif path.exists():
            yield path
        else:
            raise UsageError(f"there is no file or folder {path}")


N_CTX_EACH = 512  # room of a sequence [tokens]. Without flash attention every row looks at the cells of all sequences.

LONGEST_READ = 512  # tokens of a text that are read in one piece
ROWS_PER_PASS = 96  # most tokens of a pass: a chat that begins waits for it
HELD_OUT = 16  # one passage in so many is kept for testing,
TEST = "test/"  # and every answer to a question whose name begins so

GREEDY_SHARE = 0.6
ANSWER_TEMPERATURE = 0.8
PROMPT_TEMPERATURES = (0.7, 0.9)
_TOP_P, _TOP_K = 0.95, 200

_SHORTEST = 8  # least places of a passage
_BLOCK = 1 << 16  # characters of a text that are tokenised at a time
_LOOP, _LONGEST_PERIOD = 64, 16  # so many tokens that repeat so few end an answer: small models go round in circles


def derived(seed: int, name: str) -> int:
    """A seed for something that has a name."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6], "big")


@dataclass(slots=True)
class _Sequence:
    """An unfinished text: a prompt, which is answered next, or an answer or text, which becomes a passage."""

    stage: Literal["prompt", "answer", "read"]
    name: str
    category: str
    temperature: float
    todo: list[int]  # tokens that the target is fed next; what it says follows the last one
    given: int  # tokens that were given; what comes after is the target's own
    longest: int  # most tokens of its own
    about: str | None = None  # field of life of a prompt that the target writes
    messages: Messages = ()
    turns: Sequence[str] = ()  # what the user says after this answer
    fed: list[int] = field(default_factory=list)
    states: list[npt.NDArray[np.float16]] = field(default_factory=list)
    top_ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    top_logprobs: list[npt.NDArray[np.float16]] = field(default_factory=list)

    @property
    def own(self) -> list[int]:
        """What the target said."""
        return self.fed[self.given :]


class ExampleMaker:
    """Has a target write prompts and answers, and read texts.

    Args:
        batch: the memories of the sequences, with the taps.
        material: its tests are begun first; the user's own are half of what is begun after them.
        is_tested_with: whether a prompt is among what heads are tested with; such a one is dropped.
        done: names of passages that there are already.
        longest_answer: most tokens of an answer.

    Attributes:
        n_tokens: tokens that the target has said or read.
        remarks: what of the material was left out, a line each.
    """

    def __init__(
        self,
        model: Model,
        batch: SequenceBatch,
        seed: int,
        material: Material,
        is_tested_with: Callable[[str], bool],
        done: Set[str],
        longest_answer: int,
    ) -> None:
        self._model, self._vocab = model, model.vocab
        self._format = format_of(model)
        self._batch = batch
        self._seed = seed
        self._longest_answer = longest_answer
        self._is_tested_with = is_tested_with
        self._asked_before: set[str] = set()
        self.remarks: list[str] = []
        self.n_tokens = 0
        self._next_own = 1 + max((int(name[4:]) for name in done if name.startswith("own-")), default=-1)
        self._tests = self._sequences_of(material.tests, (), done)
        self._brought = self._sequences_of(material.asked, material.read, done)
        self._n_started = 0
        self._at_work = [self._begin() for _ in range(batch.n_sequences)]

    # What is begun.

    def _sequences_of(self, asked: Iterable[Asked], read: Iterable[Read], done: Set[str]) -> Iterator[_Sequence]:
        """What the user brought, prompts and texts in turns."""
        answers = (made for each in asked for made in self._answer_to(each))
        pieces = (made for each in read for made in self._pieces(each))
        return (made for both in zip_longest(answers, pieces) for made in both if made and made.name not in done)

    def _answer_to(self, asked: Asked) -> Iterator[_Sequence]:
        name = f"asked-{asked.name}"
        made = self._answer(name, asked.category, [{"role": "user", "content": asked.turns[0]}], asked.turns[1:])
        if made is None:
            self.remarks.append(f"the prompt {asked.name} is too long, or the chat template refuses it")
        else:
            yield made

    def _answer(self, name: str, category: str, messages: Messages, turns: Sequence[str] = ()) -> _Sequence | None:
        """An answer to be written; None where there is no room for it, or the template refuses the messages."""
        try:
            todo = self._format.answering(messages)
        except LocalspecError:
            return None
        if not todo or len(todo) > self._batch.n_ctx - self._longest_answer // 2:
            return None
        longest = min(self._longest_answer, self._batch.n_ctx - len(todo))
        greedy = Noise(derived(self._seed, f"{name}/greedy")).uniform(0, 0) < GREEDY_SHARE
        temperature = 0.0 if greedy else ANSWER_TEMPERATURE
        return _Sequence(
            "answer", name, category, temperature, todo, len(todo), longest, messages=messages, turns=turns
        )

    def _pieces(self, read: Read) -> Iterator[_Sequence]:
        longest, number = min(LONGEST_READ, self._batch.n_ctx), 0
        for tokens in self._tokens_of(read):
            for at in range(0, len(tokens) - _SHORTEST, longest):
                piece = tokens[at : at + longest + 1]  # the last is what follows the last place
                yield _Sequence("read", f"{read.category}-{read.name}-{number}", read.category, 0.0, piece, 0, 0)
                number += 1

    def _tokens_of(self, read: Read) -> Iterator[list[int]]:
        """A conversation as a whole, a text a block at a time."""
        try:
            if isinstance(read.content, str):
                for at in range(0, len(read.content), _BLOCK):
                    yield self._model.tokenize(read.content[at : at + _BLOCK], add_special=True)
            else:
                yield self._format.reading(read.content)
        except LocalspecError as error:
            self.remarks.append(f"a {read.category} was left out: {error}")

    def _prompt(self) -> _Sequence:
        name = f"own-{self._next_own:06d}"
        self._next_own += 1
        noise = Noise(derived(self._seed, f"{name}/field"))
        about = fields()[int(noise.uniform(1, 0) * len(fields()))] if noise.uniform(0, 0) >= NO_FIELD_SHARE else None
        temperature = PROMPT_TEMPERATURES[int(noise.uniform(2, 0) * len(PROMPT_TEMPERATURES))]
        todo = self._format.opening(about)
        return _Sequence("prompt", name, "own", temperature, todo, len(todo), self._format.longest_prompt, about)

    def _begin(self) -> _Sequence:
        # What heads are tested on comes first, so that it is whole long before training begins.
        if (test := next(self._tests, None)) is not None:
            return test
        self._n_started += 1
        brought = next(self._brought, None) if self._n_started % 2 else None
        return brought or self._prompt()

    # A pass.

    def step(self) -> list[Passage]:
        """One pass over all unfinished sequences; returns the passages that ended."""
        pieces: list[Piece] = []
        room = ROWS_PER_PASS
        # What is written goes before what is read, so that no answer waits for a long prompt.
        for i, sequence in sorted(enumerate(self._at_work), key=lambda each: len(each[1].todo)):
            n_fed = len(sequence.todo) - (sequence.stage == "read")
            if room:
                pieces.append(Piece(i, sequence.todo[: min(room, n_fed)]))
                room -= len(pieces[-1].tokens)
        finished: list[Passage] = []
        for (i, tokens, _), forward in zip(pieces, self._batch.decode(pieces), strict=True):
            states = [forward.hidden[name] for name in self._batch.hidden]
            passage = self._advance(i, self._at_work[i], tokens, forward.logits, states)
            if passage is not None:
                finished.append(passage)
        return finished

    def _advance(
        self, i: int, sequence: _Sequence, tokens: Sequence[int], logits: FloatArray, states: list[FloatArray]
    ) -> Passage | None:
        sequence.fed += tokens
        del sequence.todo[: len(tokens)]
        if sequence.stage != "prompt":
            sequence.states.append(as_states(np.stack(states, axis=1)))
            ids, logprobs = likeliest(logits)
            sequence.top_ids.append(ids)
            sequence.top_logprobs.append(logprobs)
        if sequence.stage == "read":
            self.n_tokens += len(tokens)
            return self._end(i, sequence) if len(sequence.todo) == 1 else None
        if sequence.todo:
            return None
        noise = Noise(derived(self._seed, f"{sequence.name}/{sequence.stage}"))
        params = SamplingParams(temperature=sequence.temperature, top_k=_TOP_K, top_p=_TOP_P)
        said = distribution(logits[-1], (), params).sample(noise, len(sequence.fed))
        sequence.todo = [said]
        self.n_tokens += 1
        ended = said in (self._format.ends if sequence.stage == "prompt" else self._vocab.eog)
        if not ended and len(sequence.own) + 1 < sequence.longest and not goes_round(sequence.own):
            return None
        if sequence.stage == "answer":
            return self._end(i, sequence)
        self._follow(i, self._asked(sequence, ended=ended))
        return None

    def _asked(self, prompt: _Sequence, *, ended: bool) -> _Sequence | None:
        """The answer to a written prompt; None if it is none, was written before or is what heads are tested with."""
        said = self._text(prompt.own + ([] if ended else prompt.todo))
        text = self._format.asked(prompt.about, said, ended=ended)
        if text is None or text in self._asked_before or self._is_tested_with(text):
            return None
        self._asked_before.add(text)
        return self._answer(prompt.name, prompt.category, [{"role": "user", "content": text}])

    def _end(self, i: int, sequence: _Sequence) -> Passage | None:
        """End a text; the user's next turn is answered, if there is one."""
        following = None
        if sequence.turns:
            said = self._text([*sequence.own, *sequence.todo])
            turn, *rest = sequence.turns
            more = [{"role": "assistant", "content": said}, {"role": "user", "content": turn}]
            following = self._answer(f"{sequence.name}+", sequence.category, [*sequence.messages, *more], rest)
        self._follow(i, following)
        return self._passage(sequence)

    def _text(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self._vocab.token_bytes, tokens)).decode("utf-8", "replace")

    def _follow(self, i: int, sequence: _Sequence | None) -> None:
        self._batch.truncate(i, 0)
        self._at_work[i] = sequence or self._begin()

    def _passage(self, sequence: _Sequence) -> Passage | None:
        if len(sequence.fed) < _SHORTEST:
            return None
        return Passage(
            sequence.name,
            sequence.category,
            sequence.given,
            is_held_out(sequence.name),
            np.array([*sequence.fed, sequence.todo[0]], dtype=np.int32),
            np.concatenate(sequence.states),
            np.concatenate(sequence.top_ids),
            np.concatenate(sequence.top_logprobs),
        )

    def unfinished(self) -> list[Passage]:
        """The unfinished passages: every place of them is a lesson."""
        found = [self._passage(each) for each in self._at_work if each.stage != "prompt"]
        return [passage for passage in found if passage is not None]


def is_held_out(name: str) -> bool:
    """Whether a passage is kept for testing: one in ``HELD_OUT``, the same in every run; conversations as a whole."""
    if name.startswith("own-"):
        return int(name[4:]) % HELD_OUT == HELD_OUT // 4  # so that even a short run has some
    return name.startswith(f"asked-{TEST}") or derived(0, name.rstrip("+")) % HELD_OUT == 0


def goes_round(tokens: Sequence[int]) -> bool:
    """Whether the end of a text repeats itself and nothing else."""
    end = list(tokens[-_LOOP:])
    return len(end) == _LOOP and any(end[p:] == end[:-p] for p in range(1, _LONGEST_PERIOD + 1))
