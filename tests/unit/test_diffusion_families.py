"""Loading masked diffusion LMs: families, mask ids, published names, refusals, adapters, the copy probe."""

from __future__ import annotations

import json
import shutil
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdiff.errors import CheckpointError, InputError, PairingError, UnsupportedModelError
from specdiff.models.diffusion import (
    DiffusionLM,
    MaskedDenoiserConfig,
    ProbeState,
    copy_probe,
    is_diffusion,
    load_tokenizer,
    merge_lora,
)
from specdiff.models.diffusion.families import find_family
from specdiff.models.diffusion.keys import LLADA
from support.copying import COPY_MASK, copying
from support.tiny_diffusion import CONFIGS, EOS, FAMILIES, MASK, VOCAB, checkpoint, weights, write


def ask(family: str) -> str | None:
    """The family argument that a checkpoint of this family needs."""
    return family if family == "diffullama" else None


def load(folder: Path, family: str, **options: object) -> DiffusionLM:
    """Load, naming the family only where the checkpoint does not."""
    return DiffusionLM.from_pretrained(folder, family=ask(family), **options)


@torch.inference_mode()
def logits(model: DiffusionLM) -> Tensor:
    """Rows for one sequence with masks."""
    return model.rows([torch.tensor([5, 6, 7, MASK, 8, MASK])], [(1, 6)])[0]


class TestFamilies:
    @pytest.mark.parametrize(
        ("family", "shift", "attention", "block", "published"),
        [
            ("dream", True, "full", 1, 151666),
            ("llada", False, "full", 1, 126336),
            ("diffullama", True, "full", 1, 811),
            ("sdar", False, "block", 4, 151669),
        ],
    )
    def test_facts(self, tmp_path: Path, family: str, shift: bool, attention: str, block: int, published: int) -> None:
        config = load(checkpoint(tmp_path / "m", family), family).config
        facts = (config.family, config.shift, config.attention, config.block_size, config.mask_id, config.eos_ids)
        assert facts == (family, shift, attention, block, MASK, (EOS,))
        assert config.vocab_size == VOCAB
        assert config.name == "m"
        assert find_family(CONFIGS[family], ask(family)).mask_id == published

    def test_diffucoder_is_a_dream(self) -> None:
        assert find_family(CONFIGS["dream"], "diffucoder").name == "dream"

    @pytest.mark.parametrize(
        ("config", "family", "error", "match"),
        [
            (CONFIGS["diffullama"], None, UnsupportedModelError, "autoregressive models have too"),
            ({"model_type": "novel", "auto_map": {"AutoModel": "x.Y"}}, None, UnsupportedModelError, "never run"),
            ({}, None, UnsupportedModelError, "model type None"),
            (CONFIGS["llada"], "sdar", PairingError, "llada"),
            (CONFIGS["llada"], "lada", InputError, "lada"),
        ],
    )
    def test_unknown_families_are_refused(
        self, config: dict, family: str | None, error: type[Exception], match: str
    ) -> None:
        with pytest.raises(error, match=match):
            find_family(config, family)

    def test_the_training_wrapper_is_recognised(self) -> None:
        config = {"model_type": "llama", "architectures": ["DiscreteDiffusionModel"]}
        assert find_family(config).name == "diffullama"

    @pytest.mark.parametrize(
        ("family", "changes"),
        [
            ("llada", {"block_type": "sequential"}),
            ("llada", {"include_qkv_bias": True}),
            ("llada", {"alibi": True}),
            ("llada", {"attention_layer_norm": True}),
            ("llada", {"scale_logits": True}),
            ("llada", {"block_group_size": 2}),
            ("dream", {"use_sliding_window": True}),
            ("dream", {"block_size": 32}),
            ("dream", {"attention_bias": False}),
        ],
    )
    def test_other_architectures_are_refused(self, tmp_path: Path, family: str, changes: dict) -> None:
        with pytest.raises(UnsupportedModelError, match=next(iter(changes)).removeprefix("use_").split("_")[0]):
            load(checkpoint(tmp_path, family, **changes), family)

    def test_a_block_variant_loads_when_it_is_stated(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path, "dream", block_size=8)
        config = DiffusionLM.from_pretrained(folder, attention="block", shift=False).config
        assert (config.block_size, config.shift) == (8, False)

    def test_remote_code_is_never_run(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path, "dream")
        for name in ("modeling_dream.py", "configuration_dream.py", "tokenization_dream.py"):
            (folder / name).write_text("raise SystemExit('remote code was run')")
        assert load(folder, "dream").config.family == "dream"

    def test_what_a_configuration_says_by_itself(self) -> None:
        assert [is_diffusion(CONFIGS[family]) for family in FAMILIES] == [True, True, False, True]
        assert is_diffusion({**CONFIGS["diffullama"], "specdiff": {"family": "diffullama"}})
        assert is_diffusion({**CONFIGS["diffullama"], "specdiff": {"family": "of another release"}})
        assert not is_diffusion({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
        assert not is_diffusion({})


class TestTokenizer:
    SETTINGS: ClassVar = {
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}, "tokenizer_class": "DreamTokenizer",
        "mask_token": "<|mask|>", "eos_token": "<|endoftext|>",
        "added_tokens_decoder": {
            str(i): {"content": c, "special": True, "lstrip": False, "rstrip": False, "normalized": False,
                     "single_word": False}
            for i, c in ((6, "<|endoftext|>"), (7, "<|mask|>"))
        },
    }  # fmt: skip

    def write(self, folder: Path) -> None:
        """The files of a Dream tokenizer, remote code included."""
        (folder / "config.json").write_text(json.dumps(CONFIGS["dream"]))
        (folder / "tokenizer_config.json").write_text(json.dumps(self.SETTINGS))
        (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "\u0120": 3, "\u0120a": 4, "c": 5}))
        (folder / "merges.txt").write_text("#version: 0.2\na b\n\u0120 a\n", encoding="utf-8")
        (folder / "tokenization_dream.py").write_text("raise SystemExit('remote code was run')")

    def test_remote_classes_are_replaced(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer("ab a<|mask|>")["input_ids"] == [2, 4, 7]
        assert (tokenizer.mask_token_id, tokenizer.eos_token_id) == (7, 6)
        tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "merges.txt").unlink()
        assert load_tokenizer(tmp_path)("ab a<|mask|>")["input_ids"] == [2, 4, 7]
        (tmp_path / "tokenizer.json").unlink()
        with pytest.raises(UnsupportedModelError, match="never run"):
            load_tokenizer(tmp_path)

    def test_broken_files(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(CheckpointError, match="no usable tokenizer"):
            load_tokenizer(tmp_path)
        with pytest.raises(CheckpointError, match="no usable tokenizer"):
            load_tokenizer(tmp_path / "nothing")


class TestMaskId:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="pass mask_id"):
            load(checkpoint(tmp_path, "dream", mask_token_id=None), "dream")

    @pytest.mark.parametrize("mask_id", [EOS, VOCAB, -1, 10**9])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_impossible(self, tmp_path: Path, family: str, mask_id: int) -> None:
        with pytest.raises(InputError, match="mask_id"):
            load(checkpoint(tmp_path, family, mask_token_id=mask_id), family)

    def test_eos_of_the_generation_config_counts(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path, "dream", eos_token_id=None)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, MASK]}))
        with pytest.raises(InputError, match="no EOS id"):
            load(folder, "dream")

    def test_the_tokenizer_may_name_it(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path, "dream", mask_token_id=None)
        settings = {"mask_token": {"content": "<|mask|>"}, "added_tokens_decoder": {"44": {"content": "<|mask|>"}}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        assert load(folder, "dream").config.mask_id == 44

    def test_two_that_differ_are_refused(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path, "dream")
        settings = {"mask_token": "<|mask|>", "added_tokens_decoder": {"44": {"content": "<|mask|>"}}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(PairingError, match=r"45.*44"):
            load(folder, "dream")
        assert load(folder, "dream", mask_id=44).config.mask_id == 44

    @pytest.mark.parametrize(
        "changes",
        [
            {"vocab_size": 0},
            {"mask_id": True},
            {"shift": 1},
            {"attention": "causal"},
            {"block_size": 4},
            {"attention": "block"},
            {"attention": "block", "block_size": 0},
            {"context": 3},
        ],
    )
    def test_configurations_are_validated(self, changes: dict) -> None:
        facts = {"family": "dream", "vocab_size": 10, "mask_id": 9, "shift": True}
        with pytest.raises(InputError):
            MaskedDenoiserConfig(**{**facts, **changes})


class TestFiles:
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_saved_and_reloaded(self, tmp_path: Path, family: str, tied: bool) -> None:
        model = load(checkpoint(tmp_path / "a", family, tied=tied), family)
        model.save_pretrained(tmp_path / "b")
        again = DiffusionLM.from_pretrained(tmp_path / "b")  # what the family is was written down
        assert torch.equal(logits(again), logits(model))
        assert replace(again.config, name="") == replace(model.config, name="")
        names = set(load_file(tmp_path / "b" / "model.safetensors"))
        assert names == set(weights(family, tied=tied))
        assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["config.json", "model.safetensors"]

    def test_stated_facts_survive_saving(self, tmp_path: Path) -> None:
        model = load(checkpoint(tmp_path / "a", "llada"), "llada", shift=True, mask_id=44)
        model.save_pretrained(tmp_path / "b")
        config = DiffusionLM.from_pretrained(tmp_path / "b").config
        assert (config.shift, config.mask_id) == (True, 44)

    def test_names_of_the_training_wrapper(self, tmp_path: Path) -> None:
        plain = checkpoint(tmp_path / "a", "diffullama")
        renamed = {
            name.replace("model.embed_tokens", "embed_tokens").replace("model.", "denoise_model."): tensor
            for name, tensor in load_file(plain / "model.safetensors").items()
        }
        wrapped = write(tmp_path / "b", CONFIGS["diffullama"], renamed)
        assert torch.equal(logits(load(wrapped, "diffullama")), logits(load(plain, "diffullama")))

    def test_shards_and_old_buffers(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path / "a", "dream")
        expected = logits(load(folder, "dream"))
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        index: dict[str, str] = {}
        for number, half in enumerate((names[::2], names[1::2])):
            shard = f"model-0000{number + 1}-of-00002.safetensors"
            save_file({name: tensors[name] for name in half}, folder / shard)
            index |= dict.fromkeys(half, shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        assert torch.equal(logits(load(folder, "dream")), expected)
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(CheckpointError, match="missing"):
            load(folder, "dream")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
        with pytest.raises(CheckpointError, match="no safetensors file of this folder"):
            load(folder, "dream")

    def test_pickles_are_refused(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path, "dream")
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="pickle"):
            load(folder, "dream")

    def test_broken_folders(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path, "dream")
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[:-100])
        with pytest.raises(CheckpointError, match="not a sound safetensors file"):
            load(folder, "dream")
        (folder / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="missing"):
            load(folder, "dream")
        (folder / "config.json").write_text("[")
        with pytest.raises(CheckpointError, match="JSON"):
            load(folder, "dream")
        shutil.rmtree(folder)
        with pytest.raises(CheckpointError, match="missing"):
            load(folder, "dream")

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (("model.norm.weight", None), "missing .'model.norm.weight'"),
            (("odd", torch.zeros(1)), "unknown .'odd'"),
            (("model.norm.weight", torch.zeros(3)), "shape"),
        ],
    )
    def test_wrong_tensors(self, tmp_path: Path, change: tuple[str, Tensor | None], match: str) -> None:
        name, tensor = change
        tensors = weights("dream")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
        with pytest.raises(CheckpointError, match=match):
            load(write(tmp_path, CONFIGS["dream"], tensors), "dream")

    def test_a_missing_size(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="hidden_size"):
            load(checkpoint(tmp_path, "dream", hidden_size=None), "dream")
        with pytest.raises(CheckpointError, match="sizes"):
            load(checkpoint(tmp_path, "dream", num_hidden_layers="two"), "dream")
        with pytest.raises(CheckpointError, match="sizes"):
            load(checkpoint(tmp_path, "llada", n_heads=0), "llada")
        with pytest.raises(CheckpointError, match="sizes"):
            load(checkpoint(tmp_path, "dream", intermediate_size=-1), "dream")

    def test_dtype(self, tmp_path: Path) -> None:
        model = load(checkpoint(tmp_path, "sdar"), "sdar", dtype=torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model.decoder.rotary_emb.inv_freq.dtype == torch.float32


def adapter(model: DiffusionLM, folder: Path, modules: list[str], *, published: bool = False) -> Tensor:
    """Write a random adapter for ``model``; return the logits of the model with the adapter beside it, unmerged."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False)
    wrapped = peft.get_peft_model(deepcopy(model.backbone), config).eval()
    wrapped.save_pretrained(folder)
    if published:
        path = folder / "adapter_model.safetensors"
        prefix = "base_model.model."
        save_file({prefix + LLADA.published(k.removeprefix(prefix)): t for k, t in load_file(path).items()}, path)
        settings = json.loads((folder / "adapter_config.json").read_text())
        names = {ours.split(".")[-1]: theirs.split(".")[-1] for theirs, ours in LLADA.inner.items()}
        settings["target_modules"] = [names.get(n, n) for n in settings["target_modules"]]
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    return logits(DiffusionLM(model.config, wrapped.base_model.model, model.raw))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # the test's own unmerged model
class TestLora:
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize(
        ("family", "modules", "published"),
        [
            ("dream", ["q_proj", "v_proj", "down_proj"], False),
            ("dream", ["k_proj", "lm_head"], False),
            ("llada", ["q_proj", "o_proj", "gate_proj", "down_proj"], True),
            ("sdar", ["embed_tokens", "up_proj"], False),
        ],
    )
    @pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # the test's own unmerged model
    @pytest.mark.filterwarnings("ignore:.*embedding layers.*")
    def test_merged_equals_unmerged(
        self, tmp_path: Path, family: str, modules: list[str], published: bool, tied: bool
    ) -> None:
        model = load(checkpoint(tmp_path / "m", family, tied=tied), family)
        plain = logits(model)
        expected = adapter(model, tmp_path / "lora", modules, published=published)
        assert (expected - plain).abs().max() > 0.01
        assert merge_lora(model, tmp_path / "lora") is model
        assert (logits(model) - expected).abs().max() < 1e-4
        model.save_pretrained(tmp_path / "merged")
        assert (logits(DiffusionLM.from_pretrained(tmp_path / "merged")) - expected).abs().max() < 1e-4

    def test_half_precision_models_are_merged_in_float32(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path / "m", "dream")
        model = load(folder, "dream", dtype=torch.bfloat16)
        exact = load(folder, "dream", dtype=torch.bfloat16)
        exact.backbone.float()
        adapter(exact, tmp_path / "lora", ["q_proj", "gate_proj"])
        merge_lora(exact, tmp_path / "lora")
        merge_lora(model, tmp_path / "lora")
        for name, tensor in model.backbone.state_dict().items():
            assert torch.equal(tensor, exact.backbone.state_dict()[name].bfloat16()), name
        assert model.decoder.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(model.decoder.rotary_emb.inv_freq, load(folder, "dream").decoder.rotary_emb.inv_freq)

    @pytest.mark.parametrize(
        ("fault", "error", "match"),
        [
            ("no config", CheckpointError, "adapter_config.json: missing"),
            ("pickle", CheckpointError, "pickle"),
            ("no weights", CheckpointError, "adapter_model.safetensors: missing"),
            ("truncated", CheckpointError, "not a sound safetensors file"),
            ("not lora", UnsupportedModelError, "LOHA"),
            ("tensor left out", CheckpointError, "missing .'base_model"),
            ("tensor added", CheckpointError, "unknown"),
            ("shape", CheckpointError, "does not fit"),
            ("nan", CheckpointError, "does not fit"),
            ("modules", CheckpointError, "does not fit"),
            ("rank", CheckpointError, "does not fit"),
            ("settings", CheckpointError, "no LoRA settings"),
        ],
    )
    def test_adapters_that_do_not_fit(self, tmp_path: Path, fault: str, error: type[Exception], match: str) -> None:
        model = load(checkpoint(tmp_path / "m", "dream"), "dream")
        folder = tmp_path / "lora"
        adapter(model, folder, ["q_proj"])
        before = logits(model)
        config, path = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        settings, tensors = json.loads(config.read_text()), load_file(path)
        first = next(iter(tensors))
        match fault:
            case "no config":
                config.unlink()
            case "no weights":
                path.unlink()
            case "pickle":
                path.rename(folder / "adapter_model.bin")
            case "truncated":
                path.write_bytes(path.read_bytes()[:-8])
            case "not lora":
                settings["peft_type"] = "LOHA"
            case "tensor left out":
                del tensors[first]
            case "tensor added":
                tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(1)
            case "shape":
                tensors[first] = torch.zeros(2, 2)
            case "nan":
                tensors[first] = torch.full_like(tensors[first], float("nan"))
            case "modules":
                settings["target_modules"] = ["no_such_module"]
            case "rank":
                settings["r"] = 0
            case "settings":
                settings |= {"target_modules": ".*q_proj", "layers_to_transform": [0]}
        if config.exists():
            config.write_text(json.dumps(settings))
        if fault.startswith("tensor") or fault in ("shape", "nan"):
            save_file(tensors, path)
        with pytest.raises(error, match=match):
            merge_lora(model, folder)
        assert torch.equal(logits(model), before)

    def test_without_peft(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = load(checkpoint(tmp_path, "dream"), "dream")
        monkeypatch.setitem(sys.modules, "peft", None)
        with pytest.raises(InputError, match="'peft' extra"):
            merge_lora(model, tmp_path)


@pytest.fixture(scope="module")
def shifted() -> DiffusionLM:
    """Copies, with shifted logits."""
    return copying(shift=True)


@pytest.fixture(scope="module")
def unshifted() -> DiffusionLM:
    """Copies, without shift."""
    return copying(shift=False)


def configured(model: DiffusionLM, **changes: object) -> DiffusionLM:
    """The same weights under another configuration."""
    return DiffusionLM(replace(model.config, **changes), model.backbone, model.raw)


class TestProbe:
    def test_confirmed(self, shifted: DiffusionLM, unshifted: DiffusionLM) -> None:
        for model in (shifted, unshifted):
            report = copy_probe(model)
            assert report.state is ProbeState.CONFIRMED
            assert report.right > 0.5 > 0 > report.wrong

    def test_the_wrong_alignment_is_contradicted(self, shifted: DiffusionLM, unshifted: DiffusionLM) -> None:
        for model in (shifted, unshifted):
            wrong = configured(model, shift=not model.config.shift)
            with pytest.raises(PairingError, match=f"shift: expected {model.config.shift}.*shift={model.config.shift}"):
                copy_probe(wrong)
            assert copy_probe(wrong, strict=False).state is ProbeState.CONTRADICTED

    def test_a_better_mask_id_contradicts(self, shifted: DiffusionLM, unshifted: DiffusionLM) -> None:
        for model in (shifted, unshifted):
            with pytest.raises(PairingError, match=f"mask_id: expected {COPY_MASK}.*got 22"):
                copy_probe(configured(model, mask_id=22), rival_mask_ids=(COPY_MASK,))
            assert copy_probe(model, rival_mask_ids=(22, 99)).state is ProbeState.CONFIRMED

    def test_a_model_that_only_continues_has_no_mask(self) -> None:
        """An autoregressive copier continues a pattern and never fills a gap in it."""

        class Continues:
            config = MaskedDenoiserConfig(family="diffullama", vocab_size=24, mask_id=COPY_MASK, shift=True)

            def rows(self, sequences: list[Tensor], spans: list[tuple[int, int]]) -> list[Tensor]:
                made = []
                for ids, (start, stop) in zip(sequences, spans, strict=True):
                    rows = torch.zeros(stop - start, 24)
                    if COPY_MASK not in ids:
                        rows[torch.arange(stop - start), ids[start - 8 : stop - 8]] = 9.0
                    made.append(rows)
                return made

        with pytest.raises(PairingError, match="weights of a masked denoiser"):
            copy_probe(Continues())

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("shift", [False, True])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_random_weights_prove_nothing(self, tmp_path: Path, family: str, shift: bool, tied: bool) -> None:
        if family == "sdar" and shift:
            shift = False
        folder = checkpoint(tmp_path, family, tied=tied)
        model = load(folder, family, shift=shift, probe=True)
        assert copy_probe(model, rival_mask_ids=(7, 11)).state is ProbeState.INCONCLUSIVE

    def test_a_tiny_vocabulary_proves_nothing(self, unshifted: DiffusionLM) -> None:
        small = configured(unshifted, vocab_size=9, mask_id=8, eos_ids=(0,))
        assert copy_probe(small).state is ProbeState.INCONCLUSIVE

    def test_loading_probes(self, tmp_path: Path, shifted: DiffusionLM) -> None:
        shifted.save_pretrained(tmp_path)
        assert DiffusionLM.from_pretrained(tmp_path).config.shift
        with pytest.raises(PairingError, match="shift"):
            DiffusionLM.from_pretrained(tmp_path, shift=False)
        assert not DiffusionLM.from_pretrained(tmp_path, shift=False, probe=False).config.shift


class TestContext:
    def test_a_prefix_that_outgrows_the_context_is_cut_in_steps_of_whole_blocks(self) -> None:
        for block, context in ((1, None), (1, 10), (1, 17), (4, 24), (8, 18)):
            config = MaskedDenoiserConfig(
                family="x", vocab_size=9, mask_id=8, shift=False, attention="full" if block == 1 else "block",
                block_size=block, context=context,
            )  # fmt: skip
            starts = []
            for length in range(1, 60):
                window = min(3, config.max_window or 3)
                window += -(length + window) % block
                start = config.first_shown(length, window)
                assert start % block == 0
                assert length - start >= 1
                assert context is None or length - start + window <= context
                starts.append(start)
            assert starts == sorted(starts)
            assert context is None or len(set(starts)) < 30
