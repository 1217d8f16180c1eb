"""ARPA files: written whole, read back equal, and every kind of damage named with its line."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdiff.errors import CheckpointError, InputError, PairingError
from specdiff.ngram.arpa import ArpaError, ArpaHeader, read_arpa, read_header, write_arpa
from specdiff.ngram.kneser_ney import estimate
from specdiff.ngram.memory import MemoryScorer
from specdiff.ngram.train import train
from support.ngram_texts import zipf_texts

FILES = Path(__file__).parent.parent / "support" / "ngram"
TOKENIZER = "sha256:" + "a" * 64
SMALL = """# a comment
\\data\\
ngram 1=5
ngram 2=3

\\1-grams:
-1.5\t<unk>\t0
-99\t<s>\t-0.3
-0.5\t</s>\t0
-0.4\t17\t-0.2
-0.6\t4\t-0.2

\\2-grams:
-0.3\t<s> 17
-0.2\t17 4
-0.1\t4 </s>

\\end\\
"""


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_what_was_written_comes_back(tmp_path: Path, order: int) -> None:
    path, texts = tmp_path / "made" / "model.arpa", zipf_texts(60, 40)
    header = train(texts, path, tokenizer_fingerprint=TOKENIZER, order=order, source={"files": ["a"]})
    made = estimate(texts, order=order)
    found, table = read_arpa(path, tokenizer_fingerprint=TOKENIZER)
    assert found == header == read_header(path)
    assert (found.order, found.counts, found.tokenizer_fingerprint) == (order, made.table.counts, TOKENIZER)
    assert (found.sequences, found.tokens) == (60, sum(map(len, texts)))
    assert found.discounts == tuple(d.amounts for d in made.discounts)
    assert found.source == {"files": ["a"]}
    for got, expected in zip(table.grams, made.table.grams, strict=True):
        np.testing.assert_array_equal(got, expected)
    for got, expected in zip(table.log_probs + table.backoffs, made.table.log_probs + made.table.backoffs, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-8)
    assert [p.name for p in path.parent.iterdir()] == ["model.arpa"]


def test_the_text_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.arpa"
    train([[17, 4]], path, tokenizer_fingerprint=TOKENIZER, order=2)
    lines = path.read_text().splitlines()
    assert lines[0].startswith('# specdiff-ngram {"schema": 1, "order": 2, "counts": [5, 3], "tokenizer_fingerprint": ')
    assert lines[1:4] == ["\\data\\", "ngram 1=5", "ngram 2=3"]
    assert [line.split("\t")[1] for line in lines if "\t" in line] == [
        "<s>", "</s>", "4", "17", "<unk>", "<s> 17", "4 </s>", "17 4",
    ]  # fmt: skip
    assert lines[-1] == "\\end\\"


def test_files_of_others_are_read(tmp_path: Path) -> None:
    header, table = read_arpa(FILES / "lmplz.arpa")
    assert (header.tokenizer_fingerprint, header.tokens, header.discounts) == ("", 0, ())
    assert header.counts == table.counts
    path = tmp_path / "small.arpa"
    path.write_text(SMALL.replace("\t", " ").replace("ngram 1=5", "ngram  1=     5").replace("\n", "\r\n"))
    _, table = read_arpa(path)
    scorer = MemoryScorer(table)
    ln10 = np.log(10)
    assert scorer.log_probs([17], [4, 17, 5]) == pytest.approx([-0.2 * ln10, -0.6 * ln10, -1.7 * ln10])
    assert scorer.log_probs([5], [4, 17, 5]) == pytest.approx([-0.6 * ln10, -0.4 * ln10, -1.5 * ln10])


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (SMALL, "", 0, "expected \\data\\, got the end of the file; it is truncated"),
        (SMALL, "{}\n", 1, "expected \\data\\, got '{}'; this is no ARPA file, check the path"),
        (SMALL, "\\data\\\n\n", 2, "expected at least one n-gram, got none"),
        ("ngram 2=3", "ngram 3=3", 4, "expected 'ngram 2=COUNT', got 'ngram 3=3'"),
        ("ngram 2=3", "2=3", 4, "expected 'ngram 2=COUNT', got '2=3'"),
        ("ngram 2=3", "ngram 2=4", 18, "expected 4 2-grams, got 3; lines are missing"),
        ("ngram 2=3", "ngram 2=2", 16, "expected \\end\\, got '-0.1\\t4 </s>'; there are more n-grams than"),
        ("ngram 1=5", "ngram 1=4", 11, "expected \\2-grams:, got '-0.6\\t4\\t-0.2'; there are more 1-grams than"),
        ("ngram 1=5", "ngram 1=6", 13, "expected 6 1-grams, got 5; lines are missing"),
        ("\\1-grams:", "\\2-grams:", 6, "expected \\1-grams:, got '\\\\2-grams:'"),
        ("-0.2\t17 4\n-0.1\t4 </s>\n\n\\end\\\n", "", 14, "expected 3 2-grams (got 1), got the end of the file; it is"),
        ("\n\\end\\\n", "", 16, "expected \\end\\, got the end of the file; it is truncated"),
        ("-0.4\t17\t-0.2", "-0.4\tthe\t-0.2", 10, "expected token ids in decimal, <s>, </s> or <unk>, got 'the'"),
        ("-0.4\t17\t-0.2", "-0.4\t-17\t-0.2", 10, "expected token ids in decimal"),
        ("-0.4\t17\t-0.2", "-0.4\t17171717171\t-0.2", 10, "expected token ids in decimal"),
        ("-0.4\t17\t-0.2", "0.4\t17\t-0.2", 10, "expected a finite logarithm of a probability (<= 0), got '0.4'"),
        ("-0.4\t17\t-0.2", "x\t17\t-0.2", 10, "expected a finite logarithm of a probability (<= 0), got 'x'"),
        ("-0.4\t17\t-0.2", "nan\t17\t-0.2", 10, "expected a finite logarithm"),
        ("-0.4\t17\t-0.2", "-0.4\t17\tinf", 10, "expected a finite number, got 'inf'"),
        ("-0.4\t17\t-0.2", "-0.4\t17\t-0.2\t1", 10, "expected a number, 1 words and perhaps a back-off weight, got"),
        ("-0.2\t17 4", "-0.2\t17 4\t0", 15, "expected a number, 2 words, got '-0.2\\t17 4\\t0'"),
        ("-0.2\t17 4", "-0.2\t17", 15, "expected a number, 2 words, got"),
        ("-0.1\t4 </s>", "-0.1\t17 4", 16, "expected different n-grams, got that of line 15 again"),
        ("-1.5\t<unk>\t0", "-1.5\t9\t0", 0, "expected <unk> among the 1-grams, got none"),
        ("# a comment", "# specdiff-ngram {", 1, "expected JSON after"),
        ("# a comment", '# specdiff-ngram {"schema": 2}', 1, "written by another version of specdiff"),
        ("# a comment", "# specdiff-ngram []", 1, "written by another version of specdiff"),
        ("# a comment", '# specdiff-ngram {"schema": 1, "counts": [5, 4]}', 5, "expected counts [5, 4] as the comment"),
        ("# a comment", '# specdiff-ngram {"schema": 1, "counts": [5, 3]}', 0, "is damaged (KeyError('discounts'))"),
    ],
)  # fmt: skip
def test_damage_is_named_with_its_line(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    path = tmp_path / "damaged.arpa"
    assert SMALL.count(old) == 1
    path.write_text(SMALL.replace(old, new))
    with pytest.raises(ArpaError, match=re.escape(message)) as caught:
        read_arpa(path)
    assert (caught.value.path, caught.value.line) == (path, line)
    assert str(caught.value).startswith(f"{path}, line {line}: " if line else f"{path}: ")
    assert isinstance(caught.value, CheckpointError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.line) == (str(caught.value), line)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.arpa"
    for length in range(0, len(SMALL) - 5, 7):
        path.write_text(SMALL[:length])
        with pytest.raises(ArpaError):
            read_arpa(path)


def test_what_cannot_be_read_or_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArpaError, match=r"none\.arpa: cannot be read \(No such file or directory\); check the path"):
        read_header(tmp_path / "none.arpa")
    with pytest.raises(ArpaError, match="cannot be read"):
        read_header(tmp_path)
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 9)
    with pytest.raises(ArpaError, match="this is no ARPA file"):
        read_header(tmp_path / "binary")


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "model.arpa", "sha256:" + "b" * 64
    train([[1, 2]], path, tokenizer_fingerprint=TOKENIZER)
    for read in (read_header, read_arpa):
        with pytest.raises(PairingError, match=f"tokenizer: expected {other}, got '{TOKENIZER}'; train an n-gram"):
            read(path, tokenizer_fingerprint=other)
        with pytest.raises(PairingError, match="got 'none recorded'"):
            read(FILES / "lmplz.arpa", tokenizer_fingerprint=TOKENIZER)


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.arpa"
    train([[1, 2]], path, tokenizer_fingerprint=TOKENIZER)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specdiff.ngram.arpa._write_section", full)
    with pytest.raises(InputError, match=r"model\.arpa: cannot be written \(No space left on device\)"):
        train([[3]], path, tokenizer_fingerprint=TOKENIZER)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model.arpa"]
    with pytest.raises(InputError, match="out: expected a file to write"):
        train([[3]], tmp_path, tokenizer_fingerprint=TOKENIZER)
    with pytest.raises(InputError, match="its folder cannot be made"):
        train([[3]], path / "below" / "model.arpa", tokenizer_fingerprint=TOKENIZER)


def test_a_header_of_another_model_is_refused(tmp_path: Path) -> None:
    table = estimate([[1, 2]], order=2).table
    header = ArpaHeader(order=2, counts=table.counts)
    with pytest.raises(InputError, match="header: expected counts"):
        write_arpa(tmp_path / "x", table, replace(header, counts=(5, 4)))
