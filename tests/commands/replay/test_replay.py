"""``localspec replay``: what is read of a file, and where the page goes. What the page shows: ``test_replay_page``."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from localspec.commands.chat.chat import AnswerRecord
from localspec.commands.replay.command import Recording, RecordingError, read, replay_command, replay_page
from localspec.errors import UsageError
from localspec.system.terminal import visible
from tests.commands.test_generate import generate
from tests.conftest import TinyFiles
from tests.support.program import assert_one_line, localspec
from tests.support.saved_chats import write_chat

EVENTS = Path(__file__).parents[2] / "data" / "replay-events.jsonl"
"""A real answer of the default pair, n-grams and the draft model guessing: ``generate --draft ngram --draft
qwen2.5-coder-0.5b --draft-length 4 --temperature 0 --format events``, asked to add type hints to a function."""


def events(*rounds: dict[str, Any], **reply: Any) -> bytes:
    """An event file: rounds, and the final line if any of its fields is given."""
    lines = [json.dumps({"type": "round", "index": i} | round_) for i, round_ in enumerate(rounds)]
    if reply:
        lines.append(json.dumps({"token_ids": [], "finish_reason": "stop", "stats": {}} | reply))
    return "".join(line + "\n" for line in lines).encode()


def emitted(text: str, kind: str = "plain", source: str = "target") -> dict[str, Any]:
    return {"id": 5, "text": text, "kind": kind, "source": source}


def guess(text: str, accepted: bool, source: str = "model") -> dict[str, Any]:
    return {"id": 5, "text": text, "source": source, "prob": 0.5, "expected": 0.25, "accepted": accepted}


def a_round(*tokens: dict[str, Any], draft: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    return {"draft": draft or [], "emitted": list(tokens), "ms_draft": 1.0, "ms_verify": 2.0, "ms_other": 0.5} | fields


def texts(recording: Recording) -> list[str]:
    return ["".join(token["text"] for r in answer.rounds for token in r["emitted"]) for answer in recording.answers]


def test_figures_that_the_file_lacks_are_counted_from_its_rounds() -> None:
    whole = read(EVENTS.read_bytes()).answers[0].stats
    counted = read(b"".join(EVENTS.read_bytes().splitlines(keepends=True)[:-1])).answers[0].stats
    known = {name for name in whole if counted[name] is not None}
    assert known >= {"tokens_per_second", "acceptance_rate", "mean_acceptance_length", "seconds_verify"}
    assert {name: counted[name] for name in known} == pytest.approx({name: whole[name] for name in known}, rel=1e-3)


@pytest.mark.parametrize("bad", [b"\x00\xff\n", b"{}\n", b"null\n", b'{"type": "round"}\n', b'{"type": "round" "}\n'])
def test_what_follows_damage_is_left_out(bad: bytes) -> None:
    good = events(a_round(emitted("a")))
    recording = read(good + bad + good)
    assert texts(recording) == ["a"]
    assert recording.damage.startswith("line 2 is damaged")


def test_several_runs_in_one_file_are_several_answers_also_without_rounds_or_an_end() -> None:
    given = {"num_draft_tokens": 8, "num_accepted_tokens": 6, "acceptance_rate": 0.75}
    one = events(a_round(emitted("a")), text="a", model="m")
    kept = events(text="hi", stats=given)  # as of a chat that is kept without rounds, goes on, and is saved
    recording = read(one + kept + events(a_round(emitted("b")), a_round(emitted("c"))))
    assert texts(recording) == ["a", "", "bc"]
    assert [answer.model for answer in recording.answers] == ["m", "", ""]
    assert [answer.stats["acceptance_rate"] for answer in recording.answers] == [None, 0.75, None]
    assert {name: recording.answers[1].stats[name] for name in given} == given
    assert recording.damage == "it ends before the answer does"


def test_encodings() -> None:
    data = events(a_round(emitted("é")), text="é").replace(rb"\u00e9", "é".encode())
    assert texts(read(data)) == ["é"]
    assert texts(read(b"\xef\xbb\xbf" + data)) == ["é"]
    assert texts(read(data.decode().encode("utf-16"))) == ["é"]
    broken = read(data.replace("é".encode(), "é".encode()[:1]))  # half of a character
    assert texts(broken) == ["\ufffd"]
    assert broken.damage == ""


def test_a_character_that_was_never_completed_is_behind_the_tokens() -> None:
    half = events(a_round(emitted("a"), emitted("")), text="a\ufffd")
    assert read(half).answers[0].text == "\ufffd"


FOREIGN = "neither the output of generate --format events nor a saved chat"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b" \n\n", "it is empty"),
        (b"\x7fELF\x02\x01\x01\x00" + bytes(200), FOREIGN),
        (b'{"id": "code-1", "prompt": "Say hello."}\n', FOREIGN),
        (b"null", FOREIGN),
        (b"[" * 200_000, FOREIGN),
        (b"9" * 10_000, FOREIGN),
        (events(a_round(emitted("a"))).split(b"\n")[0][:-4], "it is not JSON"),
        (events(text="hello"), "it has no rounds"),
        (events(a_round(emitted("a"), ms_verify=float("nan"))), f"{FOREIGN}: it has NaN"),
        (events(a_round(emitted("a"), ms_verify=1e300)), f"{FOREIGN}: ms_verify: "),
        (events(a_round(emitted("a"), ms_verify=10**400)), f"{FOREIGN}: it has a number of 401 digits"),
        (events(a_round(emitted("a"), ms_verify=-1)), f"{FOREIGN}: ms_verify: "),
        (events(a_round(emitted("a", "guessed"))), "kind of 0 of emitted: "),
        (events(a_round(draft=[guess("a", True) | {"prob": 1.5}])), "prob of 0 of draft: "),
        (events(a_round(draft=[guess("a", True) | {"accepted": 1}])), "accepted of 0 of draft: "),
        (events(a_round(draft=[guess("a", True) | {"parent": 0}])), "draft token 0 comes after 0"),
    ],
)
def test_what_is_no_recording_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(RecordingError) as refused:
        read(data)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 250


def test_a_saved_chat_that_is_none_is_refused(tmp_path: Path) -> None:
    odd = "q", "a", AnswerRecord("odd")
    for turns, reason in (
        ([], "without the rounds of an answer"),
        ([odd], "damaged: finish_reason of 0 of answers of notes: "),
    ):
        path = write_chat(tmp_path / "a.chat", *turns)
        with pytest.raises(RecordingError, match=reason):
            read(path.read_bytes())


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return Path(shutil.copy(EVENTS, tmp_path / "run.jsonl"))


def is_page(data: bytes) -> bool:
    return data.startswith(b"<!doctype html>") and data.rstrip().endswith(b"</html>")


def test_the_page_lands_beside_the_file_for_this_user_alone_and_its_path_is_printed(recorded: Path) -> None:
    """How files are written, links among them, is tested in tests/system/test_files.py."""
    out, done = recorded.with_suffix(".html"), localspec("replay", recorded)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, f"{out}\n", b"")
    assert is_page(out.read_bytes())
    assert os.name == "nt" or stat.S_IMODE(out.stat().st_mode) == 0o600
    assert sorted(path.name for path in recorded.parent.iterdir() if path.is_file()) == ["run.html", "run.jsonl"]
    out.write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        replay_command(str(recorded), str(out))
    assert out.read_text() == "mine"
    replay_command(str(recorded), str(out), force=True)
    assert is_page(out.read_bytes())


def test_the_recording_itself_is_never_replaced(recorded: Path) -> None:
    path = recorded.rename(recorded.with_name("run.html"))
    for html in (None, str(path), str(path.parent / "." / "run.html")):
        with pytest.raises(UsageError, match="is the recording itself"):
            replay_command(str(path), html, force=True)
    assert path.read_bytes() == EVENTS.read_bytes()


def test_standard_input_and_output() -> None:
    for html in ([], ["--html", "-"]):
        page = localspec("replay", "-", *html, stdin=EVENTS.read_bytes())
        assert (page.returncode, page.stderr) == (0, b"")
        assert page.stdout.decode() == replay_page(read(EVENTS.read_bytes()), "")


def test_errors_are_one_line_and_a_recording_in_part_is_shown(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recorded.parent)
    Path("foreign").write_bytes(b"\x00\x01\x1b[2J")
    for arguments, status, reason in (
        (["none.jsonl"], 1, "cannot replay none.jsonl: No such file"),
        (["."], 1, "cannot replay .: "),
        ([""], 1, "cannot replay : "),
        (["foreign"], 1, "cannot replay foreign: it is neither"),
        (["run.jsonl", "--html", "."], 2, "is a folder"),
        (["run.jsonl", "--html", "no/x.html"], 2, "there is no folder"),
        ([], 2, "FILE"),
    ):
        assert_one_line(localspec("replay", *arguments), status, reason)
    recorded.write_bytes(EVENTS.read_bytes()[:3000])
    done = localspec("replay", recorded)
    assert (done.returncode, is_page(Path(done.stdout.decode().strip()).read_bytes())) == (0, True)
    assert f"{recorded} is shown only in part: it ends in the middle of line" in done.stderr.decode()


def test_what_generate_prints_can_be_replayed(tiny: TinyFiles) -> None:
    data = generate(tiny.pair, "-p", "hello", "--format", "events").stdout
    reply = json.loads(data.splitlines()[-1])
    assert texts(read(data)) == [visible(reply["text"])]
    assert len(read(data).answers[0].rounds) == reply["stats"]["num_rounds"]
