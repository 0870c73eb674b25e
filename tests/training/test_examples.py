"""Examples: what is kept of a text is what a fresh context computes for it, whatever was written beside it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localspec.backends.base import Model
from localspec.errors import UsageError
from localspec.heads.training.examples import (
    GREEDY_SHARE,
    TEST,
    Asked,
    ChatFormat,
    ExampleMaker,
    Material,
    Overlap,
    Read,
    derived,
    fields,
    format_of,
    goes_round,
    is_held_out,
    read_texts,
    without,
)
from localspec.heads.training.shards import Passage, Shards, as_states
from localspec.sampling.sampling import Noise
from tests.conftest import Backend, TinyFiles
from tests.support import ggufs
from tests.support.lessons import MADE_UP_TAPS, MADE_UP_WIDTH, made_up

TAPS = ("layer:0", "norm")


@pytest.fixture(scope="module")
def model(reference: Backend, tiny: TinyFiles) -> Iterator[Model]:
    with reference.load(tiny.quick.target) as loaded:
        yield loaded


def make(
    model: Model,
    n: int,
    n_sequences: int = 3,
    *,
    seed: int = 5,
    material: Material | None = None,
    is_tested_with: Callable[[str], bool] = lambda text: False,
    done: Set[str] = frozenset(),
) -> tuple[list[Passage], ExampleMaker]:
    """The first n passages that come to their end."""
    with model.new_batch(n_sequences, n_sequences * 256, n_ctx=256, hidden=TAPS) as batch:
        maker = ExampleMaker(model, batch, seed, material or Material(), is_tested_with, done, 40)
        found: list[Passage] = []
        while len(found) < n:
            found += maker.step()
    return found, maker


def as_text(model: Model, tokens: list[int]) -> str:
    return b"".join(map(model.vocab.token_bytes, tokens)).decode("utf-8", "replace")


def check_against_a_fresh_context(model: Model, passage: Passage, atol: float) -> None:
    with model.new_context(512, hidden=TAPS) as context:
        forward = context.decode(passage.tokens[:-1].tolist())
        for i, tap in enumerate(TAPS):
            np.testing.assert_allclose(passage.states[:, i], forward.hidden[tap], rtol=2e-3, atol=atol)
        for row, ids, logprobs in zip(forward.logits, passage.top_ids, passage.top_logprobs, strict=True):
            exact = row - row.max() - np.log(np.exp(row - row.max()).sum())
            np.testing.assert_allclose(logprobs, exact[ids], rtol=2e-3, atol=atol)
            best = np.sort(exact)[::-1][: len(ids)]
            np.testing.assert_allclose(best, exact[ids], atol=2 * atol)  # two may change places


def test_states_and_probabilities_are_those_of_a_fresh_context(backend: Backend, tiny: TinyFiles) -> None:
    with backend.load(tiny.spm) as model:
        passages, _ = make(model, 4, material=Material(read=[Read("a", "text", "la la " * 30)]))
        for passage in passages:
            check_against_a_fresh_context(model, passage, 0.01 if backend.exact else 0.05)


def test_a_text_does_not_depend_on_what_is_written_beside_it(model: Model) -> None:
    alone, _ = make(model, 4, 1)
    beside, _ = make(model, 12, 4)
    other, _ = make(model, 4, 1, seed=6)
    by_name = {passage.name: passage for passage in beside}
    found = [passage for passage in alone if passage.name in by_name]
    assert len(found) >= 3
    for passage in found:
        np.testing.assert_array_equal(passage.tokens, by_name[passage.name].tokens)
        np.testing.assert_array_equal(passage.states, by_name[passage.name].states)
    assert [passage.tokens.tolist() for passage in other] != [passage.tokens.tolist() for passage in alone]


def test_what_heads_are_tested_on_is_written_first_and_nothing_twice(model: Model) -> None:
    """Whatever else there is to do, so that it does not grow while a head learns."""
    tests = [Asked(f"{TEST}{i}", "code", ("la",)) for i in (2, 3, 4)]
    material = Material([Asked("1", "code", ("la",))], [Read("a", "text", "la " * 400)], tests=tests)
    first, _ = make(model, 6, 1, material=material)
    names = [passage.name for passage in first]
    assert names[:3] == [f"asked-{TEST}{i}" for i in (2, 3, 4)]
    assert [passage.held_out for passage in first[:3]] == [True] * 3
    assert names[3].startswith(("asked-1", "text-a"))
    second, _ = make(model, 6, material=material, done=set(names))
    names += [passage.name for passage in second]
    assert len(set(names)) == len(names)
    assert {"asked-1", "text-a-0", "text-a-1"} <= set(names)


def test_a_conversation_is_answered_turn_by_turn(model: Model) -> None:
    material = Material([Asked("1", "chat", ("la la la", "la la"))])
    passages, _ = make(model, 2, 1, material=material)
    format = format_of(model)
    first, second = passages
    said = as_text(model, first.tokens[first.start :].tolist())
    asked = [{"role": "user", "content": "la la la"}, {"role": "assistant", "content": said}]
    expected = format.answering([*asked, {"role": "user", "content": "la la"}])
    assert [first.name, second.name] == ["asked-1", "asked-1+"]
    assert second.tokens[: second.start].tolist() == expected
    assert first.held_out == second.held_out


def test_prompts_that_heads_are_tested_with_are_dropped(model: Model) -> None:
    """Every second text counts as one: none of them is answered."""
    seen = dict[str, bool]()

    def is_tested_with(text: str) -> bool:
        return seen.setdefault(text, len(seen) % 2 == 0)

    passages, _ = make(model, 10, is_tested_with=is_tested_with)
    prompts = [as_text(model, passage.tokens[: passage.start].tolist()) for passage in passages]
    assert len(prompts) == 10
    assert all(any(text in prompt for text, is_tested in seen.items() if not is_tested) for prompt in prompts)
    assert sum(seen.values()) >= 10


@pytest.fixture(scope="module")
def passages(model: Model) -> list[Passage]:
    return make(model, 24)[0]


def test_greedy_answers_are_the_likeliest_tokens_and_the_others_are_not(passages: list[Passage]) -> None:
    greedy = {each.name: Noise(derived(5, f"{each.name}/greedy")).uniform(0, 0) < GREEDY_SHARE for each in passages}
    assert set(greedy.values()) == {False, True}
    assert {passage.held_out for passage in passages} == {False, True}
    for passage in passages:
        said = passage.tokens[passage.start :].tolist()
        likeliest = passage.top_ids[-len(said) :, 0].tolist()
        assert (said == likeliest) == (greedy[passage.name] or len(said) < 3)


def test_what_is_under_way_is_a_lesson_too(reference: Backend, tiny: TinyFiles) -> None:
    with reference.load(tiny.bpe) as model, model.new_batch(3, 3 * 256, n_ctx=256, hidden=TAPS) as batch:
        maker = ExampleMaker(model, batch, 1, Material(), lambda text: False, set(), 320)
        for _ in range(200):
            maker.step()
            if len(cut := maker.unfinished()) == 3:
                break
        for passage in cut:
            check_against_a_fresh_context(model, passage, 0.01)


def test_a_model_without_a_chat_template_continues_text(reference: Backend, tmp_path: Path) -> None:
    shape = ggufs.Shape(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, n_ff=32)
    path = ggufs.write_llama(tmp_path / "base.gguf", shape, replace(ggufs.bpe_vocab(300), chat_template=None))
    with reference.load(path) as model:
        format = format_of(model)
        assert not isinstance(format, ChatFormat)
        texts = [as_text(model, passage.tokens.tolist()) for passage in make(model, 3)[0]]
    headings = tuple(f"{field[0].upper()}{field[1:]}\n\n" for field in fields())
    assert all("<|im_start|>" not in text for text in texts)
    assert sum(text.startswith(headings) for text in texts) >= 2


@pytest.mark.parametrize("field", [None, "cooking"])
def test_the_opening_is_the_template_up_to_the_users_turn(model: Model, field: str | None) -> None:
    format = format_of(model)
    assert isinstance(format, ChatFormat)
    text = "".join(model.vocab.token_text(token) for token in format.opening(field))
    assert text.endswith("<|im_start|>userĊ")
    assert ("cooking" in text) == (field == "cooking")
    assert model.vocab.eog <= format.ends


@pytest.mark.parametrize(
    ("tokens", "round_"),
    [
        ([7] * 64, True),
        ([1, 2, 3] * 30, True),
        (list(range(64)), False),
        ([7] * 63, False),
        ([5] + [1, 2] * 31 + [3], False),
    ],
)
def test_an_answer_that_goes_round_in_circles(tokens: list[int], round_: bool) -> None:
    assert goes_round(tokens) == round_


def test_one_passage_in_sixteen_is_held_out() -> None:
    own = [is_held_out(f"own-{i:06d}") for i in range(160)]
    assert sum(own) == 10
    assert sum(own[:16]) == 1
    # 4 standard deviations of a binomial count: a false alarm in 16,000 runs, and the names are fixed.
    assert abs(sum(is_held_out(f"text-{i}") for i in range(4000)) - 250) < 4 * (4000 / 16 * 15 / 16) ** 0.5


def test_fields_name_no_kind_of_task() -> None:
    """None of those of the questions of reports, by the words that would begin its name."""
    assert len(set(fields())) == len(fields()) >= 50
    tasks = "cod debug test refactor program edit rewrit correct chat advice summar paste text extract classif list"
    tasks += " translat math sum arithmetic creativ writ poe stor verse repeat copy"
    words = [word for name in fields() for word in re.findall(r"\w+", name.lower())]
    assert not [word for word in words if word.startswith(tuple(tasks.split()))]


@pytest.mark.parametrize(
    ("text", "overlaps"),
    [
        ("Please: one two three FOUR five six seven, eight!", True),
        ("one two three four five six seven and eight", False),
        ("name a river", True),
        ("please name a  River.", True),
        ("name a big river", False),
        ("", False),
    ],
)
def test_eight_words_in_a_row_are_an_overlap(text: str, overlaps: bool) -> None:
    tested = Overlap(["zero one two three four five six seven eight nine", "Name a river!", ""])
    assert tested(text) == overlaps


def test_material_that_heads_are_tested_with_is_left_out_and_said() -> None:
    tested = Overlap(["one two three four five six seven eight"])
    material = Material(
        [Asked("a", "x", ("hello", "one two three four five six seven eight")), Asked("b", "x", ("hello",))],
        [Read("c", "chat", [{"role": "user", "content": "One two three four five six seven eight?"}])],
    )
    left = without(material, tested)
    assert [each.name for each in left.asked] == ["b"]
    assert not left.read
    assert left.remarks == [
        "2 prompts or texts are left out: they have words of the questions that heads are tested with"
    ]
    with pytest.raises(UsageError, match="all of these"):
        without(Material(material.asked[:1], material.read), tested)


def test_texts_are_read_from_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "in" / ".git").mkdir(parents=True)
    for name, data in {
        "a.txt": b"\xef\xbb\xbfhello",
        "in/b.md": "grüße".encode(),
        "in/same.md": b"hello",
        "in/.hidden": b"no",
        "in/.git/c": b"no",
        "in/empty": b" \n",
        "in/photo": b"\xff\xd8\xff",
        "in/program": b"a\0b",
    }.items():
        (tmp_path / name).write_bytes(data)
    found = read_texts([tmp_path / "a.txt", tmp_path / "in"])
    assert [each.content for each in found.read] == ["hello", "grüße"]
    assert found.remarks == ["2 files are no text in UTF-8"]
    with pytest.raises(UsageError, match="there is no file or folder"):
        read_texts([tmp_path / "nothing"])
    with pytest.raises(UsageError, match="there is no text"):
        read_texts([tmp_path / "in" / "photo"])


# On the disk: a run that was cut off loses nothing that was written.


def opened(folder: Path) -> Shards:
    return Shards(folder, MADE_UP_TAPS, MADE_UP_WIDTH)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    assert as_states(np.array([[1e6, -1e6, 2.0]], dtype=np.float32)).tolist() == [[65504.0, -65504.0, 2.0]]
    written = [made_up("a", 5), made_up("b", 17, held_out=True), made_up("c", 1)]
    shards = opened(tmp_path)
    shards.append(written[:2])
    shards.append(written[2:])
    again = opened(tmp_path)
    for found in (shards.passages, again.passages):
        assert len(found) == 3
        for one, other in zip(written, found, strict=True):
            for field in Passage.__slots__:
                np.testing.assert_array_equal(getattr(one, field), getattr(other, field), err_msg=field)
    assert shards.n_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_what_was_under_way_counts_once_after_a_run_was_cut_off(tmp_path: Path) -> None:
    shards = opened(tmp_path)
    shards.append([made_up("a", 5)], [made_up("b", 3), made_up("c", 4)])
    # "b" came to its end, and the run was killed between the two files of the next minute.
    before = (tmp_path / "unfinished.shard").read_bytes()
    shards.append([made_up("b", 9)])
    (tmp_path / "unfinished.shard").write_bytes(before)
    for _ in range(2):
        found = opened(tmp_path).passages
        assert [(each.name, len(each)) for each in found] == [("a", 5), ("b", 9), ("c", 4)]


def test_a_damaged_shard_is_left_out_and_said(tmp_path: Path) -> None:
    shards = opened(tmp_path)
    for name in "abcd":
        shards.append([made_up(name, 6)])
    whole = (tmp_path / "00001.shard").read_bytes()
    (tmp_path / "00000.shard").write_bytes(whole[:-10])
    (tmp_path / "00001.shard").write_bytes(b"")
    (tmp_path / "00002.shard").write_bytes(b"GGUF" + whole)
    found = opened(tmp_path)
    assert [each.name for each in found.passages] == ["d"]
    assert [line.split()[0] for line in found.remarks] == ["00000.shard", "00001.shard", "00002.shard"]
    found.append([made_up("e", 2)])
    assert [each.name for each in opened(tmp_path).passages] == ["d", "e"]
    assert Shards(tmp_path, ("norm",), MADE_UP_WIDTH).passages == [], "of other states"


@pytest.mark.skipif(os.name == "nt", reason="POSIX file modes")
def test_examples_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    """They are made of the user's chats and texts."""
    before = os.umask(0o022)
    try:
        shards = opened(tmp_path / "shards")
        shards.append([made_up("a", 5)], [made_up("b", 5)])
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (shards.folder, *shards.folder.iterdir())}
    assert len(modes) == 3
    assert all(mode & 0o077 == 0 for mode in modes.values()), modes
