"""Distillation: corpora and a target in, a drafter for it out. Killed runs go on where their last checkpoint was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from specdiff.corpus.identity import tokenizer_fingerprint
from specdiff.corpus.read import Corpus, read_corpus
from specdiff.distill.data import Split, split
from specdiff.distill.evaluate import DecodingEvaluator
from specdiff.distill.recipe import Recipe, adopt
from specdiff.errors import CheckpointError, InputError
from specdiff.hub.safety import check_weights
from specdiff.models.denoiser import WEIGHTS_NAME, BlockCausalDenoiser
from specdiff.models.denoiser_config import check_state
from specdiff.models.layer_cut import find_layer_list, target_fingerprint
from specdiff.models.tables import embedding_table, output_table
from specdiff.models.target import CausalTarget
from specdiff.objectives.registry import make
from specdiff.train.attention import register_window_attention
from specdiff.train.features import TargetFeatures, no_features
from specdiff.train.trainer import CHECKPOINT_NAME, DenoiserTrainer, TrainerConfig
from specdiff.train.windows import StreamConfig, WindowStream, frequent_tokens, label_table

_FEATURE_WEIGHTS = frozenset({"feature_projection.weight"})


def prepare(
    recipe: Recipe,
    output: Path,
    target: CausalTarget,
    tokenizer: PreTrainedTokenizerBase,
    corpora: Sequence[tuple[Path, float]],
    *,
    start_from: Path | None = None,
    allow_other_model: bool = False,
    name: str = "denoiser",
    checkpoint_minutes: float = 10.0,
    evaluate_minutes: float = 20.0,
) -> DenoiserTrainer:
    """Make the trainer of a run, at its last checkpoint if it has one.

    Args:
        recipe: what decides the result. output: folder of the run.
        target: loaded in the recipe's dtype; frozen, never written. tokenizer: its own.
        corpora: folders or row files of this target's answers, and how much of a batch comes from each.
        start_from: an exported denoiser of the same layers and window; only a new run reads it.
        allow_other_model: take answers of another model with the same tokenizer.
        name: free label of the drafter. checkpoint_minutes, evaluate_minutes: of training time.

    Raises:
        InputError: settings, corpora and target do not fit, or another run is in the folder (CorpusError,
            BrokenRowError: see `specdiff.corpus.read`).
        CheckpointError: files of the run, or ``start_from``, are damaged.
    """
    torch.manual_seed(recipe.seed)
    tables = target_fingerprint(embedding_table(target.model), output_table(target.model))
    read = read_corpora(corpora, target, tables, tokenizer, allow_other_model=allow_other_model)
    parts = split(read, held_out=recipe.held_out, window=recipe.window)
    begun = (output / CHECKPOINT_NAME).is_file()
    adopt(output, _record(recipe, target, tables, read, name), begun=begun)

    denoiser = _cut(recipe, target, parts, name)
    if start_from is not None and not begun:
        take_over(denoiser, start_from)
    features = TargetFeatures(target.model, recipe.feature_layers) if recipe.feature_layers else no_features
    evaluator = None
    if parts.held_out and recipe.evaluate_tokens:
        evaluator = DecodingEvaluator(
            target,
            denoiser,
            [ids for _, ids in parts.held_out],
            max_new_tokens=recipe.evaluate_tokens,
            nodes=recipe.nodes,
        )
    denoiser.decoder.set_attn_implementation(register_window_attention())
    if recipe.fuse:
        fuse_elementwise(denoiser)
    stream = WindowStream(
        parts.sources,
        label_table(denoiser.draft_vocab, target.vocab_size),
        StreamConfig(
            rows_per_batch=recipe.rows, anchors_per_row=recipe.anchors, window=recipe.window, seed=recipe.seed
        ),
    )
    config = TrainerConfig(
        steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        warmup=recipe.warmup,
        weight_decay=recipe.weight_decay,
        ema_decay=recipe.ema_decay,
        accumulate=recipe.accumulate,
        checkpoint_minutes=checkpoint_minutes,
        evaluate_minutes=evaluate_minutes,
        seed=recipe.seed,
    )
    trainer = DenoiserTrainer(
        denoiser,
        stream,
        parts.replay,
        output,
        config,
        features=features,
        objective=make(recipe.objective, recipe.parameters),
        nodes=recipe.nodes,
        evaluator=evaluator,
    )
    if begun:
        trainer.resume()
    return trainer


def fuse_elementwise(denoiser: BlockCausalDenoiser) -> None:
    """Compile the parts of the decoder that are many small passes over memory (lengths stay dynamic)."""
    for module in denoiser.decoder.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile(dynamic=True)


def read_corpora(
    corpora: Sequence[tuple[Path, float]],
    target: CausalTarget,
    tables: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    allow_other_model: bool,
) -> list[tuple[Corpus, float]]:
    """Read a target's answers, each corpus with its weight; ``tables``: the target's fingerprint.

    Raises:
        InputError: there are none, or a weight is not positive (CorpusError, BrokenRowError: see
            `specdiff.corpus.read`).
    """
    if not corpora:
        raise InputError.of("corpus", expected="at least one", got="none", remedy="make one: specdiff corpus make")
    bad = [weight for _, weight in corpora if not weight > 0]
    if bad:
        raise InputError.of("corpus", expected="weights > 0", got=bad, remedy="write FOLDER:WEIGHT, such as a:65 b:35")
    tokens = tokenizer_fingerprint(tokenizer)
    return [
        (
            read_corpus(
                path,
                target_fingerprint=tables,
                tokenizer_fingerprint=tokens,
                allow_other_model=allow_other_model,
                vocab_size=target.vocab_size,
            ),
            weight,
        )
        for path, weight in corpora
    ]


def _record(
    recipe: Recipe, target: CausalTarget, tables: str, read: Sequence[tuple[Corpus, float]], name: str
) -> dict[str, object]:
    """What a run is made of, as plain data."""
    return {
        "name": name,
        "recipe": recipe.to_json(),
        "target": {"name": target.name, "tables": tables},
        "corpora": corpora_record(read),
    }


def corpora_record(read: Sequence[tuple[Corpus, float]]) -> list[dict[str, object]]:
    """What a run's corpora are, as plain data."""
    return [
        {
            "rows": len(corpus.rows),
            "weight": weight,
            "prompts": [m.prompts.sha256 for m in corpus.manifests],
            "sampling": [asdict(m.sampling) for m in corpus.manifests],
        }
        for corpus, weight in read
    ]


def _cut(recipe: Recipe, target: CausalTarget, parts: Split, name: str) -> BlockCausalDenoiser:
    layers = recipe.layers
    if layers is None:
        layers = tuple(range(max(1, round(len(find_layer_list(target.model.get_decoder())[1]) / 5))))
    draft_vocab = frequent_tokens(
        [row for rows, _ in parts.sources for row in rows],
        vocab_size=target.vocab_size,
        size=recipe.draft_vocab_size,
        always=target.eos_ids,
    )
    return BlockCausalDenoiser.from_target(
        target.model,
        draft_vocab=draft_vocab,
        layers=layers,
        window=recipe.window,
        feature_layers=recipe.feature_layers,
        name=name,
    )


def take_over(denoiser: BlockCausalDenoiser, folder: Path) -> None:
    """Start from the weights of an exported denoiser; a projection of features that it lacks starts at zero.

    Raises:
        CheckpointError: there is none, or it is of other layers.
    """
    if not (folder / WEIGHTS_NAME).is_file():
        raise CheckpointError(f"start_from: expected {WEIGHTS_NAME} in {folder}, got none; name an exported denoiser")
    check_weights(folder)
    state = load_file(folder / WEIGHTS_NAME)
    state.pop("draft_vocab", None)
    own = denoiser.state_dict()
    state = {name: own[name] for name in own.keys() & _FEATURE_WEIGHTS} | state
    check_state(own, state, f"start_from: {folder} is no denoiser of these layers")
    denoiser.load_state_dict(state)
