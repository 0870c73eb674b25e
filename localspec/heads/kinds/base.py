"""Header of a published head: how to draft with it, and whether it fits a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localspec.backends.base import Model
from localspec.errors import UnsupportedModel, shown
from localspec.heads.card import TargetFacts
from localspec.model_files.gguf import TENSOR_TYPES, GGUFFile, damaged
from localspec.model_files.nextn import KeysAndValues
from localspec.model_files.vocab import Vocab

# llama.cpp computes all kinds; see PublishedHead.engines
LLAMA_CPP = {"llama-cpp": "localspec.heads.llama:LlamaHeadModel"}

# Matrices that a head has or borrows from its target
OWN_TENSORS = {"embeddings": "token_embd.weight", "output": "output.weight"}
MEMORY = "keys and values"  # what else a head may borrow: those of the text, which its target keeps


@dataclass(frozen=True)
class MaskBlock:
    """A block of a settled token and masks, which one pass fills in."""

    size: int  # rows of the passes that it was trained for
    mask: int  # the token of the rows to be filled in
    n_skipped: int = 1  # rows at the beginning that guess nothing
    causal: bool = False  # whether rows see those before them only, instead of one another
    n_candidates: int = 0  # candidates of each row, scored by those of the row before; 0 for all tokens

    @property
    def n_guesses(self) -> int:
        return self.size - self.n_skipped


@dataclass(frozen=True, eq=False)  # an array has no truth value
class PublishedHead:
    """A head without its weights; all that the engine would assert on has been checked.

    It reads rows of a state and a token: at place p the target's state after the p-th token, and the token after that.
    It continues its own states. One with a block reads states alone, and guesses all tokens of a draft at once. One
    with ``reads`` has no memory of its own: all its rows are at the place of the next token.
    """

    kind: str  # its name in files and arguments
    title: str  # its name for people
    # Engine that computes it -> what loads its weights, a ``LoadHeadModel`` as "module:function". The first serves
    # targets on other engines.
    engines: Mapping[str, str]
    path: Path
    taps: tuple[str, ...]  # the hidden states of the target that it reads, in order; see backends.base
    n_target: int  # width of each of them
    n_embd: int  # width of the states in its rows
    n_vocab: int  # width of the logits that the engine returns for it
    ids: npt.NDArray[np.int64]  # the target's tokens that it can guess, ascending [n_out]
    fuses: bool = False  # whether the engine makes a state of the tapped ones first, by a pass of its own
    in_target: bool = False  # whether it is a part of its target's file
    states_need_logits: bool = False  # whether llama.cpp keeps states only of rows whose logits are wanted
    has_zeroth: bool = False  # whether its memory begins with the first token and no state
    borrows: tuple[str, ...] = ()  # what the engine takes from the target: keys of OWN_TENSORS, MEMORY
    vocab: Vocab | None = None  # its tokens; None where the file names none
    block: MaskBlock | None = None
    of_model: tuple[str, int] | None = None  # architecture and number of layers of the target, where its file says them
    reads: Mapping[bool, KeysAndValues] | None = None  # of MEMORY: what layers with a window, and without one, read

    @property
    def row_width(self) -> int:
        return self.n_target * len(self.taps) if self.block else self.n_embd

    def misplaced(self, engine: str, target: Model) -> UnsupportedModel:
        """The error where this engine computes it for a target, from which it takes weights, on another one."""
        what = " and ".join(self.borrows) or f"{self.title} layer"
        return UnsupportedModel(
            f"{self.path.name} takes its {what} from its target, which has to be on {engine} for that and is on "
            f"{target.backend}; use --backend {engine}"
        )

    def misfit(self, target: TargetFacts, vocab: Vocab, kept: Mapping[bool, KeysAndValues]) -> str:
        """Why it cannot draft for a target with the ``readable`` values ``kept``, in a clause; "" where it can."""
        if self.n_target != target.n_embd:
            return f"it needs a target with states of {self.n_target} channels, but {target.name} has {target.n_embd}"
        deepest = max((int(tap.removeprefix("layer:")) for tap in self.taps if tap.startswith("layer:")), default=-1)
        if deepest >= target.n_layers - 1:
            return f"it reads the state after layer {deepest + 1}, but {target.name} has {target.n_layers} layers"
        if self.in_target:
            return ""
        if self.of_model not in (None, (target.architecture, target.n_layers)):
            architecture, n_layers = self.of_model or ("", 0)
            return (
                f"it is for a {architecture} model with {n_layers} layers, but {target.name} is a "
                f"{target.architecture} model with {target.n_layers}"
            )
        if max(int(self.ids[-1]) + 1, self.n_vocab * bool(self.borrows)) > target.n_vocab:
            return f"it is for a vocabulary of {self.n_vocab} tokens, but {target.name} has {target.n_vocab}"
        if self.borrows and self.n_embd != target.n_embd:
            what = " and ".join(self.borrows)
            return f"it needs {what} of {self.n_embd} channels from its target, but {target.name} has {target.n_embd}"
        if "output" in self.borrows and self.n_vocab != target.n_vocab:
            return f"it needs an output matrix for {self.n_vocab} tokens, but {target.name} has {target.n_vocab}"
        for windowed, read in (self.reads or {}).items():
            if (found := kept.get(windowed)) != read:
                return f"it reads keys and values of {read}, but {target.name} has {found or 'none'} there"
        difference = vocab.difference(self.vocab) if self.vocab is not None else ""
        return f"its vocabulary differs from that of {target.name}: {difference}" if difference else ""


def token_map(file: GGUFFile, n_vocab: int) -> npt.NDArray[np.int64]:
    """The target's token of each row of the output matrix [n_out], in the file's order.

    Raises:
        ModelFileError: the map is malformed, repeats a token or names one outside the vocabulary.
    """
    info = file.tensors.get("d2t")
    if info is None:
        return np.arange(n_vocab)
    if TENSOR_TYPES.get(info.ggml_type, ("",))[0] != "I64" or len(info.shape) != 1:
        raise damaged(file, "its token map d2t is not a list of 64-bit numbers")
    ids = file.tensor_bytes("d2t").view("<i8").astype(np.int64)
    if len(ids) < 2 or int(ids.min()) < 0 or int(ids.max()) >= n_vocab or len(np.unique(ids)) < len(ids):
        raise damaged(file, f"its token map d2t has a token twice, or one outside 0..{n_vocab - 1}")
    return ids


def layers_read(file: GGUFFile) -> list[int]:
    """The target's layers whose inputs a head reads, as its file numbers them.

    Raises:
        UnsupportedModel: the embeddings are among them.
        ModelFileError: it names none.
    """
    layers = file.field("target_layers")
    if not isinstance(layers, np.ndarray) or layers.dtype.kind not in "iu" or not len(layers):
        raise damaged(file, f"{file.architecture}.target_layers is {shown(layers)}")
    if int(layers.min()) < 1:
        raise UnsupportedModel(
            f"{file.path.name} reads the target's embeddings as one of its states, which is not supported"
        )
    return [int(layer) for layer in layers]


LoadHeadModel = Callable[[PublishedHead, Model, int, int | None], Model]
"""Load a head's weights for a target, with a number of threads, and layers on GPUs as for ``backends.load``; contexts'
``decode_floats`` takes states and the tokens' real ids. As ``LlamaHeadModel`` raises."""
