"""Offline use: generate for a list of prompts in this process."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config import EngineConfig, can_capture_graphs
from engine.engine import Engine
from engine.memory.host import old_objects_unvisited
from engine.types import (
    DrafterName,
    FinishReason,
    Output,
    Request,
    RequestRecord,
    SamplingParams,
    StepStats,
    TokenLogprob,
    Verifier,
)

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """The result for one prompt. drafted and accepted have one entry per round. logprobs are empty unless asked for."""

    prompt_token_ids: tuple[int, ...]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    record: RequestRecord
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]

    @property
    def seed(self) -> int:
        return self.record.seed

    @property
    def drafted(self) -> list[int]:
        return self.record.column("drafted")

    @property
    def accepted(self) -> list[int]:
        return self.record.column("accepted")


class LLM:
    """An engine in this process. `config` takes the other fields of EngineConfig.

    Nobody reads its texts while they grow, so prompts take whole passes beside them: prefill_chunk is max_step_tokens
    unless it is given. Its rounds are captured graphs where they can be, unless `graphs` is given.

    Example: LLM("models/demo/target", "models/demo/draft").generate(["def main("], SamplingParams(max_tokens=32))
    """

    def __init__(self, target: str, draft: str | None = None, **config: Any) -> None:
        settings = EngineConfig(target=target, draft=draft, **config)
        if "graphs" not in config:
            settings = replace(settings, graphs=can_capture_graphs(settings.device, settings.cache))
        if settings.prefill_chunk is None:
            settings = replace(settings, prefill_chunk=settings.max_step_tokens)
        self.engine = Engine.from_config(settings)
        self.steps: list[StepStats] = []  # of the latest `generate`
        self._ids = itertools.count()

    def sampling_params(self, **given: Any) -> SamplingParams:
        """The given fields, and the defaults of the checkpoint's generation_config.json for the others, as in a request
        to the server. Raises InvalidRequest."""
        return SamplingParams(**{**self.engine.sampling_defaults, **given})

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        k: int | Sequence[int | None] | None = None,
        *,
        verifier: Verifier | None = None,
        drafter: DrafterName | None = None,
        predictions: Sequence[Prompt] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the prompts.

        params and k: one for all prompts or one per prompt; params None: `sampling_params()`; k None: the policy
        chooses. verifier and drafter None: the engine's default. predictions: guesses of the outputs, one per prompt.

        Raises TypeError for a text in place of a list of prompts, InvalidRequest before anything runs, and RuntimeError
        if a request fails while it runs.
        """
        for name, given in (("prompts", prompts), ("predictions", predictions)):
            if isinstance(given, str):  # a sequence of texts too: one of each character
                raise TypeError(f"{name} must be a list, not the text {given[:40]!r}: put it in brackets")
        params = self.sampling_params() if params is None else params
        all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        ks = list(k) if isinstance(k, Sequence) else [k] * len(prompts)
        guesses = [()] * len(prompts) if predictions is None else [self._encode(p, special=False) for p in predictions]
        requests = [
            Request(
                f"offline-{next(self._ids)}",
                self._encode(prompt),
                prompt_params,
                prompt_k,
                verifier=verifier,
                drafter=drafter,
                prediction_ids=guess,
            )
            for prompt, prompt_params, prompt_k, guess in zip(prompts, all_params, ks, guesses, strict=True)
        ]
        for request in requests:
            self.engine.check(request)
        try:
            for request in requests:
                self.engine.submit(request)
            outputs = self._run()
        except BaseException:  # also Ctrl-C: the next call must not go on with these requests
            self.engine.abort("generate was interrupted")
            raise
        return [_complete(r, outputs[r.id]) for r in requests]

    def _encode(self, text: Prompt, *, special: bool = True) -> tuple[int, ...]:
        return tuple(self.engine.tokenizer.encode(text, special=special) if isinstance(text, str) else text)

    def _run(self) -> dict[str, list[Output]]:
        outputs: dict[str, list[Output]] = {}
        self.steps = []
        with old_objects_unvisited():
            while self.engine.has_work:
                result = self.engine.step()
                self.steps.append(result.stats)
                for output in result.outputs:
                    outputs.setdefault(output.request_id, []).append(output)
        return outputs


def _complete(request: Request, outputs: list[Output]) -> Completion:
    last = outputs[-1]
    if last.finish_reason is None or last.finish_reason == "error" or last.record is None:
        raise RuntimeError(last.error or f"request {request.id} did not finish")
    return Completion(
        prompt_token_ids=request.prompt_ids,
        token_ids=[t for o in outputs for t in o.token_ids],
        logprobs=[entry for o in outputs for entry in o.logprobs],
        prompt_logprobs=[entry for o in outputs for entry in o.prompt_logprobs],
        text="".join(o.text for o in outputs),
        finish_reason=last.finish_reason,
        record=last.record,
    )
