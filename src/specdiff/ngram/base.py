"""What an n-gram scorer is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

BOS, EOS, UNK = -1, -2, -3
"""Stand for ``<s>``, ``</s>`` and ``<unk>`` where token ids stand; no tokenizer has negative ids.

`BOS` may be the first item of a context, where the text is known to begin there; `EOS` may be a candidate, for the end
of the text. A tokenizer's own end-of-sequence token is a token like any other, and has nothing to do with `EOS`.
"""


class NgramScorer(Protocol):
    """A causal model of token ids that looks at the last few ids only.

    The path search of DiffuSpec (https://arxiv.org/abs/2510.02358, section 4.1) asks one for the score of some 15
    candidates at each step of each beam, so a call must cost microseconds.
    """

    @property
    def order(self) -> int:
        """Longest n-gram; a score depends on the last ``order - 1`` ids of the context."""
        ...

    @property
    def name(self) -> str:
        """Used in records."""
        ...

    def log_probs(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Score candidates for the id after ``context``.

        Args:
            context: token ids before the candidates, any number of them. It is a piece of a text: the text does not
                begin where the context does, unless its first item is `BOS`.
            tokens: [n] the candidates' ids.

        Returns:
            [n] natural logarithm of p(token | last ``order - 1`` ids of the context); finite. An id that the model does
            not know has the probability of ``<unk>``, each such id all of it.
        """
        ...


@runtime_checkable
class Learner(Protocol):
    """A scorer, or a part of one, that learns from the text as it is committed."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Add committed token ids to the text learnt from."""
        ...
