"""One long answer: acceptance, time and memory against depth.

The end-of-sequence token is ignored, so the text goes on to the budget. The same prompt is then decoded plainly, and
both are reported by stretches of the text, since each token costs more the longer the prefix is.

usage: python scripts/long_run.py --max-new-tokens 2000 --out long.json
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch

from specdiff.decoder import SpeculativeDecoder, load
from specdiff.files import write_text
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions

PROMPT = "Write a long story about a lighthouse keeper, with many chapters."


def resident() -> int:
    """Bytes of memory that the process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def cache_bytes(decoder: SpeculativeDecoder, positions: int) -> int:
    """Bytes of keys and values for so many positions, in the target and in a drafter made of decoder layers."""
    total = 0
    for model in (decoder.target.model, getattr(getattr(decoder.drafter, "source", None), "denoiser", None)):
        if model is not None:
            config = (model if hasattr(model, "generate") else model.decoder).config.get_text_config()
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            width = 2 * config.num_key_value_heads * size * next(model.parameters()).element_size()
            total += config.num_hidden_layers * width * positions
    return total


def run(decoder: SpeculativeDecoder, temperature: float, tokens: int, step: int, seed: int) -> list[dict]:
    """Stream a text; a line for every ``step`` tokens."""
    ids = decoder.encode(PROMPT, chat=True)
    stop = StopOptions(max_new_tokens=tokens, ignore_eos=True)
    count, rounds, lines, began, due = 0, 0, [], time.perf_counter(), step
    start = {"count": 0, "rounds": 0, "at": began, "resident": resident()}
    for part in decoder.stream(ids, sampling=SamplingOptions(temperature=temperature), stop=stop, seed=seed):
        count, rounds = count + len(part.tokens), rounds + 1
        if count >= due:
            now, held = time.perf_counter(), resident()
            done, made = count - start["count"], rounds - start["rounds"]
            line = {"tokens": count, "tau": done / made, "ms_per_token": 1e3 * (now - start["at"]) / done}
            line |= {"ms_per_round": 1e3 * (now - start["at"]) / made, "grown_mb": (held - start["resident"]) / 2**20}
            line |= {"cache_mb": cache_bytes(decoder, done) / 2**20}
            lines.append(line)
            print(json.dumps(line), flush=True)
            start = {"count": count, "rounds": rounds, "at": now, "resident": held}
            due += step
    return lines


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=2000)
    parser.add_argument("--step", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-plain", action="store_true", help="leave plain decoding out")
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    torch.set_num_threads(1)
    decoder = load(o.target, o.drafter, dtype=o.dtype)
    plain = SpeculativeDecoder(decoder.target, None, decoder.tokenizer)
    result = {"options": {k: str(v) for k, v in vars(o).items()}}
    for name, one in (("specdiff", decoder), *([] if o.no_plain else [("plain", plain)])):
        print(name)
        result[name] = run(one, o.temperature, o.max_new_tokens, o.step, o.seed)
    write_text(o.out, json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
