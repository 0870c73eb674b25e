"""Sessions and the prefix cache: going back to a conversation, saving and loading it, every way a file can be bad."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, Closed, SamplingParams, SessionFileError, UsageError
from localspec.backends import reference
from localspec.engine.prefix_cache import MIN_TOKENS, PrefixCache
from tests.conftest import TinyFiles, open_backend
from tests.support import ggufs
from tests.support.contexts import watch_passes
from tests.test_llm import draft_context

pytestmark = pytest.mark.usefixtures("measured_home")

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
LONG_TEXT = "the cat sat on the mat and looked at the other cat, which sat on another mat. " * 8


def load(tiny: TinyFiles, backend: str = "reference", **options: Any) -> LLM:
    pair = tiny.quick if backend == "reference" else tiny.pair
    options = {"draft": ["ngram", pair.draft], "n_ctx": 1024} | options
    return LLM(pair.target, backend=backend, **options)


@pytest.fixture
def llm(tiny: TinyFiles) -> Iterator[LLM]:
    with load(tiny) as loaded:
        yield loaded


@pytest.fixture(params=["reference", "ik-llama", "llama-cpp"])
def any_llm(request: pytest.FixtureRequest, tiny: TinyFiles) -> Iterator[LLM]:
    open_backend(request.param)
    with load(tiny, request.param) as loaded:
        yield loaded


def test_going_back_to_a_conversation_reads_nothing_again(any_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = any_llm
    sessions = [llm.session(system=f"{LONG_TEXT} You are number {i}.") for i in range(4)]
    first = [session.chat("hello", GREEDY, draft_length=3) for session in sessions]
    assert all(reply.stats["cached_tokens"] < reply.stats["prompt_tokens"] for reply in first)
    target, draft = watch_passes(llm.inspect().context, monkeypatch), watch_passes(draft_context(llm), monkeypatch)
    for i in (1, 3, 0, 2):
        target.clear(), draft.clear()
        reply = sessions[i].chat("go on", GREEDY, draft_length=3)
        new = reply.stats["prompt_tokens"] - reply.stats["cached_tokens"]
        assert reply.stats["cached_tokens"] >= first[i].stats["prompt_tokens"]
        assert new < 120 < reply.stats["prompt_tokens"] / 3  # the last answer is tokenised anew: gibberish
        assert max(target) <= max(new, 4)
        assert max(draft) <= new + 24 + 8  # what is new of the prompt, the answer before, a round
    assert llm.cache_info()["hits"] == 8


def test_the_bound_holds_and_the_least_recently_used_goes_first(tiny: TinyFiles) -> None:
    with load(tiny, draft=None) as llm:
        prompts = [llm.encode(f"{i} {LONG_TEXT}") for i in range(4)]
        llm.generate(prompts[0], SamplingParams(max_tokens=1))
        size = llm.inspect().context.state_bytes
        one = SamplingParams(max_tokens=1)
        for i in (1, 0, 1, 0):  # what is in use is not kept twice
            llm.generate(prompts[i], one)
            assert llm.cache_info()["entries"] == 1

        llm.prefix_cache_bytes = int(2.5 * size)
        for i in (1, 2, 0, 3, 0):  # 0 is used again before 3 needs room, so 1 goes
            reply = llm.generate(prompts[i], one)
            assert llm.cache_info()["bytes"] <= 2.5 * size
        assert reply.stats["cached_tokens"] == len(prompts[0]) - 1
        assert llm.cache_info()["evictions"] >= 1
        assert llm.generate(prompts[1], SamplingParams(max_tokens=1)).stats["cached_tokens"] < MIN_TOKENS
        llm.prefix_cache_bytes = 0
        assert llm.cache_info()["bytes"] == llm.cache_info()["entries"] == 0


def test_a_branch_keeps_its_trunk(llm: LLM) -> None:
    """Two conversations that begin alike: taking up one must not lose the other's end."""
    trunk = llm.encode(LONG_TEXT)
    left, right = [*trunk, *llm.encode("left " * 20)], [*trunk, *llm.encode("right " * 20)]
    one = SamplingParams(max_tokens=1)
    llm.generate(left, one)
    assert llm.generate(right, one).stats["cached_tokens"] >= len(trunk) - 2
    for prompt in (left, right, left, right):
        assert llm.generate(prompt, one).stats["cached_tokens"] >= len(prompt) - MIN_TOKENS


def test_a_conversation_that_goes_on_replaces_what_it_was(llm: LLM) -> None:
    prompt, one = llm.encode(LONG_TEXT), SamplingParams(max_tokens=1)
    for n in (40, 80, 120):
        for asked in (prompt[:n], "something else"):
            llm.generate(asked, one)
        assert llm.cache_info()["entries"] == 1


def test_a_memory_that_cannot_be_cut_is_used_only_whole(tiny: TinyFiles) -> None:
    with open_backend("llama-cpp").load(tiny.recurrent, n_threads=1) as model, model.new_context(256) as context:
        assert model.capabilities.rollback == "replay"
        cache = PrefixCache(1 << 24)
        tokens = [int(i) for i in np.random.default_rng(0).integers(5, 200, 90)]
        context.decode(tokens[:60], "none")
        cache.switch(context, [7] * 50)
        context.truncate(0)
        context.decode([7] * 50, "none")
        cache.switch(context, tokens[:40])  # shares 40 tokens with what was put aside, which has 60
        assert context.tokens == [7] * 50
        cache.switch(context, tokens)
        assert context.tokens == tokens[:60]
        with model.new_context(256) as fresh:
            wanted = fresh.decode(tokens[:61], "last").logits.copy()
        assert np.abs(context.decode(tokens[60:61], "last").logits - wanted).max() < 0.05


def test_what_the_disk_has_no_room_for_is_brought_back_from_memory(tiny: TinyFiles) -> None:
    """As where sequences share a memory, of which others hold most."""
    with reference.load(tiny.bpe) as model, model.new_context(256) as context, model.new_context(64) as small:
        cache, prompt, other = PrefixCache(1 << 24), list(range(5, 45)), [7] * 30
        context.decode([*prompt, *other, *other], "none")
        too_much = list(context.tokens), context.export_state()
        small.decode(prompt, "none")
        cache.switch(small, other)
        small.reuse(other)
        small.decode(other, "none")
        cache.on_disk = lambda context, prompt, n_known: too_much
        cache.switch(small, [*prompt, 3])
        assert small.tokens == prompt
        assert (cache.hits, cache.restored) == (1, 0)


def test_a_session_remembers(llm: LLM) -> None:
    session = llm.session("Be brief.", GREEDY)
    first = session.chat("hello")
    assert session.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.text},
    ]
    second = "".join(session.stream("and now"))
    expected = llm.chat([*session.messages[:-2], {"role": "user", "content": "and now"}], GREEDY)
    assert second == expected.text
    assert session.undo()
    assert len(session.messages) == 3
    assert session.undo()
    assert not session.undo()
    with pytest.raises(UsageError, match="asked with a text"):
        session.chat([{"role": "user", "content": "x"}])
    # Its messages may be any sequence; one that cannot be added to is an error, and the next question is answered.
    session.messages = ({"role": "system", "content": "terse"},)
    text = session.chat("hello").text
    assert [message["content"] for message in session.messages] == ["terse", "hello", text]
    mine: list[dict[str, Any]] = []
    session.messages = mine
    session.chat("hello")
    assert session.messages is mine
    assert len(mine) == 2
    with pytest.raises(TypeError):
        session.messages = 5
    session.messages = Fixed()
    with pytest.raises(ValueError, match="nothing can be added"):
        session.chat("hello")
    assert llm.generate("hello", GREEDY).token_ids


class Fixed(list[Any]):
    def __iadd__(self, other: Any) -> Any:
        raise ValueError("nothing can be added")


def test_questions_asked_at_once_are_answered_one_after_the_other(llm: LLM) -> None:
    session = llm.session(params=GREEDY)
    streams = [session.rounds(f"question {i}") for i in range(3)]
    replies = [stream.reply for stream in streams]
    assert [message["content"] for message in session.messages[::2]] == [f"question {i}" for i in range(3)]
    assert [message["content"] for message in session.messages[1::2]] == [reply.text for reply in replies]
    assert replies[2].stats["prompt_tokens"] > replies[1].stats["prompt_tokens"] > replies[0].stats["prompt_tokens"]


def test_what_was_cancelled_counts_as_far_as_it_was_said(llm: LLM) -> None:
    session = llm.session(params=SamplingParams(max_tokens=600, ignore_eos=True))
    stream = session.rounds("endless", speculate=False)
    for _ in range(5):
        next(stream)
    stream.close()
    reply = stream.reply
    assert session.messages[1]["content"] == reply.text
    waiting = llm.rounds("endless", session.params)
    never = session.rounds("never said")
    never.close()
    assert never.reply.token_ids == []
    waiting.close()
    with pytest.raises(Exception, match="prompt has"):
        session.chat("too long " * 2000)
    assert len(session.messages) == 2


@pytest.fixture(scope="module")
def saved_bytes(tiny: TinyFiles, module_home: Path) -> bytes:
    """A session of two turns, saved by a pair that is closed again."""
    path = module_home / "chat.session"
    with load(tiny) as llm:
        session = llm.session(LONG_TEXT, GREEDY)
        session.chat("hello", draft_length=3)
        session.chat("go on", draft_length=3)
        llm.session("another").chat("what is in between must not matter, nor be in the file")
        session.save(path)
    return path.read_bytes()


@pytest.fixture
def saved(saved_bytes: bytes, tmp_path: Path) -> Path:
    (tmp_path / "chat.session").write_bytes(saved_bytes)
    return tmp_path / "chat.session"


@pytest.mark.parametrize("backend", ["reference", "ik-llama", "llama-cpp"])
def test_a_saved_session_goes_on_without_reading(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    open_backend(backend)
    path = tmp_path / "chat.session"
    with load(tiny, backend) as llm:
        session = llm.session(LONG_TEXT, GREEDY)
        session.chat("hello", draft_length=3)
        session.save(path)
        messages = list(session.messages)
        expected = session.chat("and then", draft_length=3)
    with load(tiny, backend) as llm:
        llm.session("somebody else").chat("x", GREEDY)
        session = llm.load_session(path)
        assert (session.notice, session.messages, session.params) == (None, messages, GREEDY)
        target, draft = (watch_passes(each, monkeypatch) for each in (llm.inspect().context, draft_context(llm)))
        reply = session.chat("and then", draft_length=3)
        assert reply.token_ids == expected.token_ids
        assert reply.stats["cached_tokens"] == expected.stats["cached_tokens"]
        new = reply.stats["prompt_tokens"] - reply.stats["cached_tokens"]
        assert max(target) <= max(new, 4)
        assert max(draft) <= new + 8


def test_parameters_survive(llm: LLM, tmp_path: Path) -> None:
    biases: Any = {5: np.float32(-3.5), np.int64(6): -math.inf}
    drawn: Any = {"temperature": np.float32(0.5), "seed": np.int64(7), "stop": ["\n\n", "END"], "max_tokens": 9}
    llm.session(params=SamplingParams(**drawn, logit_bias=biases)).save(tmp_path / "empty.session")
    loaded = llm.load_session(tmp_path / "empty.session")
    assert (loaded.messages, loaded.notice, list(loaded.params.stop)) == ([], None, ["\n\n", "END"])
    expected = SamplingParams(temperature=0.5, seed=7, max_tokens=9, logit_bias={5: -3.5, 6: -math.inf})
    assert replace(loaded.params, stop=()) == expected


def test_nothing_of_another_conversation_is_in_the_file(tiny: TinyFiles, saved: Path) -> None:
    with load(tiny) as llm:
        session = llm.load_session(saved)
        tokens = llm.inspect().encoder.encode(session.messages, add_generation_prompt=False)
        assert session.notice is None
        for context in llm.inspect().contexts:
            assert len(context.tokens) > 100
            assert context.tokens == tokens[: context.n_past]
    data = saved.read_bytes()
    assert b"what is in between" not in data
    assert b"go on" in data


def test_a_model_that_shares_its_first_part_does_not_take_over_the_memory(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("other", 5)):
        (tmp_path / name).mkdir()
        ggufs.write_in_parts(tmp_path / name, seed=seed)
    one, other = (tmp_path / name / "tiny-00001-of-00002.gguf" for name in ("one", "other"))
    options: dict[str, Any] = {"draft": None, "backend": "reference", "n_ctx": 512}
    with LLM(one, **options) as llm:
        session = llm.session()
        session.chat(LONG_TEXT[:120], GREEDY)
        session.save(tmp_path / "saved")
    with LLM(other, **options) as llm:
        session = llm.load_session(tmp_path / "saved")
        assert "will be read again" in session.notice
        got = session.chat("go on", GREEDY)
        llm.prefix_cache_bytes = 0
        llm.generate("something else", GREEDY)
        assert llm.load_session(tmp_path / "saved").chat("go on", GREEDY).token_ids == got.token_ids


def test_the_text_alone_can_be_saved_and_loaded_with_what_a_program_notes(llm: LLM, tmp_path: Path) -> None:
    session = llm.session("be brief", GREEDY)
    session.chat("hello")
    session.notes = {"colour": ["blue"]}
    session.save(tmp_path / "whole")
    session.save(tmp_path / "text", memory=False)
    assert (tmp_path / "text").stat().st_size < min(2000, (tmp_path / "whole").stat().st_size)
    for name in ("whole", "text"):
        loaded = llm.load_session(tmp_path / name, memory=False)
        assert (loaded.messages, loaded.notes, loaded.notice) == (session.messages, session.notes, None)
    loaded.system = "be kind"
    assert loaded.messages[0]["content"] == loaded.system == "be kind"
    loaded.system = None
    assert loaded.messages == session.messages[1:]


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="names of files are Unicode there")
def test_a_session_of_a_file_whose_name_is_no_utf_8(tiny: TinyFiles, tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.gguf"))
    path.write_bytes(tiny.quick.target.read_bytes())
    with LLM(path, draft=None, backend="reference", n_ctx=256) as llm:
        session = llm.session()
        session.chat("hello", GREEDY)
        session.save(tmp_path / "saved")
        assert llm.load_session(tmp_path / "saved").notice is None


def as_file(text: dict[str, Any], rest: bytes = b"") -> bytes:
    document = json.dumps(text).encode()
    head = b"localspec-session 1\n%d %s\n" % (len(document), blake2b(document, digest_size=16).hexdigest().encode())
    return head + document + rest


def test_damaged_truncated_and_hostile_files(tiny: TinyFiles, saved: Path) -> None:
    """Refused with one line; where the text is whole, the chat is rebuilt from it and goes on with the same words.

    Sizes that do not fit, odd types, absurd shapes: never a traceback or an allocation of petabytes.
    """
    data = saved.read_bytes()
    header = data.index(b"\n", data.index(b"\n") + 1) + 1
    text_end = header + int(data.split(b"\n")[1].split()[0])
    text, arrays = json.loads(data[header:text_end]), data[text_end:]
    with load(tiny) as llm:
        expected = llm.load_session(saved).chat("and then", draft_length=3).token_ids

        def outcome(changed: bytes | None = None) -> str | None:
            if changed is not None:
                saved.write_bytes(changed)
            llm.generate("something else entirely, so that nothing is in memory", GREEDY)
            llm.prefix_cache_bytes = 0
            try:
                session = llm.load_session(saved)
            except SessionFileError as error:
                found: str | None = str(error)
            else:
                found = session.notice
                assert session.chat("and then", draft_length=3).token_ids == expected
            assert found is None or "\n" not in found
            return found

        for size in (5, text_end - 1):
            found = outcome(data[:size])
            assert "not a saved session" in found or "damaged" in found
        assert "damaged" in outcome(data.replace(b'"hello"', b'"jello"', 1))
        assert "will be read again" in outcome(data[: text_end + 100])
        assert outcome(data + b"more") is None
        for foreign in (b"PK\x03\x04", b"{}", b"localspec-session 2\n" + data[20:], b"\0" * 4096):
            assert outcome(foreign) is not None
        shapes = [{"shape": shape} for shape in ([1 << 50], [1 << 62, 1 << 62, 4], [-1, 4], [10**30])]
        for array in (*shapes, {"dtype": "O"}, {"dtype": "no such type"}, {"name": "other"}):
            changed = json.loads(json.dumps(text))
            changed["memories"][0]["arrays"][0].update(array)
            assert "read again" in outcome(as_file(changed, arrays))
        for memory in ({"arrays": None}, {"tokens": ["x"]}, {"tokens": [5] * 5000}, {"maker": 7}):
            first, *others = text["memories"]
            assert "read again" in outcome(as_file(text | {"memories": [first | memory, *others]}, arrays))
        assert "damaged" in outcome(as_file(text | {"params": {"temperature": 10**400}}))
        for remove in (saved.unlink, saved.mkdir):
            remove()
            assert "cannot read" in outcome()


def test_a_file_of_another_model_is_read_again_from_its_text(tiny: TinyFiles, saved: Path) -> None:
    with LLM(tiny.bpe, draft=None, backend="reference", n_ctx=1024) as llm:
        session = llm.load_session(saved)
        assert ("quick" in session.notice, "tiny-bpe" in session.notice) == (True, True)
        reply = session.chat("and then")
        assert reply.stats["cached_tokens"] == 0
        expected = llm.chat([*session.messages[:-2], {"role": "user", "content": "and then"}], GREEDY)
        assert reply.token_ids == expected.token_ids
    with load(tiny, n_ctx=64) as llm:
        assert "room for 64" in str(llm.load_session(saved).notice)


def test_what_cannot_be_written_is_refused_and_nothing_is_lost(llm: LLM, tmp_path: Path) -> None:
    precious, folder = tmp_path / "thesis.txt", sorted(os.listdir(tmp_path))
    precious.write_text("years of work")
    session = llm.session()
    session.messages.append({"role": "user", "content": "x"})
    with pytest.raises(SessionFileError, match="not a saved session"):
        session.save(precious)
    assert precious.read_text() == "years of work"
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(SessionFileError, match="choose another name"):
            session.save(tmp_path / "pipe")
        assert (tmp_path / "pipe").is_fifo()
        (tmp_path / "pipe").unlink()
    for name in ("no/folder", "a" * 300, "nul\0"):
        with pytest.raises(SessionFileError, match="cannot write"):
            session.save(tmp_path / name)
    session.params = SamplingParams(stop=["\ud800"])
    with pytest.raises(SessionFileError, match="not JSON"):
        session.save(tmp_path / "x.session")
    llm.close()
    with pytest.raises(Closed):
        session.save(tmp_path / "late.session")
    assert sorted(os.listdir(tmp_path)) == sorted([*folder, "thesis.txt"])


def test_a_file_gives_way_to_a_whole_one_in_one_step(
    tiny: TinyFiles, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that whatever ends the writing early, as ``kill -9`` does, leaves the older one."""
    old, new = saved.read_bytes(), tmp_path / "new.session"

    def end(temporary: Path, path: Path) -> None:
        assert saved.read_bytes() == old
        shutil.copy(temporary, new)
        raise KeyboardInterrupt

    with load(tiny, idle=False) as llm:
        session = llm.load_session(saved)
        session.messages[-1]["content"] = "something else"
        monkeypatch.setattr(os, "replace", end)
        with pytest.raises(KeyboardInterrupt):
            session.save(saved)
        assert saved.read_bytes() == old
        again = llm.load_session(new)
        assert (again.messages, again.notice) == (session.messages, None)
    assert not list(tmp_path.glob(".*.tmp"))
