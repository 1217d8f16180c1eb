"""Texts of token ids for n-gram models: Zipf's law with some order in it, the same for the same seed."""

from __future__ import annotations

import random


def zipf_texts(count: int, vocabulary: int, *, seed: int = 5, longest: int = 13) -> list[list[int]]:
    """``count`` texts of 0 to ``longest`` ids below ``vocabulary``; an id often decides the next."""
    rng = random.Random(seed)
    weights = [1 / (i + 1) for i in range(vocabulary)]
    texts: list[list[int]] = []
    for _ in range(count):
        text: list[int] = []
        for _ in range(rng.randrange(longest + 1)):
            follows = bool(text) and rng.random() < 0.4
            text.append((text[-1] * 7 + 3) % vocabulary if follows else rng.choices(range(vocabulary), weights)[0])
        texts.append(text)
    return texts
