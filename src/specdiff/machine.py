"""What the machine says of itself, for those that decide by it."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def memory(meminfo: Path = Path("/proc/meminfo")) -> tuple[int | None, int | None]:
    """(total, available) bytes; None where the platform does not tell."""
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
        return int(rows["MemTotal"].split()[0]) * 1024, int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        names = getattr(os, "sysconf_names", {})
        if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
        return None, None


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the processor."""
    name = platform.processor() or platform.machine()
    try:
        rows = [line.split(":", 1) for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()]
        return next((row[1].strip() for row in rows if row[0].startswith("model name") and len(row) > 1), name)
    except OSError:
        return name


def load() -> float | None:
    """How many processes ran or waited for a processor in the last minute, on average; None where it is not told."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
