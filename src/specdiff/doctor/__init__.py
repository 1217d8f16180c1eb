"""What this machine and installation can do, measured where that is cheap, and what will be slow and why.

Speculative decoding pays where one target pass over many rows costs little more than over one. So the doctor measures
exactly that ratio, in both dtypes, rather than guess it from the names of processors.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

from specdiff.doctor import probes
from specdiff.doctor.facts import Finding, Matmul, Report, Threads
from specdiff.doctor.findings import OPTIONAL, find
from specdiff.hub import ModelStore
from specdiff.machine import memory

__all__ = ["Finding", "Matmul", "Report", "Threads", "examine"]

_PACKAGES = ("specdiff", "torch", "transformers", "safetensors", "tokenizers", "gguf")


def examine(store: ModelStore | None = None) -> Report:
    """Look at everything; takes about half a second on an idle machine.

    Args:
        store: the model store to describe, by default the user's.
    """
    total, available = memory()
    facts: dict[str, Any] = {
        "versions": {"python": platform.python_version()} | {name: probes.version(name) for name in _PACKAGES},
        "extras": {name: probes.version(name) for name in OPTIONAL},
        "platform": f"{platform.system()} {platform.machine()}",
        "devices": probes.devices(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_flags": probes.cpu_flags(),
        "threads": probes.threads(),
        "memory_total": total,
        "memory_available": available,
        "matmuls": tuple(probes.measure_matmul(dtype) for dtype in (torch.float32, torch.bfloat16)),
        "bandwidth": probes.measure_bandwidth(),
        "store": probes.describe_store(store),
    }
    return Report(**facts, findings=find(**facts))
