"""A placement in the words of ``llama_model_params``: names are looked up, and what would abort is refused before."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localspec.backends.placement import Placement
from localspec.backends.rpc_link import Link
from localspec.errors import UsageError
from localspec.model_files.gguf_file import GGUFFile

_SPLIT = {"none": 0, "layer": 1, "row": 2}


@dataclass(frozen=True, slots=True)
class Place:
    """A device beside the CPU that an engine can put weights on.

    Attributes:
        name: the engine's, e.g. CUDA0.
        handle: for ``llama_model_params.devices``; 0 where an engine takes none.
        buffer: the name of its memory.
        splits_rows: whether ``--split-mode row`` works on it.
    """

    name: str
    handle: int
    buffer: str
    splits_rows: bool


@dataclass(frozen=True, slots=True)
class Places:
    """Where an engine can put weights.

    Attributes:
        devices: all but the CPU, in the engine's order.
        usual: those that it takes when none are named.
        buffers: name -> kind of memory, the CPU's too.
        most: how many shares its ``tensor_split`` has.
        links: of the RPC servers among them.
    """

    devices: Sequence[Place]
    usual: Sequence[Place]
    buffers: Mapping[str, int]
    most: int
    links: Sequence[Link] = ()


class _Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buffer", ctypes.c_void_p))


class Placed:
    """What ``llama_model_params`` takes for a placement, and keeps alive what it points to.

    Args:
        placement: what was asked.
        places: what the engine has.
        gguf: the model's file.
        engine: the engine's name, for messages.

    Attributes:
        used: devices that the model will use.
        links: of RPC servers.

    Raises:
        UsageError: there is no such device or memory, or it cannot do that.
    """

    def __init__(self, placement: Placement, places: Places, gguf: GGUFFile, engine: str) -> None:
        placement.check_file(gguf)
        self.placement, self.links = placement, places.links
        self.used = _used(placement, places, engine)
        count = gguf.field("block_count", 0)
        overrides = placement.overrides(count if isinstance(count, int) else 0)
        reached = {"CPU", *(place.buffer for place in self.used)}
        for pattern, buffer in overrides:
            if buffer not in places.buffers or buffer not in reached:
                names = ", ".join(name for name in places.buffers if name in reached)
                raise UsageError(f"--override-tensor {pattern}={buffer}: the model uses the buffers {names}")
        self._devices = self._overrides = self._shares = None
        if placement.device is not None or placement.rpc:
            handles = [place.handle for place in self.used]
            self._devices = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
        if overrides:
            rows = [_Override(pattern.encode(), places.buffers[buffer]) for pattern, buffer in overrides]
            self._overrides = (_Override * (len(rows) + 1))(*rows, _Override(None, None))
        if placement.tensor_split:
            self._shares = (ctypes.c_float * max(places.most, len(placement.tensor_split)))(*placement.tensor_split)

    @property
    def on_devices(self) -> bool:
        """Whether some of the weights may go to another device than the CPU."""
        return bool(self.used)

    @property
    def lost(self) -> str | None:
        """Why a device is gone; None while all are there."""
        return next((link.lost for link in self.links if link.lost is not None), None)

    @property
    def keeps_some(self) -> bool:
        """Whether some tensors were told to stay on the CPU."""
        return self._overrides is not None

    def fill(self, params: Any) -> None:
        """Say it to the engine."""
        if self.placement.split_mode is not None:
            params.split_mode = _SPLIT[self.placement.split_mode]
        if self.placement.main_gpu is not None:
            params.main_gpu = self.placement.main_gpu
        if self._devices is not None:
            params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        if self._overrides is not None:
            params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)
        if self._shares is not None:
            params.tensor_split = ctypes.cast(self._shares, ctypes.POINTER(ctypes.c_float))


def _used(placement: Placement, places: Places, engine: str) -> list[Place]:
    """The devices that a model will use, in the order in which they are filled."""
    used = list(places.usual)
    if placement.device is not None:
        by_name = {place.name: place for place in places.devices}
        for name in placement.device:
            if name not in by_name and name != "none":
                raise UsageError(f"--device {name}: {engine} only has {', '.join(by_name) or 'the CPU'} here")
        used = [by_name[name] for name in placement.device if name != "none"]
    splits = [each for each in placement.asked if each in ("--split-mode", "--tensor-split", "--main-gpu")]
    if splits and not used:
        raise UsageError(f"{' and '.join(splits)}: {engine} only has the CPU here")
    if len(placement.tensor_split or ()) > len(used):
        names = ", ".join(place.name for place in used)
        raise UsageError(
            f"--tensor-split has {len(placement.tensor_split or ())} shares for {len(used)} devices: {names}"
        )
    if placement.split_mode == "row" and (stiff := [place.name for place in used if not place.splits_rows]):
        raise UsageError(f"--split-mode row: {stiff[0]} cannot divide matrices; use --split-mode layer")
    if placement.split_mode == "none" and (placement.main_gpu or 0) >= len(used):
        raise UsageError(f"--main-gpu {placement.main_gpu}: the devices are numbered 0 to {len(used) - 1}")
    if placement.split_mode == "none":
        used = [used[placement.main_gpu or 0]]
    return used
