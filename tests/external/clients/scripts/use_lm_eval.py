"""lm-eval: scores, rolling scores and texts by local-completions; texts by local-chat-completions."""

import json
import os
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

ASKED: dict[str, Any] = json.load(sys.stdin)
TASKS = TaskManager(include_path=ASKED["tasks"], include_defaults=False)


def answers(model: str, path: str, tasks: list[str], model_args: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """{task: what the model answered to each sample}"""
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={"model": ASKED["model"], "base_url": ASKED["url"] + path} | model_args,
        tasks=tasks,
        task_manager=TASKS,
        bootstrap_iters=0,
        **settings,
    )
    assert found is not None
    return {task: [sample["resps"][0][0] for sample in found["samples"][task]] for task in tasks}


os.environ["OPENAI_API_KEY"] = ASKED["key"]
ALL = ["scores", "rolling", "texts"]
TOKENIZERS = {
    "local": {"tokenizer": ASKED["tokenizer"], "tokenizer_backend": "huggingface"},
    "remote": {"auth_token": ASKED["key"]},  # the default where the server has one
}
result: dict[str, Any] = {
    name: answers("local-completions", "/v1/completions", ALL, arguments) for name, arguments in TOKENIZERS.items()
}
chats = answers("local-chat-completions", "/v1/chat/completions", ["texts"], {}, apply_chat_template=True)
print(json.dumps(result | {"chats": chats["texts"]}))
