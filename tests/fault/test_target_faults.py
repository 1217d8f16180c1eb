"""Row 11: every fault gives a typed error, neighbours are unharmed, and the target decodes properly afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.base import Drafter, DraftRequest, Observation
from specdiff.errors import (
    ContextOverflowError,
    DrafterError,
    InputError,
    ModelError,
    NumericsError,
    PairingError,
    SpecdiffError,
)
from specdiff.models.target import CausalTarget, ScoreRequest
from specdiff.sampling import SamplingOptions
from specdiff.stopping import FinishReason, StopOptions
from specdiff.testing import ScriptedDrafter, chain
from specdiff.types import Budget, Chain, Draft, DraftLaw, Provenance, TokenTree
from specdiff.verify.registry import get
from support.tiny_targets import VOCAB, tiny_model

_PROMPTS = (torch.tensor([5, 9, 11]), torch.tensor([41]), torch.tensor([7, 7, 30, 2, 8]))
_NEW = 8
_BUDGET = Budget(gamma=3, shape=Chain())
_UNIFORM = torch.full((1, VOCAB), 1 / VOCAB)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", max_position_embeddings=64)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    return [_decode(model, [p])[0] for p in _PROMPTS]


def _decode(model: PreTrainedModel, prompts: Sequence[Tensor]) -> list[list[int]]:
    loop = _loop(model, ScriptedDrafter(lambda r: [3, 4], vocab_size=VOCAB), prompts)
    _drain(loop)
    return [row.new_tokens for row in loop.rows]


def _loop(
    model: PreTrainedModel,
    drafter: Drafter | None,
    prompts: Sequence[Tensor] = _PROMPTS,
    *,
    keep_errors: bool = False,
    rule: str = "",
    temperature: float = 0.0,
) -> DecodeLoop:
    sampling, stop = SamplingOptions(temperature=temperature), StopOptions(max_new_tokens=_NEW)
    requests = [Request(prompt=p, index=i, stop=stop, sampling=sampling) for i, p in enumerate(prompts)]
    picked = get(rule) if rule else None
    return DecodeLoop(CausalTarget(model), drafter, requests, budget=_BUDGET, keep_errors=keep_errors, rule=picked)


def _drain(loop: DecodeLoop) -> None:
    for rounds, _ in enumerate(loop.run()):
        assert rounds < 50, "hangs"


# Faults of the target -------------------------------------------------------------------------------------------------


@contextmanager
def _broken_forward(model: PreTrainedModel, breaks: Callable[[int, Tensor], None]) -> Iterator[None]:
    """``breaks(pass number, logits)`` runs after every forward pass."""
    passes = iter(range(1000))
    hook = model.register_forward_hook(lambda _m, _a, output: breaks(next(passes), output.logits))
    try:
        yield
    finally:
        hook.remove()


def _spoil(value: float, place: tuple[int, int]) -> Callable[[int, Tensor], None]:
    def breaks(number: int, logits: Tensor) -> None:
        if number == 2:
            logits[place] = value

    return breaks


def _raise(error: Exception, when: int) -> Callable[[int, Tensor], None]:
    def breaks(number: int, logits: Tensor) -> None:
        if number == when:
            raise error

    return breaks


_LOGITS = {
    "NaN at the root": (float("nan"), (1, 0)),
    "NaN at a node": (float("nan"), (1, 2)),
    "infinite logit": (float("inf"), (1, 1)),
    "minus infinity": (float("-inf"), (1, 0)),
}


@pytest.mark.parametrize("fault", _LOGITS)
def test_a_row_with_bad_logits_fails_alone(
    model: PreTrainedModel, expected: list[list[int]], fault: str, met: Callable[[str], None]
) -> None:
    drafter = ScriptedDrafter(lambda r: [3, 4], vocab_size=VOCAB)
    with _broken_forward(model, _spoil(*_LOGITS[fault])):
        loop = _loop(model, drafter, keep_errors=True)
        _drain(loop)
    assert isinstance(loop.rows[1].error, NumericsError)
    assert loop.rows[1].finish is FinishReason.ERROR
    assert [loop.rows[i].new_tokens for i in (0, 2)] == [expected[0], expected[2]]
    with _broken_forward(model, _spoil(*_LOGITS[fault])), pytest.raises(NumericsError, match="NaN or infinite"):
        _drain(_loop(model, drafter))
    assert _decode(model, _PROMPTS) == expected
    met("NaN or infinite row")


_RAISED = {
    "CUDA out of memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "ran out of memory"),
    "CPU out of memory": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "ran out of memory"),
    "shape mismatch inside": (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "raised RuntimeError"),
    "index error inside": (IndexError("index out of range in self"), "raised IndexError"),
}


@pytest.mark.parametrize("when", [0, 2], ids=["prefill", "decode"])
@pytest.mark.parametrize("fault", _RAISED)
def test_what_a_forward_pass_raises_is_typed(
    model: PreTrainedModel, expected: list[list[int]], fault: str, when: int, met: Callable[[str], None]
) -> None:
    error, text = _RAISED[fault]
    drafter = ScriptedDrafter(lambda r: [3, 4], vocab_size=VOCAB)
    with _broken_forward(model, _raise(error, when)), pytest.raises(ModelError, match=text) as caught:
        _drain(_loop(model, drafter))
    assert caught.value.__cause__ is error
    assert _decode(model, _PROMPTS) == expected
    met("out of memory" if "memory" in fault else "error inside the target")


def test_a_session_goes_on_after_running_out_of_memory(model: PreTrainedModel, met: Callable[[str], None]) -> None:
    request = ScoreRequest(5, TokenTree(torch.tensor([4, 8, 9]), (-1, -1, 1)))
    session = CausalTarget(model).open(1)
    session.prefill([torch.arange(9)])
    before = session.score([request])[0]
    with _broken_forward(model, _raise(torch.OutOfMemoryError("CUDA out of memory"), 0)), pytest.raises(ModelError):
        session.score([request])
    assert session.lengths == [8]
    after = session.score([request])[0]
    assert before is not None
    assert after is not None
    torch.testing.assert_close(before, after)
    met("out of memory")


_REQUESTS: dict[str, tuple[Tensor, type[SpecdiffError], str]] = {
    "empty prompt": (torch.empty(0, dtype=torch.int64), InputError, "at least one token"),
    "prompt as long as the context": (torch.ones(64, dtype=torch.int64), ContextOverflowError, "fewer than 64"),
    "prompt longer than the context": (torch.ones(90, dtype=torch.int64), ContextOverflowError, "fewer than 64"),
    "ids of a larger vocabulary": (torch.tensor([3, VOCAB]), InputError, "own tokenizer"),
    "negative ids": (torch.tensor([3, -1]), InputError, "own tokenizer"),
}
_KIND_OF_REQUEST = {ContextOverflowError: "context overflow", InputError: "wrong prompt"}


@pytest.mark.parametrize("fault", _REQUESTS)
def test_requests_that_cannot_be_decoded_are_refused(
    model: PreTrainedModel, expected: list[list[int]], fault: str, met: Callable[[str], None]
) -> None:
    prompt, error, text = _REQUESTS[fault]
    with pytest.raises(error, match=text):
        _loop(model, None, [_PROMPTS[0], prompt])
    assert _decode(model, _PROMPTS) == expected
    met(_KIND_OF_REQUEST[error])


@pytest.mark.parametrize("layers", [(3,), (-1,), (0, 99)])
def test_features_of_layers_that_do_not_exist_are_refused(
    model: PreTrainedModel, layers: tuple[int, ...], met: Callable[[str], None]
) -> None:
    with pytest.raises(InputError, match="feature_layers"):
        CausalTarget(model).open(1, layers)
    met("wrong shape")


# Faults of the drafter ------------------------------------------------------------------------------------------------


class _Faulty(ScriptedDrafter):
    """Drafts well, but from its second round on returns ``fault(good draft)`` for row 1."""

    def __init__(self, fault: Callable[[Draft], object]) -> None:
        super().__init__(lambda r: [3, 4], vocab_size=VOCAB, q=_UNIFORM[0])
        self._fault = fault

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = super().propose(requests)
        return [
            self._fault(d) if r.row == 1 and self.passes > 1 else d  # type: ignore[misc]
            for r, d in zip(requests, drafts, strict=True)
        ]


def _with_law(
    rows: Tensor, row_of: tuple[int, ...] = (0, 0, -1), vocab: Tensor | None = None
) -> Callable[[Draft], Draft]:
    return lambda draft: Draft(draft.tree, Provenance.CHAIN, DraftLaw(rows, row_of, vocab), draft.paths)


def _with_paths(*paths: tuple[int, ...]) -> Callable[[Draft], Draft]:
    return lambda draft: Draft(draft.tree, Provenance.CHAIN, draft.law, paths)


def _twins(draft: Draft) -> Draft:
    tree = TokenTree(torch.tensor([3, 3]), (-1, -1))
    return Draft(tree, Provenance.IID, DraftLaw(_UNIFORM, (0, -1, -1)), ((0,), (1,)))


def _off_path(draft: Draft) -> Draft:
    tree = TokenTree(torch.tensor([3, 4]), (-1, -1))
    return Draft(tree, Provenance.IID, DraftLaw(_UNIFORM, (0, -1, -1)), ((0,),))


def _on_another_device(draft: Draft) -> Draft:
    return Draft(TokenTree(draft.tree.tokens.to("meta"), draft.tree.parents))


def _changed(index: int, value: float) -> Tensor:
    rows = _UNIFORM.clone()
    rows[0, index] = value
    return rows


_DRAFTS: dict[str, tuple[Callable[[Draft], object], str]] = {
    "None": (lambda d: None, "expected a Draft, got NoneType"),
    "a list of ids": (lambda d: [3, 4], "expected a Draft, got list"),
    "a bare tree": (lambda d: d.tree, "expected a Draft, got TokenTree"),
    "a token beyond the vocabulary": (lambda d: chain([3, VOCAB]), "token ids"),
    "a negative token": (lambda d: chain([-1]), "token ids"),
    "deeper than asked": (lambda d: chain([3, 4, 5, 6]), "depth 4 exceeds"),
    "NaN in q": (_with_law(_changed(7, float("nan"))), "sum to 1"),
    "infinity in q": (_with_law(_changed(7, float("inf"))), "sum to 1"),
    "negative q": (_with_law(_changed(7, -1 / VOCAB) + 2 / VOCAB**2), "sum to 1"),
    "q that sums to 2": (_with_law(_UNIFORM * 2), "sum to 1"),
    "logits as q": (_with_law(_UNIFORM.log()), "sum to 1"),
    "q of a smaller vocabulary": (_with_law(_UNIFORM[:, :-1]), "97 columns"),
    "q of a padded vocabulary": (_with_law(torch.full((1, 128), 1 / 128)), "97 columns"),
    "q without a row dimension": (_with_law(_UNIFORM[0]), r"\[M, W\]"),
    "q of integers": (_with_law(torch.ones(1, VOCAB, dtype=torch.int64)), r"\[M, W\]"),
    "q whose columns are fewer than its vocabulary": (_with_law(_UNIFORM, vocab=torch.arange(9)), "9 columns"),
    "columns beyond the vocabulary": (_with_law(torch.tensor([[0.5, 0.5]]), vocab=torch.tensor([3, 200])), "q columns"),
    "a column twice": (_with_law(torch.full((1, 3), 1 / 3), vocab=torch.tensor([3, 4, 4])), "each once"),
    "columns in no order": (_with_law(torch.full((1, 3), 1 / 3), vocab=torch.tensor([4, 3, 5])), "each once"),
    "columns of another dtype": (_with_law(torch.full((1, 2), 0.5), vocab=torch.tensor([3.0, 4.0])), "int64"),
    "no columns": (_with_law(torch.ones(1, 0), vocab=torch.tensor([], dtype=torch.int64)), "int64"),
    "columns as a list": (_with_law(torch.full((1, 2), 0.5), vocab=[3, 4]), "law.vocab"),  # type: ignore[arg-type]
    "q rows as a list": (_with_law([[1.0]]), "law.rows"),  # type: ignore[arg-type]
    "a bare tensor as law": (lambda d: replace(d, law=_UNIFORM), "expected law"),  # type: ignore[arg-type]
    "a bare tensor as tree": (lambda d: replace(d, tree=d.tree.tokens), "expected tree"),  # type: ignore[arg-type]
    "row_of of floats": (_with_law(_UNIFORM, (0.0, 0.0, -1.0)), "integers"),  # type: ignore[arg-type]
    "of another kind than declared": (lambda d: chain([3]), "declared 'chain' drafts, got a 'fixed' one"),
    "a q row too few": (_with_law(_UNIFORM, (0, 1, -1)), "row_of"),
    "row_of for fewer nodes": (_with_law(_UNIFORM, (0,)), "row_of"),
    "children without a q row": (_with_law(_UNIFORM, (0, -1, -1)), "needs the q row"),
    "a path that names no node": (_with_paths((0, 9)), "one path over all its nodes"),
    "a path upside down": (_with_paths((1, 0)), "one path over all its nodes"),
    "two paths for one chain": (_with_paths((0, 1), (0,)), "one path over all its nodes"),
    "two equal siblings": (_twins, "same token"),
    "a node that was never drawn": (_off_path, "no path"),
    "tokens on another device": (_on_another_device, "CPU"),
}
_KINDS = {
    "wrong type": (
        *("None", "a list of ids", "a bare tree", "columns as a list", "q rows as a list"),
        *("a bare tensor as law", "a bare tensor as tree", "row_of of floats"),
    ),
    "NaN or infinite row": ("NaN in q", "infinity in q"),
    "wrong dtype": ("q of integers", "columns of another dtype"),
    "wrong device": ("tokens on another device",),
    "wrong vocabulary": (
        "a token beyond the vocabulary",
        "a negative token",
        "q of a smaller vocabulary",
        "q of a padded vocabulary",
        "q whose columns are fewer than its vocabulary",
        "columns beyond the vocabulary",
    ),
    "unfit pair": ("of another kind than declared",),
    "no law": ("a column twice", "columns in no order", "no columns", "negative q", "q that sums to 2", "logits as q"),
}
_KIND_OF_DRAFT = {fault: kind for kind, faults in _KINDS.items() for fault in faults}


@pytest.mark.parametrize("fault", _DRAFTS)
def test_a_faulty_draft_fails_its_row_alone(
    model: PreTrainedModel, expected: list[list[int]], fault: str, met: Callable[[str], None]
) -> None:
    make, text = _DRAFTS[fault]
    with pytest.raises(DrafterError, match=text):
        _drain(_loop(model, _Faulty(make)))
    loop = _loop(model, _Faulty(make), keep_errors=True)
    _drain(loop)
    assert isinstance(loop.rows[1].error, DrafterError)
    assert loop.rows[1].finish is FinishReason.ERROR
    assert [loop.rows[i].new_tokens for i in (0, 2)] == [expected[0], expected[2]]
    assert _decode(model, _PROMPTS) == expected
    met(_KIND_OF_DRAFT.get(fault, "wrong shape"))


def test_when_every_draft_is_faulty_the_loop_ends(model: PreTrainedModel, met: Callable[[str], None]) -> None:
    drafter = ScriptedDrafter(lambda r: [VOCAB], vocab_size=VOCAB)
    loop = _loop(model, drafter, keep_errors=True)
    _drain(loop)
    assert [row.finish for row in loop.rows] == [FinishReason.ERROR] * 3
    met("wrong vocabulary")


class _Raising(ScriptedDrafter):
    """Raises in one of its methods."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__(lambda r: [3], vocab_size=VOCAB)
        self._where, self._error = where, error

    def open(self, rows: int) -> ScriptedDrafter:
        self._raise_in("open")
        return self

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self._raise_in("propose")
        return super().propose(requests)

    def observe(self, observations: Sequence[Observation]) -> None:
        self._raise_in("observe")

    def provenance(self, budget: Budget) -> Provenance:
        self._raise_in("provenance")
        return super().provenance(budget)

    def rewind(self, row: int, length: int) -> None:
        self._raise_in("rewind")

    @property
    def passes(self) -> int:
        self._raise_in("passes")
        return 0

    @passes.setter
    def passes(self, count: int) -> None: ...

    def _raise_in(self, name: str) -> None:
        if name == self._where:
            raise self._error


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_token_ids_of_another_dtype_are_typed(
    model: PreTrainedModel, expected: list[list[int]], dtype: torch.dtype, met: Callable[[str], None]
) -> None:
    drafter = ScriptedDrafter(lambda r: [3], vocab_size=VOCAB)
    drafter.propose = lambda requests: [  # type: ignore[method-assign]
        Draft(TokenTree(torch.tensor([3], dtype=dtype), (-1,))) for _ in requests
    ]
    with pytest.raises(DrafterError, match="int64"):
        _drain(_loop(model, drafter))
    assert _decode(model, _PROMPTS) == expected
    met("wrong dtype")


@pytest.mark.parametrize("error", [ValueError("broken"), KeyError(3), torch.OutOfMemoryError("CUDA out of memory")])
@pytest.mark.parametrize("where", ["open", "provenance", "passes", "propose", "observe", "rewind"])
def test_what_a_drafter_raises_is_typed(
    model: PreTrainedModel, expected: list[list[int]], where: str, error: Exception, met: Callable[[str], None]
) -> None:
    with pytest.raises(DrafterError, match="drafter 'scripted' raised") as caught:
        _drain(_loop(model, _Raising(where, error)))
    assert caught.value.__cause__ is error
    assert _decode(model, _PROMPTS) == expected
    met("out of memory" if isinstance(error, torch.OutOfMemoryError) else "raising drafter")


@pytest.mark.parametrize("returned", [None, [], [chain([3])] * 5], ids=["None", "none", "too many"])
def test_a_wrong_number_of_drafts_is_typed(
    model: PreTrainedModel, expected: list[list[int]], returned: object, met: Callable[[str], None]
) -> None:
    drafter = ScriptedDrafter(lambda r: [3], vocab_size=VOCAB)
    drafter.propose = lambda requests: returned  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(DrafterError):
        _drain(_loop(model, drafter))
    assert _decode(model, _PROMPTS) == expected
    met("wrong shape")


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(4, 33), torch.zeros(4, 64), torch.zeros(4, 32, dtype=torch.float64)],
    ids=["wrong width", "width of two layers", "wrong dtype"],
)
def test_features_that_a_drafter_cannot_use_are_typed(
    model: PreTrainedModel, expected: list[list[int]], weight: Tensor, met: Callable[[str], None]
) -> None:
    class Reader(ScriptedDrafter):
        def observe(self, observations: Sequence[Observation]) -> None:
            for o in observations:
                torch.nn.functional.linear(o.features, weight)  # type: ignore[arg-type]

    drafter = Reader(lambda r: [3], vocab_size=VOCAB)
    drafter.feature_layers = (1,)
    with pytest.raises(DrafterError, match="raised RuntimeError"):
        _drain(_loop(model, drafter))
    assert _decode(model, _PROMPTS) == expected
    met("wrong dtype" if weight.dtype == torch.float64 else "wrong shape")


@pytest.mark.parametrize("rule", ["ratio", "block", "match", "multi_round"])
def test_rules_that_are_not_exact_for_the_draft_are_refused(
    model: PreTrainedModel, expected: list[list[int]], rule: str, met: Callable[[str], None]
) -> None:
    drafter = ScriptedDrafter(lambda r: [3], vocab_size=VOCAB)
    with pytest.raises(PairingError, match="exact"):
        _loop(model, drafter, rule=rule, temperature=0.8)
    assert _decode(model, _PROMPTS) == expected
    met("unfit pair")
