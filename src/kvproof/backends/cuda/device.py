"""A CUDA device: what it is, its kernels, its scratch, and arrays to and from it.

Arrays of the host (NumPy, or torch tensors on the CPU) are copied to the device and results back;
CUDA tensors are taken where they lie, and everything runs on torch's current stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.backends.cuda import program
from kvproof.errors import Refused, RequestError

LEAST = (8, 0)  # compute capability: int8 products of 16 x 32, copies that a barrier counts
LARGEST = 2**31 - 1  # elements of an array


def torch_with_cuda() -> Any:
    """The torch module; Refused, with the reason, where it is missing or sees no device."""
    try:
        import torch
    except ImportError as error:
        raise Refused("backend cuda: torch is missing; install kvproof[cuda]") from error
    if torch.version.cuda is None:
        raise Refused(
            f"backend cuda: torch {torch.__version__} is built without CUDA; install one with it"
        )
    if not torch.cuda.is_available():
        raise Refused(
            "backend cuda: torch sees no CUDA device; check the driver (nvidia-smi) and "
            "CUDA_VISIBLE_DEVICES"
        )
    return torch


class Device:
    """One device; made once. Refused if it cannot run the kernels."""

    def __init__(self, index: int) -> None:
        self.torch = torch_with_cuda()
        driver = program.bindings("driver")
        self.nvrtc = program.nvrtc_version()
        self.index = index
        self.torch_device = self.torch.device("cuda", index)
        with self.torch.cuda.device(index):
            self.torch.zeros(1, device=self.torch_device)  # makes the context
        self.properties = self.torch.cuda.get_device_properties(index)
        self.capability = (int(self.properties.major), int(self.properties.minor))
        if self.capability < LEAST:
            raise Refused(
                f"backend cuda: {self.properties.name} has compute capability "
                f"{self.capability[0]}.{self.capability[1]}; its kernels need "
                f"{LEAST[0]}.{LEAST[1]} or higher"
            )
        self.architecture = architecture(self.capability)
        self.processors = int(self.properties.multi_processor_count)
        self.room: int = program.checked(
            driver.cuDeviceGetAttribute(
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                index,
            ),
            "cuDeviceGetAttribute",
        )
        self.driver: int = program.checked(driver.cuDriverGetVersion(), "cuDriverGetVersion")
        self._kernels: dict[Any, program.Kernel] = {}
        self._tables: dict[Any, Any] = {}
        self._scratch: dict[int, tuple[Any, Any]] = {}
        self._outgrown: list[tuple[Any, Any]] = []

    def current(self) -> AbstractContextManager[Any]:
        """Makes it torch's current device for a while."""
        made: AbstractContextManager[Any] = self.torch.cuda.device(self.index)
        return made

    def memory(self) -> tuple[int, int]:
        """(free, all) bytes."""
        free, total = self.torch.cuda.mem_get_info(self.index)
        return int(free), int(total)

    def kernel(
        self, name: str, entry: str, macros: dict[str, int], threads: int, shared: int = 0
    ) -> program.Kernel:
        """A kernel of this device, compiled at first use."""
        key = (name, entry, *macros.items())
        if key not in self._kernels:
            with self.current():
                self._kernels[key] = program.Kernel(
                    name, entry, macros, self.architecture, threads=threads, shared=shared
                )
        return self._kernels[key]

    def table(self, key: Any, made: Any) -> Any:
        """The tensor of an array that `made` gives, put onto the device at first use."""
        if key not in self._tables:
            self._tables[key] = self.tensor(np.ascontiguousarray(made()))
        return self._tables[key]

    def stream(self) -> int:
        """torch's current stream, as a handle."""
        return int(self.torch.cuda.current_stream(self.index).cuda_stream)

    def capturing(self) -> bool:
        """Whether that stream is being captured into a graph: nothing can be waited for then."""
        with self.current():
            return bool(self.torch.cuda.is_current_stream_capturing())

    def scratch(self, floats: int, counters: int) -> tuple[Any, Any]:
        """(float32, int32) of at least these sizes for a launch on the current stream; the counters
        are zero, and every launch leaves them so.

        Kept by stream and only ever grown. A graph has its own where those of its stream are too
        small at capture.
        """
        stream = self.stream()
        held = self._scratch.get(stream)
        if held is not None and len(held[0]) >= floats and len(held[1]) >= counters:
            return held
        sizes = [floats, counters] if held is None else [
            max(floats, 2 * len(held[0])) if floats > len(held[0]) else len(held[0]),
            max(counters, 2 * len(held[1])) if counters > len(held[1]) else len(held[1]),
        ]  # fmt: skip
        made = (
            self.torch.empty(sizes[0], dtype=self.torch.float32, device=self.torch_device),
            self.torch.zeros(sizes[1], dtype=self.torch.int32, device=self.torch_device),
        )
        if not self.capturing():
            if held is not None:  # a graph may have been made with it
                self._outgrown.append(held)
            self._scratch[stream] = made
        return made

    def tensor(self, x: NDArray[Any]) -> Any:
        """A copy of an array of the host on the device."""
        return self.torch.tensor(x, device=self.torch_device)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An uninitialised tensor."""
        kind = getattr(self.torch, dtype)
        return self.torch.empty(shape, dtype=kind, device=self.torch_device)


def architecture(capability: tuple[int, int]) -> str:
    """What NVRTC compiles for: the device's own, with the features of Hopper alone where it is one
    ("sm_90a")."""
    return f"sm_{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")


def is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor, asked without importing torch."""
    return type(x).__module__.split(".")[0] == "torch" and hasattr(x, "data_ptr")


def on_host(x: Any) -> bool:
    """Whether x lies in the memory of the host."""
    return not is_tensor(x) or x.device.type == "cpu"


def host_array(x: Any, what: str) -> NDArray[Any]:
    """The NumPy array behind something of the host; RequestError names `what` if there is none."""
    try:
        if is_tensor(x):
            x = x.detach()
            if x.is_floating_point():
                x = x.float()
            return np.asarray(x.numpy())
        return np.asarray(x)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{what}: needs an array of numbers: {error}") from error


def same_device(**arrays: Any) -> Any:
    """The device that all given arrays lie on (None: the host); RequestError if they differ."""
    places = {}
    for name, x in arrays.items():
        if x is not None:
            places[name] = None if on_host(x) else x.device
    if len(set(places.values())) > 1:
        text = ", ".join(f"{n} on {'the host' if d is None else d}" for n, d in places.items())
        raise RequestError(f"backend cuda: arrays lie on different devices: {text}")
    place = next(iter(places.values()), None)
    if place is not None and place.type != "cuda":
        raise RequestError(f"backend cuda: tensors lie on {place}; give CUDA tensors or arrays")
    return place
