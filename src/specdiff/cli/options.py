"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Target = Annotated[str, typer.Option("--target", help="Catalog name, local folder, or Hugging Face id.")]
Drafter = Annotated[
    str,
    typer.Option(
        "--drafter", help="'default', 'none', 'ngram', a folder of weights, or several joined by '+' (an ensemble)."
    ),
]
Rule = Annotated[str, typer.Option("--rule", help="Verification rule; 'auto' picks by draft kind and temperature.")]
ShapeText = Annotated[
    str | None,
    typer.Option(
        "--shape",
        help="chain, samples:K, siblings:6,2,1,1, best-first:NODES or paths:KEEP (with --ngram; further values as "
        "paths:3,beam=5,mass=0.9,cap=20,weight=0.7); for autoregressive and EAGLE drafters also static:eagle, "
        "static:0,1,0.0,0.1 (nodes by rank; ',sampled' draws them) and dynamic:NODES[,top=K]; default by temperature.",
    ),
]
Ngram = Annotated[
    str | None,
    typer.Option(
        "--ngram",
        help="N-gram model for --shape paths: 'prompt' (learns from the text itself), an ARPA file "
        "(specdiff ngram train), or prompt+FILE (both).",
    ),
]
Steps = Annotated[int, typer.Option("--steps", help="Denoising steps of a masked diffusion LM.")]
Order = Annotated[
    str,
    typer.Option("--order", help="With --steps: left_to_right, confidence, entropy, margin or random."),
]
Family = Annotated[
    str | None, typer.Option("--family", help="Family of a masked diffusion LM whose files do not say: diffullama.")
]
Adapter = Annotated[
    str | None, typer.Option("--adapter", help="Folder of a LoRA adapter (PEFT's) of a masked diffusion LM.")
]
Refresh = Annotated[
    int | None,
    typer.Option("--refresh", help="Rounds between two computations of a fully bidirectional drafter's prefix."),
]
Controller = Annotated[
    str,
    typer.Option(
        "--controller",
        help="Who sizes the drafts: 'fixed', 'adl' (adaptive depth, within --gamma), or 'planner' (specdiff tune "
        "first; 'planner:FILE' for a plan kept elsewhere).",
    ),
]
Gamma = Annotated[int | None, typer.Option("--gamma", help="Draft window; default the drafter's.")]
DraftTemperature = Annotated[float, typer.Option("--draft-temperature", help="Temperature of the draft, > 0.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens to produce.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 = argmax.")]
TopK = Annotated[int | None, typer.Option("--top-k")]
TopP = Annotated[float, typer.Option("--top-p")]
MinP = Annotated[float, typer.Option("--min-p")]
RepetitionPenalty = Annotated[float, typer.Option("--repetition-penalty")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Stop string; may be given several times.")]
Seed = Annotated[int, typer.Option("--seed")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, bf16, fp16 or fp32.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...; default the best one.")]
Tf32 = Annotated[bool, typer.Option("--tf32", help="Allow TF32 matrix products on CUDA (recorded; off by default).")]
