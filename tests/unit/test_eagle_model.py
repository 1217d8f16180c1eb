"""The EAGLE head against an independent float64 forward and loss; the published layout, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdiff.errors import CheckpointError, PairingError, UnsupportedModelError
from specdiff.models.eagle import EagleHead, is_eagle
from specdiff.objectives.eagle import eagle_loss
from support.reference_eagle import forward, loss
from support.tiny_targets import VOCAB, tiny_model


def head_of(family: str = "llama", *, bias: bool = True, seed: int = 3) -> EagleHead:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return EagleHead(tiny_model(family), bias=bias).eval()


def inputs(n: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, VOCAB, (1, n), generator=generator), torch.randn(1, n, 32, generator=generator)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_equals_the_reference(family: str, bias: bool) -> None:
    head = head_of(family, bias=bias)
    for parameter in head.parameters():  # biases start at zero: none may go unnoticed
        torch.nn.init.normal_(parameter, std=0.3)
    tokens, features = inputs()
    config = head.decoder.config
    rows = tiny_model(family).get_input_embeddings().weight[tokens[0]]
    wanted = forward(
        head.published_state(), rows, features[0], heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads, theta=config.rope_parameters["rope_theta"], eps=config.rms_norm_eps,
    )  # fmt: skip
    with torch.no_grad():
        got = head(tokens, features)[0]
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_loss_and_gradient_equal_the_reference() -> None:
    generator = torch.Generator().manual_seed(2)
    predicted = torch.randn(7, 8, generator=generator, dtype=torch.float64) * 2
    features = torch.randn(7, 8, generator=generator, dtype=torch.float64)
    table = torch.randn(13, 8, generator=generator, dtype=torch.float64)
    mine, theirs = predicted.clone().requires_grad_(), predicted.clone().requires_grad_()
    result = eagle_loss(mine, features, mine @ table.T, features @ table.T, weight=0.1)
    wanted = loss(theirs, features, table, weight=0.1)
    result.loss.backward()
    wanted.backward()
    torch.testing.assert_close(result.loss, wanted)
    torch.testing.assert_close(mine.grad, theirs.grad)
    assert float(result.agreement) == float(
        ((predicted @ table.T).argmax(-1) == (features @ table.T).argmax(-1)).float().mean()
    )


def test_the_loss_of_the_target_itself_is_the_entropy_of_its_laws() -> None:
    features = torch.randn(5, 8, dtype=torch.float64)
    logits = torch.randn(5, 9, dtype=torch.float64)
    result = eagle_loss(features, features, logits, logits)
    p = logits.softmax(-1)
    assert float(result.regression) == 0
    torch.testing.assert_close(result.classification, -(p * p.log()).sum(-1).mean())
    assert float(result.agreement) == 1


@pytest.mark.parametrize("bias", [True, False])
def test_layout_round_trip(bias: bool, tmp_path: Path) -> None:
    target = tiny_model("llama")
    head = EagleHead(target, bias=bias)
    head.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.post_attention_layernorm.weight"} <= names
    assert ("fc.bias" in names) is bias
    assert not names & {"embed_tokens.weight", "lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight"}
    loaded = EagleHead.from_pretrained(tmp_path, target)
    for name, tensor in head.published_state().items():
        assert torch.equal(loaded.published_state()[name], tensor.bfloat16().float()), name
    assert is_eagle(tmp_path, json.loads((tmp_path / "config.json").read_text()))


def published(folder: Path, *, table: bool = True, **changes: object) -> Path:
    """A folder as heads are published: the target's architecture, its table beside the head, no fingerprint."""
    head = head_of()
    head.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for name in ("target_fingerprint", "name", "bias"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]} | changes))
    if table:
        tensors = load_file(folder / "model.safetensors")
        tensors["embed_tokens.weight"] = torch.zeros(VOCAB, 32, dtype=torch.bfloat16)
        save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_published_head_is_recognised_and_its_table_left(tmp_path: Path) -> None:
    folder = published(tmp_path)
    assert is_eagle(folder, json.loads((folder / "config.json").read_text()))
    head = EagleHead.from_pretrained(folder, tiny_model("llama"))
    tokens, features = inputs()
    torch.testing.assert_close(head(tokens, features), head_of()(tokens, features), rtol=0.05, atol=0.05)


def test_a_causal_model_is_no_head(tmp_path: Path) -> None:
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    assert not is_eagle(tmp_path, json.loads((tmp_path / "config.json").read_text()))


def drop(name: str):
    return lambda tensors: {k: t for k, t in tensors.items() if k != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("fc.weight"), "missing.*fc.weight"),
        (lambda t: t | {"d2t": torch.zeros(3)}, "unknown.*d2t.*EAGLE-3"),
        (lambda t: t | {"fc.weight": torch.zeros(32, 96)}, r"fc.weight of shape \(32, 64\), got \(32, 96\)"),
    ],
)
def test_other_tensors_are_refused(change, message: str, tmp_path: Path) -> None:
    folder = published(tmp_path)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        EagleHead.from_pretrained(folder, tiny_model("llama"))


@pytest.mark.parametrize("changes", [{"model_type": "qwen2"}, {"hidden_size": 64}, {"vocab_size": 5}])
def test_heads_of_other_targets_are_refused(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(PairingError, match=next(iter(changes))):
        EagleHead.from_pretrained(published(tmp_path, **changes), tiny_model("llama"))


def test_an_export_knows_its_target(tmp_path: Path) -> None:
    head_of().save_pretrained(tmp_path)
    with pytest.raises(PairingError, match="target_fingerprint"):
        EagleHead.from_pretrained(tmp_path, tiny_model("llama", seed=9))


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = published(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle format are refused"):
        EagleHead.from_pretrained(folder, tiny_model("llama"))


def test_other_families_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        EagleHead(tiny_model("gpt2"))
