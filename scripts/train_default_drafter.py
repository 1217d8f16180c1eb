"""Train the default drafter: a block-causal denoiser cut from a target, on the target's own answers.

Example:
    python scripts/train_default_drafter.py --target TARGET_DIR --data answers_t0.jsonl:65 answers_t1.jsonl:35 \
        --held-out answers_t0.jsonl --exclude-from gsm8k/train/7073 --output runs/default --minutes 100
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from specdiff.cli.distill import parse_parameter
from specdiff.distill.run import fuse_elementwise, take_over
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.objectives.registry import OBJECTIVES, make
from specdiff.train.attention import register_window_attention
from specdiff.train.features import TargetFeatures, no_features
from specdiff.train.trainer import DenoiserTrainer, TrainerConfig
from specdiff.train.windows import AnswerRow, StreamConfig, WindowStream, frequent_tokens, label_table, read_rows


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="directory or name of the target model")
    parser.add_argument("--data", nargs="+", required=True, metavar="PATH[:WEIGHT]", help="answers to train on")
    parser.add_argument("--held-out", type=Path, help="T = 0 answers; its excluded rows measure acceptance")
    parser.add_argument(
        "--exclude-from", action="append", default=[], metavar="PREFIX/NUMBER",
        help="leave out of training all ids PREFIX/n with n >= NUMBER; may be repeated",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="continue the run in --output")
    parser.add_argument("--layers", type=int, nargs="+", default=list(range(6)), help="target layers to start from")
    parser.add_argument("--feature-layers", type=int, nargs="*", default=[], help="target layers whose states it reads")
    parser.add_argument("--start-from", type=Path, help="an exported denoiser of the same layers and window")
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--draft-vocab-size", type=int, default=9216)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--anchors", type=int, default=32, help="windows of a row")
    parser.add_argument("--held-out-rows", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--learning-rate", type=float, default=8e-4)
    parser.add_argument("--warmup", type=float, default=0.03)
    parser.add_argument("--objective", default="cross_entropy", help=", ".join(OBJECTIVES))
    parser.add_argument("--parameter", action="append", default=[], metavar="NAME=VALUE", help="of the objective")
    parser.add_argument("--ema-decay", type=float, default=0.99)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--checkpoint-minutes", type=float, default=5.0)
    parser.add_argument("--evaluate-minutes", type=float, default=8.0)
    parser.add_argument("--log-steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="fuse the norms and MLPs (about a minute at the start)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="denoiser")
    return parser.parse_args()


def is_excluded(row_id: str, rules: list[str]) -> bool:
    """Say whether a row belongs to the held-out tail of its set."""
    for rule in rules:
        prefix, _, first = rule.rpartition("/")
        if not prefix or not first.isdigit():
            raise SystemExit(f"--exclude-from: expected PREFIX/NUMBER, got {rule!r}")
        row_prefix, _, number = row_id.rpartition("/")
        if row_prefix == prefix and number.isdigit() and int(number) >= int(first):
            return True
    return False


def read_sources(arguments: argparse.Namespace) -> list[tuple[list[AnswerRow], float]]:
    """Read the training rows of each --data file with its weight."""
    sources = []
    for item in arguments.data:
        path, _, weight = item.rpartition(":")
        if not path:
            path, weight = item, "1"
        try:
            share = float(weight)
        except ValueError:
            raise SystemExit(f"--data: expected PATH or PATH:WEIGHT, got {item!r}") from None
        sources.append((read_rows(path, keep=lambda name: not is_excluded(name, arguments.exclude_from)), share))
    return sources


def main() -> None:
    """Train."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=getattr(torch, arguments.dtype))
    ends = target.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]

    sources = read_sources(arguments)
    held_out: list[AnswerRow] = []
    if arguments.held_out:
        held_out = read_rows(arguments.held_out, keep=lambda name: is_excluded(name, arguments.exclude_from))
        held_out = sorted(held_out, key=lambda row: row.id)[: arguments.held_out_rows]
    vocab_size = target.get_input_embeddings().weight.shape[0]
    draft_vocab = frequent_tokens(
        [row for rows, _ in sources for row in rows],
        vocab_size=vocab_size,
        size=arguments.draft_vocab_size,
        always=[e for e in ends if e is not None],
    )
    denoiser = BlockCausalDenoiser.from_target(
        target,
        draft_vocab=draft_vocab,
        layers=arguments.layers,
        window=arguments.window,
        feature_layers=arguments.feature_layers,
        name=arguments.name,
    )
    if arguments.start_from:
        take_over(denoiser, arguments.start_from)
    features = TargetFeatures(target, arguments.feature_layers) if arguments.feature_layers else no_features
    denoiser.decoder.set_attn_implementation(register_window_attention())
    del target
    if arguments.compile:
        fuse_elementwise(denoiser)

    stream = WindowStream(
        sources,
        label_table(draft_vocab, vocab_size),
        StreamConfig(
            rows_per_batch=arguments.rows,
            anchors_per_row=arguments.anchors,
            window=arguments.window,
            seed=arguments.seed,
        ),
    )
    config = TrainerConfig(
        minutes=arguments.minutes,
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        warmup=arguments.warmup,
        ema_decay=arguments.ema_decay,
        weight_decay=arguments.weight_decay,
        checkpoint_minutes=arguments.checkpoint_minutes,
        evaluate_minutes=arguments.evaluate_minutes,
        log_steps=arguments.log_steps,
        seed=arguments.seed,
    )
    objective = make(arguments.objective, dict(parse_parameter(item) for item in arguments.parameter))
    trainer = DenoiserTrainer(
        denoiser, stream, held_out, arguments.output, config, features=features, objective=objective
    )
    summary = {
        "rows": [len(rows) for rows, _ in sources],
        "held_out": len(held_out),
        "draft_vocab": draft_vocab.numel(),
        "trained_parameters": sum(p.numel() for p in denoiser.parameters()),
        "stream": asdict(stream.config),
        "trainer": asdict(config),
        "objective": repr(objective),
    }
    print(json.dumps(summary), flush=True)
    if arguments.resume:
        trainer.resume()
    trainer.run()


if __name__ == "__main__":
    main()
