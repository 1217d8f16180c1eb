"""What may be loaded: sound safetensors, no pickle, no code; and the fingerprint of what was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specdiff.errors import CheckpointError
from specdiff.hub import check_folder, model_fingerprint
from specdiff.hub.headers import check_safetensors
from support.hub import WEIGHTS, safetensors_bytes, write_model


def write_header(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_what_the_library_writes_is_accepted_in_every_dtype(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16)
    dtypes += (torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
    tensors = {str(dtype): torch.zeros(3, 2).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(1.0), "empty": torch.zeros(0, 5)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert set(check_safetensors(tmp_path / "model.safetensors")) == set(tensors)


def test_the_handwritten_file_of_these_tests_is_one_the_library_opens(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(WEIGHTS, {"format": "pt"}))
    assert set(check_safetensors(path)) == set(WEIGHTS)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(WEIGHTS)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": entry(dtype="F31")}, "unknown dtype"),
        ({"a": entry(dtype=32)}, "unknown dtype"),
        ({"a": entry(shape=[-1])}, "malformed shape"),
        ({"a": entry(shape=[1.0])}, "malformed shape"),
        ({"a": entry(shape=[True])}, "malformed shape"),
        ({"a": entry(shape="1")}, "malformed shape"),
        ({"a": entry(shape=[1] * 65)}, "malformed shape"),
        ({"a": entry(offsets=[0])}, "malformed data offsets"),
        ({"a": entry(offsets=[-4, 0])}, "malformed data offsets"),
        ({"a": entry(offsets=[4, 0])}, "do not fit"),
        ({"a": entry(offsets=[0, 5])}, "do not fit"),
        ({"a": entry(shape=[1 << 62, 4, 0], offsets=[0, 0])}, "do not fit"),
        ({"a": entry(shape=[1 << 62, 4], offsets=[0, 0])}, "do not fit"),
        ({"a": entry(), "b": entry()}, "starts at 0, expected 4"),
        ({"a": entry(offsets=[4, 8])}, "starts at 4, expected 0"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "is not dtype, shape and data_offsets"),
        ({"a": entry() | {"more": 1}}, "is not dtype, shape and data_offsets"),
        ({"a": 1}, "is not dtype, shape and data_offsets"),
        ({"a": entry(), "__metadata__": {"n": 1}}, "__metadata__"),
        ({"a": entry(), "__metadata__": None}, "__metadata__"),
        ({}, "longer than its header says"),
        ([], "not a JSON object"),
        (b' {"a": 1}', "not a JSON object"),
        (b"{" * 100_000, "not valid JSON"),
        (b'{"a": ' * 100_000, "not valid JSON"),
        (b'{"\xff": 1}', "not valid JSON"),
        (b'{"\\ud800": {}}', "not valid JSON"),
        (b'{"a": {}, "a": {}}', "a key occurs twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_malformed_header_is_refused_with_the_reason(tmp_path: Path, header: object, reason: str) -> None:
    path = write_header(tmp_path / "bad.safetensors", header, b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors") as caught:
        check_safetensors(path)
    assert reason in str(caught.value)
    assert "fetch it again" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x10", b"\0" * 8, b"\xff" * 8, b"\x01" + b"\0" * 8, b"\xff" * 7 + b"\x7f{}"])
def test_an_impossible_header_length_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        check_safetensors(path)


def test_a_missing_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_safetensors(tmp_path / "absent.safetensors")


def test_a_sound_folder_passes(tmp_path: Path) -> None:
    assert check_folder(write_model(tmp_path)) == (tmp_path / "model.safetensors",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_pickled_weights_are_refused_unless_safetensors_are_there(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    (tmp_path / name).write_bytes(b"\x80\x04.")
    check_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pickle format are refused") as caught:
        check_folder(tmp_path)
    assert name in str(caught.value)


@pytest.mark.parametrize(("name", "reason"), [("model.gguf", "not read"), ("notes.txt", r"no \*\.safetensors")])
def test_other_formats_are_not_read(tmp_path: Path, name: str, reason: str) -> None:
    (write_model(tmp_path) / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=reason):
        check_folder(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("nested", [False, True])
def test_remote_code_is_refused_unless_allowed(tmp_path: Path, file: str, nested: bool) -> None:
    write_model(tmp_path)
    wish: dict[str, object] = {"auto_map": {"AutoModel": "org/repo--modeling.Model"}}
    wish = {"text_config": [wish]} if nested else wish
    (tmp_path / file).write_text(json.dumps({"model_type": "llama"} | wish), encoding="utf-8")
    with pytest.raises(CheckpointError, match="auto_map") as caught:
        check_folder(tmp_path)
    assert file in str(caught.value)
    check_folder(tmp_path, allow_remote_code=True)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_experts_implementation_internal"])
@pytest.mark.parametrize("value", ["org/flash-attn", {"text_config": "org/flash-attn@v1"}])
def test_kernels_from_a_hub_are_refused(tmp_path: Path, key: str, value: object) -> None:
    write_model(tmp_path, {key: value})
    with pytest.raises(CheckpointError, match="kernel"):
        check_folder(tmp_path)
    check_folder(write_model(tmp_path, {key: "sdpa", "auto_map": {}}))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\ufeff{}", "[" * 100_000, "{}"])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        check_folder(tmp_path)


def test_a_missing_configuration_or_folder_is_refused(tmp_path: Path) -> None:
    (write_model(tmp_path / "model") / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: missing"):
        check_folder(tmp_path / "model")
    with pytest.raises(CheckpointError, match="not one"):
        check_folder(tmp_path / "absent")


def sharded(folder: Path) -> Path:
    (write_model(folder) / "model.safetensors").unlink()
    names = list(WEIGHTS)
    for number, name in enumerate(names):
        (folder / f"model-{number}.safetensors").write_bytes(safetensors_bytes({name: WEIGHTS[name]}))
    write_index(folder, {name: f"model-{number}.safetensors" for number, name in enumerate(names)})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def test_shards_must_all_be_there(tmp_path: Path) -> None:
    assert len(check_folder(sharded(tmp_path))) == 3
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: missing"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"embed.weight": "model-1.safetensors"}, "lacks tensor 'embed.weight'"),
        ({"embed.weight": "../model-0.safetensors"}, "no file of this folder"),
        ({"embed.weight": "model.bin"}, "no file of this folder"),
        ({"embed.weight": 3}, "no file of this folder"),
        ({}, "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, weight_map: object, reason: str) -> None:
    write_index(sharded(tmp_path), weight_map)
    with pytest.raises(CheckpointError, match=reason.replace("(", r"\(")):
        check_folder(tmp_path)


def test_the_fingerprint_depends_on_weights_and_configuration_only(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    (two / "README.md").write_text("words", encoding="utf-8")
    config = json.loads((two / "config.json").read_text(encoding="utf-8"))
    config |= {"transformers_version": "9", "_name_or_path": "x"}
    (two / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=8), encoding="utf-8")
    same = model_fingerprint(one)
    assert same == model_fingerprint(two)
    assert same.startswith("sha256:")
    assert len(same) == 71
    write_model(two, {"rope_theta": 1})
    assert model_fingerprint(two) != same
    write_model(two, {"specdiff_origin": {"label": "Q4_1-dequantised to bf16"}})
    assert model_fingerprint(two) != same, "equal weights, but dequantised"
    weights = bytearray((write_model(two) / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (two / "model.safetensors").write_bytes(weights)
    assert model_fingerprint(two) != same


def test_no_fingerprint_without_weights_or_configuration(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no fingerprint"):
        model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("[", encoding="utf-8")
    with pytest.raises(CheckpointError, match="no fingerprint"):
        model_fingerprint(tmp_path)
