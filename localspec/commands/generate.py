"""``localspec generate``: one answer, for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from localspec.commands.chat.screen import TextView, no_echo, only_thought
from localspec.commands.options import RunOptions
from localspec.engine.request import RoundStream
from localspec.errors import ModelFileError, UnknownModel, UsageError, check_text
from localspec.model_files.catalog import Catalog
from localspec.spec_decode.rounds import Round
from localspec.system.process import on_interrupt
from localspec.system.terminal import Progress, moves_cursor, read_all


def model_and_prompt(model: str | None, text: str | None, prompt: str | None) -> tuple[str | None, str | None]:
    """MODEL, PROMPT and ``--prompt`` -> model and prompt; None reads standard input. A single argument is the prompt if
    it has several words and names no model."""
    if text is not None and prompt is not None:
        raise UsageError("there are two prompts, an argument and --prompt: leave one of them out")
    if model is None or text is not None or prompt is not None:
        return model, prompt if text is None else text
    try:
        Catalog.load().resolve(model)
    except UnknownModel as error:
        if len(model.split()) > 1 and not model.endswith(".gguf"):
            return None, model
        raise UnknownModel(f"{error} (a prompt of one word goes after -p)") from None
    except ModelFileError:
        pass  # a model, but not on this disk
    return model, None


def generate_command(options: RunOptions, prompt: str | None, *, raw: bool = False, format: str = "text") -> int:
    """Answer one prompt on standard output; ``KeyboardInterrupt`` after Ctrl-C, the answer until then printed.

    ``format``: ``text`` streams the answer, ``json`` prints one object, ``events`` a line per round and the object.
    """
    if raw and options.system is not None and "system" not in options.from_file:
        raise UsageError("--system needs the chat template and cannot be combined with --raw")
    thinking = {"think": options.think != "auto", "think_budget": options.think_budget is not None}
    if raw and any(named and name not in options.from_file for name, named in thinking.items()):
        raise UsageError("--think and --think-budget need the chat template and cannot be combined with --raw")
    if prompt is None:
        prompt = read_all()
    check_text(prompt, "the prompt")
    if not prompt.strip() and not (raw and prompt):
        raise UsageError("the prompt is empty: give it as an argument, after -p or on standard input")
    if options.corpora():  # indexed before the answer: there is no idle time behind it
        options = replace(options, load=replace(options.load, idle=False))
    with options.opened(chats=not raw) as llm:
        params = options.params({} if raw else llm.chat_defaults)
        system = options.system if options.system is not None else llm.chat_defaults.get("system")
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        stream = llm.rounds(prompt, params) if raw else llm.rounds(messages, params, **options.asked)
        with stream, on_interrupt(stream.close):
            _print_answer(stream, format)
            if stream.reply.finish_reason == "cancelled":
                raise KeyboardInterrupt
    return 0


def _print_answer(stream: RoundStream, format: str) -> None:
    out = sys.stdout
    if format == "text":
        view = TextView(out)
        # An echo would put ^C into the answer, or into the line of progress.
        with no_echo() if out.isatty() or moves_cursor(sys.stderr) else nullcontext():
            for round_ in _watched(stream):
                view.round(round_)
        view.finish()
        if said := only_thought(stream.reply.text, stream.reply.stats.thinking_tokens):
            print(f"localspec: {said}; --format json has it", file=sys.stderr)
        return
    if format == "events":
        for step in stream.steps():
            out.write(_line(step.as_event()))
            out.flush()
    else:
        for _ in _watched(stream):
            pass
    out.write(_line(stream.reply.as_dict()))
    out.flush()


def _watched(stream: RoundStream) -> Iterator[Round]:
    """The rounds; until the first, a line on a terminal's standard error says how far a long prompt is read."""
    begun = False
    with Progress() as progress:
        for step in stream.steps():
            if isinstance(step, Round):
                begun = True
                progress.clear()
                yield step
            elif not begun:
                progress.report(f"reading the prompt: {step}", step.fraction)


def _line(value: dict[str, Any]) -> str:
    # Escaped to ASCII: safe on a terminal whatever a model says, and in every encoding.
    return json.dumps(value, allow_nan=False) + "\n"
