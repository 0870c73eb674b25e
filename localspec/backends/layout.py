"""Which layers llama.cpp puts on which device, said before it is done."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from localspec.backends.placement import Placement
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.kv_memory import KV_VALUE_BYTES, kv_shape

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
    count = gguf.field("block_count", 0)
    n_layer = count if isinstance(count, int) else 0
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
