"""A stand-in for ``LLM`` that says what a test tells it to: for the screen only, nothing here decodes.

``python -m tests.support.scripted_llm`` opens the chat with it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

from localspec.engine.request import Reply, checked_length
from localspec.engine.worker import Job
from localspec.llm import Asking, Session, load
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.rounds import Draft, DraftToken, EmittedToken, Round, Span, SpecStats, Verdict

NO_PAIR = SimpleNamespace(
    target=SimpleNamespace(engine="none", backend="none"), state=SimpleNamespace(times=None), draft_specs=[]
)
"""What is loaded: nothing that could decode."""

Guess = tuple[str, str, bool]  # Text, source, accepted


def make_round(index: int, guesses: Sequence[Guess], own: str, finish: Any = None, ms: float = 30.0) -> Round:
    """A round: its guesses, and the token that the target added."""
    n_accepted = sum(accepted for _, _, accepted in guesses)
    kind: Any = "plain" if not guesses else "bonus" if n_accepted == len(guesses) else "recovered"
    spoken = [(text, "accepted", source) for text, source, accepted in guesses if accepted]
    if own:
        spoken.append((own, kind, "target"))
    return Round(
        index=index,
        draft=Draft([DraftToken(i, source, 0.9) for i, (_, source, _) in enumerate(guesses)]),
        verdict=Verdict(n_accepted, 0, kind),
        emitted=[EmittedToken(crc32(text.encode()) % 50_000, kind, source, text) for text, kind, source in spoken],
        ms_draft=5.0 * len(guesses),
        ms_verify=ms,
        draft_texts=[text for text, _, _ in guesses],
        spans=[Span(text, kind, source) for text, kind, source in spoken],
        finish_reason=finish,
    )


def think_round(text: str) -> Round:
    """A round of one token that belongs to a thinking block."""
    token = EmittedToken(0, "plain", text=text, thinking=True)
    return replace(make_round(0, [], ""), emitted=[token], spans=[Span(text, "plain", "target", "thinking")])


def speak(text: str, source: str = "model") -> list[Round]:
    """An answer in words: three guesses a round, of which every other round has the last one wrong."""
    words = [word + " " for word in text.split(" ")]
    words[-1] = words[-1][:-1]
    rounds: list[Round] = []
    while words:
        good = len(rounds) % 2 == 0
        taken, words = words[:3], words[3:]
        guesses: list[Guess] = [(word, source, True) for word in taken[:-1]]
        if not good:
            guesses.append(("WRONG ", source, False))
        rounds.append(make_round(len(rounds), guesses, taken[-1], None if words else "stop"))
    return rounds


@dataclass
class ScriptedLLM(Asking[Any]):
    """Answers each question with the next of its answers; the last one again and again."""

    answers: list[list[Any]] = field(default_factory=list)
    pace: float = 0.0
    gate: Path | None = None
    draft_length: int | str = "auto"
    model_name: str = "scripted"
    model_path: Path = Path("scripted.gguf")
    draft_names: list[str] = field(default_factory=lambda: ["scripted-draft"])
    backend_name: str = "none"
    n_ctx: int = 4096
    warnings: list[str] = field(default_factory=list)
    chat_defaults: dict[str, Any] = field(default_factory=dict)
    thinking: Any = None
    asked: list[Any] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    params: list[SamplingParams | None] = field(default_factory=list)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, checked_length(value) if name == "draft_length" else value)

    def context_info(self) -> dict[str, Any]:
        return {"n_ctx": self.n_ctx, "reason": "as scripted", "short": False}

    def job(self, question: Any, params: SamplingParams | None, **options: Any) -> Job:
        self.asked.append(question() if callable(question) else question)
        self.options.append(options)
        self.params.append(params)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

        def submit(job: Job) -> None:
            threading.Thread(target=job.run, daemon=True).start()

        return Job(lambda job: self._speak(answer, job), submit=submit)

    def _speak(self, rounds: Sequence[Any], job: Job) -> Reply:
        stats, said = SpecStats(), list[Round]()
        stats.seconds_plain_token = 0.05
        for round_ in rounds:
            time.sleep(self.pace)
            if not isinstance(round_, Round):  # how far the prompt is read
                job.give(round_)
                continue
            while self.gate and round_.index == 2 and not self.gate.exists():
                time.sleep(0.02)
            if job.stopped():
                break
            stats.add(round_)
            said.append(round_)
            job.give(round_)
        finish = said[-1].finish_reason if said else None
        tokens = [token for round_ in said for token in round_.emitted]
        text, ids = "".join(round_.text for round_ in said), [token.id for token in tokens]
        return Reply(text, ids, finish or "cancelled", stats, self.model_name, self.draft_names, "none", tokens=tokens)

    def _as_chat(self, question: Any) -> Any:
        return [{"role": "user", "content": question}] if isinstance(question, str) else question

    def run(self, work: Callable[[Any], Any], *, conversation: Any = None) -> Any:
        return work(NO_PAIR)

    def session(self, system: str | None = None, params: SamplingParams | None = None) -> Session:
        llm: Any = self
        return Session(llm, system, params)

    def load_session(self, path: Path, *, memory: bool) -> Session:
        llm: Any = self
        return load(llm, path, memory=memory)

    def read_ahead(self, messages: Any, *, think: str = "auto") -> None:
        """Nothing reads here."""

    def explain(self) -> str:
        return "because the script says so"

    def tokenize(self, text: str) -> list[int]:
        return [crc32(word.encode()) for word in text.split()]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return f"<{tokens[0]}>"

    def set_draft(self, spec: Any) -> None:
        self.draft_names = [] if spec is None else [str(spec)]

    def close(self) -> None:
        return

    def __enter__(self) -> ScriptedLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        return


DEMO = """Here is a function that reverses a list. It walks from both ends towards the middle and swaps what it finds, \
so it needs no second list and takes time in proportion to the length of the list, which is as good as it can be.

```python
def reverse(items: list[int]) -> list[int]:
    left, right = 0, len(items) - 1  # this comment is long enough to run over the edge of the screen at eighty
    while left < right:
        items[left], items[right] = items[right], items[left]
        left, right = left + 1, right - 1
    return items
```

宽字符也必须保持可读，不能在行尾被切成两半，因为那样会很难看，而且光标会在错误的地方。 Done, and émigré naïve 🙂 too."""


if __name__ == "__main__":
    from localspec.commands.chat.chat import Chat, header
    from localspec.commands.chat.command import answer_lines, converse
    from localspec.commands.chat.screen import ChatScreen

    pace = float(sys.argv[1]) if len(sys.argv) > 1 else 0.1
    plain = not sys.stdin.isatty()
    gate = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    llm: Any = ScriptedLLM([speak(DEMO), speak(DEMO, "ngram")], pace, gate)
    chat = Chat(llm, ChatScreen(plain=plain), params=SamplingParams())
    if not plain:
        header(chat)
    sys.exit(answer_lines(chat) if plain else converse(chat))
