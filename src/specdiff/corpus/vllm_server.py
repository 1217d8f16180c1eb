"""The backend ``server``: a running vLLM server, through its OpenAI-compatible ``/v1/completions``.

Token ids go in and come out (``return_token_ids``, or ``return_tokens_as_token_ids`` for older servers), so no text is
ever tokenised again. Servers that give no ids back are refused.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from specdiff.corpus.plan import Group, Job, Sampling
from specdiff.corpus.problems import CorpusError
from specdiff.corpus.row import CorpusRow
from specdiff.errors import ModelError

_BUSY = (429, 502, 503, 504)
_PREFIX = "token_id:"


class ServerBackend:
    """Answers with a server.

    Args:
        url: such as ``http://host:8000`` (``/v1`` may follow). sampling: how. eos_ids: ids that end an answer.
        model: name the server knows the target by; "" = the only one it serves.
        tries: of a request that fails to connect or finds the server busy. pause: seconds before the second one,
            doubled each time. timeout: seconds a request may take.

    Raises:
        ModelError: the server cannot be reached. CorpusError: it serves several models and none was named.
    """

    def __init__(
        self,
        url: str,
        sampling: Sampling,
        *,
        eos_ids: tuple[int, ...],
        model: str = "",
        tries: int = 6,
        pause: float = 1.0,
        timeout: float = 3600.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise CorpusError(f"server: expected an address such as http://host:8000, got {url!r}")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._sampling, self._eos_ids = sampling, eos_ids
        self._tries, self._pause, self._timeout = tries, pause, timeout
        self._model = model or self._only_model()

    def answer(self, group: Group) -> Iterator[list[CorpusRow]]:
        """See `specdiff.corpus.backend.Backend`; all rows of a group are under way at once."""
        with ThreadPoolExecutor(max_workers=len(group)) as pool:
            waiting: set[Future[CorpusRow]] = {pool.submit(self._answer, job) for job in group}
            try:
                while waiting:
                    ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    yield [future.result() for future in ready]
            finally:
                for future in waiting:
                    future.cancel()

    def _answer(self, job: Job) -> CorpusRow:
        answer = self._call(
            "/v1/completions",
            {
                "model": self._model,
                "prompt": list(job.prompt_ids),
                "max_tokens": self._sampling.max_new_tokens,
                "temperature": self._sampling.temperature,
                "top_p": self._sampling.top_p,
                "seed": job.seed,
                "stop_token_ids": list(self._eos_ids),
                "logprobs": 0,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            },
        )
        try:
            choice = answer["choices"][0]
            logprobs = [float(x) for x in choice["logprobs"]["token_logprobs"]]
            ids = choice.get("token_ids")
            if ids is None:
                ids = [int(name.removeprefix(_PREFIX)) for name in choice["logprobs"]["tokens"]]
            if not ids or len(ids) != len(logprobs):
                raise ValueError(f"{len(ids)} ids, {len(logprobs)} log-probabilities")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ModelError(
                f"server: expected token ids with log-probabilities, got {json.dumps(answer)[:200]} ({error!r}); "
                "use a vLLM server, which returns them"
            ) from error
        return CorpusRow(
            id=job.id,
            sample=job.sample,
            prompt_ids=job.prompt_ids,
            ids=tuple(ids),
            logprobs=tuple(logprobs),
            finish="eos" if ids[-1] in self._eos_ids else "length",
            seed=job.seed,
        )

    def _only_model(self) -> str:
        served = self._call("/v1/models")
        try:
            names = [str(entry["id"]) for entry in served["data"]]
        except (KeyError, TypeError) as error:
            raise ModelError(f"server: {self._url}/v1/models lists no models; check the address") from error
        if len(names) != 1:
            raise CorpusError(f"server: expected one model, it serves {names}; name one with --server-model")
        return names[0]

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        reason = ""
        for attempt in range(self._tries):
            if attempt:
                time.sleep(self._pause * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=self._timeout) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.read()[:300].decode(errors='replace')}"
                if error.code not in _BUSY:
                    raise ModelError(f"server: {self._url}{path} answered {reason}; check model and options") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = repr(error)
        raise ModelError(f"server: {self._url}{path} failed {self._tries} times ({reason}); check that it is running")
