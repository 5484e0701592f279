"""inspect-ai: a task with one sample, over its provider for servers that speak OpenAI's API."""

import json
import sys
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, get_model
from inspect_ai.scorer import includes

ASKED: dict[str, Any] = json.load(sys.stdin)
KINDS = {"system": ChatMessageSystem, "user": ChatMessageUser}


def main() -> None:
    model = get_model(
        f"openai-api/foretoken/{ASKED['model']}",
        base_url=ASKED["url"] + "/v1",
        api_key=ASKED["key"],
        config=GenerateConfig(**ASKED["sampling"]),
    )
    messages = [KINDS[message["role"]](content=message["content"]) for message in ASKED["messages"]]
    task = Task(dataset=[Sample(input=messages, target=ASKED["right"])], scorer=includes(ignore_case=False))
    (log,) = eval(task, model=model, log_dir="logs", display="none")
    print(json.dumps(read(log)))


def read(log: Any) -> dict[str, Any]:
    if log.status != "success":
        return {"status": log.status, "error": str(log.error and log.error.message)}
    (sample,) = log.samples
    return {
        "status": log.status,
        "accuracy": log.results.scores[0].metrics["accuracy"].value,
        "chat": sample.output.completion,
        "usage": [sample.output.usage.input_tokens, sample.output.usage.output_tokens],
    }


main()
