"""Clients of other projects against the real application, each in an environment of its own.

The server counts in float64 and the requests are seeded, so every client must read the text of a plain HTTP request.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.external.conftest import ROOT
from tests.external.environments import environment
from tests.serving.conftest import ARGS, AUTOSCALING, serving

pytestmark = [pytest.mark.external, pytest.mark.integration, pytest.mark.slow]

SCRIPTS = Path(__file__).parent / "scripts"
TARGET = ROOT / "models/demo/target"
LIMIT_S = 600  # of one client; on a busy machine lm-eval and guidellm took more than 180
KEY = "key-of-a-client"
SERVER = {name: value for name, value in ARGS.items() if name != "max_model_len"}  # clients expect the model's own
MAX_CHOICES = SERVER["max_running"] + SERVER["max_waiting"]

PROMPT = "def fibonacci(n):\n    "
MESSAGES = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "Return the mean of a list of numbers."},
]
SAMPLING = {"max_tokens": 24, "temperature": 0.8, "seed": 2}
WAYS = {"completion", "completion stream", "chat", "chat stream"}  # every library must have read these


@dataclass(frozen=True)
class Asked:
    """What every client asks, and the answers of plain HTTP requests."""

    url: str
    completion: dict[str, Any]
    chat: dict[str, Any]

    def of(self, way: str) -> tuple[str, list[int]]:
        """Return the text of a way to ask, and its numbers of prompt and completion tokens."""
        reply = self.chat if "chat" in way else self.completion
        (choice,), usage = reply["choices"], reply["usage"]
        text: str = choice["message"]["content"] if "chat" in way else choice["text"]
        return text, [usage["prompt_tokens"], usage["completion_tokens"]]

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        reply = httpx.post(self.url + path, json={"model": "demo"} | body, headers=_authorization(), timeout=60)
        answer: dict[str, Any] = reply.raise_for_status().json()
        return answer


def _authorization() -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("clients")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    with serving(folder, SERVER | {"api_key_file": str(keys)}, AUTOSCALING | {"max_replicas": 1}) as application:
        plain = Asked(application.url, {}, {})
        completion = plain.post("/v1/completions", prompt=PROMPT, **SAMPLING)
        yield Asked(application.url, completion, plain.post("/v1/chat/completions", messages=MESSAGES, **SAMPLING))


def test_what_cannot_be_installed_is_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = "http://127.0.0.1:9/simple"
    variables = os.environ | {"FORETOKEN_CLIENTS": str(tmp_path), "PIP_INDEX_URL": nowhere, "UV_DEFAULT_INDEX": nowhere}
    subprocess.run([ROOT / "scripts/setup_clients.sh", "openai"], env=variables, check=True, timeout=LIMIT_S)
    monkeypatch.setattr("tests.external.environments.ENVIRONMENTS", tmp_path)
    with pytest.raises(pytest.skip.Exception, match=r"openai: .*(No matching distribution|refused)"):
        environment("openai")


def run(client: str, arguments: list[str], folder: Path, said: str = "") -> str:
    """What the client's Python prints. It runs in `folder`, which is also its home: it leaves nothing elsewhere."""
    variables = {
        "PATH": os.defpath,
        "HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # litellm otherwise waits 8 s for a list of prices
        "OPENAI_API_KEY": KEY,
    }
    command = [str(environment(client) / "bin/python"), "-P", *arguments]
    done = subprocess.run(
        command, input=said, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def told(client: str, asked: Asked, folder: Path, **more: Any) -> dict[str, Any]:
    """The JSON that the client's script prints last."""
    question = {
        "url": asked.url,
        "key": KEY,
        "model": "demo",
        "prompt": PROMPT,
        "messages": MESSAGES,
        "sampling": SAMPLING,
    }
    script = SCRIPTS / f"use_{client.replace('-', '_')}.py"
    said = run(client, [str(script)], folder, json.dumps(question | more))
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer


def assert_same_texts(texts: dict[str, Any], asked: Asked) -> None:
    assert texts.keys() >= WAYS
    for way, read in texts.items():
        text, usage = asked.of(way)
        if way.endswith("usage"):
            assert read == usage, way
        elif way.endswith("stream"):
            assert "".join(read) == text, way
            assert sum(map(bool, read)) >= 3, way
        else:
            assert read == text, way


ERRORS = {
    "field": ["BadRequestError", 400, None, "temperature"],
    "context": ["BadRequestError", 400, "context_length_exceeded", "max_tokens"],
    "key": ["AuthenticationError", 401, "invalid_api_key", None],
    "model": ["NotFoundError", 404, "model_not_found", "model"],
    "path": ["NotFoundError", 404, "not_found", None],
    "method": ["APIStatusError", 405, "method_not_allowed", None],
    "size": ["APIStatusError", 413, "request_too_large", None],
    "deadline": ["InternalServerError", 504, "deadline_exceeded", None],
    "connection": ["APIConnectionError", None, None, None],
    "timeout": ["APITimeoutError", None, None, None],
    "stream": ["APIError", None, "deadline_exceeded", None],
}


def test_openai(asked: Asked, tmp_path: Path) -> None:
    result = told("openai", asked, tmp_path, max_choices=MAX_CHOICES)
    assert_same_texts(result["texts"], asked)
    assert result["models"] == ["demo"]
    assert result["errors"] == ERRORS
    assert result["retry"]["refused"] == ["RateLimitError", 429, "engine_overloaded", None]
    assert result["retry"]["retries"] >= 1
    assert result["retry"]["text"] == asked.of("completion")[0]


def test_langchain(asked: Asked, tmp_path: Path) -> None:
    result = told("langchain", asked, tmp_path)
    assert_same_texts(result["texts"], asked)
    several = asked.post("/v1/completions", prompt=[PROMPT] * 3, **SAMPLING)["choices"]
    assert result["batches"] == {"completion": [c["text"] for c in several], "chat": [asked.of("chat")[0]] * 3}


def test_litellm(asked: Asked, tmp_path: Path) -> None:
    result = told("litellm", asked, tmp_path)
    assert_same_texts(result["texts"], asked)
    assert result["errors"] == {
        "field": "BadRequestError",
        "key": "AuthenticationError",
        "model": "NotFoundError",
        "context": "ContextWindowExceededError",
    }


def test_llama_index(asked: Asked, tmp_path: Path) -> None:
    result = told("llama-index", asked, tmp_path)
    assert_same_texts(result["texts"], asked)
    said = asked.post("/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}], **SAMPLING)
    assert result["completion over chats"] == said["choices"][0]["message"]["content"]


def test_inspect_ai(asked: Asked, tmp_path: Path) -> None:
    text, usage = asked.of("chat")
    result = told("inspect-ai", asked, tmp_path, right=text)
    assert result == {"status": "success", "accuracy": 1, "chat": text, "usage": usage}


SNIPPETS = [
    ("def add(a, b):\n    return", " a + b\n"),
    ("import os\nimport", " sys\n"),
    ("for i in range(", "10):\n    print(i)\n"),
    ("class Stack:\n    def push(self, item):\n", "        self.items.append(item)\n"),
]
TASKS: dict[str, dict[str, Any]] = {
    "scores": {"output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": "{{continuation}}"},
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{context}}{{continuation}}",
    },
    "texts": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{continuation}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24},
    },
}
METRICS = {"scores": "acc", "rolling": "bits_per_byte", "texts": "exact_match"}


def write_tasks(folder: Path) -> None:
    """For lm-eval: the snippets, and tasks that read them."""
    snippets = folder / "snippets.jsonl"
    snippets.write_text("".join(json.dumps({"context": a, "continuation": b}) + "\n" for a, b in SNIPPETS))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(snippets)}},
            "test_split": "test",
            "target_delimiter": "",
            "metric_list": [{"metric": METRICS[name]}],
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(common | task))


class Reference:
    """The target as transformers runs it."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float64)
        self.tokens = AutoTokenizer.from_pretrained(TARGET)

    def ids(self, text: str) -> list[int]:
        return self.tokens.encode(text, add_special_tokens=False)

    def scores(self, ids: list[int], begin: int) -> tuple[float, bool]:
        """Return the log-probability of ids[begin:] after ids[:begin], and whether greedy decoding would write it."""
        with torch.no_grad():
            law = self.model(torch.tensor([ids])).logits[0, begin - 1 : -1].log_softmax(-1)
        ends = torch.tensor(ids[begin:])
        return float(law[torch.arange(len(ends)), ends].sum()), bool((law.argmax(-1) == ends).all())


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def test_lm_eval(asked: Asked, reference: Reference, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    result = told("lm-eval", asked, tmp_path, tasks=str(tmp_path), tokenizer=str(TARGET))
    # lm-eval's remote tokenizer takes a BOS with the id 0 for none, and begins with the end token.
    prefixes = {"local": reference.tokens.bos_token_id, "remote": reference.tokens.eos_token_id}
    for tokenizer, prefix in prefixes.items():
        assert_right_scores(result[tokenizer], reference, prefix)
        assert result[tokenizer]["texts"] == result["local"]["texts"]
    greedily = {"max_tokens": 24, "temperature": 0, "stop": ["\n\n"]}
    for (context, _), text, chat in zip(SNIPPETS, result["local"]["texts"], result["chats"], strict=True):
        assert text == asked.post("/v1/completions", prompt=context, **greedily)["choices"][0]["text"]
        messages = [{"role": "user", "content": context}]
        said = asked.post("/v1/chat/completions", messages=messages, **greedily)["choices"][0]["message"]["content"]
        assert chat == said


def assert_right_scores(result: dict[str, Any], reference: Reference, prefix: int) -> None:
    for (context, continuation), scored, rolling in zip(SNIPPETS, result["scores"], result["rolling"], strict=True):
        ids = reference.ids(context + continuation)
        begin = len(reference.ids(context.rstrip()))  # lm-eval scores the white space at a context's end too
        score, greedy = reference.scores(ids, begin)
        assert scored == [pytest.approx(score, abs=1e-4), greedy]
        whole, _ = reference.scores([prefix, *ids], 1)
        assert rolling == pytest.approx(whole, abs=1e-4)


def test_guidellm(asked: Asked, tmp_path: Path) -> None:
    """Its defaults: streamed chats, with the usage in every chunk. Only the tokenizer must be named."""
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={asked.url},api_key={KEY}",
        "tokenizer": f"kind=hf_auto,model={TARGET}",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "profile": "kind=synchronous",
        "constraint": "kind=max_requests,count=4",
        "output": f"kind=json,path={report}",
    }
    arguments = [item for name, value in options.items() for item in (f"--{name}", value)]
    run("guidellm", ["-m", "guidellm", "run", "--disable-console", *arguments], tmp_path)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (requests["errored"], requests["incomplete"], len(requests["successful"])) == ([], [], 4)
    for request in requests["successful"]:
        assert request["output"]
        assert request["output_metrics"]["total_tokens"] == 16
        assert request["info"]["timings"]["token_iterations"] >= 3
