r"""What every objective is: a function of the windows' hidden rows, named and with checked parameters.

An objective reads windows of :math:`\gamma` rows that one denoising step made for one prefix :math:`s`, and the tokens
:math:`x_1 \dots x_\gamma` that the target wrote there. Row :math:`k` gives the marginal :math:`q_k(\cdot \mid s)`, the
softmax of the frozen output head over that row.

Unknown labels. A label is `IGNORED` where the draft vocabulary lacks the token, or where the text ends. No draft can
be accepted past such a place, so for every objective that speaks of prefixes **an unknown label ends the streak: the
product is 0 from there on** (`specdiff.objectives.prefixes`), and what the window's later rows say takes no part.
Objectives that score rows one by one (cross-entropy, DistillSpec) skip the row and go on.

Shape legend: A windows, G rows of a window (gamma), H hidden size, D draft vocabulary, K top tokens of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from torch import Tensor

from specdiff.errors import InputError
from specdiff.objectives.masking import Masking

IGNORED = -1
"""Label of a row that takes no part in the loss."""

TargetRows: TypeAlias = Callable[[Tensor], Tensor]
"""From [R] int64 numbers of flat rows (window * G + offset) to the target's [R, D] log-probabilities there."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """A batch of windows to learn from.

    Attributes:
        hidden: [A, G, H] the drafter's states.
        head_weight: [D, H] frozen output head.
        labels: [A, G] int64 columns of the head, `IGNORED` where unknown.
        target: the target's rows, for the objectives that compare whole rows.
        reached: [A, G] bool, where the text has a token, whether or not the draft vocabulary has it: where there is a
            target row to compare with. None: wherever the label is known.
        masking: which rows were hidden from the drafter, where not all of them were.
    """

    hidden: Tensor
    head_weight: Tensor
    labels: Tensor
    target: TargetRows | None = None
    reached: Tensor | None = None
    masking: Masking | None = None

    def __post_init__(self) -> None:
        """Reject shapes that do not fit, labels outside the head, and a head that asks for a gradient."""
        hidden, head = self.hidden, self.head_weight
        if hidden.ndim != 3 or head.ndim != 2 or hidden.shape[2] != head.shape[1] or hidden.shape[1] < 1:
            raise InputError.of(
                "hidden and head_weight",
                expected="shapes [A, G, H] and [D, H]",
                got=(tuple(hidden.shape), tuple(head.shape)),
                remedy="flatten all leading dimensions of the states into A",
            )
        if head.requires_grad:
            raise InputError.of(
                "head_weight", expected="a frozen tensor", got="one that requires a gradient", remedy="detach it"
            )
        shape = hidden.shape[:2]
        masked = None if self.masking is None else self.masking.masked
        for name, value in (("labels", self.labels), ("reached", self.reached), ("masking", masked)):
            if value is not None and value.shape != shape:
                raise InputError.of(
                    name, expected=f"shape {tuple(shape)}", got=tuple(value.shape), remedy="give one value a hidden row"
                )
        if self.labels.numel() and (int(self.labels.min()) < IGNORED or int(self.labels.max()) >= head.shape[0]):
            raise InputError.of(
                "labels",
                expected=f"columns of the head (0 to {head.shape[0] - 1}) or {IGNORED}",
                got=(int(self.labels.min()), int(self.labels.max())),
                remedy="map target ids to draft columns with specdiff.train.windows.label_table",
            )

    @property
    def known(self) -> Tensor:
        """[A, G] bool: whether the label is known."""
        return self.labels != IGNORED


@dataclass(frozen=True, kw_only=True)
class WindowLoss:
    """The loss and what it was made of.

    Attributes:
        loss: [] the objective, with a gradient.
        log_q: [A, G] log q of each row's label; 0 where not scored. No gradient.
        correct: [A, G] bool, whether the label is the row's most likely token; False where not scored.
        scored: [A, G] bool, the rows whose label is known and that this objective read.
    """

    loss: Tensor
    log_q: Tensor
    correct: Tensor
    scored: Tensor


class Objective(ABC):
    """A loss with its parameters; concrete ones are frozen dataclasses whose fields are the parameters."""

    name: ClassVar[str]
    """What the registry calls it."""
    needs_target: ClassVar[bool] = False
    """Whether it reads `Windows.target`."""
    needs_masking: ClassVar[bool] = False
    """Whether it reads `Windows.masking`; the others refuse one, since they would score rows the drafter saw."""

    @abstractmethod
    def loss(self, windows: Windows, *, chunk: int = 512) -> WindowLoss:
        """Return the mean loss.

        Args:
            windows: what to learn from.
            chunk: rows whose logits exist at one time (at least one window's).

        Returns:
            The loss and its parts. Where no label is known the loss is 0, with a gradient of 0.

        Raises:
            InputError: the windows lack what the objective needs, or have what it cannot use.
        """

    def check(self, windows: Windows, chunk: int) -> None:
        """Refuse windows that this objective cannot read.

        Raises:
            InputError: naming what is missing or too much.
        """
        if chunk < 1:
            raise InputError.of("chunk", expected="an integer >= 1", got=chunk, remedy="allow one row at least")
        if self.needs_target and windows.target is None:
            raise InputError.of(
                "target", expected=f"the target's rows for {self.name!r}", got=None, remedy="give Windows.target"
            )
        if self.needs_masking and windows.masking is None:
            raise InputError.of(
                "masking", expected=f"a masking for {self.name!r}", got=None, remedy="draw one with draw_masking"
            )
        if not self.needs_masking and windows.masking is not None:
            raise InputError.of(
                "masking",
                expected=f"None for {self.name!r}, which scores rows as if no window token had been seen",
                got="a masking",
                remedy="hide the whole window, or choose the objective 'mdm'",
            )
