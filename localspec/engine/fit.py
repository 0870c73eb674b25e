"""How much memory models take, and the largest context that fits with them: one estimate, for loading and doctor."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from localspec.backends.base import Context, Model, SequenceBatch
from localspec.backends.llama.binding import N_UBATCH
from localspec.backends.llama.ggml import Device, llama_gpus, metal_gpu
from localspec.backends.placement import Placement, Target, layout
from localspec.backends.trust import ensure_batches, why_no_branches
from localspec.controllers.auto import FLAT_ROW
from localspec.controllers.batching import TURNS_GAIN, SharedPasses
from localspec.controllers.cost_model import PassTimes, row_ms
from localspec.engine.drafts import draft_files
from localspec.engine.loading import Report
from localspec.engine.options import LoadOptions
from localspec.engine.state import FULL_CONTEXTS, n_sequences, target_memory
from localspec.errors import EngineError, LocalspecError, UnsupportedModel
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.kv_memory import KV_VALUE_BYTES, KVShape, kv_shape
from localspec.model_files.sources.base import size_text
from localspec.system.files import is_same_file
from localspec.system.machine import read_memory

PROGRAM_BYTES = 64 << 20  # engine library, vocabularies and Python; 50 to 60 MB were measured
TIGHT = 0.9  # share of free memory that leaves little for other programs
CTX_STEP = 256  # engines round a context up to a multiple of this
LEAST_CTX = 512  # smallest context worth suggesting


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a header says of memory: bytes of the weights, widths of the residual stream and of the widest feed-forward
    layer, rows of the output matrix."""

    n_bytes: int
    kv: KVShape  # what keys and values take
    n_layer: int  # transformer blocks
    n_embd: int
    n_ff: int
    n_head: int
    n_vocab: int
    n_params: int  # parameters

    @property
    def own_layer(self) -> Sizes:
        """What its layer for multi-token prediction takes in addition: keys and values of a layer."""
        kv = replace(self.kv, values_per_token=self.kv.values_per_token[-1:], windowed=self.kv.windowed[-1:])
        return replace(self, n_bytes=0, kv=kv)

    @classmethod
    def of(cls, gguf: GGUFFile) -> Sizes:
        """Sizes of a file; unknown or odd values count as 0."""
        output = gguf.tensors.get("output.weight") or gguf.tensors.get("token_embd.weight")
        n_vocab = output.shape[1] if output is not None and len(output.shape) > 1 else 0
        return cls(
            gguf.n_bytes,
            kv_shape(gguf),
            n_layer=count(gguf, "block_count"),
            n_embd=count(gguf, "embedding_length"),
            n_ff=count(gguf, "feed_forward_length"),
            n_head=count(gguf, "attention.head_count"),
            n_vocab=n_vocab,
            n_params=gguf.n_params,
        )


def count(gguf: GGUFFile, field: str) -> int:
    """A number from a header: the largest over layers, 0 if missing."""
    value = gguf.field(field)
    try:
        return max(0, int(max(value)))
    except TypeError:
        return value if isinstance(value, int) and value >= 0 else 0
    except ValueError:
        return 0


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that one model takes [bytes]."""

    weights: int
    kv: int  # keys and values of the whole context
    compute: int  # the engine's buffers for a pass

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute


def need(sizes: Sizes, n_ctx: int, kv_type: str, backend: str, *, contexts: int = 1, together: bool = False) -> Need:
    """Memory to run a model with so many ``contexts`` for n_ctx tokens each, or one memory of that size that answers
    share (``together``). The reference engine keeps everything in float64."""
    if backend == "reference":
        compute = 8 * sizes.n_vocab * n_ctx * contexts
        return Need(8 * sizes.n_params, contexts * sizes.kv.bytes(n_ctx, "f64"), compute)
    padded = -(-n_ctx // CTX_STEP) * CTX_STEP
    # The buffer holds whichever is larger, the logits of N_UBATCH tokens or a layer's intermediate values, in float32;
    # within 1 % of what both engines report for vocabularies of 49k, 152k and 262k tokens. Without flash attention
    # these are the scores of all heads and the mask.
    widths = [sizes.n_vocab, 3 * sizes.n_ff + 4 * sizes.n_embd]
    if together and backend == "ik-llama":
        widths.append((sizes.n_head + 1) * contexts * padded)
    compute = 4 * N_UBATCH * (sizes.n_embd + max(widths))
    return Need(sizes.n_bytes, contexts * sizes.kv.bytes(padded, kv_type), compute)


# The context where none is asked for.
#
# Engines write to all of a context when they make it, so that its memory is taken, and the time for that spent, even if
# it is not used (1.5B at f16 on two cores: 32,768 tokens take 0.97 GB and 2.7 s); the time of a token does not depend
# on it.

USUAL_CTX = 8192
"""Up to so many tokens a context may take what is free but for a tenth; beyond, half of what weights leave free."""

MOST_ON_CPU = 32768
"""Reading more takes a CPU of today longer than people wait (five minutes at 100 tokens a second)."""


@dataclass(frozen=True, slots=True)
class Load:
    """A model that is to be loaded, and its memories."""

    sizes: Sizes
    contexts: int = 1  # see ``need``
    together: bool = False
    gpu_share: float = 0.0  # share of it that goes to a GPU


def loads_for(target: Load, models: Sequence[Load], heads: Sequence[Load], parallel: int) -> list[Load]:
    """The same with the contexts that a pair makes of them, at most, for so many answers at a time."""
    several = parallel > 1
    n = (FULL_CONTEXTS if several else 1) * (1 + bool(heads))  # a head reads states, of another context than the first
    own = int(several)  # in which some engines compute an answer that is alone
    return [
        replace(target, contexts=n + own, together=several),
        *(replace(each, contexts=FULL_CONTEXTS if several else 1, together=several) for each in models),
        *(replace(each, contexts=n_sequences(parallel)) for each in heads),
    ]


@dataclass(frozen=True, slots=True)
class Space:
    """Free memory [bytes]: the machine's, and that of GPUs with memory of their own (None: there is none)."""

    ram: int
    gpu: int | None = None

    @classmethod
    def beside(cls, ram: int, gpus: Sequence[Device], loaded: int = 0) -> Space:
        """Given free memory and what GPUs say, on which so many bytes are ours already."""
        if all(each.shared for each in gpus):
            return cls(ram)
        return cls(ram, loaded + sum(each.free_bytes for each in gpus))

    def __add__(self, other: Space) -> Space:
        return Space(self.ram + other.ram, (self.gpu or 0) + (other.gpu or 0))

    def __sub__(self, other: Space) -> Space:
        return Space(self.ram - other.ram, (self.gpu or 0) - (other.gpu or 0))

    def holds(self, other: Space) -> bool:
        return other.ram <= self.ram and (other.gpu or 0) <= (self.gpu or 0)


@dataclass(frozen=True, slots=True)
class ContextChoice:
    """A context's size, why, and whether it is less than the usual for want of memory."""

    n_ctx: int
    reason: str
    short: bool = False

    def __str__(self) -> str:
        return f"{self.n_ctx:,} tokens ({self.reason})"


def gpu_share(n_gpu_layers: int | None, n_layer: int) -> float:
    """Share of a model of so many blocks that goes to the GPU; the output counts as a layer, and None is all."""
    return 1.0 if n_gpu_layers is None or n_gpu_layers < 0 else min(1.0, n_gpu_layers / (n_layer + 1))


def taken(loads: Sequence[Load], n_ctx: int, kv_type: str, backend: str) -> Space:
    """What models take with contexts of n_ctx tokens each."""
    needs = [
        need(each.sizes, n_ctx, kv_type, backend, contexts=each.contexts, together=each.together) for each in loads
    ]
    gpu = sum(each.total * load.gpu_share for each, load in zip(needs, loads, strict=True))
    return Space(PROGRAM_BYTES + round(sum(each.total for each in needs) - gpu), round(gpu))


def choose_context(
    loads: Sequence[Load], kv_type: str, backend: str, space: Space, n_ctx_train: int, *, on_gpu: bool = False
) -> ContextChoice:
    """The context size where none is asked for.

    The most that the model was trained for (``USUAL_CTX`` where its file does not say), on a CPU ``MOST_ON_CPU``; less
    where memory does not hold it. ``loads``: the target first; ``space``: what is free before anything is loaded;
    ``on_gpu``: whether all of the target is computed there.
    """
    trained = n_ctx_train if n_ctx_train > 0 else USUAL_CTX
    most = trained if on_gpu else min(trained, MOST_ON_CPU)
    if space.gpu is None:  # what a GPU that shares the machine's memory takes is of that
        loads = [replace(each, gpu_share=0.0) for each in loads]
    beside = (taken(loads, 0, kv_type, backend).ram + space.ram) / 2

    def bound_by(n_ctx: int) -> str | None:
        """What is too small for a context; None where it fits."""
        found = taken(loads, n_ctx, kv_type, backend)
        if space.gpu is not None and (found.gpu or 0) > TIGHT * space.gpu:
            return f"what fits into the {size_text(space.gpu)} that are free on the GPU"
        if found.ram > TIGHT * space.ram:
            return f"what fits into the {size_text(space.ram)} of memory that are free"
        if n_ctx > USUAL_CTX and found.ram > beside:
            return "half of the memory that the weights leave free; --ctx N takes more"
        return None

    if bound_by(most) is None:
        if most < trained:
            return ContextChoice(most, "the most that a CPU gets unasked; --ctx N takes more")
        known = "all that the model was trained for"
        return ContextChoice(most, known if n_ctx_train > 0 else "its file does not say what it was trained for")
    sizes = range(min(LEAST_CTX, most), most, CTX_STEP)
    n_fitting = bisect_left(sizes, True, key=lambda n_ctx: bound_by(n_ctx) is not None)
    why = bound_by(sizes[n_fitting] if n_fitting < len(sizes) else most)
    if not n_fitting:
        return ContextChoice(sizes[0] if sizes else most, f"more than {why}", short=True)
    n_ctx = sizes[n_fitting - 1]
    return ContextChoice(n_ctx, str(why), short=n_ctx < min(USUAL_CTX, trained))


def read_sizes(path: Path) -> Sizes | None:
    """Sizes of a file; None where it cannot be read, which loading it says better."""
    try:
        with GGUFFile(path) as gguf:
            return Sizes.of(gguf)
    except (LocalspecError, OSError):
        return None


def context_of(
    target: Model, draft: Sequence[str], options: LoadOptions, free: int, warn: Callable[[str], None]
) -> ContextChoice:
    """The context size of a loaded target; ``free``: memory before it was loaded [bytes]."""
    if options.n_ctx is not None:
        if 0 < target.n_ctx_train < options.n_ctx:
            warn(
                f"--ctx {options.n_ctx} exceeds the {target.n_ctx_train} tokens this model was trained for; "
                "answers far into the context may degrade"
            )
        return ContextChoice(options.n_ctx, "as asked for")
    usual = min(USUAL_CTX, target.n_ctx_train or USUAL_CTX)
    if options.placement:
        return ContextChoice(usual, "the usual where weights are placed by hand; --ctx N takes more")
    sizes, device = read_sizes(target.path), target.capabilities.device
    if sizes is None:
        return ContextChoice(usual, "the usual: its file cannot be read again")
    share = 0.0 if device == "cpu" else gpu_share(options.n_gpu_layers, sizes.n_layer)
    models, heads = list[Load](), list[Load]()
    for path, is_model in draft_files(draft, target):
        found = sizes.own_layer if is_same_file(path, target.path) else read_sizes(path)
        if found is not None:
            (models if is_model else heads).append(Load(found, gpu_share=float(share > 0)))
    gpus = [] if device == "cpu" else gpus_of(target.backend)
    space = Space.beside(free, gpus, round(share * sizes.n_bytes))
    loads = loads_for(Load(sizes, gpu_share=share), models, heads, most_answers(options))
    kv_type = options.kv_cache_type
    return choose_context(loads, kv_type, target.backend, space, target.n_ctx_train, on_gpu=device == "gpu")


def layers_that_fit(
    gguf: GGUFFile, gpus: Sequence[Device], n_ctx: int, kv_type: str, *, reserve: int = 0
) -> int | None:
    """Most layers of a file that GPUs with memory of their own hold, each its share; None: all, the output included.
    ``n_ctx``: tokens of all contexts together; ``reserve``: what a draft takes of all GPUs together [bytes]."""
    sizes, free = Sizes.of(gguf), sum(each.free_bytes for each in gpus)
    buffers = need(sizes, 0, kv_type, "llama-cpp").compute
    rooms = [TIGHT * each.free_bytes - reserve * each.free_bytes / max(1, free) for each in gpus]
    used = [Target(each.name, each.name, each.free_bytes) for each in gpus]

    def fits(n: int) -> bool:
        shares = layout(gguf, Placement(), used, n, n_ctx, kv_type)[1:]
        return all(
            not share.layers or share.weights_bytes + share.cache_bytes + buffers <= room
            for share, room in zip(shares, rooms, strict=True)
        )

    n_all = sizes.n_layer + 1
    return None if fits(n_all) else next((n for n in range(n_all - 1, 0, -1) if fits(n)), 0)


def layers_for(path: Path, draft: Sequence[str], options: LoadOptions, parallel: int) -> int | None:
    """``layers_that_fit`` for a target on llama.cpp's GPUs as they are now; None: all, or the GPUs do not say."""
    gpus = [each for each in gpus_of("llama-cpp") if not each.shared]
    if not gpus:
        return None
    with GGUFFile(path) as gguf:
        n_ctx = options.n_ctx or min(USUAL_CTX, gguf.n_ctx_train or USUAL_CTX)
        contexts = loads_for(Load(Sizes.of(gguf)), [], [], parallel)[0].contexts
        known = Catalog.load().draft_for(path) if "auto" in draft else None
        drafts = None if known is None else read_sizes(known)
        reserve = 0 if drafts is None else need(drafts, n_ctx, options.kv_cache_type, "llama-cpp").total
        return layers_that_fit(gguf, gpus, contexts * n_ctx, options.kv_cache_type, reserve=reserve)


def gpus_of(backend: str) -> list[Device]:
    """GPUs that an engine uses, with what is free now; empty too where it does not say."""
    if backend == "mlx":
        return metal_gpu() or []
    return (llama_gpus() or []) if backend == "llama-cpp" else []


# Whether drafts may branch, which on some engines has to be known when the target's context is made.


def why_chains(model: Model, times: PassTimes, options: LoadOptions, parallel: int, report: Report) -> str | None:
    """Why drafts are chains, as part of a sentence; None where they may branch. The first call checks the engine."""
    if parallel > 1:
        return "answers share passes"
    if not model.capabilities.trees or not model.capabilities.trees_apart:
        return model.why_no_trees()
    row = row_ms(times) / times(1)
    if row >= FLAT_ROW:
        return f"a further row of a pass costs {row:.2f} of a token here, and branches pay under {FLAT_ROW}"
    return why_no_branches(model, options.n_gpu_layers, lambda line: report(line, None))


# How many answers at a time: as many as make more tokens together, which t(w) says, and as there is memory for.

MOST = 16
"""t(w) is measured to 24 rows, and draft tokens need some of them."""

CELLS_EACH = 512
"""Tokens that a running answer is assumed to hold, its prompt included: every row passes over those of all, or
over those of its own (``Capabilities.own_cells``)."""

LEAST_CELLS = 1024
"""Room for each answer at least; see ``scheduler.RESERVED``."""

ENOUGH = 0.95
"""Of the most tokens per millisecond that any number makes; with more answers each becomes slower for little."""

N_CONTEXTS = FULL_CONTEXTS + 1
"""What memory is estimated for: room for all answers, and a context in which some engines compute one that is alone."""

MEMORY_SHARE = 0.5
"""Of the memory that is free, what they may take: drafts and buffers come after them."""


def most_answers(options: LoadOptions) -> int:
    return MOST if options.parallel == "auto" else int(options.parallel)


@dataclass(frozen=True, slots=True)
class ParallelChoice:
    n: int
    reason: str


def open_memory(
    options: LoadOptions, target: Model, times: PassTimes, n_ctx: int, report: Report
) -> tuple[ParallelChoice, str | None, Context, SequenceBatch | None]:
    """The target's memory: the number of answers, why drafts are chains, and what ``target_memory`` returns.
    ``LocalspecError``: there is no memory for it, or the engine cannot do what was asked for with this file."""

    def opened(choice: ParallelChoice) -> tuple[ParallelChoice, str | None, Context, SequenceBatch | None]:
        if choice.n > 1:
            ensure_batches(target, options.n_gpu_layers)
        chains = why_chains(target, times, options, choice.n, report)
        return choice, chains, *target_memory(target, n_ctx, choice.n, branches=chains is None)

    if options.parallel != "auto":
        return opened(ParallelChoice(int(options.parallel), "as asked for"))
    if options.placement.rpc:
        return opened(ParallelChoice(1, "if a server is lost, one answer at a time can go on when it is back"))
    available = read_memory().available if target.capabilities.device == "cpu" else None
    choice = choose_parallel(target, times, n_ctx, available)
    try:
        return opened(choice)
    except (EngineError, UnsupportedModel) as error:
        if choice.n == 1:
            raise
        return opened(ParallelChoice(1, str(error)))


def choose_parallel(model: Model, times: PassTimes, n_ctx: int, available: int | None) -> ParallelChoice:
    """How many answers at a time; ``available`` is memory that can be taken now [bytes], None if unknown."""
    if not model.capabilities.batches:
        return ParallelChoice(1, f"{model.backend} computes one conversation of this model at a time")
    if not model.capabilities.keeps_kv_type:
        kept = f"{model.backend} keeps values of several conversations in 16 bits"
        return ParallelChoice(1, f"{kept}, and a {model.kv_type} cache was asked for")
    with GGUFFile(model.path) as file:
        kv_type = model.kv_type if model.kv_type in KV_VALUE_BYTES else "f16"
        needed = kv_shape(file).bytes(N_CONTEXTS * n_ctx, kv_type)
    if available is not None and needed > MEMORY_SHARE * available:
        room = f"{N_CONTEXTS} contexts of {n_ctx:,} tokens take {needed / 1e9:.2f} GB"
        return ParallelChoice(1, f"{room}, over half of the {available / 1e9:.2f} GB that are free")
    most = max(1, min(MOST, FULL_CONTEXTS * n_ctx // min(n_ctx, LEAST_CELLS)))
    rates = [_rate(times, model, n) for n in range(1, most + 1)]
    if max(rates) < TURNS_GAIN * rates[0]:
        return ParallelChoice(1, "a pass over several takes as long here as theirs one after the other")
    n = next(i for i, rate in enumerate(rates, 1) if rate >= ENOUGH * max(rates))
    bound = f", and there is room for no more than {n}" if n == most < MOST else ""
    gain = rates[n - 1] / rates[0]
    return ParallelChoice(n, f"{n} together are expected to make {gain:.1f} times the tokens of one{bound}")


def _rate(times: PassTimes, model: Model, n: int) -> float:
    """Tokens per millisecond of n answers that draft nothing."""
    shared = SharedPasses(times, model.capabilities.device)
    shared.n_cells = CELLS_EACH if model.capabilities.own_cells else n * CELLS_EACH
    return n / shared.with_overhead(n, n)
