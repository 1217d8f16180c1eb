"""Prompts for the default drafter's corpora in plain language.

Writes JSON lines (``id``, ``prompt``). Questions are made of WordNet's nouns (WordNet licence), translations and
passages of paragraphs of the Debian Administrator's Handbook (GPL-2+ or CC BY-SA 3.0), summaries of news
documents (one a line),
passages with a question of FOLDOC (GFDL), and instructions are what the target itself writes where its chat template
expects the user's text (Xu et al., 2024, "Magpie"). No prompt of a test set is read.

usage: python scripts/general_prompts.py --wordnet dict/ --handbook html/ --foldoc foldoc.dict --news lee_background.cor
           --target MODEL_FOLDER --out general.jsonl
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from specdiff.files import write_text
from specdiff.models.load_target import load_target

PERSON, PLACE = {"18"}, {"15"}  # WordNet's lexicographer files noun.person and noun.location
NEWS_QUESTIONS = (
    "Where did this happen?",
    "When did this happen?",
    "Why did this happen?",
    "What happened?",
    "Who is involved?",
)
QUESTIONS = ("What is {}?", "Describe {}.", "What is {} used for?", "How does {} work?", "Who made {}?")
COUNTS = {"questions": 450, "translations": 300, "summaries": 250, "passages": 300, "instructions": 1300}
LANGUAGES = {"de-DE": "German", "fr-FR": "French", "es-ES": "Spanish"}


def noun_questions(folder: Path, rng: random.Random, count: int) -> Iterator[str]:
    """Short questions about named people, places and things."""
    entries = []
    for line in (folder / "data.noun").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            continue
        fields, _, _ = line.partition(" | ")
        parts = fields.split()
        entries.append((parts[4].replace("_", " "), parts[1], "@i" in parts))
    rng.shuffle(entries)
    made = 0
    for word, kind, named in entries:
        if made == count:
            return
        if not named and (not word.islower() or len(word.split()) > 2):
            continue
        if named and kind in PERSON:
            forms = ("Who was {}?", "When was {} born?", "What is {} known for?", "Where did {} live?")
        elif named and kind in PLACE:
            forms = ("Where is {}?", "What is {} known for?", "How many people live in {}?", "When was {} founded?")
        else:
            forms = (
                "What is {}?",
                "What is the meaning of {}?",
                "Where does the word {} come from?",
                "Who invented {}?",
            )
        yield rng.choice(forms).format(word)
        made += 1


def paragraphs(folder: Path) -> list[str]:
    """Texts of a book's HTML pages, a paragraph each."""
    found = []
    for page in sorted(folder.rglob("*.html")):
        for raw in re.findall(r'<(?:p|div class="para")>(.*?)</(?:p|div)>', page.read_text("utf-8"), re.DOTALL):
            text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", raw)).split())
            if len(text.split()) >= 6:
                found.append(text)
    return list(dict.fromkeys(found))


def sentences(text: str) -> list[str]:
    """A paragraph's sentences of 8 to 40 words."""
    return [s for s in re.split(r"(?<=[.!?]) +", text) if 8 <= len(s.split()) <= 40]


def translations(book: Path, rng: random.Random, count: int) -> Iterator[str]:
    """Sentences to translate into English, two thirds of them German."""
    for code, share in (("de-DE", 0.66), ("fr-FR", 0.17), ("es-ES", 0.17)):
        pool = [s for text in paragraphs(book / code) for s in sentences(text)]
        for sentence in rng.sample(pool, min(len(pool), round(count * share))):
            yield f"Translate {LANGUAGES[code]} to English: {sentence}"


def definitions(path: Path) -> list[tuple[str, str]]:
    """FOLDOC's longer entries: headword and text."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        blocks = re.split(r"\n(?=\S)", file.read())
    found = []
    for block in blocks:
        head, _, body = block.partition("\n")
        body = " ".join(body.split())
        if 60 <= len(body.split()) <= 400 and head.replace(" ", "").isalpha():
            found.append((head.strip(), re.sub(r"[{}]", "", body)))
    return found


def passages(book: Path, foldoc: Path, news: list[str], rng: random.Random, count: int) -> Iterator[str]:
    """A passage or several, then a question that they answer."""
    entries = definitions(foldoc)
    texts = [text for text in paragraphs(book / "en-US") if len(text.split()) >= 50]
    for index in range(count):
        if index % 3 == 0:
            yield f"{rng.choice(news)[:1800]}\n{rng.choice(NEWS_QUESTIONS)}"
            continue
        head, body = rng.choice(entries)
        around = [rng.choice(texts), body] if index % 3 == 1 else [body]
        question = rng.choice(
            ("What is {}?", "Describe {}.", "What is {} used for?", "How does {} work?", "Who made {}?")
        )
        yield "\n".join([*around, question.format(head)])


def instructions(name: str, count: int, seed: int) -> Iterator[str]:
    """What the target writes in the user's place of its chat template, at temperature 1."""
    target, tokenizer = load_target(name, dtype="bf16")
    marked = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False)
    ids = tokenizer(marked.split("\0")[0], return_tensors="pt", add_special_tokens=False)["input_ids"]
    torch.manual_seed(seed)
    seen: set[str] = set()
    while len(seen) < count:
        out = target.model.generate(
            ids.repeat(32, 1), do_sample=True, temperature=1.0, top_p=0.95, top_k=0, max_new_tokens=160
        )
        for row in out[:, ids.shape[1] :]:
            ended = bool((row == tokenizer.eos_token_id).any())
            text = tokenizer.decode(row, skip_special_tokens=True).strip()
            if ended and len(text.split()) >= 3 and text not in seen and len(seen) < count:
                seen.add(text)
                yield text


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("wordnet", "handbook", "foldoc", "news", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--seed", type=int, default=0)
    for name, default in (
        ("questions", 450),
        ("translations", 300),
        ("summaries", 250),
        ("passages", 300),
        ("instructions", 900),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    news = [line.strip() for line in args.news.read_text("utf-8").splitlines() if line.strip()]
    made = {
        "question": noun_questions(args.wordnet, rng, args.questions),
        "translation": translations(args.handbook, rng, args.translations),
        "summary": (f"Summarize: {text}" for text in rng.sample(news, min(len(news), args.summaries))),
        "passage": passages(args.handbook, args.foldoc, news, rng, args.passages),
        "instruction": instructions(args.target, args.instructions, args.seed),
    }
    rows = [{"id": f"{kind}/{i}", "prompt": text} for kind, texts in made.items() for i, text in enumerate(texts)]
    rng.shuffle(rows)
    write_text(args.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{len(rows)} prompts: {dict(Counter(row['id'].split('/')[0] for row in rows))}")


if __name__ == "__main__":
    main()
