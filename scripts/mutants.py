"""Plant every known fault in a copy of the sources and see that some test notices; print the kill rate.

A mutant is one replaced snippet. It counts as killed if the named tests fail on the mutated copy; they must pass on the
clean one. Two positive controls look wrong but are exact: their tests must pass as they stand.

usage: python scripts/mutants.py [--only NAME] [--list] [--processes N] [--out mutants.json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXACT = ("tests/exact/test_rules_exact.py",)
DRAFT_LAW = ("tests/exact/test_draft_law.py",)
LOOP = ("tests/statistical/test_loop_law.py",)
STREAM = ("tests/unit/test_text_stream.py",)


@dataclass(frozen=True)
class Mutant:
    """A planted fault: in ``file``, ``old`` (found exactly once) becomes ``new``; ``tests`` must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "argmax draft with a softmax q",
        "trees/sampled.py",
        "columns = [random.draw(row) for row in probs]",
        "columns = [int(row.argmax()) for row in probs]",
        EXACT,
    ),
    Mutant(
        "q before the filters, draft after",
        "trees/sampled.py",
        "columns = [random.draw(row) for row in probs]",
        "columns = [random.draw(row * (row >= row.topk(min(2, len(row))).values[-1])) for row in probs]",
        EXACT,
    ),
    Mutant(
        "draft at T = .7 with q at T = 1",
        "drafters/marginal.py",
        "    if isinstance(shape, Chain):\n        return sample_chain(probs, random, vocab, source=source)",
        "    if isinstance(shape, Chain):\n        hot = torch.softmax(logits / budget.temperature / 0.7, dim=-1)\n"
        "        from dataclasses import replace\n        draft = sample_chain(hot, random, vocab, source=source)\n"
        "        return replace(draft, law=replace(draft.law, rows=probs))",
        DRAFT_LAW,
    ),
    Mutant("residual = p", "verify/base.py", "    return left / left.sum()", "    return p", EXACT),
    Mutant("residual not renormalised", "verify/base.py", "    return left / left.sum()", "    return left", EXACT),
    Mutant("rejected token not zeroed", "verify/base.py", "    rest[token] = 0\n", "", EXACT),
    Mutant(
        "the same uniform for the accept test and the residual",
        "randomness.py",
        "        return next(self._uniforms) < probability",
        "        self._last = next(self._uniforms)\n        self._uniforms = __import__('itertools').chain("
        "[self._last], self._uniforms)\n        return self._last < probability",
        LOOP,
    ),
    Mutant(
        "accept 10 % too lenient",
        "randomness.py",
        "        return next(self._uniforms) < probability",
        "        return next(self._uniforms) < 1.1 * probability",
        ("tests/unit/test_randomness.py",),
    ),
    Mutant(
        "bf16 uniforms",
        "randomness.py",
        "torch.rand(self._BLOCK, dtype=torch.float64, generator=self._generator)",
        "torch.rand(self._BLOCK, dtype=torch.bfloat16, generator=self._generator)",
        ("tests/unit/test_randomness.py",),
    ),
    Mutant(
        "bonus token drawn from the wrong row",
        "verify/ratio.py",
        "return Verdict(path, random.draw(law.row(row)), Extra.BONUS)",
        "return Verdict(path, random.draw(law.row(max(row - 1, 0))), Extra.BONUS)",
        EXACT,
    ),
    Mutant(
        "first token unverified",
        "verify/ratio.py",
        "if not random.coin(acceptance(p, q, token)):",
        "if depth > 0 and not random.coin(acceptance(p, q, token)):",
        EXACT,
    ),
    Mutant(
        "stale keys and values after a roll-back",
        "models/slot_cache.py",
        "        if sources:\n",
        "        if False:\n",
        ("tests/parity/test_target_tree_pass.py",),
    ),
    Mutant(
        "rejected slots stay committed",
        "models/slot_cache.py",
        "self._slots.lengths[row] += len(kept[row])",
        "self._slots.lengths[row] += self.layers[0].written if self.layers else len(kept[row])",
        ("tests/parity/test_target_tree_pass.py",),
    ),
    Mutant(
        "siblings tested in an order that depends on p",
        "verify/multi_round.py",
        "for node in draws[row]:",
        "for node in sorted(draws[row], key=lambda n: -float(p[tokens[n]])):",
        EXACT,
    ),
    Mutant(
        "duplicate siblings merged under multi-round",
        "verify/multi_round.py",
        "for node in draws[row]:",
        "for node in dict.fromkeys(draws[row]):",
        EXACT,
    ),
    Mutant(
        "q keeps the rejected sibling",
        "verify/without_replacement.py",
        "p, q = residual(p, q), without(q, tokens[node])",
        "p = residual(p, q)",
        EXACT,
    ),
    Mutant(
        "block verification keeps a prefix with its own rate",
        "verify/base.py",
        "    return left / denominator if denominator > 0 else 1.0",
        "    return rate",
        EXACT,
    ),
    Mutant(
        "traversal forgets the rate",
        "verify/traversal.py",
        "left = (parent.rate * parent.p - parent.q).clamp_min(0)",
        "left = (parent.p - parent.q).clamp_min(0)",
        EXACT,
    ),
    Mutant(
        "draft and verifier share uniforms",
        "decode.py",
        'RandomStream(request.seed, "verify", request.index)',
        'RandomStream(request.seed, "draft", request.index)',
        LOOP,
    ),
    Mutant(
        "processors fed the wrong prefix inside a draft",
        "sampling.py",
        "path[::-1]",
        "path[:0]",
        ("tests/parity/test_options.py",),
    ),
    Mutant(
        "EOS inside a draft ignored",
        "decode.py",
        "            if row.finish is not None:\n                break",
        "            if row.finish is not None and len(kept) > len(drafted):\n                break",
        ("tests/parity/test_stops.py",),
    ),
    Mutant(
        "tree positions off by one",
        "models/cached_decoder.py",
        "torch.tensor([0, *tree.depths])",
        "torch.tensor([0, *(d + 1 for d in tree.depths)])",
        ("tests/parity/test_target_tree_pass.py",),
    ),
    Mutant(
        "nodes see their siblings",
        "models/cached_decoder.py",
        "            row[node + 1] = 1\n",
        "            row[1 : node + 2] = b'\\x01' * (node + 1)\n",
        ("tests/parity/test_target_tree_pass.py",),
    ),
    Mutant(
        "streamed text does not wait for the whole of 're",
        "text.py",
        """, "'v", "'r")""",
        """, "'v")""",
        STREAM,
    ),
    Mutant(
        "a decoding window is anchored in replacement characters",
        "detokenizer.py",
        " and _has_anchor(text[:stable])",
        "",
        STREAM,
    ),
    Mutant(
        "a decoding window need not agree with the whole text",
        "detokenizer.py",
        "self.text.endswith(text) and ",
        "",
        STREAM,
    ),
)
CONTROLS = {
    "walk (emits its own draws, tests nothing)": ("tests/exact/test_planted_faults.py", "-k", "walk_ignores_q"),
    "point mass (accepts with p, knows no q)": ("tests/exact/test_planted_faults.py", "-k", "point_mass_on_an_argmax"),
}


def run(source: Path, tests: tuple[str, ...]) -> tuple[bool, str]:
    """Whether the tests pass on a source folder, and the end of what they printed."""
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        output = done.stdout[-2000:] + done.stderr[-500:]
        raise SystemExit(f"pytest could not run {tests} (exit {done.returncode}):\n{output}")
    return done.returncode == 0, done.stdout[-300:]


def kill(mutant: Mutant) -> bool:
    """Whether the mutant's tests fail on a mutated copy of the sources."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "assets"))
        path = copy / "specdiff" / mutant.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(mutant.old)) != 1:
            raise SystemExit(f"{mutant.name}: expected the snippet once in {mutant.file}, found it {count} times")
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        passed, _ = run(copy, mutant.tests)
    return not passed


def main() -> int:
    """Run mutants and controls; exit 1 unless every mutant dies and every control lives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="mutants whose name contains this")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--processes", type=int, default=2, help="mutants at a time")
    parser.add_argument("--out", type=Path, help="also write what was killed as JSON")
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if options.only is None or options.only in m.name]
    if options.list:
        print(*(f"{m.name} ({m.file})" for m in mutants), sep="\n")
        return 0
    began = time.monotonic()
    suites = sorted({m.tests for m in mutants})
    with ThreadPoolExecutor(options.processes) as pool:
        clean = dict(zip(suites, pool.map(lambda t: run(ROOT / "src", t), suites), strict=True))
        broken = [" ".join(t) + "\n" + out for t, (passed, out) in clean.items() if not passed]
        if broken:
            raise SystemExit("the tests must pass before faults are planted; these do not:\n" + "\n".join(broken))
        dead: list[bool] = []
        for mutant, killed in zip(mutants, pool.map(kill, mutants), strict=True):
            print(f"{'killed  ' if killed else 'SURVIVED'}  {mutant.name}", flush=True)
            dead.append(killed)
        alive = {name: run(ROOT / "src", tests)[0] for name, tests in CONTROLS.items()}
    for name, passed in alive.items():
        print(f"{'passes  ' if passed else 'REJECTED'}  control: {name}")
    print(
        f"kill rate {sum(dead)}/{len(dead)} = {100 * sum(dead) / max(1, len(dead)):.0f} %, "
        f"controls {sum(alive.values())}/{len(alive)}, {time.monotonic() - began:.0f} s"
    )
    if options.out is not None:
        names = [m.name for m in mutants]
        options.out.write_text(json.dumps({"killed": dict(zip(names, dead, strict=True)), "controls": alive}))
    return 0 if all(dead) and all(alive.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
