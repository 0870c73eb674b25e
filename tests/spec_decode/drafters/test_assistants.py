"""Gemma 4's assistants: heads that read the keys and values of their target, in a context over its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec import LocalspecError, SamplingParams
from localspec.backends.llama import llama_cpp
from localspec.commands.files import inspect_command
from localspec.errors import ModelFileError
from localspec.heads.kinds import read_published
from tests.conftest import open_backend
from tests.spec_decode.drafters.test_published_heads import (
    GREEDY,
    PROMPT,
    SEEDED,
    drafts_as_a_fresh_one,
    open_mtp,
    says_what_it_says_without,
)
from tests.support import ggufs
from tests.support.gemma4_ggufs import write_assistant, write_gemma4

pytestmark = pytest.mark.usefixtures("llama_cpp")

WIDE: dict[str, Any] = {"pattern": (True, False) * 3, "n_shared": 2, "n_each": 32}
"""A target some of whose layers use keys and values of earlier ones, as E2B and E4B do."""

Files = tuple[Path, Path]


def write_pair(folder: Path, **of_target: Any) -> Files:
    target = write_gemma4(folder / "target.gguf", **of_target)
    return target, write_assistant(target, folder / "assistant.gguf")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_pair(tmp_path_factory.mktemp("gemma4"))


@pytest.mark.parametrize(
    ("of_target", "pattern", "options"),
    [
        ({}, (True, True, False), {}),
        (WIDE, (True, True, False), {}),
        ({"pattern": (False, True, True)}, (True,), {}),
        ({}, (True, False), {"kv_cache_type": "q8_0"}),
    ],
)
def test_the_text_does_not_depend_on_it(
    tmp_path: Path, of_target: dict[str, Any], pattern: tuple[bool, ...], options: dict[str, Any]
) -> None:
    target = write_gemma4(tmp_path / "target.gguf", **of_target)
    assistant = write_assistant(target, tmp_path / "assistant.gguf", pattern=pattern)
    with open_mtp(target, assistant, **options) as llm:
        assert (llm.draft_names, llm.warnings) == (["head"], [])
        says_what_it_says_without(llm, "head", 0.03)
        drafts_as_a_fresh_one(llm)
        assert llm.warnings == []


def test_several_answers_at_a_time_draft_with_it_each_as_alone(files: Files) -> None:
    asked = [(f"{word} two one two", replace(SEEDED, seed=i)) for i, word in enumerate(("one", "two", "three", "four"))]
    with open_mtp(*files) as llm:
        alone = [llm.generate(*each) for each in asked]
    with open_mtp(*files, parallel=3) as llm:
        beside = [stream.reply for stream in [llm.rounds(*each) for each in asked]]
        assert llm.warnings == []
    for mine, expected in zip(beside, alone, strict=True):
        assert mine.token_ids[:8] == expected.token_ids[:8]  # later width noise may part them
        assert mine.stats["num_accepted_tokens"] > 0


def test_it_goes_on_in_a_conversation_and_beside_others(files: Files) -> None:
    """The target's context is made anew for it, with the text; and again for another draft, and back."""
    target, assistant = files
    with open_mtp(target, None) as plain, open_mtp(target, None) as llm:
        text = PROMPT
        for draft in (None, assistant, None, [assistant, "ngram"], assistant):
            llm.set_draft(draft)
            reply = llm.generate(text, replace(GREEDY, max_tokens=20))
            assert reply.token_ids == plain.generate(text, replace(GREEDY, max_tokens=20)).token_ids
            assert bool(reply.stats["by_source"].get("head", {}).get("num_draft_tokens")) == (draft is not None)
            text += reply.text
        assert llm.warnings == []


def test_an_answer_that_fills_the_context_is_no_failure(files: Files) -> None:
    until_full = SamplingParams(ignore_eos=True, temperature=0.0)
    with open_mtp(*files, n_ctx=256) as llm:
        reply = llm.generate(PROMPT, until_full)
        assert reply.token_ids == llm.generate(PROMPT, until_full, speculate=False).token_ids
        assert len(reply.token_ids) > 200
        assert (llm.draft_names, llm.warnings) == (["head"], [])


def test_auto_takes_the_one_that_lies_beside_its_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, assistant = write_pair(tmp_path)
    other = write_gemma4(target.parent / "other.gguf", pattern=(True, False, False))
    apart = target.parent / "MTP" / assistant.name
    apart.parent.mkdir()
    for path, place, expected in ((target, assistant, [assistant]), (other, assistant, []), (target, apart, [apart])):
        assistant = assistant.rename(place)
        with open_mtp(path, "auto", idle=True) as llm:  # what passes cost is measured briefly then
            assert llm.warnings == []
            assert [draft.path for draft in llm.run(lambda pair: pair.state.models)] == expected
    assert inspect_command(str(assistant)) == 0
    said = capsys.readouterr().out
    assert "Gemma 4 assistant, reads nextn" in said
    assert "embeddings and keys and values of the target, on llama-cpp" in said


@pytest.mark.parametrize(
    ("of_target", "extra", "why"),
    [
        (
            {"pattern": (True, False, False, False)},
            {},
            r"2 heads of 32 channels and a window of 32 .*but \S.* has none",
        ),
        ({"pattern": (False, True, True)}, {}, r"1 heads of 64 channels, but .* has none there"),
        ({}, {"attention.head_count_kv": [4, 4, 1]}, "keys and values of 4 heads of 32 channels"),
        ({}, {"attention.sliding_window": 16}, "a window of 16 .*but .* has 2 heads of .* and a window of 32"),
    ],
)
def test_one_for_another_target_is_refused(
    files: Files, of_target: dict[str, Any], extra: Mapping[str, Any], why: str
) -> None:
    folder = files[0].parent
    target = write_gemma4(folder / "other.gguf", **of_target) if of_target else files[0]
    assistant = write_assistant(files[0], folder / "odd.gguf", extra=extra)
    with pytest.raises(LocalspecError, match=f"does not fit: it reads .*{why}"):
        open_mtp(target, assistant)


def test_it_is_for_gemma_4_on_llama_cpp_and_no_model_itself(files: Files, tmp_path: Path) -> None:
    llama = ggufs.write_llama(tmp_path / "llama.gguf", ggufs.Shape(n_layer=4), ggufs.bpe_vocab())
    for engine in ("llama-cpp", open_backend("reference").name):
        with pytest.raises(LocalspecError, match=r"it reads keys and values of .* but .* has none there"):
            open_mtp(llama, files[1], backend=engine)
    with pytest.raises(LocalspecError, match="cannot generate text"):
        open_mtp(files[1], None)


DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"extra": {"embedding_length_out": None}}, "embedding_length_out is None"),
    (
        {"extra": {"embedding_length_out": 64}},
        "nextn.pre_projection.weight is .112, 256. and should be .112, 128.",
    ),
    ({"extra": {"embedding_length_out": 112}}, "is as wide as its target"),
    ({"extra": {"nextn_predict_layers": 2}}, "2 of its 3 layers are for multi-token prediction"),
    ({"extra": {"attention.sliding_window_pattern": 2}}, "sliding_window_pattern is 2"),
    ({"extra": {"attention.sliding_window_pattern": [True, False]}}, "sliding_window_pattern is"),
    ({"pattern": (False, False)}, "has no layer with a window"),
    ({"extra": {"attention.head_count_kv": [2, 1, 1]}}, "do not all read the same keys and values"),
    ({"extra": {"attention.head_count_kv": [3, 3, 1]}}, "4 attention heads cannot share 3 key heads"),
    ({"extra": {"attention.head_count_kv": [2, 2]}}, r"head_count_kv is \[2, 2\]"),
    ({"extra": {"attention.head_count_kv": [2, 2, 0]}}, r"head_count_kv is \[2, 2, 0\]"),
    ({"extra": {"attention.value_length_swa": 16}}, "keys and values differ in width"),
    ({"extra": {"rope.dimension_count": 66}}, "it rotates 66 of 64 channels"),
    ({"extra": {"rope.dimension_count_swa": 31}}, "it rotates 31 of 32 channels"),
    ({"drop": ("token_embd.weight",)}, "lacks token_embd.weight"),
    ({"drop": ("rope_freqs.weight",)}, "lacks rope_freqs.weight"),
    ({"drop": ("nextn.post_projection.weight",)}, "lacks nextn.post_projection.weight"),
    ({"drop": ("blk.2.layer_output_scale.weight",)}, "lacks blk.2.layer_output_scale.weight"),
]


@pytest.mark.parametrize(("options", "why"), DAMAGED)
def test_what_the_engine_would_end_the_process_over_is_refused(
    files: Files, tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ModelFileError, match=why) as caught:
        read_published(write_assistant(files[0], tmp_path / "odd.gguf", **options))
    assert "\n" not in str(caught.value)


def test_without_memory_for_its_context_the_answer_goes_on(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the target has read is there, though the engine empties a memory for which such a context is made."""
    with open_mtp(*files) as llm:
        plain = llm.generate(PROMPT, GREEDY, speculate=False).token_ids
        init, made = llama_cpp.binding().api.llama_init_from_model, list[int]()

        def refused(*given: Any) -> int | None:
            made.append(init(*given))
            llama_cpp.binding().free_context(made[-1])
            return None

        monkeypatch.setattr(llama_cpp.binding().api, "llama_init_from_model", refused)
        assert llm.generate(PROMPT, GREEDY).token_ids == plain
        assert len(made) == 1
        (warning,) = llm.warnings
        assert "could not create a context" in warning
