"""``generate``: three formats that agree, from arguments and pipes, into pipes."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_cli import PROGRAM, localspec
from tests.conftest import TinyFiles
from tests.support.endless import write_endless
from tests.support.interrupting import interrupted
from tests.support.tmux import Tmux

STATS = {
    "prompt_tokens",
    "completion_tokens",
    "num_rounds",
    "num_draft_tokens",
    "num_accepted_tokens",
    "accepted_per_position",
    "acceptance_rate",
    "mean_acceptance_length",
    "tokens_per_second",
    "time_to_first_token_s",
    "seconds_prompt",
    "seconds_draft",
    "seconds_verify",
    "seconds_other",
    "estimated_plain_tokens_per_second",
    "estimated_speedup",
    "by_source",
}


pytestmark = pytest.mark.usefixtures("measured_home")


def generate(
    pair: Any, *options: str, stdin: bytes = b"", keep_ngrams: bool = False
) -> subprocess.CompletedProcess[bytes]:
    """Forty tokens of the tiny pair on the reference engine, three guesses a round of the draft model, greedy."""
    only = [] if keep_ngrams else ["--draft-only"]
    result = localspec(
        "generate", pair.target, "--draft", pair.draft, *only, "--draft-length", "3", "--backend", "reference",
        "--temperature", "0", "--max-tokens", "40", *options, stdin=stdin,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr.decode()
    return result


def test_a_named_draft_model_does_not_cost_the_free_ngrams(tiny: TinyFiles) -> None:
    both, alone = (
        json.loads(generate(tiny.pair, "-p", "la la la la", "--format", "json", keep_ngrams=keep).stdout)
        for keep in (True, False)
    )
    assert both["draft"] == ["ngram", tiny.pair.draft.stem]
    assert alone["draft"] == [tiny.pair.draft.stem]
    assert both["token_ids"] == alone["token_ids"]


def test_the_three_formats_say_the_same(tiny: TinyFiles) -> None:
    text = generate(tiny.pair, "-p", "hello").stdout.decode()
    reply = json.loads(generate(tiny.pair, "-p", "hello", "--format", "json").stdout)
    *rounds, last = map(json.loads, generate(tiny.pair, "-p", "hello", "--format", "events").stdout.splitlines())
    assert text.removesuffix("\n") == reply["text"].removesuffix("\n")
    assert set(reply) == {"text", "token_ids", "finish_reason", "model", "draft", "backend", "stats"}
    assert set(reply["stats"]) >= STATS
    assert (reply["backend"], reply["model"]) == ("reference", tiny.pair.target.stem)
    assert reply["draft"] == [tiny.pair.draft.stem]
    assert reply["finish_reason"] in ("stop", "length")
    assert {name: last[name] for name in ("text", "token_ids", "finish_reason")} == {
        name: reply[name] for name in ("text", "token_ids", "finish_reason")
    }
    assert [token["id"] for event in rounds for token in event["emitted"]] == reply["token_ids"]
    assert "".join(event["text"] for event in rounds) == reply["text"]


def test_a_round_has_the_documented_fields(tiny: TinyFiles) -> None:
    *rounds, last = map(json.loads, generate(tiny.pair, "-p", "hello", "--format", "events").stdout.splitlines())
    drafted = accepted = 0
    for index, event in enumerate(rounds):
        assert event["type"] == "round"
        assert event["index"] == index
        assert set(event) >= {"draft", "emitted", "ms_draft", "ms_verify", "ms_other"}
        fates = [guess["accepted"] for guess in event["draft"]]
        assert fates == sorted(fates, reverse=True)
        for guess in event["draft"]:
            assert set(guess) >= {"id", "text", "source", "prob", "accepted"}
            assert 0 <= guess["prob"] <= 1
        reach = [math.prod(guess["expected"] for guess in event["draft"][:i]) for i in range(len(fates) + 1)]
        assert event["tokens_expected"] == pytest.approx(sum(reach), abs=0.01)
        assert event["ms_verify_expected"] > 0
        for token in event["emitted"]:
            assert set(token) >= {"id", "text", "kind"}
            assert token["kind"] in ("accepted", "recovered", "bonus", "plain")
        drafted += len(fates)
        accepted += sum(fates)
    assert (drafted, accepted) == (last["stats"]["num_draft_tokens"], last["stats"]["num_accepted_tokens"])
    assert 0 < accepted < drafted


def test_speculation_changes_nothing(tiny: TinyFiles) -> None:
    ids = [
        json.loads(generate(tiny.pair, "-p", "hello", "--format", "json", *options).stdout)["token_ids"]
        for options in ([], ["--draft", "ngram"], ["--draft-length", "0"], ["--draft-length", "auto"])
    ]
    assert ids[0] == ids[1] == ids[2] == ids[3]


def test_the_prompt_from_standard_input(tiny: TinyFiles) -> None:
    by_argument = generate(tiny.pair, "-p", "hello\nthere").stdout
    assert generate(tiny.pair, stdin=b"hello\nthere\n").stdout == by_argument
    assert generate(tiny.pair, stdin=b"\xef\xbb\xbfhello\nthere").stdout == by_argument


def test_the_prompt_as_an_argument(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    by_option = json.loads(generate(tiny.pair, "-p", "hello there", "--format", "json").stdout)
    by_argument = json.loads(generate(tiny.pair, "hello there", "--format", "json").stdout)
    assert by_argument["token_ids"] == by_option["token_ids"]
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))  # without models
    monkeypatch.setenv("LOCALSPEC_OFFLINE", "1")
    alone = localspec("generate", "hello there", stdin=b"")
    assert alone.returncode == 1
    assert b"the default model" in alone.stderr


def test_raw_leaves_the_template_out(tiny: TinyFiles) -> None:
    chat = json.loads(generate(tiny.pair, "-p", "hello", "--format", "json").stdout)
    raw = json.loads(generate(tiny.pair, "-p", "hello", "--format", "json", "--raw").stdout)
    system = json.loads(generate(tiny.pair, "-p", "hello", "--format", "json", "--system", "be brief").stdout)
    counts = [reply["stats"]["prompt_tokens"] for reply in (raw, chat, system)]
    assert counts == sorted(set(counts))


def test_a_stop_string_ends_the_text(tiny: TinyFiles) -> None:
    whole = json.loads(generate(tiny.pair, "-p", "hello", "--format", "json").stdout)["text"]
    middle = whole[len(whole) // 2 : len(whole) // 2 + 2]
    reply = json.loads(generate(tiny.pair, "-p", "hello", "--format", "json", "--stop", middle).stdout)
    assert reply["text"] == whole[: whole.index(middle)]
    assert reply["finish_reason"] == "stop"


def test_max_tokens_is_kept(tiny: TinyFiles) -> None:
    reply = json.loads(generate(tiny.pair, "-p", "hello", "--format", "json", "--max-tokens", "5").stdout)
    assert (len(reply["token_ids"]), reply["finish_reason"]) == (5, "length")


@pytest.mark.parametrize("format", ["json", "events"])
def test_ctrl_c_still_prints_what_there_is(tmp_path: Path, format: str) -> None:
    model = write_endless(tmp_path / "endless.gguf")
    command = ["generate", model, "--ctx", "8000", "--draft", "none", "--backend", "reference", "-p", "x"]
    out, errors = interrupted(
        "call localspec.spec_decode.rounds:SpecStats.add", [*command, "--format", format], count=10
    )
    *rounds, reply = map(json.loads, out.splitlines())
    assert all(event["type"] == "round" for event in rounds)
    assert len(rounds) >= (9 if format == "events" else 0)
    assert reply["finish_reason"] == "cancelled"
    assert 9 <= len(reply["token_ids"]) < 7000
    assert reply["text"]
    assert errors[-1] == "localspec: interrupted"


def test_a_terminal_never_gets_control_characters(tiny: TinyFiles, tmp_path: Path) -> None:
    command = [*PROGRAM, "generate", str(tiny.pair.target), "--draft", "none", "--backend", "reference"]
    command += ["-p", "hello", "--temperature", "0", "--max-tokens", "60"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    control = {char for char in raw if char < " " and char not in "\n\t"}
    assert control, "the tiny model no longer says control characters; choose another prompt"
    log = tmp_path / "log"
    terminal = Tmux(["script", "-qc", shlex.join(command), str(log)], tmp_path, {})
    terminal.wait("EXIT 0")
    terminal.close()
    logged = log.read_text("utf-8").split("\n", 1)[1].rsplit("\nScript done", 1)[0]
    answer = logged.split("\x1b[K")[-1]
    assert not control & set(answer.replace("\r\n", "\n"))
    assert all(chr(0x2400 + ord(char)) in answer for char in control)


@pytest.mark.real
def test_the_real_pair_answers(real_model: Any) -> None:
    target, draft = real_model("qwen2.5-coder-1.5b"), real_model("qwen2.5-coder-0.5b")
    result = subprocess.run(
        [*PROGRAM, "generate", str(target), "--draft", str(draft), "--draft-length", "3", "--format", "json",
         "--temperature", "0", "--max-tokens", "24", "-p", "What is the capital of France? One word."],
        capture_output=True, check=True, timeout=280,
    )  # fmt: skip
    reply = json.loads(result.stdout)
    assert "Paris" in reply["text"]
    assert reply["stats"]["num_draft_tokens"] > 0
