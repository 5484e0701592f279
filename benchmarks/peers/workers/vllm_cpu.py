"""vLLM on a CPU as a worker, run by the Python of vLLM's own environment: vllm_cpu.py TARGET DTYPE BATCH [DRAFT K]."""

import importlib
import json
import sys
import time
from typing import Any

MAX_MODEL_LEN = 1024


def load(vllm: Any, target: str, dtype: str, batch: int, draft: str | None, k: int) -> Any:
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": k} if draft else None
    return vllm.LLM(
        target,
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=batch,
        speculative_config=speculative,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )


def main() -> None:
    vllm: Any = importlib.import_module("vllm")  # only vLLM's environment has it
    target, dtype, batch, *spec = sys.argv[1:]
    draft, k = spec or (None, "0")
    llm = load(vllm, target, dtype, int(batch), draft, int(k))
    print("@@{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        params = vllm.SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print("@@" + json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
