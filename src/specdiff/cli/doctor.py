"""``specdiff doctor``: what this machine and installation can do, and what will be slow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from specdiff.cli.models import print_json
from specdiff.cli.show import folding_table
from specdiff.doctor import Report, examine

_STYLES = {"broken": "bold red", "slow": "yellow", "note": "dim"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
) -> None:
    """Examine versions, devices, speed, memory and the model store; exit code 1 if something is broken."""
    report = examine()
    if as_json:
        print_json(report.to_json())
    else:
        console = Console(highlight=False)
        table = folding_table()
        for key, value in rows(report):
            table.add_row(Text(key, style="bold"), Text(value))
        console.print(table)
        console.print()
        for finding in report.findings:
            console.print(Text.assemble((finding.level, _STYLES[finding.level]), "  ", finding.text))
    if any(finding.level == "broken" for finding in report.findings):
        raise typer.Exit(1)


def rows(report: Report) -> Iterator[tuple[str, str]]:
    """The facts of a report, one line each."""
    yield "versions", ", ".join(f"{name} {version or 'missing'}" for name, version in report.versions.items())
    yield "optional", ", ".join(f"{name} {version or 'missing'}" for name, version in report.extras.items())
    yield "platform", report.platform
    yield "devices", ", ".join(report.devices)
    yield "cpu", f"{report.cpu_capability}; {' '.join(report.cpu_flags) or 'flags unknown'}"
    threads = report.threads
    load = "unknown" if threads.load is None else f"{threads.load:.1f}"
    omp = threads.omp or "unset"
    yield "threads", f"torch {threads.torch}, OMP_NUM_THREADS {omp}, processors {threads.usable:g}, load {load}"
    free = "unknown" if report.memory_available is None else decimal(report.memory_available)
    total = "unknown" if report.memory_total is None else decimal(report.memory_total)
    yield "memory", f"{free} free of {total}"
    for matmul in report.matmuls:
        one, many = matmul.one_row * 1e3, matmul.many_rows * 1e3
        yield f"matmul {matmul.dtype}", f"1 row {one:.2f} ms, 16 rows {many:.2f} ms, ratio {matmul.ratio:.1f}"
    yield "bandwidth", f"{report.bandwidth / 1e9:.1f} GB/s (copy, reads and writes)"
    if "error" not in report.store:
        store = report.store
        yield "store", f"{store['root']}, {decimal(store['used_bytes'])} used, {decimal(store['free_bytes'])} free"
        yield "models", ", ".join(f"{name} {state}" for name, state in store["models"].items())
