r"""The frozen head in chunks: log q of chosen labels, and losses of windows, without ever holding all logits.

With logits :math:`z = W h` and any loss that reads :math:`\log q(y) = z_y - \log \sum_v e^{z_v}` of the labels (and of
each row's top tokens :math:`t_1 \dots t_K`), the gradient with respect to the logits is

.. math::
    \frac{\partial L}{\partial z} = g\, e_y + \sum_k g_k\, e_{t_k} - \Big(g + \sum_k g_k\Big)\, \mathrm{softmax}(z),

so a chunk needs its softmax only, changed in place, and one product with the head on the way back.

Two functions. `label_log_q` is an ordinary differentiable function of all rows; its backward pass makes the logits of
each chunk again. `one_sweep` is for losses that are sums over windows: each chunk's gradient is made while its softmax
is at hand, so nothing is made twice, and what is kept is the gradient of the hidden rows.

Shape legend: R rows, H hidden size, D draft vocabulary, K top tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from specdiff.objectives.base import IGNORED


class LabelScores(NamedTuple):
    """What the head says of rows and their labels.

    Attributes:
        log_q: [R] log q of the labels; 0, without a gradient, where `IGNORED`. fp32 or better.
        correct: [R] bool, whether the label is the most likely token; False where `IGNORED`.
        top: [R, K] the K largest log q of each row, falling.
    """

    log_q: Tensor
    correct: Tensor
    top: Tensor


def label_log_q(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, *, num_top: int = 0, chunk: int = 512
) -> LabelScores:
    """Return log q of the labels and of each row's top tokens, differentiable in the hidden rows.

    Args:
        hidden: [R, H] states.
        head_weight: [D, H] frozen head.
        labels: [R] int64, `IGNORED` where unknown.
        num_top: K, at most D.
        chunk: rows whose logits exist at one time. If all rows fit into one chunk, its softmax waits for the backward
            pass; otherwise each chunk is made again there.

    Returns:
        The scores.
    """
    return LabelScores(
        *cast("tuple[Tensor, Tensor, Tensor]", _apply(_LabelLogQ, hidden, head_weight, labels, num_top, chunk))
    )


def score_type(hidden: Tensor) -> torch.dtype:
    """Return the type log q has: fp32, or what the rows have if that is better."""
    return torch.promote_types(hidden.dtype, torch.float32)


ChunkLoss: TypeAlias = Callable[[Tensor, slice], tuple[Tensor, Tensor, Tensor]]
"""From a chunk of hidden entries and its place to its part of the loss [], and two things to keep of each entry."""


def one_sweep(hidden: Tensor, chunk_loss: ChunkLoss, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sum a loss over chunks of entries, making each chunk's gradient while it is at hand.

    Args:
        hidden: [N, ...] entries (rows or windows).
        chunk_loss: called once a chunk, in order; its loss must not depend on other chunks.
        size: entries a chunk.

    Returns:
        The loss [], with a gradient if the entries ask for one, and the kept things, each [N, ...].
    """
    return cast("tuple[Tensor, Tensor, Tensor]", _apply(_OneSweep, hidden, chunk_loss, size))


class _LabelLogQ(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, labels: Tensor, num_top: int, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, dtype = hidden.shape[0], score_type(hidden)
        log_q = torch.zeros(rows, dtype=dtype, device=hidden.device)
        correct = torch.zeros(rows, dtype=torch.bool, device=hidden.device)
        top = torch.zeros(rows, num_top, dtype=dtype, device=hidden.device)
        columns = torch.zeros(rows, num_top, dtype=torch.int64, device=hidden.device)
        kept: tuple[Tensor, Tensor] | None = None
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            label, known = labels[part].clamp_min(0), labels[part] != IGNORED
            logits = (hidden[part] @ head_weight.T).to(dtype)
            if num_top:
                top[part], columns[part] = logits.topk(num_top, dim=-1)
            largest, best = logits.max(dim=-1, keepdim=True)
            picked = logits.gather(1, label[:, None])
            mass = logits.sub_(largest).exp_()
            total = mass.sum(dim=-1, keepdim=True)
            normaliser = total.log() + largest
            log_q[part] = torch.where(known, (picked - normaliser)[:, 0], 0.0)
            correct[part] = known & (best[:, 0] == label)
            top[part] -= normaliser
            kept = (mass, total)
        ctx.save_for_backward(hidden, head_weight, labels, columns)
        ctx.chunk, ctx.kept = chunk, kept if rows <= chunk and ctx.needs_input_grad[0] else None
        ctx.mark_non_differentiable(correct)
        return log_q, correct, top

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the name of ctx
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, head_weight, labels, columns = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        on_label, _, on_top = grad_outputs
        on_label = torch.where(labels == IGNORED, 0.0, on_label)
        grad = torch.empty_like(hidden)
        kept, ctx.kept = ctx.kept, None  # changed in place below, so good for one backward pass only
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            mass, total = kept or _softmax_parts(hidden[part], head_weight)
            scale = on_label[part, None]
            mass.mul_(-(scale + on_top[part].sum(dim=-1, keepdim=True)) / total)
            mass.scatter_add_(1, labels[part, None].clamp_min(0), scale)
            mass.scatter_add_(1, columns[part], on_top[part])
            grad[part] = mass.to(head_weight.dtype) @ head_weight
        return grad, None, None, None, None


class _OneSweep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, chunk_loss: ChunkLoss, size: int) -> tuple[Tensor, Tensor, Tensor]:
        wanted = bool(ctx.needs_input_grad[0])
        grad = torch.empty_like(hidden) if wanted else None
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, max(hidden.shape[0], 1), size):
            part = slice(start, start + size)
            with torch.set_grad_enabled(wanted):
                entries = hidden[part].detach().requires_grad_(wanted)
                loss, first, second = chunk_loss(entries, part)
                if grad is not None:
                    made = torch.autograd.grad(loss, entries, allow_unused=True)[0] if loss.requires_grad else None
                    grad[part] = 0.0 if made is None else made
            parts.append((loss.detach(), first.detach(), second.detach()))
        losses, firsts, seconds = zip(*parts, strict=True)
        ctx.save_for_backward(grad)
        total, first, second = torch.stack(losses).sum(), torch.cat(firsts), torch.cat(seconds)
        ctx.mark_non_differentiable(first, second)
        return total, first, second

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the name of ctx
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,) = cast("tuple[Tensor | None]", ctx.saved_tensors)
        return (None if grad is None else grad * grad_outputs[0].to(grad.dtype)), None, None


def _softmax_parts(hidden: Tensor, head_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return [R, D] exp(logits - largest) and its [R, 1] sums."""
    logits = (hidden @ head_weight.T).to(score_type(hidden))
    mass = logits.sub_(logits.max(dim=-1, keepdim=True).values).exp_()
    return mass, mass.sum(dim=-1, keepdim=True)


def _apply(function: type[torch.autograd.Function], *arguments: object) -> object:
    return cast("Any", function).apply(*arguments)
