"""block: decide the whole chain at once (Sun et al. 2025, "Block Verification", arXiv 2403.10444, algorithm 2).

Never accepts less than the ratio rule, and as much as any rule can for one path: a ratio p/q above 1 early in the
chain makes up for one below 1 later.
"""

from __future__ import annotations

from specdiff.randomness import Random
from specdiff.types import Draft, Extra, Provenance, Verdict
from specdiff.verify.base import TargetLaw, acceptance, dense_q, keep, require, tokens_of


class Block:
    """Block verification of ONE chain sampled from q."""

    name = "block"
    exact_for = frozenset({Provenance.CHAIN})
    greedy_only = False
    needs_chain = True

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        """Test prefixes from the longest down; use at most one coin a node, and one draw.

        The rate a_i = min(1, a_{i-1} p(x_i) / q(x_i)), a_0 = 1, is the probability with which the prefix x_1..x_i
        counts as accepted. The full chain is kept with a_gamma; a shorter prefix, once all longer ones failed, with
        S_i / (S_i + 1 - a_i), S_i = sum_x (a_i p(x) - q(x))+, and the token after it is drawn from that positive part.
        """
        require(self, draft, law)
        tokens = tokens_of(draft.tree)
        path = draft.paths[0] if draft.paths else ()
        rates = [1.0]
        for row, node in zip((0, *(n + 1 for n in path)), path, strict=False):
            p = law.row(row)
            q = dense_q(draft.law, row - 1, like=p)
            rate = min(1.0, rates[-1] * acceptance(p, q, tokens[node]))
            if rate == 0.0:  # no longer prefix can be kept either
                break
            rates.append(rate)
        if len(rates) > len(path) and random.coin(rates[-1]):
            return Verdict(path, random.draw(law.row(path[-1] + 1 if path else 0)), Extra.BONUS)
        for length in range(min(len(rates), len(path)) - 1, -1, -1):
            row = path[length - 1] + 1 if length else 0
            p = law.row(row)
            left = (rates[length] * p - dense_q(draft.law, row - 1, like=p)).clamp_min(0)
            total = left.sum().item()
            if random.coin(keep(rates[length], total)):
                return Verdict(path[:length], random.draw(left if total > 0 else p), Extra.RECOVERED)
        raise AssertionError("the empty prefix is always kept")
