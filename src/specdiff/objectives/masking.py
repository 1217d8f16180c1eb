r"""Which window tokens stay visible, for the masked-diffusion loss with a random rate.

Each window draws a rate :math:`t \in (0, 1]` and hides each of its tokens with probability :math:`t`, independently;
scoring the hidden ones with weight :math:`1/t` makes the expected loss that of the masked-diffusion bound. The rates of
a batch are stratified (one uniform, shifted by ``1/A`` from window to window), which leaves each rate uniform and takes
most of the variance that :math:`1/t` brings.

The pattern is data: whoever packs a batch writes the tokens with ``masked == False`` into the window's rows, and hands
the same pattern to the objective.

Shape legend: A windows, G rows of a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdiff.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Masking:
    """A drawn pattern.

    Attributes:
        masked: [A, G] bool, True where the window's token is hidden from the drafter, and so to be learnt.
        rate: [A] fp32 in (0, 1], the probability with which each of the window's tokens was hidden.
    """

    masked: Tensor
    rate: Tensor

    def __post_init__(self) -> None:
        """Reject patterns without a rate a window, and rates that are no probability of hiding."""
        if self.masked.ndim != 2 or self.rate.shape != self.masked.shape[:1]:
            raise InputError.of(
                "masked and rate",
                expected="shapes [A, G] and [A]",
                got=(tuple(self.masked.shape), tuple(self.rate.shape)),
                remedy="give each window one rate",
            )
        if not bool(((self.rate > 0) & (self.rate <= 1)).all()):
            raise InputError.of(
                "rate", expected="numbers in (0, 1]", got=self.rate, remedy="draw rates with draw_masking"
            )

    def weights(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return [A, G] 1 / rate where hidden, 0 where visible; the mean over patterns is 1."""
        return self.masked.to(dtype) / self.rate.to(dtype)[:, None]


def draw_masking(num_windows: int, window: int, generator: torch.Generator, *, lowest: float = 0.05) -> Masking:
    """Draw a rate for each window and hide each of its tokens with that probability.

    Args:
        num_windows: A.
        window: G.
        generator: the only source of randomness.
        lowest: smallest rate; bounds the weight 1 / rate. 1 hides every window whole.

    Returns:
        The pattern, on the generator's device.

    Raises:
        InputError: an argument is out of range.
    """
    if num_windows < 0 or window < 1:
        raise InputError.of(
            "num_windows and window", expected=">= 0 and >= 1", got=(num_windows, window), remedy="give real sizes"
        )
    if not 0.0 < lowest <= 1.0:
        raise InputError.of(
            "lowest", expected="a number in (0, 1]", got=lowest, remedy="a rate of 0 would weigh its rows infinitely"
        )
    device = generator.device
    start = torch.rand(1, generator=generator, device=device)
    place = (start + torch.arange(num_windows, device=device) / max(num_windows, 1)) % 1.0
    rate = (1.0 - (1.0 - lowest) * place).clamp(lowest, 1.0)
    draws = torch.rand(num_windows, window, generator=generator, device=device)
    return Masking(masked=draws < rate[:, None], rate=rate)
