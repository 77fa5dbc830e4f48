"""The levels of a machine's memory: the smaller, the faster."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ..algorithm.io_model import GPU, GPUS
from .measure import one_thread

BANKS = 128  # bytes a cycle and processor between shared memory and registers: 32 of 4 (CUDA C++ Programming Guide)
SYSFS = Path("/sys/devices/system/cpu/cpu0/cache")
SMALLEST = 1 << 18  # bytes of a level whose bandwidth a call of torch can show


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes that it holds, and bytes a second, None where that is not known. note: how it is known."""

    name: str
    size: int
    bandwidth: float | None
    note: str = ""


def of_gpu(gpu: GPU) -> list[Level]:
    """A card's, from its datasheet, the fastest first.

    >>> for level in of_gpu(GPUS["A100"]):
    ...     print(level.name, level.size >> 20, "MiB", level.bandwidth and round(level.bandwidth / 1e12, 1), "TB/s")
    shared memory and L1 20 MiB 19.5 TB/s
    L2 40 MiB None TB/s
    HBM 38146 MiB 1.6 TB/s
    """
    shared = None if gpu.clock is None else gpu.processors * BANKS * gpu.clock
    levels = [Level("shared memory and L1", gpu.shared * gpu.processors, shared, f"{gpu.processors} processors")]
    if gpu.l2 is not None:
        levels.append(Level("L2", gpu.l2, None))
    if gpu.memory is not None:
        levels.append(Level("HBM", gpu.memory, gpu.bandwidth, "datasheet"))
    return levels


def known(name: str) -> GPU | None:
    """The card of `GPUS` that a device of this name is.

    >>> known("NVIDIA H200").name, known("NVIDIA GeForce RTX 4090")
    ('H200', None)
    """
    return next((gpu for gpu in GPUS.values() if gpu.name in name.replace("-", " ").split()), None)


def present() -> tuple[str, list[Level]]:
    """This machine's GPU, or else its CPU: (name, levels). Bandwidths are measured by copies of half of a level."""
    return _present_gpu() if torch.cuda.is_available() else _present_cpu()


def _present_gpu() -> tuple[str, list[Level]]:
    card = torch.cuda.get_device_properties(0)
    like = known(card.name)
    shared = None if like is None or like.clock is None else card.multi_processor_count * BANKS * like.clock
    on_chip = card.shared_memory_per_multiprocessor * card.multi_processor_count
    return card.name, [
        Level("shared memory", on_chip, shared, f"{card.multi_processor_count} processors"),
        Level("L2", card.L2_cache_size, None),
        Level("HBM", card.total_memory, copy_bandwidth(1 << 30, "cuda"), "measured"),
    ]


def _present_cpu() -> tuple[str, list[Level]]:
    levels = []
    for index in sorted(SYSFS.glob("index*")):
        kind, size = (index / "type").read_text().strip(), (index / "size").read_text().strip()
        if kind != "Instruction" and size.endswith("K"):
            size_in_bytes = int(size[:-1]) * 1024
            levels.append(_cpu_level(f"L{(index / 'level').read_text().strip()}", size_in_bytes))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with one_thread():
        levels.append(Level("memory", memory, copy_bandwidth(1 << 28, "cpu"), "measured, one thread"))
    return "this CPU", levels


def _cpu_level(name: str, size: int) -> Level:
    if size < SMALLEST:
        return Level(name, size, None)
    with one_thread():
        return Level(name, size, copy_bandwidth(size // 2, "cpu"), "measured, one thread")


def copy_bandwidth(size: int, device: str) -> float:
    """Bytes read and written a second while `size` of them, source and copy together, are copied again and again."""
    source = torch.ones(size // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best, turns = float("inf"), max(1, (1 << 24) // size)
    for _ in range(5):
        _wait(device)
        start = time.perf_counter()
        for _ in range(turns):
            target.copy_(source)
        _wait(device)
        best = min(best, (time.perf_counter() - start) / turns)
    return size / best


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
