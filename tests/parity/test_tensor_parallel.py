"""Two ranks under torchrun say what one process says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from support.tiny_targets import tiny_model

_WORKER = """
import json, os, sys
import torch
from specdiff.decode import DecodeLoop, Request
from specdiff.models.load_target import load_target
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.testing import ScriptedDrafter
from specdiff.types import Budget, Chain

torch.set_num_threads(1)
folder, out, parallel = sys.argv[1:]
target, _ = load_target(folder, **({"tp_plan": "auto"} if parallel == "yes" else {"device": "cpu"}))
texts = []
for temperature in (0.0, 0.9):
    requests = [
        Request(prompt=torch.arange(3, 3 + n), index=i, seed=5, stop=StopOptions(max_new_tokens=12),
                sampling=SamplingOptions(temperature=temperature))
        for i, n in enumerate((6, 1))
    ]
    drafter = ScriptedDrafter(lambda r: [(7 * len(r.prefix) + i) % 96 for i in range(3)], vocab_size=96)
    loop = DecodeLoop(target, drafter, requests, budget=Budget(gamma=3, shape=Chain()))
    for _ in loop.run():
        pass
    texts += [row.new_tokens for row in loop.rows]
shard = target.model.model.layers[0].mlp.up_proj.weight
shape = list(getattr(shard, "to_local", lambda: shard)().shape)
with open(f"{out}.{os.environ.get('RANK', 'one')}", "w") as file:
    json.dump({"texts": texts, "shape": shape}, file)
if parallel == "yes":
    torch.distributed.destroy_process_group()
"""


def _run(command: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    folder, worker, out = tmp_path / "tiny-llama", tmp_path / "worker.py", tmp_path / "out"
    tiny_model("llama", vocab_size=96).save_pretrained(folder)  # a vocabulary that two ranks can split
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    worker.write_text(_WORKER)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    _run([sys.executable, str(worker), str(folder), str(out), "no"])
    _run([sys.executable, *torchrun, str(worker), str(folder), str(out), "yes"])
    one, first, second = (json.loads(Path(f"{out}.{name}").read_text()) for name in ("one", "0", "1"))
    assert one["shape"] == [48, 32]
    assert first["shape"] == second["shape"] == [24, 32]  # each rank holds half
    assert first["texts"] == second["texts"] == one["texts"]
    assert torch.tensor([len(t) for t in one["texts"]]).tolist() == [12] * 4
