"""The card of a head: its kind and sizes, its target, and how it was made."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from localspec.errors import ModelFileError, UnsupportedModel, is_number, is_whole, shown
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import Vocab

ARCHITECTURE = "localspec-head"
VERSION = 1

# chained: one layer that continues its own states (EAGLE: Li et al. 2024, arXiv:2401.15077). exit: untrained, the
# target's last norm for a state after some layer (LayerSkip: Elhoushi et al. 2024, arXiv:2404.16710).
Kind = Literal["chained", "exit"]

_TAP = re.compile(r"norm|layer:(0|[1-9]\d{0,3})")
_MAX_STEPS, _MAX_TAPS = 64, 16
_MAX_TEXT = 1 << 20

NARROW = 32  # channels of a layer that adds nothing: engines need whole blocks
_N_CTX = 1 << 17  # context that files for engines declare [tokens]; engines only remark on longer ones

# Category -> share of places where the head was right, by how many tokens ahead: the first is the next token
Rates = Mapping[str, tuple[float, ...]]

ALL_TEXTS = "all"  # the category of all places


def block_shapes(block: str, n: int, n_q: int, n_kv: int, n_ff: int, n_in: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer of n channels, as llama.cpp names them: name -> (rows, columns), or the length of a vector.

    Its queries have ``n_q`` channels, keys and values ``n_kv``; they are made of rows of ``n_in``.
    """
    return {
        f"{block}.attn_norm.weight": (n,),
        f"{block}.attn_q.weight": (n_q, n_in),
        f"{block}.attn_k.weight": (n_kv, n_in),
        f"{block}.attn_v.weight": (n_kv, n_in),
        f"{block}.attn_output.weight": (n, n_q),
        f"{block}.ffn_norm.weight": (n,),
        f"{block}.ffn_gate.weight": (n_ff, n),
        f"{block}.ffn_up.weight": (n_ff, n),
        f"{block}.ffn_down.weight": (n, n_ff),
    }


@dataclass(frozen=True)
class TargetFacts:
    """What identifies a target."""

    fingerprint: str  # of the file, see backends.trust
    name: str
    architecture: str
    n_embd: int
    n_layers: int  # blocks that a pass goes through
    n_vocab: int  # rows of the output matrix
    vocab: str  # Vocab.fingerprint

    @classmethod
    def of(cls, file: GGUFFile, fingerprint: str) -> TargetFacts:
        """The facts of an open model file; UnsupportedModel if it cannot generate text or does not say its sizes."""
        file.check_generates_text()
        embedding, n_layers = file.tensors["token_embd.weight"], file.field("block_count")
        if len(embedding.shape) != 2 or not is_whole(n_layers):
            raise UnsupportedModel(f"{file.path.name} does not say how many layers it has")
        n_embd, n_vocab = embedding.shape
        extra = file.field("nextn_predict_layers", 0)  # for multi-token prediction
        n_layers -= extra if is_whole(extra) else 0
        vocab = Vocab.from_gguf(file).fingerprint
        return cls(fingerprint, file.name, file.architecture, n_embd, int(n_layers), n_vocab, vocab)


@dataclass(frozen=True)
class CurvePoint:
    """Acceptance on held-out answers after so many tokens, repetitions counted, and so many minutes of training."""

    tokens_seen: int
    minutes: float
    acceptance: Rates


@dataclass(frozen=True)
class Training:
    """How a head was made."""

    command: str = ""  # what makes it again
    seed: int = 0
    data_tokens: int = 0  # distinct tokens in the training data
    tokens_seen: int = 0  # tokens trained on, repetitions counted
    minutes: float = 0.0  # of making the data and training
    machine: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)  # of programs and libraries
    curve: tuple[CurvePoint, ...] = ()  # on held-out answers
    acceptance: Rates = field(default_factory=dict)  # of the head in full precision, on held-out answers
    earlier: tuple[str, ...] = ()  # commands of the heads that it started from, the first one first

    def __post_init__(self) -> None:
        whole = [self.seed, self.data_tokens, self.tokens_seen, *(point.tokens_seen for point in self.curve)]
        minutes = [self.minutes, *(point.minutes for point in self.curve)]
        tables = (self.acceptance, *(point.acceptance for point in self.curve))
        rates = [rate for table in tables for by_step in table.values() for rate in by_step]
        texts = [self.command, self.machine, *self.versions.values(), *self.earlier]
        for what, holds in (
            ("a count", all(is_whole(each) and 0 <= each < 1 << 63 for each in whole)),
            ("a duration", all(is_number(each) and 0 <= each < 1 << 63 for each in minutes)),
            ("an acceptance", all(is_number(each) and 0 <= each <= 1 for each in rates)),
            ("a text", all(isinstance(each, str) for each in texts)),
        ):
            if not holds:
                raise ValueError(f"{what} of its training is none")

    @property
    def first_rate(self) -> float | None:
        """Share of held-out places at which the first token was right: the median of the kinds of text."""
        rates = [by_step[0] for kind, by_step in self.acceptance.items() if kind != ALL_TEXTS and by_step]
        return median(rates) if rates else None

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Training:
        """Read what ``to_json`` wrote; a ValueError says in a line what is wrong with it."""
        if len(text) > _MAX_TEXT:
            raise ValueError("what it says of its training is too long")
        try:
            said = json.loads(text)
            found = {each.name: said[each.name] for each in fields(cls) if each.name in said}
            found["curve"] = tuple(
                CurvePoint(each["tokens_seen"], each["minutes"], _rates(each["acceptance"]))
                for each in said.get("curve", ())
            )
            found["acceptance"], found["earlier"] = _rates(said.get("acceptance", {})), tuple(said.get("earlier", ()))
            return cls(**found)
        except (AttributeError, KeyError, TypeError, RecursionError):
            raise ValueError("what it says of its training is no table of that") from None


def _rates(said: Any) -> Rates:
    return {category: tuple(by_step) for category, by_step in said.items()}


@dataclass(frozen=True, eq=False)  # an array has no truth value
class HeadCard:
    """A head without its weights; ModelFileError if it contradicts itself."""

    kind: Kind
    taps: tuple[str, ...]  # the hidden states of the target that it reads, in order: norm, layer:i
    token_map: npt.NDArray[np.int32]  # the target's tokens that it can guess, ascending [n_out]
    steps: int  # tokens ahead that it guesses
    target: TargetFacts
    n_head: int = 0  # this and the next three are sizes of the block; 0 where there is none
    n_head_kv: int = 0
    d_head: int = 0
    d_ff: int = 0
    rope_base: float = 10000.0  # of the rotary embedding, which turns neighbouring channels as llama's does
    norm_eps: float = 1e-6
    training: Training = field(default_factory=Training)
    license: str = ""

    def __post_init__(self) -> None:
        reason = next(self._contradictions(), None)
        if reason is not None:
            raise ModelFileError(f"this is not a head: {reason}")

    @property
    def n_embd(self) -> int:
        return self.target.n_embd

    @property
    def n_out(self) -> int:
        return len(self.token_map)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that it must have: name -> (rows, columns), or the length of a vector."""
        n, n_q, n_kv = self.n_embd, self.n_head * self.d_head, self.n_head_kv * self.d_head
        if self.kind == "exit":
            return {"output_norm.weight": (n,)}
        return {
            "head.fc.weight": (n, len(self.taps) * n),
            "head.embed.weight": (n, n),
            "head.embed.bias": (n,),
            "head.chain.weight": (n, n),
            "output_norm.weight": (n,),
        } | block_shapes("blk.0", n, n_q, n_kv, self.d_ff, n)

    def layer_metadata(self) -> dict[str, Any]:
        """What an engine reads of its layer; where it has none, of the narrowest there can be."""
        own = self.n_head, self.n_head_kv, self.d_head, self.d_ff
        n_head, n_head_kv, d_head, d_ff = own if self.kind == "chained" else (1, 1, NARROW, NARROW)
        sizes = {
            "block_count": 1,
            "context_length": _N_CTX,
            "embedding_length": self.n_embd,
            "feed_forward_length": d_ff,
            "attention.head_count": n_head,
            "attention.head_count_kv": n_head_kv,
            "attention.key_length": d_head,
            "attention.value_length": d_head,
            "attention.layer_norm_rms_epsilon": float(self.norm_eps),
            "rope.dimension_count": d_head,
            "rope.freq_base": float(self.rope_base),
        }
        return {f"llama.{name}": value for name, value in sizes.items()}

    def metadata(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in ("steps", "n_head", "n_head_kv", "d_head", "d_ff")}
        own: dict[str, Any] = {"version": VERSION, "kind": self.kind, "taps": ",".join(self.taps)}
        own["token_map"] = np.asarray(self.token_map, dtype=np.int32)
        own |= numbers | {"rope_base": float(self.rope_base), "norm_eps": float(self.norm_eps)}
        own |= {f"target.{name}": value for name, value in asdict(self.target).items()}
        own["training"] = self.training.to_json()
        general = {"general.architecture": ARCHITECTURE, "general.name": f"head for {self.target.name}"}
        if self.license:
            general["general.license"] = self.license
        return general | {f"localspec.head.{name}": value for name, value in own.items()}

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> HeadCard:
        """The card of an open head file.

        Raises:
            UnsupportedModel: it is no head, or one of a later version.
            ModelFileError: what it says makes no head.
        """
        name = file.path.name
        if file.architecture != ARCHITECTURE:
            raise UnsupportedModel(f"{name} is not a head: its architecture is {shown(file.architecture)}")

        def get(key: str, kind: type, default: Any = None) -> Any:
            value = file.metadata.get(f"localspec.head.{key}", default)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ModelFileError(f"{name} is damaged: localspec.head.{key} is {shown(value)}; make it again")
            return value

        version = get("version", int)
        if version != VERSION:
            raise UnsupportedModel(f"{name} is a head of version {version}; this localspec reads version {VERSION}")
        token_map = get("token_map", np.ndarray)
        if token_map.dtype.kind not in "iu":
            raise ModelFileError(f"{name} is damaged: its token map is not made of whole numbers; make it again")
        text = {key: get(f"target.{key}", str) for key in ("fingerprint", "name", "architecture", "vocab")}
        sizes = {key: get(f"target.{key}", int) for key in ("n_embd", "n_layers", "n_vocab")}
        try:
            return cls(
                kind=get("kind", str),
                taps=tuple(get("taps", str)[:1000].split(",")),
                token_map=np.array(token_map, dtype=np.int64).astype(np.int32),
                **{key: get(key, int) for key in ("steps", "n_head", "n_head_kv", "d_head", "d_ff")},
                rope_base=get("rope_base", float),
                norm_eps=get("norm_eps", float),
                target=TargetFacts(**text, **sizes),
                training=Training.from_json(get("training", str, "{}")),
                license=str(file.metadata.get("general.license", "")),
            )
        except (ModelFileError, ValueError) as error:
            raise ModelFileError(f"{name} is damaged: {error}; make it again") from None

    def misfit(self, target: TargetFacts) -> str:
        """Why it cannot draft for a target, in a clause; "" where it can. It need not be trained for the same file, as
        what it guesses is verified."""
        theirs = self.target
        if theirs.fingerprint == target.fingerprint:
            return ""
        for what, its, wanted in (
            ("the architecture", theirs.architecture, target.architecture),
            ("a width of", theirs.n_embd, target.n_embd),
            ("a number of layers of", theirs.n_layers, target.n_layers),
            ("an output matrix of rows numbering", theirs.n_vocab, target.n_vocab),
        ):
            if its != wanted:
                return f"it is for {theirs.name}, with {what} {its} where {target.name} has {wanted}"
        same = theirs.vocab == target.vocab
        return "" if same else f"it is for {theirs.name}, whose vocabulary differs from that of {target.name}"

    def _contradictions(self) -> Iterator[str]:
        target, sizes = self.target, (self.n_head, self.n_head_kv, self.d_head, self.d_ff)
        if self.kind not in get_args(Kind):
            yield f"its kind is {shown(self.kind)}, not one of {', '.join(get_args(Kind))}"
        if min(target.n_embd, target.n_layers, target.n_vocab) <= 0:
            yield f"its target has {target.n_embd} channels, {target.n_layers} layers and {target.n_vocab} tokens"
        if not 0 < len(self.taps) <= _MAX_TAPS or len(set(self.taps)) < len(self.taps):
            yield f"it reads {len(self.taps)} hidden states, some perhaps twice"
        for tap in self.taps:
            if not _TAP.fullmatch(tap) or (tap != "norm" and int(tap.removeprefix("layer:")) >= target.n_layers):
                yield f"there is no hidden state {shown(tap)} in a model of {target.n_layers} layers"
        if not 1 <= self.steps <= _MAX_STEPS:
            yield f"it guesses {self.steps} tokens ahead"
        ids = self.token_map
        if ids.ndim != 1 or not 1 < len(ids) <= target.n_vocab:
            yield f"its token map has {ids.size} entries for {target.n_vocab} tokens"
        elif ids[0] < 0 or ids[-1] >= target.n_vocab or (ids[1:] <= ids[:-1]).any():
            yield f"its token map does not ascend within 0..{target.n_vocab - 1}"
        if self.kind == "exit":
            if self.taps in (("norm",), (f"layer:{target.n_layers - 1}",)) or len(self.taps) > 1 or any(sizes):
                yield "an exit reads the state after one layer before the last, and has no block"
        elif min(sizes) <= 0 or self.n_head % self.n_head_kv:
            yield f"its block has {sizes[0]} heads, {sizes[1]} of keys, of {sizes[2]} channels, and {sizes[3]} between"
        elif self.d_head % 8 or self.d_ff % 32:
            # ik-llama ends the process over rows of 33, and is wrong about heads of 2.
            yield f"engines need heads of a multiple of 8 channels and an MLP of a multiple of 32, not {sizes[2:]}"
        if not (0 < self.rope_base < math.inf and 0 < self.norm_eps < 1):
            yield f"its rotation has the base {self.rope_base} and its norms the epsilon {self.norm_eps}"
