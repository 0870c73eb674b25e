"""``generate``: three formats that agree, from arguments and pipes, into pipes."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from localspec.commands.chat.screen import TextView
from localspec.spec_decode.rounds import SpecStats
from tests.conftest import TinyFiles
from tests.support.endless import write_endless
from tests.support.interrupting import interrupted
from tests.support.program import Stream, assert_one_line, localspec
from tests.support.thinkers import write_thinker

pytestmark = pytest.mark.usefixtures("measured_home")


def generate(pair: Any, *options: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Forty tokens of the tiny pair on the reference engine, three guesses a round of the draft model, greedy."""
    given = ["--draft", pair.draft, "--draft-only", "--draft-length", "3", "--backend", "reference"]
    given += ["--temperature", "0", "--max-tokens", "40", *options]
    result = localspec("generate", pair.target, *given, stdin=stdin)
    assert result.returncode == 0, result.stderr.decode()
    return result


def reply(pair: Any, *options: str) -> Any:
    return json.loads(generate(pair, "-p", "hello", "--format", "json", *options).stdout)


def test_the_three_formats_say_the_same_in_the_documented_fields(tiny: TinyFiles) -> None:
    text, found = generate(tiny.pair, "-p", "hello").stdout.decode(), reply(tiny.pair)
    *rounds, last = map(json.loads, generate(tiny.pair, "-p", "hello", "--format", "events").stdout.splitlines())
    assert text.removesuffix("\n") == found["text"].removesuffix("\n")
    assert set(found) == {"text", "token_ids", "finish_reason", "model", "draft", "backend", "stats"}
    assert set(found["stats"]) >= set(SpecStats())  # docs/formats.md has them all: tests/docs
    assert (found["backend"], found["model"]) == ("reference", tiny.pair.target.stem)
    assert found["finish_reason"] in ("stop", "length")
    assert last | {"stats": 0} == found | {"stats": 0}
    assert [token["id"] for event in rounds for token in event["emitted"]] == found["token_ids"]
    assert "".join(event["text"] for event in rounds) == found["text"]
    drafted = accepted = 0
    for index, event in enumerate(rounds):
        assert (event["type"], event["index"]) == ("round", index)
        assert set(event) >= {"ms_draft", "ms_verify", "ms_other"}
        fates = [guess["accepted"] for guess in event["draft"]]
        assert fates == sorted(fates, reverse=True)
        assert all(set(guess) >= {"id", "text", "source"} and 0 <= guess["prob"] <= 1 for guess in event["draft"])
        reach = [math.prod(guess["expected"] for guess in event["draft"][:i]) for i in range(len(fates) + 1)]
        assert event["tokens_expected"] == pytest.approx(sum(reach), abs=0.01)
        assert event["ms_verify_expected"] > 0
        assert {token["kind"] for token in event["emitted"]} <= {"accepted", "recovered", "bonus", "plain"}
        drafted += len(fates)
        accepted += sum(fates)
    assert (drafted, accepted) == (last["stats"]["num_draft_tokens"], last["stats"]["num_accepted_tokens"])
    assert 0 < accepted < drafted


def test_the_prompt_is_an_option_an_argument_or_standard_input(tiny: TinyFiles) -> None:
    by_option = generate(tiny.pair, "-p", "hello\nthere").stdout
    for given in (b"hello\nthere\n", b"\xef\xbb\xbfhello\nthere"):
        assert generate(tiny.pair, stdin=given).stdout == by_option
    assert generate(tiny.pair, "hello\nthere").stdout == by_option
    assert_one_line(localspec("generate", "hello there"), 1, "the default model")  # a prompt alone is for it


def test_options_of_an_answer(tiny: TinyFiles) -> None:
    whole, raw = reply(tiny.pair), reply(tiny.pair, "--raw")
    assert raw["stats"]["prompt_tokens"] < whole["stats"]["prompt_tokens"]  # --raw leaves the template out
    middle = whole["text"][len(whole["text"]) // 2 :][:2]
    stopped = reply(tiny.pair, "--stop", middle)
    assert (stopped["text"], stopped["finish_reason"]) == (whole["text"].partition(middle)[0], "stop")
    cut = reply(tiny.pair, "--max-tokens", "5")
    assert (len(cut["token_ids"]), cut["finish_reason"]) == (5, "length")


def test_thinking_is_in_the_json_alone(tmp_path: Path) -> None:
    path = write_thinker(tmp_path, "deepseek")
    command = ["generate", path, "--draft", "none", "--backend", "reference", "--temperature", "1", "--seed", "1"]
    command += ["--max-tokens", "40", "-p", "in the and"]
    reply = json.loads(localspec(*command, "--think-budget", "9", "--format", "json").stdout)
    assert reply["thinking"]
    assert reply["stats"]["num_forced_tokens"] > 0
    assert "thinking" not in json.loads(localspec(*command, "--think", "off", "--format", "json").stdout)
    assert localspec(*command, "--raw", "--think", "off").returncode == 2
    only = localspec(*command, "--max-tokens", "9")  # thinking takes more
    note = b"localspec: no answer came after 9 tokens of thinking; --format json has it"
    assert (only.stdout.strip(), only.stderr.splitlines()[-1]) == (b"", note)
    assert b"no answer" not in localspec(*command, "--max-tokens", "9", "--think", "off").stderr


def test_how_far_a_long_prompt_is_read_is_an_event_and_on_a_terminal_a_line_that_goes_away(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", tiny.quick.target, "--draft", "none", "--backend", "reference", "--ctx", "2048", "--raw"]
    command += ["--max-tokens", "3", "-p", "la lo li lu " * 120]
    done = localspec(*command, "--format", "events")
    assert (done.returncode, b"reading" in done.stderr) == (0, False)  # no terminal, no line
    *events, _ = map(json.loads, done.stdout.splitlines())
    kinds = [event["type"] for event in events]
    assert kinds == sorted(kinds)
    assert kinds.count("prompt") > 3
    (recording := tmp_path / "recording").write_bytes(done.stdout)
    assert localspec("replay", recording).returncode == 0  # which steps over them
    interrupt = "call localspec.spec_decode.rounds:PromptProgress.as_event"
    out, errors = interrupted(interrupt, [*command, "--format", "events"], count=2)
    *events, answer = map(json.loads, out.splitlines())
    assert {event["type"] for event in events} == {"prompt"}
    assert (answer["finish_reason"], answer["token_ids"], errors[-1]) == ("cancelled", [], "localspec: interrupted")
    monkeypatch.setattr(Stream, "isatty", lambda self: True)
    monkeypatch.setattr("localspec.commands.generate.no_echo", nullcontext)
    drawn: list[str] = []
    monkeypatch.setattr(TextView, "round", lambda view, round_: drawn.append(sys.stderr.buffer.getvalue().decode()))
    localspec(*command)
    *lines, end = drawn[0].split("\r\x1b[K")  # when the answer begins
    assert any(re.fullmatch(r"reading the prompt: 0 of \d,\d+ tokens 0%", line) for line in lines)
    assert end == ""


@pytest.mark.parametrize("format", ["json", "events"])
def test_ctrl_c_still_prints_what_there_is(tmp_path: Path, format: str) -> None:
    model = write_endless(tmp_path / "endless.gguf")
    command = ["generate", model, "--ctx", "8000", "--draft", "none", "--backend", "reference", "-p", "x"]
    command += ["--format", format]
    out, errors = interrupted("call localspec.spec_decode.rounds:SpecStats.add", command, count=10)
    *rounds, found = map(json.loads, out.splitlines())
    assert all(event["type"] == "round" for event in rounds)
    assert len(rounds) >= (9 if format == "events" else 0)
    assert (found["finish_reason"], errors[-1]) == ("cancelled", "localspec: interrupted")
    assert 9 <= len(found["token_ids"]) < 7000


def test_a_corpus_is_indexed_before_the_answer(tiny: TinyFiles, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("one two three " * 20)
    generate(tiny.quick, "--draft", f"corpus:{tmp_path / 'notes'}", "-p", "one two")
    again = generate(tiny.quick, "--draft", f"corpus:{tmp_path / 'notes'}", "-p", "one two")
    assert b"indexing" not in again.stderr, "nothing of it is new"


def test_a_terminal_never_gets_control_characters(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [tiny.pair.target, "--draft", "none", "--backend", "reference"]
    command = ["generate", *options, "-p", "hello", "--temperature", "0", "--max-tokens", "60"]
    raw = localspec(*command).stdout.decode()
    control = {char for char in raw if char < " " and char not in "\n\t"}
    assert control, "the tiny model no longer says control characters; choose another prompt"
    monkeypatch.setattr(Stream, "isatty", lambda self: True)
    monkeypatch.setattr("localspec.commands.generate.no_echo", nullcontext)
    answer = localspec(*command).stdout.decode()
    assert not control & set(answer)
    assert all(chr(0x2400 + ord(char)) in answer for char in control)


@pytest.mark.real
def test_the_real_pair_answers(real_model: Any) -> None:
    target, draft = real_model("qwen2.5-coder-1.5b"), real_model("qwen2.5-coder-0.5b")
    options = ["--draft", draft, "--draft-length", "3", "--format", "json", "--temperature", "0", "--max-tokens", "24"]
    result = localspec("generate", target, *options, "-p", "What is the capital of France? One word.")
    found = json.loads(result.stdout)
    assert "Paris" in found["text"]
    assert found["stats"]["num_draft_tokens"] > 0
