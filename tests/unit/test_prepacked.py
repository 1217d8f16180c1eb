"""Packed weights give the products of the plain layer, follow its changes, and stay out of what is not theirs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from specdiff.decoder import load
from specdiff.models import prepacked
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.models.load_target import load_target
from specdiff.models.prepacked import PrepackedLinear, is_prepacked, prepack
from support.tiny_targets import tiny_model
from support.tokenizing import byte_level

DTYPES = [d for d in (torch.float32, torch.bfloat16) if prepacked.can_pack(torch.empty(2, 2, dtype=d))]
pytestmark = pytest.mark.skipif(not DTYPES, reason="this machine has no kernels for packed weights")


def layer(dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(40, 24, bias=bias).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40,), (1, 40), (1, 1, 40), (3, 17, 40), (0, 40)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_plain_layer(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    plain = layer(dtype, bias=bias)
    packed = copy.deepcopy(plain)
    assert prepack(packed) == 1
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        close(packed(x), plain(x))
    with torch.no_grad():
        strided = torch.stack([x, x], dim=-1)[..., 0]
        close(packed(strided), plain(x))


def test_gradients_and_state_are_those_of_the_plain_layer() -> None:
    plain = layer(torch.float32)
    packed = copy.deepcopy(plain)
    prepack(packed)
    for one in (plain, packed):
        one(torch.ones(2, 40)).sum().backward()
    close(packed.weight.grad, plain.weight.grad)
    assert packed.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("change", ["in place", "load", "data", "cast", "assigned"])
def test_a_changed_weight_is_packed_again(change: str) -> None:
    packed = layer(torch.float32)
    prepack(packed)
    x = torch.ones(3, 40)
    with torch.no_grad():
        packed(x)
        if change == "in place":
            packed.weight.mul_(2)
        elif change == "load":
            packed.load_state_dict({"weight": torch.ones(24, 40), "bias": torch.ones(24)})
        elif change == "data":
            packed.weight.data = torch.ones(24, 40)
        elif change == "cast":
            packed.double()
            x = x.double()
        else:
            packed.weight = nn.Parameter(torch.ones(24, 40))
        close(packed(x), nn.functional.linear(x, packed.weight, packed.bias))


def test_copies_and_pickles_carry_no_packed_weight() -> None:
    packed = layer(torch.float32)
    prepack(packed)
    x = torch.ones(3, 40)
    with torch.no_grad():
        expected = packed(x)
        for twin in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
            assert isinstance(twin, PrepackedLinear)
            close(twin(x), expected)
            twin.weight.zero_()
            close(twin(x), twin.bias.expand(3, 24))
        close(packed(x), expected)


def test_layers_of_other_kinds_and_scarce_memory_leave_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        """Somebody's own."""

    model = nn.ModuleDict({"own": Own(4, 4), "wide": nn.Linear(4, 4).double(), "hooked": nn.Linear(4, 4)})
    model["hooked"]._hf_hook = object()  # type: ignore[assignment]
    assert prepack(model) == 0
    assert not is_prepacked(model)
    monkeypatch.setattr(prepacked, "free_memory", lambda: 2.0 * 40 * 24 * 4 - 1)
    assert prepack(layer(torch.float32)) == 0
    monkeypatch.setattr(prepacked, "free_memory", lambda: 2.0 * 40 * 24 * 4)
    assert prepack(layer(torch.float32)) == 1


def test_free_memory_is_a_size() -> None:
    assert 1 << 20 < prepacked.free_memory() < 1 << 50


def test_loading_packs_target_and_drafter_or_not(tmp_path) -> None:
    tiny_model("llama", seed=1, vocab_size=len(byte_level())).save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    packed, _ = load_target(tmp_path, dtype="fp32", device="cpu")
    plain, _ = load_target(tmp_path, dtype="fp32", device="cpu", prepack=False)
    assert (packed.info.prepacked, plain.info.prepacked) == (True, False)
    texts = []
    for choice in (True, False):
        pair = load(str(tmp_path), str(tmp_path), dtype="fp32", device="cpu", prepack=choice)
        assert is_prepacked(pair.drafter.model) == choice
        texts.append(pair.generate("The fox", max_new_tokens=20).tokens)
    assert texts[0] == texts[1]


def test_a_packed_denoiser_gives_the_same_logits() -> None:
    target = tiny_model("llama", seed=1)
    made = BlockCausalDenoiser.from_target(
        target, draft_vocab=torch.arange(0, 97, 2), layers=(0, 1), window=4, feature_layers=(1, 2)
    )
    nn.init.normal_(made.feature_projection.weight)
    packed = copy.deepcopy(made)
    packed.prepack()
    assert is_prepacked(packed)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 97, (1, 6), generator=generator)
    features, is_mask = torch.randn(1, 6, 64, generator=generator), torch.tensor([[0, 0, 0, 1, 1, 1]]).bool()
    mask, positions = torch.zeros(1, 1, 6, 6), torch.arange(6)[None]
    with torch.inference_mode():
        logits = [x.head(x.hidden(x.embed(tokens, is_mask, features), mask, positions)) for x in (made, packed)]
        close(logits[1], logits[0])
    packed.head(torch.ones(2, 32, requires_grad=True)).sum().backward()  # still trains
