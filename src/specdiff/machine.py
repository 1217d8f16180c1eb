"""What the machine says of itself, for those that decide by it."""

from __future__ import annotations

import os
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
