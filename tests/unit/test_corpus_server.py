"""vLLM backends without vLLM: a server here that answers as vLLM's does, and an engine that looks like it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from specdiff.corpus.plan import Batching, EncodedPrompt, Sampling, plan_groups
from specdiff.corpus.problems import CorpusError
from specdiff.corpus.row import CorpusRow
from specdiff.corpus.specs import ServerSpec, VllmSpec
from specdiff.corpus.vllm_server import ServerBackend
from specdiff.errors import ModelError

EOS = 2
SAMPLING = Sampling(temperature=0.5, top_p=0.9, max_new_tokens=4, samples=2, seed=1)
PROMPTS = [EncodedPrompt(id=f"p{i}", ids=(5, 10 + i)) for i in range(3)]
[GROUP] = plan_groups(PROMPTS, SAMPLING, Batching())


def tokens(prompt: list[int], seed: int) -> list[int]:
    return [prompt[-1], seed % 1000 + 20, *([EOS] if prompt[-1] % 2 else [30, 31])]


class Server:
    """A server whose next answers can be spoilt."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.spoilt: list[tuple[int, Any]] = []
        self.models, self.with_ids = ["m"], True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": name} for name in outer.models]})

            def do_POST(self) -> None:
                assert self.path == "/v1/completions"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                self.reply(*(outer.spoilt.pop(0) if outer.spoilt else (200, outer.complete(body))))

            def reply(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = tokens(body["prompt"], body["seed"])
        logprobs = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": [-i / 100 for i in ids]}
        choice: dict[str, Any] = {"logprobs": logprobs, "finish_reason": "stop"}
        if self.with_ids:
            choice["token_ids"] = ids
        return {"choices": [choice]}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def check(rows: list[CorpusRow]) -> None:
    assert {row.key for row in rows} == {job.key for job in GROUP}
    for row in rows:
        assert list(row.ids) == tokens(list(row.prompt_ids), row.seed)
        assert row.logprobs == tuple(-i / 100 for i in row.ids)
        assert row.finish == ("eos" if row.ids[-1] == EOS else "length")


@pytest.mark.parametrize("with_ids", [True, False])
def test_ids_go_in_and_come_out(server: Server, with_ids: bool) -> None:
    server.with_ids = with_ids
    backend = ServerSpec(url=server.url + "/v1/", eos_ids=(EOS,)).open(SAMPLING)
    check([row for rows in backend.answer(GROUP) for row in rows])
    asked = next(body for body in server.asked if body["seed"] == GROUP[0].seed)
    assert asked == {
        "model": "m", "prompt": list(GROUP[0].prompt_ids), "max_tokens": 4, "temperature": 0.5, "top_p": 0.9,
        "seed": GROUP[0].seed, "stop_token_ids": [EOS], "logprobs": 0, "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip


def backend(server: Server, **options: Any) -> ServerBackend:
    return ServerBackend(server.url, SAMPLING, eos_ids=(EOS,), pause=0.001, **options)


def test_a_busy_server_is_asked_again(server: Server) -> None:
    server.spoilt = [(503, {}), (429, {}), (502, {})]
    check([row for rows in backend(server).answer(GROUP) for row in rows])
    assert len(server.asked) == len(GROUP) + 3


@pytest.mark.parametrize(
    ("spoilt", "named"),
    [
        ((400, {"error": "max_tokens too large"}), "400 .*max_tokens too large"),
        ((200, {"choices": []}), "expected token ids with log-probabilities"),
        ((200, {"choices": [{"text": "hello", "logprobs": None}]}), "use a vLLM server"),
        ((200, {"choices": [{"logprobs": {"tokens": ["he"], "token_logprobs": [-1]}}]}), "use a vLLM server"),
        ((200, {"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1]}}]}), "2 ids, 1 log-prob"),
        ((200, [1]), "use a vLLM server"),
    ],
)
def test_answers_that_are_no_rows_are_refused(server: Server, spoilt: tuple[int, Any], named: str) -> None:
    server.spoilt = [spoilt] * 20
    with pytest.raises(ModelError, match=named):
        list(backend(server).answer(GROUP[:1]))


def test_a_server_that_stays_busy_or_is_gone(server: Server) -> None:
    server.spoilt = [(503, {"later": 1})] * 99
    with pytest.raises(ModelError, match=r"failed 3 times.*503"):
        list(backend(server, tries=3).answer(GROUP[:1]))
    with pytest.raises(ModelError, match="check that it is running"):
        ServerBackend("http://127.0.0.1:1", SAMPLING, eos_ids=(EOS,), tries=2, pause=0.001)
    with pytest.raises(CorpusError, match="expected an address"):
        ServerBackend("localhost:8000", SAMPLING, eos_ids=(EOS,))


def test_one_of_several_models_must_be_named(server: Server) -> None:
    server.models = ["m", "n"]
    with pytest.raises(CorpusError, match=r"\['m', 'n'\]"):
        backend(server)
    list(backend(server, model="n").answer(GROUP[:1]))
    assert server.asked[0]["model"] == "n"


class FakeEngine:
    """What is used of ``vllm.LLM``."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        FakeEngine.last = self

    last: FakeEngine

    def generate(self, prompts: list[dict[str, list[int]]], parameters: list[Any], use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.parameters = parameters
        made = []
        for prompt, chosen in zip(prompts, parameters, strict=True):
            ids = tokens(prompt["prompt_token_ids"], chosen.seed)
            logprobs = [{i: SimpleNamespace(logprob=-i / 100), 999: SimpleNamespace(logprob=-0.0)} for i in ids]
            made.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs)]))
        return made


def test_the_offline_engine_is_asked_for_the_same_law(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.LLM = FakeEngine  # type: ignore[attr-defined]
    module.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    spec = VllmSpec(source="folder", eos_ids=(EOS,), dtype="fp32", options={"max_model_len": 64})
    check([row for rows in spec.open(SAMPLING).answer(GROUP) for row in rows])
    assert FakeEngine.last.arguments == {
        "model": "folder", "dtype": "float32", "seed": 0, "logprobs_mode": "raw_logprobs", "max_model_len": 64,
    }  # fmt: skip
    assert vars(FakeEngine.last.parameters[0]) == {
        "temperature": 0.5, "top_p": 0.9, "max_tokens": 4, "stop_token_ids": [EOS], "seed": GROUP[0].seed,
        "logprobs": 0, "detokenize": False,
    }  # fmt: skip


def test_without_vllm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(CorpusError, match=r"specdiff\[vllm\].*--server"):
        VllmSpec(source="folder", eos_ids=(EOS,)).open(SAMPLING)
