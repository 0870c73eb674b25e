"""Where a model's weights go when there is more than one device: llama.cpp's options, under its names."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from localspec.backends.llama.rpc import MAX_SERVERS, checked_address
from localspec.errors import MAX_COUNT, UsageError, as_float, checked_whole, is_number, listed, shown
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.kv_memory import KV_VALUE_BYTES, kv_shape

SPLIT_MODES = ("none", "layer", "row")

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""What llama.cpp's ``--cpu-moe`` matches: weights of experts; a token uses a few of them."""

_INPUTS = ("token_embd", "token_types", "position_embd", "per_layer_token_embd")
"""Read row by row on the CPU: in another device's memory, llama.cpp aborts where that cannot do it."""

_OVERRIDE = re.compile(r".+?=[^,=]+(?=,|$)|.+", re.DOTALL)
_MAX_PATTERN = 200
_FOREIGN_GROUP = re.compile(r"\(\?(?![:=!])|\\[AZGkKz]|(?<!\\)[*+?}]\+")
"""What Python's expressions have and those of C++ (ECMAScript) have not."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the target's weights go, in llama.cpp's words; draft models stay where they would be without it.

    Raises:
        UsageError: a value makes no sense.
    """

    split_mode: str | None = None  # whole layers for each device (``layer``), parts of matrices (``row``), one device
    tensor_split: tuple[float, ...] | None = None  # shares of the devices in their order; None goes by free memory
    main_gpu: int | None = None  # the number of the device that a split mode of ``none`` uses
    # By the names that ``localspec doctor`` shows, in the order to fill them; ``none`` is the CPU, and None all GPUs.
    device: tuple[str, ...] | None = None
    # ``PATTERN=BUFFER``: tensors whose name a regular expression finds go into the memory of that name, e.g. ``CPU`` or
    # ``CUDA0``; the first that matches counts.
    override_tensor: tuple[str, ...] = ()
    cpu_moe: bool = False  # the experts of all layers stay in the CPU's memory
    n_cpu_moe: int | None = None  # those of the first n layers do
    rpc: tuple[str, ...] = ()  # addresses (``HOST:PORT``) of llama.cpp's RPC servers; their devices come first
    allow_insecure_rpc: bool = False  # whether these may be others than loopback

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if self.split_mode is not None and self.split_mode not in SPLIT_MODES:
            raise UsageError(f"--split-mode must be {', '.join(SPLIT_MODES)}, not {shown(self.split_mode)}")
        put("tensor_split", _shares(self.tensor_split))
        for name in ("main_gpu", "n_cpu_moe"):
            if (value := getattr(self, name)) is not None:
                put(name, checked_whole("--" + name.replace("_", "-"), value, 0, MAX_COUNT))
        if self.main_gpu is not None and self.split_mode != "none":
            raise UsageError("--main-gpu needs --split-mode none; use --device to choose several GPUs")
        if not isinstance(self.cpu_moe, bool):
            raise UsageError(f"--cpu-moe is on or off, not {shown(self.cpu_moe)}")
        if self.cpu_moe and self.n_cpu_moe is not None:
            raise UsageError("use either --cpu-moe (all layers) or --n-cpu-moe (some layers)")
        if self.device is not None:
            put("device", _names(self.device))
        # As in llama.cpp a comma stands between several: one that follows the name of a buffer.
        given = _texts("--override-tensor", self.override_tensor)
        put("override_tensor", tuple(part.removeprefix(",") for each in given for part in _OVERRIDE.findall(each)))
        for each in self.override_tensor:
            _checked_override(each)
        servers = _parts("--rpc", self.rpc)
        put("rpc", tuple(checked_address(each, self.allow_insecure_rpc is True) for each in servers))
        if len(set(self.rpc)) < len(self.rpc) or len(self.rpc) > MAX_SERVERS:
            raise UsageError(f"--rpc takes up to {MAX_SERVERS} servers, each once")
        if self.allow_insecure_rpc and not self.rpc:
            raise UsageError("--allow-insecure-rpc needs --rpc")
        if self.device == ("none",) and self.rpc:
            raise UsageError("--device none cannot be combined with --rpc")
        if self.device == ("none",) and self.divides:
            raise UsageError("--device none leaves nothing to split")
        if self.split_mode == "none" and self.tensor_split:
            raise UsageError("--tensor-split cannot be combined with --split-mode none")

    def __bool__(self) -> bool:
        return bool(self.given())

    @property
    def asked(self) -> list[str]:
        """The options that were given, as the command line calls them."""
        return ["--" + name.replace("_", "-") for name in self.given()]

    def given(self) -> dict[str, Any]:
        """What was given, as JSON has it; ``Placement(**given)`` is the same again."""
        values = {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines that know these options."""
        return ("llama-cpp",) if self.device is not None or self.rpc else ("llama-cpp", "ik-llama")

    @property
    def divides(self) -> bool:
        """Whether weights are to be divided among devices."""
        return bool(self.split_mode or self.tensor_split or self.main_gpu is not None)

    def in_order(self, names: Sequence[str]) -> list[str]:
        """Those of some engines that know the options, the best at dividing weights first.

        Raises:
            UsageError: none does.
        """
        if not self:
            return list(names)
        known = [name for name in names if name in self.engines]
        if not known:
            check_engine(self, names[0])
        return sorted(known, key=self.engines.index) if self.divides else known

    def overrides(self, n_layers: int) -> list[tuple[str, str]]:
        """(pattern, buffer) in the order in which they count, for a model of so many layers."""
        found = [_checked_override(each) for each in self.override_tensor]
        if self.cpu_moe:
            found.append((EXPERTS, "CPU"))
        return found + [(rf"blk\.{i}{EXPERTS}", "CPU") for i in range(min(self.n_cpu_moe or 0, n_layers))]

    def check_file(self, gguf: GGUFFile) -> None:
        """Raise UsageError where a file has no experts to place, or no tensor that a pattern finds."""
        names = list(gguf.tensors)
        if (self.cpu_moe or self.n_cpu_moe) and not any(re.search(EXPERTS, name) for name in names):
            option = "--cpu-moe" if self.cpu_moe else "--n-cpu-moe"
            raise UsageError(f"{option}: {gguf.path.name} is not a mixture of experts")
        for pattern, buffer in map(_checked_override, self.override_tensor):
            found = [name for name in names if re.search(pattern, name)]
            if not found:
                raise UsageError(f"--override-tensor {pattern}={buffer} matches no tensor of {gguf.path.name}")
            inputs = [name for name in found if name.startswith(_INPUTS)]
            if inputs and buffer != "CPU":
                raise UsageError(f"--override-tensor {pattern}={buffer} matches {inputs[0]}, which stays on the CPU")


def _shares(value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    several = [value] if is_number(value) else listed(value)
    if isinstance(value, str):  # as typed
        with suppress(ValueError):
            several = [float(part) for part in re.split(r"[,/]", value)]
    if not several or not all(map(is_number, several)):
        raise UsageError(f"--tensor-split takes shares such as 3,1, not {shown(value)}")
    shares = tuple(as_float(each) for each in several)
    if any(not math.isfinite(each) or each < 0 for each in shares) or not 0 < sum(shares) < 3e38:
        raise UsageError(f"--tensor-split takes shares of 0 or more that are not all 0, not {shown(value)}")
    return shares


def _texts(option: str, value: Any) -> tuple[str, ...]:
    several = [value] if isinstance(value, str) else listed(value)
    if several is None or not all(isinstance(each, str) and each for each in several):
        raise UsageError(f"{option} takes texts, not {shown(value)}")
    return tuple(several)


def _parts(option: str, value: Any) -> list[str]:
    return [part.strip() for each in _texts(option, value) for part in each.split(",")]


def _names(value: Any) -> tuple[str, ...]:
    texts = _parts("--device", value)
    if not texts or not all(texts):
        raise UsageError(f"--device takes names such as CUDA0,CUDA1, or none, not {shown(value)}")
    if len(set(texts)) < len(texts):
        raise UsageError(f"--device names {next(name for name in texts if texts.count(name) > 1)} twice")
    if "none" in texts and len(texts) > 1:
        raise UsageError("--device none cannot be combined with other devices")
    return tuple(texts)


def _checked_override(text: str) -> tuple[str, str]:
    pattern, equals, buffer = text.rpartition("=")
    if not equals or not pattern or not buffer or len(pattern) > _MAX_PATTERN or "\0" in text:
        raise UsageError(f"--override-tensor takes PATTERN=BUFFER, such as exps=CPU, not {shown(text)}")
    try:
        re.compile(pattern)
    except (re.error, RecursionError) as error:
        raise UsageError(f"--override-tensor {shown(pattern)} is not a valid regular expression: {error}") from None
    if _FOREIGN_GROUP.search(pattern):
        raise UsageError(f"--override-tensor {shown(pattern)} uses syntax that C++ regular expressions do not support")
    return pattern, buffer


def check_engine(placement: Placement, backend: str) -> None:
    """Raise UsageError for options that an engine does not have."""
    if placement and backend not in placement.engines:
        names = " and ".join(placement.asked)
        raise UsageError(f"{backend} has no {names}; use --backend {' or '.join(placement.engines)}")


# -- which layers llama.cpp puts on which device, said before it is done -----------------------------------------------

_BLOCK = re.compile(r"blk\.(\d+)\.")
_OUTPUT = ("output", "cls")


@dataclass(frozen=True, slots=True)
class Target:
    """A device that weights go to: its name, that of its memory, and how much of that is free [bytes]."""

    name: str
    buffer: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """What a device gets."""

    name: str  # the device's
    layers: tuple[int, ...]  # blocks that are computed there; the output is one more than there are blocks
    weights_bytes: int
    cache_bytes: int  # keys and values of these layers


def layout(
    gguf: GGUFFile, placement: Placement, used: Sequence[Target], n_gpu_layers: int, n_ctx: int, kv_type: str
) -> list[Share]:
    """Where everything goes: the CPU's share first, then those of the devices ``used``, in their order.

    As ``load_tensors`` in llama-model.cpp: the last ``n_gpu_layers`` of blocks and output (negative is all) are divided
    in the proportion of ``tensor_split``, or of the devices' free memory; the input stays on the CPU.
    """
    n_layer = gguf.whole("block_count")
    n_far = min(n_layer + 1 if n_gpu_layers < 0 else n_gpu_layers, n_layer + 1) if used else 0
    shares = [float(each) for each in placement.tensor_split or ()] or [float(each.free_bytes) for each in used]
    shares += [0.0] * (len(used) - len(shares))
    ends = [end / (sum(shares) or 1.0) for end in accumulate(shares)]
    start = n_layer + 1 - n_far

    def place(layer: int) -> int:
        """0 is the CPU, the devices count from 1."""
        return 0 if layer < start else 1 + min(bisect_right(ends, (layer - start) / n_far), len(used) - 1)

    buffers = {"CPU": 0} | {each.buffer: i for i, each in enumerate(used, 1)}
    overrides = [(re.compile(pattern), buffers[buffer]) for pattern, buffer in placement.overrides(n_layer)]
    weights, cache = [0] * (len(used) + 1), [0.0] * (len(used) + 1)
    for tensor in gguf.tensors.values():
        block = _BLOCK.match(tensor.name)
        layer = int(block[1]) if block else n_layer if tensor.name.startswith(_OUTPUT) else -1
        usual = 0 if layer < 0 else place(layer)
        weights[next((to for pattern, to in overrides if pattern.search(tensor.name)), usual)] += tensor.n_bytes
        if tensor.name == "token_embd.weight" and "output.weight" not in gguf.tensors and place(n_layer):
            weights[place(n_layer)] += tensor.n_bytes  # read as the output matrix too: there is a copy
    values = kv_shape(gguf).values_per_token
    for i, each in enumerate(values):
        cache[place(i * n_layer // len(values))] += each * n_ctx * KV_VALUE_BYTES[kv_type]
    layers = [tuple(layer for layer in range(n_layer + 1) if place(layer) == i) for i in range(len(used) + 1)]
    names = ["CPU", *(each.name for each in used)]
    return [Share(*each) for each in zip(names, layers, weights, map(round, cache), strict=True)]
