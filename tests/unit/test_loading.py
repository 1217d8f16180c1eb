"""From names to a running pair: the two faces agree, options reach their part, and what means nothing is refused."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from typer.testing import CliRunner

import specdiff
from specdiff.cli.app import app
from specdiff.decoder import Settings, SpeculativeDecoder, load
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.drafters.masked import MaskedSource
from specdiff.drafters.multistep import MultiStepDrafter
from specdiff.errors import CheckpointError, InputError
from specdiff.hub.manifest import MANIFEST, check_hashes, read_manifest, write_manifest
from specdiff.loading import default_denoiser, load_pair
from specdiff.models.diffusion import DiffusionLM
from support.tiny_diffusion import tiny
from support.tiny_targets import tiny_model
from support.tokenizing import byte_level

# peft, of the test's own unmerged models
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
PROMPT = "the lazy dog and the lazy fox"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, a fully bidirectional masked diffusion LM with its tokenizer, and an adapter for that."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), byte_level()
    for name, seed in (("target", 1), ("diffusion", 2)):
        model = tiny_model("llama", vocab_size=len(tokenizer), seed=seed).eval()
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    path = folder / "diffusion" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token_id": len(tokenizer) - 1}))
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    lm = DiffusionLM.from_pretrained(folder / "diffusion", family="diffullama")
    peft.get_peft_model(lm.backbone, config).save_pretrained(folder / "adapter")
    return folder


def denoiser(decoder: SpeculativeDecoder) -> DiffusionLM:
    assert isinstance(decoder.drafter, MarginalDrafter)
    assert isinstance(decoder.drafter.source, MaskedSource)
    assert isinstance(decoder.drafter.source.denoiser, DiffusionLM)
    return decoder.drafter.source.denoiser


def test_the_two_faces_are_one_and_hide_no_option(folders: Path) -> None:
    assert specdiff.load == SpeculativeDecoder.from_pretrained
    face = inspect.signature(specdiff.load).parameters
    assert face.keys() - {"settings"} == inspect.signature(load_pair).parameters.keys()

    class Mine(SpeculativeDecoder):
        pass

    settings = Settings(rule="match", gamma=2)
    mine = Mine.from_pretrained(str(folders / "target"), "ngram", dtype="fp32", settings=settings)
    ours = load(str(folders / "target"), "ngram", dtype="fp32", settings=settings)
    assert type(mine) is Mine
    assert mine.settings is settings
    assert mine.generate(PROMPT, max_new_tokens=12) == ours.generate(PROMPT, max_new_tokens=12)


def test_an_adapter_and_a_refresh_interval_reach_the_drafter(folders: Path) -> None:
    names = str(folders / "target"), str(folders / "diffusion")
    plain = load(*names, family="diffullama", dtype="fp32", prepack=False)
    adapted = load(*names, family="diffullama", dtype="fp32", adapter=folders / "adapter", refresh=3, prepack=False)
    unmerged = DiffusionLM.from_pretrained(folders / "diffusion", family="diffullama")
    wrapped = peft.PeftModel.from_pretrained(unmerged.backbone, folders / "adapter").eval()
    ids = torch.tensor([[5, 6, 7]])
    expected = wrapped(input_ids=ids).logits
    assert (denoiser(adapted).backbone(input_ids=ids).logits - expected).abs().max() < 1e-4
    assert (denoiser(plain).backbone(input_ids=ids).logits - expected).abs().max() > 0.01
    assert isinstance(adapted.drafter, MarginalDrafter)
    assert isinstance(adapted.drafter.source, MaskedSource)
    assert adapted.drafter.source.refresh == 3
    texts = [d.generate(PROMPT, max_new_tokens=12) for d in (plain, adapted, load(names[0], "none", dtype="fp32"))]
    assert len({g.tokens for g in texts}) == 1
    stepping = load(*names, family="diffullama", steps=3, order="entropy", refresh=2)
    assert isinstance(stepping.drafter, MultiStepDrafter)


def test_from_the_command_line(folders: Path) -> None:
    command = ["generate", "--target", str(folders / "target"), "--dtype", "fp32", "-n", "12", "--json", PROMPT]
    with_options = ["--family", "diffullama", "--adapter", str(folders / "adapter"), "--refresh", "2"]
    plain = CliRunner().invoke(app, [*command, "--drafter", "none"])
    ours = CliRunner().invoke(app, [*command, "--drafter", str(folders / "diffusion"), *with_options])
    assert ours.exit_code == 0, ours.output
    assert json.loads(ours.stdout)["tokens"] == json.loads(plain.stdout)["tokens"]


@pytest.mark.parametrize("drafter", ["none", "ngram", "target", "ngram+target"])
@pytest.mark.parametrize("option", ["steps", "adapter", "refresh"])
def test_options_of_diffusion_drafters_are_refused_beside_others(folders: Path, drafter: str, option: str) -> None:
    value = {"steps": 2, "adapter": str(folders / "adapter"), "refresh": 2}[option]
    name = drafter.replace("target", str(folders / "target"))
    with pytest.raises(InputError, match=rf"^{option}: expected a masked diffusion LM"):
        load(str(folders / "target"), name, **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": 0}, "^steps: expected an integer >= 1"),
        ({"order": "sideways"}, "^order: expected left_to_right or"),
        ({"order": "margin"}, "^order: expected more than one step"),
        ({"refresh": 0}, "^refresh: expected an integer >= 1"),
        ({"adapter": "nowhere"}, "adapter_config.json: missing"),
    ],
)
def test_values_that_mean_nothing_are_refused(folders: Path, options: dict[str, object], match: str) -> None:
    with pytest.raises((InputError, CheckpointError), match=match):
        load(str(folders / "target"), str(folders / "diffusion"), family="diffullama", **options)  # type: ignore[arg-type]


def test_a_refresh_interval_of_an_exact_cache_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^refresh: expected None for block-causal attention"):
        MaskedSource(tiny(tmp_path, "sdar"), refresh=2)


def flip_last_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_a_flipped_bit_in_a_folder_with_a_manifest_is_met_at_load(folders: Path, tmp_path: Path, part: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folders / "target", copy)
    write_manifest(copy, name="copy", title="", licence="", label="", provenance={})
    names = (str(copy), "none") if part == "target" else (str(folders / "target"), str(copy))
    load(*names)
    flip_last_bit(copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: expected sha256 .*, got sha256"):
        load(*names)
    (copy / MANIFEST).unlink()
    load(*names)  # nothing is known of it


def test_the_drafter_of_the_package_is_as_recorded() -> None:
    """Else: python scripts/record_drafter.py."""
    assert check_hashes(default_denoiser(), read_manifest(default_denoiser())) == ()


@pytest.mark.parametrize("fault", ["flipped bit", "no record"])
def test_a_changed_drafter_of_the_package_is_refused(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    copy = tmp_path / "denoiser"
    shutil.copytree(default_denoiser(), copy)
    monkeypatch.setattr("specdiff.loading.default_denoiser", lambda: copy)
    if fault == "no record":
        (copy / MANIFEST).unlink()
    else:
        flip_last_bit(copy / "denoiser.safetensors")
    with pytest.raises(CheckpointError, match=r"denoiser.safetensors: expected|specdiff.json: missing"):
        load(str(folders / "target"), "default")
