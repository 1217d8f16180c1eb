"""Causal n-gram language models over token ids: a cheap proxy of what a text goes on with.

Read `base` (what a scorer is), `table` (a model's numbers), `kneser_ney` (how they are estimated), `arpa` (how they are
stored), and the scorers: `memory` (pure Python), `kenlm_scorer` (KenLM), `prompt` (the text itself), `mixture` (two of
them). `train` goes from token ids to a file, `load` from a file to a scorer.
"""
