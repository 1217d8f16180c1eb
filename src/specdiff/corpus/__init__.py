"""Corpora: answers of a target to many prompts, kept as token ids with the target's log-probability of each token.

Read `row` (what a line is), `plan` (which rows there are and which are computed together), `writer` (how a line gets to
the disk), `make` (the whole run), `read` (how it comes back). Backends produce the rows: `decoding` (transformers, in
this process), `vllm_engine` (vLLM, in this process) and `vllm_server` (a running OpenAI-compatible server).
"""
