"""Looking at the machine: short measurements, and reading what the system tells."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specdiff.doctor.facts import Matmul, Threads
from specdiff.errors import SpecdiffError
from specdiff.hub import ModelStore

_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16", "sve")
_WIDTH = 2048  # the matrix is [2048, 2048]: 16 MB in fp32, past most second-level caches
_ROWS = 16
_BANDWIDTH_BYTES = 64 << 20


def version(package: str) -> str:
    """Installed version, "" where the package is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def measure_matmul(dtype: torch.dtype) -> Matmul:
    """Time 1 and 16 rows against one matrix on the CPU, about a tenth of a second."""
    weight = torch.randn(_WIDTH, _WIDTH, dtype=dtype)

    def seconds(rows: int) -> float:
        inputs = torch.randn(rows, _WIDTH, dtype=dtype)
        return best_of(lambda: torch.nn.functional.linear(inputs, weight), budget=0.05)

    with torch.inference_mode():
        return Matmul(dtype=str(dtype).removeprefix("torch."), one_row=seconds(1), many_rows=seconds(_ROWS))


def measure_bandwidth() -> float:
    """Bytes a second of a copy too large for caches, reads and writes counted."""
    source = torch.ones(_BANDWIDTH_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _BANDWIDTH_BYTES / best_of(lambda: target.copy_(source), budget=0.05)


def best_of(run: Callable[[], object], budget: float) -> float:
    """Least seconds of one call, over at least 10 calls and about ``budget`` seconds, after a warm-up call."""
    run()
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 10 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def devices() -> tuple[str, ...]:
    """Usable devices, best first, the CPU last."""
    found: list[str] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found.append(f"cuda:{index} ({torch.cuda.get_device_name(index)})")
    if torch.backends.mps.is_available():
        found.append("mps")
    if torch.xpu.is_available():
        found.append("xpu")
    return (*found, "cpu")


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Flags that matter for bf16 and vector speed; empty where the platform does not tell."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    lines = [line for line in text.splitlines() if line.lower().startswith(("flags", "features"))]
    words = set(lines[0].split()) if lines else set()
    return tuple(flag for flag in _CPU_FLAGS if flag in words)


def threads() -> Threads:
    """Threads asked for, and what there is to run them."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Threads(
        torch=torch.get_num_threads(), omp=os.environ.get("OMP_NUM_THREADS", ""), usable=usable_processors(), load=load
    )


def usable_processors(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Processors this process may use: its affinity, or less where a container's quota says so."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = quota_file.read_text(encoding="ascii").split()
        return count if quota == "max" else min(count, int(quota) / int(period))
    except (OSError, ValueError):
        return count


def describe_store(store: ModelStore | None = None) -> dict[str, Any]:
    """Where the model store is, what is in it, and the room left; ``error`` if it cannot be read."""
    try:
        store = store or ModelStore()
        statuses = store.list()
        return {
            "root": str(store.root),
            "writable": is_writable(store.root),
            "free_bytes": store.folders.free_bytes(),
            "used_bytes": sum(status.stored_bytes for status in statuses),
            "models": {status.name: status.state.value for status in statuses},
        }
    except (SpecdiffError, OSError) as error:
        return {"error": str(error)}


def is_writable(folder: Path) -> bool:
    """Whether a file can be made in ``folder``, or the folder itself in the nearest one that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
