"""What the doctor knows of a machine and an installation: frozen data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing worth knowing.

    Attributes:
        level: ``note``, ``slow`` (works, slower than it could) or ``broken`` (will fail).
        text: what, why, and what to do about it.
    """

    level: Literal["note", "slow", "broken"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """Time of ``[rows, 2048] @ [2048, 2048]``, best of several.

    Attributes:
        dtype: ``float32`` or ``bfloat16``.
        one_row: seconds for 1 row.
        many_rows: seconds for 16 rows.
    """

    dtype: str
    one_row: float
    many_rows: float

    @property
    def ratio(self) -> float:
        """How many one-row passes 16 rows cost; 16 means that speculation cannot pay, 1 that drafts are free."""
        return self.many_rows / self.one_row


@dataclass(frozen=True, kw_only=True)
class Threads:
    """Threads asked for against processors there are.

    Attributes:
        torch: intra-op threads of torch.
        omp: value of OMP_NUM_THREADS, "" if unset.
        usable: processors this process may run on, cgroup quota included (1.5 is possible).
        load: one-minute load average, None where the platform has none.
    """

    torch: int
    omp: str
    usable: float
    load: float | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything ``specdiff doctor`` knows.

    Attributes:
        versions: of Python, specdiff and the packages it stands on; "" where missing.
        extras: optional package -> version, "" where missing.
        platform: system and processor in words.
        devices: usable devices, best first.
        cpu_capability: vector instructions torch uses.
        cpu_flags: bf16 and vector flags of the processor.
        threads: see `Threads`.
        memory_total, memory_available: bytes, None where unknown.
        matmuls: one a dtype.
        bandwidth: bytes a second moved by a large copy, reads and writes together.
        store: root folder, free bytes of its disk, bytes used, name -> state of each model; or ``error``.
        findings: in order of weight.
    """

    versions: dict[str, str]
    extras: dict[str, str]
    platform: str
    devices: tuple[str, ...]
    cpu_capability: str
    cpu_flags: tuple[str, ...]
    threads: Threads
    memory_total: int | None
    memory_available: int | None
    matmuls: tuple[Matmul, ...]
    bandwidth: float
    store: dict[str, Any]
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds, sizes in bytes."""
        data = asdict(self)
        for row, matmul in zip(data["matmuls"], self.matmuls, strict=True):
            row["ratio"] = matmul.ratio
        return data
