"""Arguments of the Python API: every odd value works or is refused in one line."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, LocalspecError, SamplingParams, UsageError
from localspec.errors import MAX_COUNT, MAX_THREADS
from localspec.sampling.sampling import HUGE, MANY
from localspec.spec_decode.drafters.names import names_of_files
from tests.conftest import TinyFiles

ODD: list[Any] = [
    True, 5, -1, 3.5, math.nan, math.inf, 10**30, 10**400, -(10**5000), 2**32, np.int64(3), np.uint8(4), np.float32(2),
    np.float64("nan"), "5", "", "\ud800", "a\0b", b"5", b"", bytearray(b"x"), (), [], {}, (5,), [b"a"], [None],
    [1.5], {"a": 1}, range(3), np.array([1, 2]), np.array(3), object(), len, Path("nowhere"), Fraction(1, 2), 1 + 2j,
]  # fmt: skip

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


def in_one_line(call: Callable[[], Any]) -> None:
    """It works, or says in one line why not."""
    said = ""
    try:
        call()
    except LocalspecError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 700


@pytest.fixture(scope="module")
def llm(tiny: TinyFiles) -> Iterator[LLM]:
    pair = tiny.quick
    with LLM(pair.target, draft=["ngram", pair.draft], backend="reference", n_ctx=96, draft_length=2) as loaded:
        yield loaded


# -- loading -----------------------------------------------------------------------------------------------------


def is_whole(least: int, most: int = 1 << 20000) -> Callable[[Any], bool]:
    whole = (int, np.integer)
    return lambda value: isinstance(value, whole) and not isinstance(value, bool) and least <= int(value) <= most


NO_DRAFTS = ("5", "\ud800", "a\0b", "()", "[]", "nowhere")
SENSIBLE: dict[str, Callable[[Any], bool]] = {
    "draft": lambda value: isinstance(value, (Path, str, tuple, list, dict)) and str(value) in NO_DRAFTS,
    "n_ctx": is_whole(1, MAX_COUNT),
    "n_threads": is_whole(1, MAX_THREADS),
    "n_gpu_layers": is_whole(-1, MAX_COUNT),
    "draft_length": lambda value: is_whole(0, 64)(value) or (isinstance(value, str) and value == "5"),
    "prefix_cache_bytes": is_whole(0),
    "max_queue": is_whole(0),
    "parallel": lambda value: is_whole(1, 64)(value) or (isinstance(value, str) and value == "5"),
    "progress": callable,
}
"""What loads; all else is refused."""


@pytest.mark.parametrize(
    "name",
    [
        "model", "draft", "draft_length", "backend", "n_ctx", "n_threads", "n_gpu_layers", "kv_cache_type",
        "draft_backend", "prefix_cache_bytes", "max_queue", "cancel", "progress", "placement", "parallel",
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_a_line_before_there_is_a_thread(
    tiny: TinyFiles, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):
        pass

    def start(thread: threading.Thread) -> None:
        raise Started

    monkeypatch.setattr(threading.Thread, "start", start)
    for value in ODD:
        with pytest.raises((LocalspecError, Started)) as caught:
            LLM(**({"model": tiny.quick.target, "draft": None, "backend": "reference"} | {name: value}))
        assert str(caught.value).isprintable()
        assert (caught.type is Started) is bool(SENSIBLE.get(name, lambda value: False)(value)), value


def test_numbers_of_numpy_load_a_pair(tiny: TinyFiles) -> None:
    pair = tiny.quick
    with LLM(
        pair.target, draft=(each for each in ("ngram", pair.draft)), backend="reference", n_ctx=np.int64(64),
        n_threads=np.uint8(1), draft_length=np.int32(2), prefix_cache_bytes=np.int64(1 << 20), max_queue=np.int8(4),
    ) as llm:  # fmt: skip
        assert (llm.n_ctx, llm.draft_length, llm.max_queue, llm.prefix_cache_bytes) == (64, 2, 4, 1 << 20)
        assert llm.draft_names == ["ngram", pair.draft.stem]


@pytest.mark.parametrize("n_ctx", [2, 4, 8, 9, 10])
def test_a_context_of_a_few_tokens(tiny: TinyFiles, isolated_home: Path, n_ctx: int) -> None:
    """Nothing is known of what passes cost: the first load of a file, in a home of its own."""
    shutil.rmtree(isolated_home / "calibration", ignore_errors=True)
    with LLM(tiny.quick.target, draft=["ngram", tiny.quick.draft], backend="reference", n_ctx=n_ctx) as llm:
        assert len(llm.generate([5], SamplingParams(ignore_eos=True)).token_ids) == n_ctx - 1


# -- asking ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["draft_length", "deadline", "conversation", "logprobs", "drafters", "prediction", "params"]
)
def test_an_odd_option_of_a_request(llm: LLM, name: str) -> None:
    for value in ODD:
        options = {"params": SHORT, name: value}
        in_one_line(lambda options=options: llm.generate([1, 2], **options))  # type: ignore[misc]
        if name != "conversation":
            in_one_line(lambda options=options: llm.session().chat("Hi", **options))  # type: ignore[misc]


@pytest.mark.parametrize("name", ["generate", "chat", "logprobs", "encode", "tokenize", "detokenize", "token_text"])
def test_an_odd_prompt(llm: LLM, name: str) -> None:
    prompts = [each for each in ODD if not callable(each)]
    prompts += [[1, 2.0], [True, 2], [1, "a"], [10**30], [-1], [5, -1], [5, 300], [1] * 200, np.array([[1, 2]])]
    prompts += [["user"], [{"role": "user"}], {"role": "user", "content": "x"}, [{"role": "user", "content": 5}]]
    prompts += [[{"role": "user", "content": "\ud800"}], iter([{"role": "user", "content": "x"}]), [[1, 2]]]
    for prompt in prompts:
        options = {"params": SHORT} if name in ("generate", "chat") else {}
        in_one_line(lambda prompt=prompt, options=options: getattr(llm, name)(prompt, **options))  # type: ignore[misc]


@pytest.mark.parametrize("prompt", [b"hello", bytearray(b"x"), [True, 5], [300], [5, -1], [5, 10**30], [1, 2.5], {}])
def test_what_is_no_prompt_is_never_answered(llm: LLM, prompt: Any) -> None:
    with pytest.raises(UsageError, match="prompt"):
        llm.generate(prompt, SHORT)


def test_token_ids_of_any_kind_are_a_prompt(llm: LLM) -> None:
    expected = llm.generate([5, 6, 7], SHORT).token_ids
    for prompt in ((5, 6, 7), range(5, 8), np.array([5, 6, 7], np.uint8), iter([5, 6, 7]), [np.int64(5), 6, 7]):
        assert llm.generate(prompt, SHORT).token_ids == expected  # type: ignore[arg-type]


def test_drafters_by_any_sequence_of_names(llm: LLM) -> None:
    for names in ("ngram", ["ngram"], ("ngram",), {"ngram"}, (each for each in ["ngram"])):
        sources = llm.generate([5, 6, 5, 6, 5, 6, 5], SHORT, drafters=names).stats["by_source"]
        assert set(sources) <= {"ngram"}
    for wrong in (5, [5], [b"ngram"]):
        with pytest.raises(UsageError, match="names of drafters"):
            llm.generate([5], SHORT, drafters=wrong)


def test_odd_settings_change_nothing(llm: LLM) -> None:
    before = (llm.draft_names, llm.draft_length, llm.max_queue, llm.prefix_cache_bytes)
    for value in (True, -1, 3.5, math.nan, b"ngram", [b"x"], object(), 1 + 2j):
        names = ("draft_length", "max_queue", "prefix_cache_bytes")
        for change in (llm.set_draft, *(lambda v, n=n: setattr(llm, n, v) for n in names)):
            with pytest.raises(UsageError):
                change(value)  # type: ignore[operator]
    assert (llm.draft_names, llm.draft_length, llm.max_queue, llm.prefix_cache_bytes) == before
    assert llm.generate([5], SHORT).token_ids


def test_odd_sessions_are_refused(llm: LLM) -> None:
    for system in (5, b"x", ["x"], np.array([1, 2])):
        with pytest.raises(UsageError, match="system must be a text"):
            llm.session(system)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="system must be a text"):
            llm.session().system = system  # type: ignore[assignment]
    with pytest.raises(UsageError, match="SamplingParams"):
        llm.session(params={"temperature": 1})  # type: ignore[arg-type]
    for path in (5, None, 2.5):
        with pytest.raises(UsageError, match="no path"):
            llm.load_session(path)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="no path"):
            llm.session().save(path)  # type: ignore[arg-type]


# -- sampling parameters -----------------------------------------------------------------------------------------


def test_numbers_of_any_kind_become_pythons_own(llm: LLM) -> None:
    odd = SamplingParams(
        temperature=Fraction(1, 2), top_k=np.int8(40), top_p=np.float32(0.5), min_p=np.float16(0.25), seed=np.int64(-5),  # type: ignore[arg-type]
        repeat_penalty=np.float64(1.5), repeat_last_n=np.uint8(16), presence_penalty=1, max_tokens=np.int16(9),  # type: ignore[arg-type]
        logit_bias={np.int64(3): np.float32(1)}, stop=["x"], ignore_eos=np.bool_(True),  # type: ignore[arg-type]
    )  # fmt: skip
    plain = SamplingParams(
        temperature=0.5, top_k=40, top_p=0.5, min_p=0.25, seed=-5, repeat_penalty=1.5, repeat_last_n=16,
        presence_penalty=1.0, max_tokens=9, logit_bias={3: 1.0}, stop=("x",), ignore_eos=True,
    )  # fmt: skip
    assert odd == plain
    numbers = (odd.temperature, odd.top_k, odd.top_p, odd.min_p, odd.seed, odd.max_tokens, odd.presence_penalty)
    assert [type(number) for number in numbers] == [float, int, float, float, int, int, float]
    assert llm.generate([5, 6], odd).token_ids == llm.generate([5, 6], plain).token_ids


def test_parameters_are_as_they_were_when_they_were_made() -> None:
    bias, stop = {3: 1.0}, ["x"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[4], stop[0] = math.nan, ""
    assert params == SamplingParams(logit_bias={3: 1.0}, stop="x")


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": True}, {"temperature": 10**400}, {"top_p": np.float32("nan")}, {"top_k": 2.0}, {"top_k": True},
        {"seed": False}, {"seed": 2**64}, {"seed": 1.0}, {"max_tokens": np.float64(3)}, {"max_tokens": True},
        {"repeat_penalty": 1e300}, {"repeat_penalty": 1e-300}, {"frequency_penalty": -1e300}, {"stop": b"x"},
        {"presence_penalty": 1e39}, {"logit_bias": {3: 1e39}}, {"logit_bias": {3: math.nan}}, {"stop": [b"x"]},
        {"logit_bias": {True: 1.0}}, {"logit_bias": {3: True}}, {"logit_bias": {3: 10**400}}, {"ignore_eos": "no"},
        {"stop": (each for each in "ab")}, {"logit_bias": [(3, 1.0)]}, {"repeat_last_n": None}, {"ignore_eos": None},
    ],
    ids=lambda wrong: str(wrong)[:40],
)  # fmt: skip
def test_parameters_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-30, 1.0, 100.0])
@pytest.mark.parametrize(("size", "times"), [(HUGE, MANY), (HUGE, 1 / MANY), (1 / HUGE, MANY)])
def test_the_largest_parameters_leave_numbers(llm: LLM, temperature: float, size: float, times: float) -> None:
    for sign in (1, -1):
        params = SamplingParams(
            temperature=temperature, logit_bias={5: sign * size, 6: -size, 10**40: 1.0}, repeat_penalty=times,
            frequency_penalty=-sign * size, presence_penalty=-size, repeat_last_n=10**30, top_k=10**30,
            max_tokens=12, ignore_eos=True,
        )  # fmt: skip
        for length in (2, "auto"):
            assert len(llm.generate([5, 6, 5, 6], params, draft_length=length).token_ids) == 12


# -- which drafts ------------------------------------------------------------------------------------------------


def test_one_file_under_several_names_is_one_draft(tiny: TinyFiles, tmp_path: Path, monkeypatch: Any) -> None:
    pair, link, hard = tiny.quick, tmp_path / "link.gguf", tmp_path / "hard.gguf"
    link.symlink_to(pair.draft)
    os.link(pair.draft, hard)
    monkeypatch.chdir(pair.draft.parent)
    names = [
        pair.draft.name,
        f"./{pair.draft.name}",
        str(pair.draft),
        link,
        hard,
        f"../{Path.cwd().name}/{pair.draft.name}",
    ]
    with LLM(pair.target, draft=names, backend="reference", n_ctx=64, draft_length=2) as llm:
        assert llm.draft_names == [pair.draft.stem]
        expected = llm.generate([5, 6], SHORT).token_ids
        (loaded,) = llm.inspect().state.models
        llm.set_draft([link, hard, "ngram"])
        assert llm.draft_names == ["ngram", "link"]
        assert llm.inspect().state.models[0].model is loaded.model  # not read again
        assert llm.generate([5, 6], SHORT, drafters=["link"]).token_ids == expected


def test_two_files_of_one_name_are_told_apart(tiny: TinyFiles, tmp_path: Path) -> None:
    pair, files = tiny.quick, [tmp_path / folder / "draft.gguf" for folder in "ab"]
    files.append(tmp_path / "ngram.gguf")
    for file in files:
        file.parent.mkdir(exist_ok=True)
        shutil.copy(pair.draft, file)
    with LLM(pair.target, draft=[*files, "ngram"], backend="reference", n_ctx=64, draft_length=2) as llm:
        assert llm.draft_names == ["ngram", "a/draft", "b/draft", f"{tmp_path.name}/ngram"]
        every = {drafter.info.source for drafter in llm.inspect().state.drafters_for(None)}
        assert every == {"ngram", "model", "model2", "model3"}
        for name, source in zip(llm.draft_names, ["ngram", "model", "model2", "model3"], strict=True):
            (one,) = llm.inspect().state.drafters_for([name])
            assert one.info.source == source
        reply = llm.generate([5, 6], SHORT, drafters=["b/draft"])
        assert set(reply.stats["by_source"]) == {"model2"}


def test_names_take_as_many_folders_as_they_need(tmp_path: Path) -> None:
    def name(*paths: str, taken: tuple[str, ...] = ()) -> list[str]:
        return names_of_files([tmp_path / path for path in paths], taken)

    assert name("x/d.gguf", "y/e.gguf") == ["d", "e"]
    assert name("x/d.gguf", "y/d.gguf", "e.gguf") == ["x/d", "y/d", "e"]
    assert name("1/x/d.gguf", "2/x/d.gguf") == ["1/x/d", "2/x/d"]
    assert name("x/d.gguf", taken=("d",)) == ["x/d"]
    assert name("d.gguf", "d") == [str(tmp_path / "d.gguf"), str(tmp_path / "d")]
    assert name("1/x/d.gguf", "x/d.gguf")[0] == "1/x/d"


def test_names_are_read_while_drafters_are_swapped(tiny: TinyFiles) -> None:
    pair = tiny.quick
    with LLM(pair.target, draft=None, backend="reference", n_ctx=64) as llm:
        known = [[], ["ngram"], [pair.draft.stem], ["ngram", pair.draft.stem]]
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                assert llm.draft_names in known
                llm.explain()

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            try:
                for spec in ("ngram", pair.draft, ["ngram", pair.draft], None) * 10:
                    llm.set_draft(spec)
            finally:
                done.set()
            watching.result()
