"""The doctor: facts are gathered without a fault, and judged in plain words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from specdiff.cli.doctor import doctor
from specdiff.doctor import Matmul, Report, Threads, examine, probes
from specdiff.doctor.findings import find
from specdiff.hub import ModelStore
from specdiff.machine import memory


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return examine(ModelStore(tmp_path_factory.mktemp("home")))


def test_the_report_is_complete_and_plain_data(report: Report) -> None:
    data = json.loads(json.dumps(report.to_json()))
    assert data["versions"]["torch"]
    assert data["devices"][-1] == "cpu"
    assert [matmul["dtype"] for matmul in data["matmuls"]] == ["float32", "bfloat16"]
    assert all(matmul["one_row"] > 0 and matmul["ratio"] > 0 for matmul in data["matmuls"])
    assert data["bandwidth"] > 0
    assert data["threads"]["usable"] > 0
    assert data["store"]["models"]["smollm2-135m"] == "absent"
    assert data["store"]["writable"]
    assert data["findings"]


def test_the_command_prints_words_or_json(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    monkeypatch.setattr("specdiff.cli.doctor.examine", lambda: report)
    app = typer.Typer()
    app.command()(doctor)
    words = CliRunner().invoke(app, [])
    assert words.exit_code == 0
    for word in ("versions", "matmul bfloat16", "bandwidth", "smollm2-135m absent"):
        assert word in words.stdout
    assert json.loads(CliRunner().invoke(app, ["--json"]).stdout)["platform"] == report.platform


def test_a_store_that_cannot_be_used_is_broken_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: Report
) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = probes.describe_store(ModelStore(tmp_path / "file" / "home"))
    assert not store["writable"]
    broken = Report(**vars(report) | {"store": store, "findings": judge(store=store)})
    monkeypatch.setattr("specdiff.cli.doctor.examine", lambda: broken)
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 1
    assert "SPECDIFF_HOME" in result.stdout


FINE: dict[str, Any] = {
    "versions": {"torch": "2", "transformers": "5", "safetensors": "1", "gguf": "1"},
    "extras": {"peft": "1", "vllm": "1"},
    "devices": ("cuda:0 (H)", "cpu"),
    "cpu_flags": ("amx_bf16",),
    "threads": Threads(torch=4, omp="", usable=8.0, load=0.1),
    "memory_available": 20 << 30,
    "matmuls": (
        Matmul(dtype="float32", one_row=1.0, many_rows=8.0),
        Matmul(dtype="bfloat16", one_row=1.5, many_rows=2.0),
    ),
    "store": {"root": "/r", "writable": True, "free_bytes": 1 << 40, "used_bytes": 0, "models": {"m": "ready"}},
}


def judge(**changes: object):
    return find(**FINE | changes)


def texts(**changes: object) -> str:
    return "\n".join(f"{finding.level}: {finding.text}" for finding in judge(**changes))


def test_a_fine_machine_has_no_findings() -> None:
    assert judge() == ()


SLOW_BF16 = (
    Matmul(dtype="float32", one_row=1.0, many_rows=6.0),
    Matmul(dtype="bfloat16", one_row=9.0, many_rows=20.0),
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": FINE["versions"] | {"gguf": ""}}, "broken: gguf is not installed"),
        ({"extras": {"peft": "", "vllm": "1"}}, "note: peft is not installed; only"),
        ({"store": {"error": "no home"}}, "broken: The model store cannot be used: no home"),
        ({"store": FINE["store"] | {"writable": False}}, "broken: /r cannot be written"),
        ({"store": FINE["store"] | {"free_bytes": 1e9}}, "slow: Only 1.0 GB are free"),
        ({"store": FINE["store"] | {"models": {"m": "damaged"}}}, "broken: m is damaged"),
        ({"store": FINE["store"] | {"models": {"m": "partial"}}}, "note: m is partly fetched"),
        ({"memory_available": 1e9}, "slow: Only 1.0 GB of memory"),
        ({"threads": Threads(torch=16, omp="16", usable=8.0, load=0.0)}, "slow: torch runs 16 threads on 8 processors"),
        ({"threads": Threads(torch=2, omp="", usable=2.0, load=9.0)}, "Set OMP_NUM_THREADS=1 until it is idle"),
        ({"threads": Threads(torch=1, omp="1", usable=2.0, load=9.0)}, "slow: The machine is busy"),
        ({"threads": Threads(torch=1, omp="1", usable=1.5, load=None), "devices": ("cpu",)}, "slow: No accelerator"),
        ({"devices": ("cpu",)}, "note: bf16 wins for the target's passes"),
        ({"devices": ("cpu",)}, "note: In bfloat16, 16 rows cost 1.3 times one row"),
        ({"devices": ("cpu",), "matmuls": SLOW_BF16}, "slow: 16 rows take 3.3 times as long in bf16"),
        ({"devices": ("cpu",), "matmuls": SLOW_BF16, "cpu_flags": ()}, "neither AMX nor AVX512-BF16"),
        ({"devices": ("cpu",), "matmuls": SLOW_BF16}, "slow: In float32, 16 rows cost 6.0 times one row"),
        (
            {"devices": ("cpu",), "threads": Threads(torch=1, omp="1", usable=2.0, load=9.0)},
            "note: Times measured on a busy machine",
        ),
    ],
)
def test_each_fact_is_judged(changes: dict[str, object], words: str) -> None:
    assert words in texts(**changes)


def test_broken_comes_before_slow_before_notes() -> None:
    levels = [
        finding.level
        for finding in judge(devices=("cpu",), extras={"peft": "", "vllm": ""}, store={"error": "no home"})
    ]
    assert levels == sorted(levels, key=("broken", "slow", "note").index)
    assert set(levels) == {"broken", "slow", "note"}


def test_the_system_is_read_where_it_tells_and_unknown_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor: 0\nflags : fpu avx2 amx_bf16\nflags : fpu\n", encoding="utf-8")
    assert probes.cpu_flags(tmp_path / "cpuinfo") == ("avx2", "amx_bf16")
    (tmp_path / "arm").write_text("Features : fp bf16 sve\n", encoding="utf-8")
    assert probes.cpu_flags(tmp_path / "arm") == ("bf16", "sve")
    assert probes.cpu_flags(tmp_path / "absent") == ()
    (tmp_path / "meminfo").write_text("MemTotal: 10 kB\nMemAvailable: 4 kB\n", encoding="utf-8")
    assert memory(tmp_path / "meminfo") == (10240, 4096)
    assert memory(tmp_path / "absent")[1] is None
    full = probes.usable_processors(tmp_path / "absent")
    (tmp_path / "cpu.max").write_text("max 100000\n", encoding="ascii")
    assert probes.usable_processors(tmp_path / "cpu.max") == full
    (tmp_path / "cpu.max").write_text("50000 100000\n", encoding="ascii")
    assert probes.usable_processors(tmp_path / "cpu.max") == 0.5
    assert probes.version("no-such-package-at-all") == ""
