"""From facts to plain words: what is broken, what will be slow, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdiff.doctor.facts import Finding, Matmul, Threads

OPTIONAL = {"peft": "training and loading LoRA drafters", "vllm": "the vLLM integration"}
"""Optional packages and what they are for."""

_REQUIRED = ("torch", "transformers", "safetensors", "gguf")
_CHEAP_RATIO = (
    2.5  # a draft of 15 tokens must win back this many plain passes; real drafts commit 2 to 4 tokens a round
)
_LEVELS = ("broken", "slow", "note")


def find(
    *,
    versions: dict[str, str],
    extras: dict[str, str],
    devices: tuple[str, ...],
    cpu_flags: tuple[str, ...],
    threads: Threads,
    memory_available: int | None,
    matmuls: tuple[Matmul, ...],
    store: dict[str, Any],
    **_: object,
) -> tuple[Finding, ...]:
    """Judge the facts of a `Report`; what is broken comes first, then what is slow, then notes."""
    found = [*_installation(versions, extras), *_store(store), *_memory(memory_available), *_contention(threads)]
    if devices == ("cpu",):
        found += _cpu_speed(matmuls, cpu_flags, _is_busy(threads))
    return tuple(sorted(found, key=lambda finding: _LEVELS.index(finding.level)))


def _installation(versions: dict[str, str], extras: dict[str, str]) -> Iterator[Finding]:
    for package in _REQUIRED:
        if not versions[package]:
            yield Finding(level="broken", text=f"{package} is not installed: run `pip install {package}`.")
    for package, purpose in OPTIONAL.items():
        if not extras[package]:
            yield Finding(level="note", text=f"{package} is not installed; only {purpose} needs it.")


def _store(store: dict[str, Any]) -> Iterator[Finding]:
    if "error" in store:
        yield Finding(level="broken", text=f"The model store cannot be used: {store['error']}")
        return
    if not store["writable"]:
        yield Finding(
            level="broken", text=f"{store['root']} cannot be written, so no model can be pulled: set SPECDIFF_HOME."
        )
    if store["free_bytes"] < 2e9:
        yield Finding(
            level="slow",
            text=f"Only {store['free_bytes'] / 1e9:.1f} GB are free for models; `specdiff models remove` makes room.",
        )
    for name, state in store["models"].items():
        if state == "damaged":
            yield Finding(level="broken", text=f"{name} is damaged: run `specdiff models pull {name}` to replace it.")
        if state == "partial":
            yield Finding(level="note", text=f"{name} is partly fetched: `specdiff models pull {name}` continues.")


def _memory(available: int | None) -> Iterator[Finding]:
    if available is not None and available < 2e9:
        yield Finding(
            level="slow",
            text=f"Only {available / 1e9:.1f} GB of memory are free: a model that does not fit is swapped, and crawls.",
        )


def _contention(threads: Threads) -> Iterator[Finding]:
    if threads.torch > threads.usable:
        yield Finding(
            level="slow",
            text=f"torch runs {threads.torch} threads on {threads.usable:g} processors. They wait for one another at "
            f"every operation: set OMP_NUM_THREADS={max(1, int(threads.usable))}.",
        )
    # Each parallel region ends in a barrier; one descheduled thread makes all of them wait for a time slice.
    if threads.load is not None and threads.torch > 1 and threads.load + threads.torch > threads.usable * 1.25 + 1:
        yield Finding(
            level="slow",
            text=f"The machine is busy (load {threads.load:.1f} on {threads.usable:g} processors) and torch uses "
            f"{threads.torch} threads: operations wait for threads that do not get to run, milliseconds at a time. Set "
            "OMP_NUM_THREADS=1 until it is idle; measure speed only then.",
        )
    elif _is_busy(threads):
        yield Finding(
            level="slow",
            text=f"The machine is busy (load {threads.load:.1f} on {threads.usable:g} processors): expect a fraction "
            "of its speed, and compare speeds only within one run.",
        )


def _is_busy(threads: Threads) -> bool:
    return threads.load is not None and threads.load > threads.usable


def _cpu_speed(matmuls: tuple[Matmul, ...], flags: tuple[str, ...], busy: bool) -> Iterator[Finding]:
    yield Finding(
        level="slow", text="No accelerator: models run on the CPU. Models up to about 2 B parameters are usable."
    )
    if busy:
        yield Finding(level="note", text="Times measured on a busy machine say little; run this again when it is idle.")
        return
    by_dtype = {matmul.dtype: matmul for matmul in matmuls}
    fp32, bf16 = by_dtype["float32"], by_dtype["bfloat16"]
    if bf16.many_rows > fp32.many_rows:
        supported = bool({"amx_bf16", "avx512_bf16", "bf16"} & set(flags))
        why = "" if supported else "; this CPU has neither AMX nor AVX512-BF16"
        yield Finding(
            level="slow",
            text=f"16 rows take {bf16.many_rows / fp32.many_rows:.1f} times as long in bf16 as in fp32{why}. Use "
            "--dtype fp32 if memory allows.",
        )
    elif bf16.one_row > fp32.one_row:
        yield Finding(
            level="note",
            text="bf16 wins for the target's passes over a draft, fp32 for single rows: plain decoding, the baseline "
            "to beat, may be faster in fp32. Compare against the faster one.",
        )
    best = min(matmuls, key=lambda matmul: matmul.many_rows)
    cost = f"In {best.dtype}, 16 rows cost {best.ratio:.1f} times one row"
    if best.ratio > _CHEAP_RATIO:
        yield Finding(
            level="slow",
            text=f"{cost}: a target pass over a draft is expensive here. Use short drafts (--gamma 3 to 5), no wide "
            "trees.",
        )
    else:
        yield Finding(level="note", text=f"{cost}: checking a draft costs little more than a token. Drafting can pay.")
