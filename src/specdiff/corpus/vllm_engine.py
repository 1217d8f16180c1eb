"""The backend ``vllm``: a group goes through vLLM's offline engine in this process.

The same file format and the same law of the log-probabilities (vLLM's ``raw_logprobs``) as the backend
``transformers``. At temperature 0 the tokens are the same wherever the two agree on the largest logit; above it both
draw from the same law, but each with its own generator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from specdiff.corpus.plan import Group, Job, Sampling
from specdiff.corpus.problems import CorpusError
from specdiff.corpus.row import CorpusRow
from specdiff.errors import ModelError

_DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class VllmBackend:
    """Answers with vLLM.

    Args:
        source: model folder or hub id. sampling: how. eos_ids: ids that end an answer.
        dtype: auto, bf16, fp16 or fp32. options: further arguments of ``vllm.LLM``.

    Raises:
        CorpusError: vLLM is not installed. ModelError: it cannot serve the model.
    """

    def __init__(
        self,
        source: str,
        sampling: Sampling,
        *,
        eos_ids: tuple[int, ...],
        dtype: str = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        # in this process, so that whatever ends it ends the engine too
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            import vllm  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise CorpusError(
                "backend: vllm is not installed beside specdiff; install specdiff[vllm] in an environment of its own, "
                "or give the address of a running server with --server"
            ) from error
        self._vllm, self._sampling, self._eos_ids = vllm, sampling, eos_ids
        arguments = {"seed": 0, "logprobs_mode": "raw_logprobs", **(options or {})}
        try:
            self._engine = vllm.LLM(model=source, dtype=_DTYPES[dtype], **arguments)
        except Exception as error:
            raise ModelError(f"target: vLLM cannot serve {source!r}: {error}") from error

    def answer(self, group: Group) -> Iterator[list[CorpusRow]]:
        """See `specdiff.corpus.backend.Backend`; the rows of a group come all at once."""
        prompts = [{"prompt_token_ids": list(job.prompt_ids)} for job in group]
        outputs = self._engine.generate(prompts, [self._parameters(job) for job in group], use_tqdm=False)
        yield [self._row(job, output.outputs[0]) for job, output in zip(group, outputs, strict=True)]

    def _parameters(self, job: Job) -> Any:
        return self._vllm.SamplingParams(
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            max_tokens=self._sampling.max_new_tokens,
            stop_token_ids=list(self._eos_ids),
            seed=job.seed,
            logprobs=0,  # of the chosen token alone
            detokenize=False,
        )

    def _row(self, job: Job, output: Any) -> CorpusRow:
        ids = tuple(output.token_ids)
        return CorpusRow(
            id=job.id,
            sample=job.sample,
            prompt_ids=job.prompt_ids,
            ids=ids,
            logprobs=tuple(found[token].logprob for token, found in zip(ids, output.logprobs, strict=True)),
            finish="eos" if ids[-1] in self._eos_ids else "length",
            seed=job.seed,
        )
