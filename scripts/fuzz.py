"""Fuzz what parses or detokenises: any input must give the right answer or a typed error, never another exception.

Run ``python scripts/fuzz.py --cases 1000000 --seed 0``. Every case is a function of (seed, its number), so a failure is
reproduced by ``--only NUMBER``. Three kinds of case take turns: streaming text, stop strings, sampling options.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from specdiff import detokenizer
from specdiff.errors import InputError
from specdiff.sampling import LawBuilder, SamplingOptions
from specdiff.stopping import FinishReason, StopCheck, StopOptions, cut_at_stop
from specdiff.text import TextStream
from specdiff.types import TokenTree

TEXTS = (
    "Hello, world! It's a test; don't  panic.",
    "naïve café — über",
    "日本語のテキスト、漢字。",
    "👩‍👩‍👧‍👦 family 🇩🇪 flags 😀😀",
    "def f(x):\n    return x  # ok\n\n\n",
    "a ' b 's c 've d n't e . f 're ?",
    "ไทยภาษา العربية עברית",
    "\ufffd raw \ufffd\ufffd",
    "\u0301combining e\u0301",
    "tabs\t\tand   spaces   ",
    "<|end|> not special",
)
WORDS = ("the", "he", "in", "er", "an", "re", "on", "world", "don", "'t", "n't", "'s", "'ve", "'m", "lo", "test", "ing")
PIECES = (*WORDS, *".?!,'nmsvert \n\tabcdxyz", "é", "日", "本", "語", "😀", "字", "\ufffd", "  ", "    ")
SPECIAL = ("<|end|>", "<|pad|>")


def _fast(model: Any, decoder: Any, pre: Any = None, **options: Any) -> PreTrainedTokenizerFast:
    inner = Tokenizer(model)
    inner.decoder = decoder
    if pre is not None:
        inner.pre_tokenizer = pre
    inner.add_special_tokens([AddedToken(s, special=True) for s in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=inner, **options)


@cache
def tokenizers() -> dict[str, Any]:
    """One tiny tokenizer of each kind that language models use, and some that they do not."""
    to_char = _byte_characters()
    symbols = list(to_char)
    partial = ["😀".encode()[:2], "😀".encode()[2:], "日".encode()[:1], "日本".encode()[1:4], "é".encode()[1:] + b" "]
    whole = [w.encode() for w in (*WORDS, " the", " '", " n", " .", "\n\n", "  ", "日", "é", " 😀", "\ufffd")]
    merged = ["".join(to_char[b] for b in chunk) for chunk in (*partial, *whole)]
    byte_vocabulary = {s: i for i, s in enumerate(dict.fromkeys([*(to_char[b] for b in symbols), *merged]))}

    spaced = [p.replace(" ", "▁") for p in (*PIECES, *(" " + w for w in WORDS), " 日", " 😀")]
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    llama_pieces = list(dict.fromkeys(["<unk>", *bytes_, "▁", *spaced]))
    spaces = [*(" " + p for p in PIECES), *(w + " " for w in WORDS), " ' ", " ", "  "]
    plain = list(dict.fromkeys(["[UNK]", *PIECES, *spaces]))
    wordpieces = list(dict.fromkeys(["[UNK]", *(p for p in PIECES if not p.isspace()), *("##" + w for w in WORDS)]))
    ended = list(dict.fromkeys(["<unk>", *WORDS, *(w + "</w>" for w in WORDS), ".</w>", ".", "é</w>"]))
    ctc = list(dict.fromkeys(["<pad>", "|", *(p for p in PIECES if not p.isspace())]))

    def numbered(names: Sequence[str]) -> dict[str, int]:
        return {name: i for i, name in enumerate(names)}

    characters = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    llama = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return {
        "byte-level": _fast(models.BPE(byte_vocabulary, []), decoders.ByteLevel(), pre_tokenizers.ByteLevel(False)),
        "byte-fallback": _fast(
            models.Unigram([(p, -1.0) for p in llama_pieces], 0, True), llama, pre_tokenizers.Metaspace()
        ),
        "metaspace": _fast(
            models.Unigram([(p, -1.0) for p in dict.fromkeys(["<unk>", "▁", *spaced])], 0, False),
            decoders.Metaspace(),
            pre_tokenizers.Metaspace(),
        ),
        "word-piece": _fast(
            models.WordPiece(numbered(wordpieces), unk_token="[UNK]"),
            decoders.WordPiece("##", True),
            pre_tokenizers.BertPreTokenizer(),
            clean_up_tokenization_spaces=True,
        ),
        "cleaned": _fast(
            models.WordLevel(numbered(plain), unk_token="[UNK]"),
            decoders.Fuse(),
            characters,
            clean_up_tokenization_spaces=True,
        ),
        "plain": _fast(models.WordLevel(numbered(plain), unk_token="[UNK]"), decoders.Fuse(), characters),
        "word-end": _fast(
            models.WordLevel(numbered(ended), unk_token="<unk>"),
            decoders.BPEDecoder("</w>"),
            pre_tokenizers.Whitespace(),
        ),
        "ctc": _fast(models.WordLevel(numbered(ctc), unk_token="<pad>"), decoders.CTC(), pre_tokenizers.Whitespace()),
        "no-decoder": _fast(models.WordLevel(numbered(plain), unk_token="[UNK]"), None, pre_tokenizers.Whitespace()),
        "python-bytes": ByT5Tokenizer(extra_ids=4),
    }


def _byte_characters() -> dict[int, str]:
    """Byte -> the character that byte-level vocabularies write for it (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def random_ids(rng: random.Random, tokenizer: Any) -> list[int]:
    """Ids of real text, of random pieces, or of anything, up to a few hundred now and then."""
    size = len(tokenizer)
    ids: list[int] = []
    wanted = rng.choice((1, 3, 6, 12, 24)) if rng.random() < 0.97 else rng.choice((70, 200))
    while len(ids) < wanted:
        kind = rng.random()
        if kind < 0.4:
            start = rng.randrange(20)
            ids += tokenizer.encode(rng.choice(TEXTS)[start : start + rng.randrange(1, 20)], add_special_tokens=False)
        elif kind < 0.5:
            ids += [rng.randrange(size)] * rng.randrange(1, 6)
        ids.append(rng.randrange(size))
    return ids[:wanted]


def random_stops(rng: random.Random, text: str) -> list[str]:
    """Stop strings, most of them taken from the text, where they overlap and contain one another."""
    stops: list[str] = []
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        if text and rng.random() < 0.8:
            start = rng.randrange(len(text))
            stops.append(text[start : start + rng.randrange(1, 12)])
        else:
            stops.append(rng.choice(PIECES))
    return [s for s in stops if s]


def stream_case(rng: random.Random) -> None:
    """Streamed text equals the full decode, cut where plain decoding would cut it, however ids are grouped."""
    tokenizer = tokenizers()[rng.choice(list(tokenizers()))]
    ids = random_ids(rng, tokenizer)
    options: dict[str, Any] = {"skip_special_tokens": rng.random() < 0.7}
    if rng.random() < 0.3:
        options["clean_up_tokenization_spaces"] = rng.random() < 0.5
    full = tokenizer.decode(ids, **options)
    stops, include = random_stops(rng, full), rng.random() < 0.5
    expected, _ = reference(lambda i: tokenizer.decode(i, **options), ids, stops, include_stop=include)
    stream = TextStream(tokenizer, stop_strings=stops, include_stop=include, **options)
    got, at = "", 0
    while at < len(ids):
        step = rng.choice((1, 1, 2, 5))
        got += stream.push(ids[at : at + step])
        at += step
        assert expected.startswith(got), f"emitted {got!r}, which does not begin {expected!r}"
    got += stream.finish()
    assert got == expected, f"{type(tokenizer).__name__} {ids} {stops}: expected {expected!r}, got {got!r}"


def reference(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], stops: Sequence[str], *, include_stop: bool = False
) -> tuple[str, int | None]:
    """Text and count of ids at the first id after which the full text contains a stop string; slow and obvious."""
    if stops:
        for count in range(1, len(ids) + 1):
            text = decode(ids[:count])
            if any(s in text for s in stops):
                return cut_at_stop(text, stops, include_stop=include_stop), count
    return decode(ids), None


def stop_case(rng: random.Random) -> None:
    """`StopCheck` ends at the same id as the reference."""
    tokenizer = tokenizers()[rng.choice(list(tokenizers()))]
    ids = random_ids(rng, tokenizer)
    skip = rng.random() < 0.7

    def decode(some: Sequence[int]) -> str:
        return tokenizer.decode(some, skip_special_tokens=skip)

    stops = random_stops(rng, decode(ids))
    _, expected = reference(decode, ids, stops)
    check = StopCheck(StopOptions(stop_strings=stops, max_new_tokens=10_000), eos_ids=(), room=None, decode=decode)
    got = next((n for n, i in enumerate(ids, 1) if check.feed(i) is FinishReason.STOP_STRING), None)
    assert got == expected, f"{ids} {stops}: expected the end after {expected} ids, got {got}"


JUNK: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    5,
    10**400,
    0.0,
    0.5,
    1.0,
    -0.5,
    1e-30,
    1e-4,
    1e30,
    1e300,
    float("nan"),
    float("inf"),
    -float("inf"),
    "0.7",
    "",
    b"1",
    (3,),
    1j,
    object(),
    torch.tensor(1.0),
    [],
    [1],
    [[1]],
    [[]],
    [[1, 2], [3]],
    [["a"]],
    [99],
    [[99]],
    [[7]],
    [None],
    ["a", ""],
    [lambda ids, scores: scores],
    {},
    {1: 2.0},
    {"1": 2.0},
    {(1, 2): -1.0},
    {(): 1.0},
    {1: float("nan")},
    {99: 1.0},
    {-1: 1.0},
    {None: 1.0},
    [lambda ids, scores: scores * float("nan")],
    [lambda ids: 0],
    [lambda ids, scores: scores[:, :2]],
)


def options_case(rng: random.Random) -> None:
    """Any values give options or an `InputError`; options that were accepted give laws, or an `InputError`."""
    names = list(SamplingOptions.__dataclass_fields__)
    chosen: dict[str, Any] = {"temperature": rng.choice((0.0, 1.0, 0.3))} if rng.random() < 0.7 else {}
    for name in rng.sample(names, rng.randrange(1, 4)):
        chosen[name] = rng.choice(JUNK)
    stop = {rng.choice(list(StopOptions.__dataclass_fields__)): rng.choice(JUNK)}
    with contextlib.suppress(InputError):
        StopOptions(**stop)
    try:
        options = SamplingOptions(**chosen)
        builder = LawBuilder(options, prompt_length=2, eos_ids=[7], vocab_size=8)
    except InputError:
        return
    scores = torch.tensor([[rng.gauss(0, 3) for _ in range(8)] for _ in range(3)])
    law = builder.law(scores, torch.tensor([1, 2]), TokenTree(torch.tensor([3, 1]), (-1, 0)))
    for row in range(3):
        try:
            p = law.row(row)
        except InputError:
            continue
        assert float(p.min()) >= 0, f"{options}: row {row} is no law: {p}"
        assert abs(float(p.sum()) - 1) < 1e-5, f"{options}: row {row} is no law: {p}"


CASES = (stream_case, stop_case, options_case)


def run(cases: int, seed: int, *, first: int = 0, progress: Callable[[str], None] | None = None) -> list[str]:
    """Run cases ``first .. first + cases - 1``; return a description of each failure."""
    failures: list[str] = []
    began = time.monotonic()
    for number in range(first, first + cases):
        case, rng = CASES[number % len(CASES)], random.Random(f"{seed}/{number}")
        # short windows move often, which is where they can go wrong
        detokenizer.WINDOW_LIMIT, detokenizer.WINDOW_KEEP = rng.choice(((32, 12), (32, 12), (6, 2), (3, 1)))
        try:
            case(rng)
        except Exception:
            failures.append(f"case {number} ({case.__name__}), seed {seed}:\n{traceback.format_exc()}")
        if progress is not None and (number - first + 1) % 50_000 == 0:
            progress(f"{number - first + 1} cases, {len(failures)} failures, {time.monotonic() - began:.0f} s")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this one case and show its failure")
    arguments = parser.parse_args()
    if arguments.only is not None:
        failures = run(1, arguments.seed, first=arguments.only)
    else:
        failures = run(arguments.cases, arguments.seed, progress=lambda line: print(line, flush=True))
        print(f"{arguments.cases} cases, seed {arguments.seed}: {len(failures)} failures")
    for failure in failures[:20]:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
