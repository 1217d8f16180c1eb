"""Which rows a corpus has, and which of them are computed together.

Rows are cut into groups, and a group always runs as one batch of the same rows: alone, after a kill, on one machine or
on ten. Rounding in a batch depends on its shape, so this is what makes a resumed corpus equal to an uninterrupted one
bit for bit. Shards and workers take whole groups.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from specdiff.checking import integer, real
from specdiff.errors import InputError


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the target reads it.

    Attributes:
        id: its name, unique in a corpus. ids: at least one token, chat template included.
    """

    id: str
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn.

    Attributes:
        temperature: 0 = argmax. top_p: smallest set of tokens whose mass reaches it, in (0, 1]; idle at temperature 0.
        max_new_tokens: most tokens of an answer. samples: answers to each prompt (one at temperature 0).
        seed: of the whole corpus.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 512
    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        real("temperature", self.temperature, lambda t: t == 0 or 1e-5 <= t < 1e9, expected="0 or a number >= 1e-5",
             remedy="use 0 for argmax")  # fmt: skip
        real("top_p", self.top_p, lambda p: 0 < p <= 1, expected="a number in (0, 1]", remedy="1.0 keeps all")
        integer("max_new_tokens", self.max_new_tokens, 1, remedy="ask for at least one token")
        integer("samples", self.samples, 1, remedy="ask for at least one answer a prompt")
        integer("seed", self.seed, 0, remedy="use 0, 1, 2, ...")
        if self.temperature == 0 and self.samples > 1:
            raise InputError.of(
                "samples", expected="1 at temperature 0", got=self.samples, remedy="all of them would be equal"
            )


@dataclass(frozen=True, kw_only=True)
class Batching:
    """What is computed together.

    Attributes:
        rows: most rows of a group. tokens: most cache slots of a group, counted before anything is known of the
            answers: rows x (longest prompt + max_new_tokens). A single row may exceed it.
    """

    rows: int = 32
    tokens: int = 32768

    def __post_init__(self) -> None:
        integer("batch rows", self.rows, 1, remedy="use at least one row")
        integer("batch tokens", self.tokens, 1, remedy="leave it out, or use what fits into memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A row still to be made.

    Attributes:
        id, sample, prompt_ids, seed: as of the row, see `specdiff.corpus.row.CorpusRow`.
    """

    id: str
    sample: int
    prompt_ids: tuple[int, ...]
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        """As of the row."""
        return self.id, self.sample


Group = tuple[Job, ...]


@dataclass(frozen=True)
class Shard:
    """Part ``index`` (from 1) of ``count``."""

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not (isinstance(self.count, int) and isinstance(self.index, int) and 1 <= self.index <= self.count <= 9999):
            raise InputError.of(
                "shard", expected="i/n with 1 <= i <= n <= 9999", got=f"{self.index}/{self.count}", remedy="say 1/4"
            )

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``i/n``.

        Raises:
            InputError: it is not of that form.
        """
        index, _, count = text.partition("/")
        if not (index.isascii() and index.isdigit() and count.isascii() and count.isdigit()):
            raise InputError.of("shard", expected="i/n, such as 1/4 to 4/4", got=text, remedy="say 1/4")
        return cls(int(index[:9]), int(count[:9]))

    def of(self, groups: Sequence[Group]) -> list[Group]:
        """The groups of this shard: every ``count``-th."""
        return list(groups[self.index - 1 :: self.count])


def row_seed(seed: int, prompt_id: str, sample: int) -> int:
    """The seed of one row, 53 bits: a function of the corpus's seed, the prompt's name and the sample only."""
    text = f"{seed}/{sample}/{prompt_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11


def plan_groups(prompts: Sequence[EncodedPrompt], sampling: Sampling, batching: Batching) -> list[Group]:
    """All rows of a corpus in groups: of like length to keep padding small, in an order that any start is a fair part.

    A pure function of its arguments.
    """
    jobs = [
        Job(id=p.id, sample=sample, prompt_ids=p.ids, seed=row_seed(sampling.seed, p.id, sample))
        for p in sorted(prompts, key=lambda p: len(p.ids))
        for sample in range(sampling.samples)
    ]
    groups: list[Group] = []
    start = 0
    for end in range(1, len(jobs) + 1):
        # sorted by length, so the longest prompt of jobs[start : end + 1] is the last
        full = end - start == batching.rows or end == len(jobs)
        if full or (end - start + 1) * (len(jobs[end].prompt_ids) + sampling.max_new_tokens) > batching.tokens:
            groups.append(tuple(jobs[start:end]))
            start = end
    random.Random(sampling.seed).shuffle(groups)
    return groups
