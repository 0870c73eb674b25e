"""Heads that nobody trained: the target's own last norm and output rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localspec.backends import reference
from localspec.errors import UnsupportedModel
from localspec.heads import sources as module
from localspec.heads.file import read_card
from localspec.heads.sources import exit_head
from localspec.heads.trained import load_head, target_facts
from localspec.model_files.gguf import GGUFFile, tensor_rows
from localspec.model_files.vocab import Vocab
from tests.conftest import TinyFiles
from tests.support import ggufs


def test_what_leaves_early_meets_the_targets_own_norm_and_output_matrix(tiny: TinyFiles) -> None:
    """So a state that goes all the way gives the target's own logits, as exactly as output rows of 4 bits can."""
    target = tiny.pair.target
    facts = target_facts(target)
    head_file = exit_head(target, facts, 2)
    written = head_file.stat().st_mtime_ns
    assert exit_head(target, facts, 1) != exit_head(target, facts, 2) == head_file
    assert head_file.stat().st_mtime_ns == written
    with GGUFFile(target) as file, GGUFFile(head_file) as made:
        name = "output_norm.weight"
        assert np.array_equal(tensor_rows(made, name, [0]), tensor_rows(file, name, [0]))
    with load_head(head_file, target, "reference") as head, reference.load(target) as model:
        assert (head.kind, head.taps) == ("exit", ("layer:1",))
        last = f"layer:{model.n_layers - 1}"
        forward = model.new_context(32, hidden=(last,)).decode([5, 6, 7, 80])
        found = head.new_context(32).decode_floats(forward.hidden[last], range(4)).logits
        expected = forward.logits[:, head.token_map]
        assert np.sqrt(np.mean((found - expected) ** 2)) < 0.12 * expected.std()


def test_it_can_guess_the_first_tokens_and_those_that_end_an_answer(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "N_OUT", 50)
    target = tiny.pair.target
    with GGUFFile(target) as file:
        ends = Vocab.from_gguf(file).eog
    card = read_card(exit_head(target, target_facts(target), 1))
    assert card.token_map.tolist() == sorted({*range(50), *ends})


def test_a_norm_that_heads_do_not_have(tmp_path: Path) -> None:
    shape = ggufs.Shape(n_layer=2)
    weights = ggufs.llama_weights(shape, len(ggufs.spm_vocab()))
    weights["output_norm.bias"] = np.zeros(shape.n_embd, np.float32)
    target = ggufs.write_llama(tmp_path / "layer-norm.gguf", shape, weights=weights)
    with pytest.raises(UnsupportedModel, match=r"layer-norm\.gguf cannot be left early: its last norm"):
        exit_head(target, target_facts(target), 1)
