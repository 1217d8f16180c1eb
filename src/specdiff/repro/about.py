"""What a measurement was made with: versions, machine, commit."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from specdiff.corpus.manifest import package_versions
from specdiff.machine import memory, processor


def machine_facts() -> dict[str, Any]:
    """What must stay the same within one measurement."""
    total, _ = memory()
    return {
        "processor": processor(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "memory_gib": None if total is None else round(total / 2**30),
        "python": platform.python_version(),
        "versions": package_versions(),
    }


def run_facts() -> dict[str, Any]:
    """What may differ between the parts of an interrupted measurement."""
    return {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit()}


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """Commit of the source tree that the package runs from, with ``+`` where files differ; None outside of one."""
    git = shutil.which("git")
    if git is None:
        return None
    out = subprocess.run(
        [git, "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude", "*", "--abbrev=40"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    tracked = subprocess.run(
        [git, "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return out.stdout.strip() or None if out.returncode == 0 and tracked.returncode == 0 else None
