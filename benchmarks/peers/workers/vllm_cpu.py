"""vLLM on a CPU as a worker, run by the Python of vLLM's own environment: vllm_cpu.py TARGET DTYPE BATCH [DRAFT K].

A request has prompts, and max_tokens or steps: with steps the reply has the seconds of so many steps in which all
sequences decode.
"""

import importlib
import itertools
import json
import sys
import time
from typing import Any

numbers = itertools.count()  # of requests whose steps are timed


def load(vllm: Any, target: str, dtype: str, batch: int, draft: str | None, k: int) -> Any:
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": k} if draft else None
    return vllm.LLM(
        target,
        dtype=dtype,
        max_num_seqs=batch,
        speculative_config=speculative,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )


def timed_steps(vllm: Any, llm: Any, prompts: list[list[int]], steps: int) -> list[float]:
    """Seconds of steps, behind those that read the prompts. [] if a text ends before: its context has no more room."""
    engine, names = llm.llm_engine, [f"timed-{next(numbers)}" for _ in prompts]
    params = vllm.SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    reading = set(names)
    while reading:
        reading -= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    seconds: list[float] = []
    while len(seconds) < steps:
        start = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - start)
        if len(outputs) < len(names) or any(output.finished for output in outputs):
            seconds = []
            break
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return seconds


def main() -> None:
    vllm: Any = importlib.import_module("vllm")  # only vLLM's environment has it
    target, dtype, batch, *spec = sys.argv[1:]
    draft, k = spec or (None, "0")
    llm = load(vllm, target, dtype, int(batch), draft, int(k))
    print("@@{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "steps" in request:
            print(
                "@@" + json.dumps({"seconds": timed_steps(vllm, llm, request["prompts"], request["steps"])}), flush=True
            )
            continue
        params = vllm.SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print("@@" + json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
