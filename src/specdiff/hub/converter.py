"""Running the conversion of `specdiff.hub.convert` in a process of its own, offline and quiet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import specdiff.errors
from specdiff.errors import CheckpointError
from specdiff.hub.catalog import CatalogEntry

_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1", "PYTHONUTF8": "1"}
# The child finds specdiff where this process has it from, even if that place is on no path of a fresh Python.
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from specdiff.hub.convert import main; main()"


class Converter(Protocol):
    """The seam to conversion: fills the empty ``folder`` from ``gguf`` and returns the versions of what did it."""

    def __call__(self, gguf: Path, folder: Path, entry: CatalogEntry) -> dict[str, str]:
        """Convert."""
        ...


def convert_in_process(gguf: Path, folder: Path, entry: CatalogEntry) -> dict[str, str]:
    """Convert ``gguf`` into ``folder``; the process dies with this call, also when interrupted.

    Raises:
        CheckpointError: the conversion failed; the message says why.
    """
    origin = {"title": entry.title, "label": entry.label, "gguf": entry.gguf, "gguf_sha256": entry.gguf_sha256}
    request = {"gguf": str(gguf), "folder": str(folder), "recipe": asdict(entry.recipe), "origin": origin}
    package_root = str(Path(specdiff.errors.__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, package_root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        cwd=folder,
        env=os.environ | _QUIET,
    )
    try:
        output, _ = process.communicate(json.dumps(request))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    lines = [line for line in output.splitlines() if line.strip()]
    if process.returncode < 0:
        raise CheckpointError(
            f"{gguf.name}: conversion was killed (signal {-process.returncode}), most often for lack of memory; free "
            f"about {2 * entry.bf16_size / 1e9:.1f} GB and run the pull again, the download is kept"
        )
    if process.returncode != 0:
        raise CheckpointError(
            f"{gguf.name}: conversion failed ({' / '.join(lines[-2:])}); the download is kept, run the pull again"
        )
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise CheckpointError(f"{answer['error']}; the download is kept")
    return answer["versions"]
