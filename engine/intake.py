"""Checks requests against the model and turns them into sequences. Refusals that depend on the model are made here."""

import secrets
from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from math import inf

from engine.config import EngineConfig
from engine.detokenize import Detokenizer, TextStream
from engine.models.tokenizer import Tokenizer
from engine.sampling.noise import sequence_key
from engine.sequence import Sequence
from engine.speculation import Capabilities, Speculation, SpeculationFields, resolve
from engine.types import (
    DRAFTERS,
    SEED_RANGE,
    DrafterName,
    InvalidRequest,
    Request,
    RequestRecord,
    SamplingParams,
)
from policies.config import PolicyConfig


def refuse_used_ids(ids: Iterable[str], used: Container[str]) -> None:
    """Raise InvalidRequest for an id that is in `used` or comes twice."""
    seen: set[str] = set()
    for request_id in ids:
        if request_id in used or request_id in seen:
            raise InvalidRequest(f"request id {request_id!r} is in use: choose another", "id")
        seen.add(request_id)


class Intake:
    """Holds constants, and the policy and drafters in force, each replaced as a whole. Any thread may call `check`."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        vocab_size: int,
        max_model_len: int,
        drafters: tuple[DrafterName, ...],
    ) -> None:
        self.drafters = drafters if config.max_spec_length else ()  # those that a request may name
        self.max_spec_length = config.max_spec_length if drafters else 0
        self.policy = config.policy  # the policy in force
        self._config = config
        self._tokenizer = tokenizer
        self.eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def put_drafters(self, drafters: tuple[DrafterName, ...]) -> None:
        """Let requests name these drafters from now on. Requests that were checked before may still name others, which
        draft nothing."""
        if self._config.max_spec_length:
            self.drafters = drafters

    def put_policy(self, policy: PolicyConfig, sequences: Iterable[Sequence]) -> None:
        """Let this policy be in force, also for the engine's sequences."""
        self.policy = policy
        for sequence in sequences:
            sequence.policy_drafts = policy.drafts

    def adopt(self, sequence: Sequence) -> None:
        """Let the server's own drafter serve a sequence that came while there was none, if its request left that to the
        server."""
        drafter = self.capabilities.drafter
        if sequence.drafter is not None or not sequence.takes_drafts or drafter is None:
            return
        record = sequence.record
        sequence.drafter = record.drafter = drafter
        sequence.k = record.fixed_k = None
        record.k_max = self.max_spec_length if sequence.max_k is None else sequence.max_k

    @property
    def capabilities(self) -> Capabilities:
        """What `resolve` needs to know of this engine under the policy in force."""
        return Capabilities(
            drafters=self.drafters,
            drafter=self._config.drafter or ("model" if "model" in self.drafters else None),
            verifier=self._config.verifier,
            max_spec_length=self.max_spec_length,
            policy_drafts=self.policy.drafts,
            trees=not self._config.deterministic,
        )

    def check(self, *requests: Request) -> None:
        """Raise InvalidRequest for a request that can never be served. Any thread may call it.

        Requests that share their prompt, prediction or parameters, as the choices of one prompt do, share the check of
        these: a prompt may have 100,000 tokens, and this runs on the event loop.
        """
        prompts, predictions, params = set[int](), set[int](), set[int]()
        for request in requests:
            if id(request.prompt_ids) not in prompts:
                prompts.add(id(request.prompt_ids))
                self._check_prompt(request.prompt_ids)
            if id(request.prediction_ids) not in predictions:
                predictions.add(id(request.prediction_ids))
                self._in_vocabulary("prediction", request.prediction_ids)
            self._check(request)
            if id(request.params) not in params:
                params.add(id(request.params))
                self._check_params(request.params)

    def _check_prompt(self, prompt_ids: tuple[int, ...]) -> None:
        if not prompt_ids:
            raise InvalidRequest("the prompt holds no tokens: give at least one", "prompt")
        for token in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token < self._vocab_size:
                raise InvalidRequest(
                    f"prompt token id {token} is outside the vocabulary: {self._allowed_ids}", "prompt"
                )

    def _check(self, request: Request) -> None:
        """Check all but the ids of the tokens, and the parameters."""
        prompt, limit = len(request.prompt_ids), self._max_model_len
        if prompt + request.params.max_tokens > limit:
            raise InvalidRequest(
                f"the prompt's {prompt} tokens and max_tokens {request.params.max_tokens} exceed the context of "
                f"{limit} tokens",
                "max_tokens" if prompt < limit else "prompt",
                "context_length_exceeded",
            )
        if request.deadline_s is not None and not 0 < request.deadline_s < inf:
            raise InvalidRequest("deadline_s must be a number of seconds above 0", "deadline_s")
        if (count := len(request.prediction_ids)) > limit:
            raise InvalidRequest(f"no output is as long as a prediction of {count} tokens", "prediction")
        self._speculation(request)

    def _check_params(self, params: SamplingParams) -> None:
        """Raise InvalidRequest for a parameter that names a token outside the vocabulary, or that leaves no token."""
        named = {
            "logit_bias": [token for token, _ in params.logit_bias],
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words": [token for word in params.bad_word_ids for token in word],
        }
        for param, ids in named.items():
            self._in_vocabulary(param, ids)
        if params.min_tokens and len(self._end_ids(params)) >= self._vocab_size:
            raise InvalidRequest("every token would end the text, and min_tokens forbids them all", "stop_token_ids")
        if params.excludes:
            self._check_remaining(params)

    def _in_vocabulary(self, param: str, ids: Seq[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
            raise InvalidRequest(f"{param} names a token outside the vocabulary: {self._allowed_ids}", param)

    @property
    def _allowed_ids(self) -> str:
        return f"give ids from 0 to {self._vocab_size - 1}"

    def _check_remaining(self, params: SamplingParams) -> None:
        """Raise InvalidRequest unless some token is allowed wherever the text may be."""
        excluded = {word[-1] for word in params.bad_word_ids} | (self._end_ids(params) if params.min_tokens else set())
        allowed = range(self._vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
        if all(token in excluded for token in allowed):
            message = "every allowed token ends a bad word, or the text before min_tokens: no token would be left"
            raise InvalidRequest(message, "bad_words" if params.allowed_token_ids is None else "allowed_token_ids")

    def _speculation(self, request: Request, can: Capabilities | None = None) -> Speculation:
        """Return how the request speculates. Raises InvalidRequest for a way that this engine does not have."""
        fields = SpeculationFields(
            k=request.k,
            max_k=request.max_k,
            drafter=request.drafter,
            verifier=request.verifier,
            predicted=bool(request.prediction_ids),
            lenience=request.lenience,
            typical=request.typical,
            temperature=request.params.temperature,
            tree=request.tree,
        )
        return resolve(fields, self.capabilities if can is None else can)

    def _checked_speculation(self, request: Request) -> Speculation:
        """Return how a checked request speculates. A drafter that it names, or the server's own, may have left since:
        then nothing is drafted for it."""
        can = replace(self.capabilities, drafters=DRAFTERS)
        try:
            return self._speculation(request, can)
        except InvalidRequest:
            return self._speculation(request, replace(can, drafter="model"))

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        return (frozenset() if params.ignore_eos else self.eos_ids) | frozenset(params.stop_token_ids)

    def _detokenizer(self, prompt: list[int], *, skip_special_tokens: bool) -> Detokenizer:
        tokenizer = self._tokenizer
        if skip_special_tokens:
            return Detokenizer(tokenizer.decode, prompt, tokenizer.special_ids)
        return Detokenizer(partial(tokenizer.decode, skip_special_tokens=False), prompt)

    def sequence(self, request: Request, handle: int, arrived: float) -> Sequence:
        """Turn a checked request into a waiting sequence. arrived: monotonic seconds. Draws a seed if it has none."""
        params, plan = request.params, self._checked_speculation(request)
        seed = secrets.randbelow(SEED_RANGE) if params.seed is None else params.seed
        prompt = list(request.prompt_ids)
        detokenizer = self._detokenizer(prompt, skip_special_tokens=params.skip_special_tokens)
        text = TextStream(detokenizer, params.stop, include=params.include_stop_str_in_output)
        within = min((t for t in (request.deadline_s, self._config.request_timeout_s) if t is not None), default=None)
        record = RequestRecord(
            request.id,
            seed,
            len(prompt),
            plan.k_max,
            arrived=arrived,
            verifier=plan.verifier,
            drafter=plan.drafter,
            lenience=request.lenience,
            typical=request.typical,
            policy=self.policy.name,
            fixed_k=plan.k,
        )
        return Sequence(
            handle=handle,
            request_id=request.id,
            tokens=prompt,
            num_prompt=len(prompt),
            params=params,
            k=plan.k,
            key=sequence_key(seed, request.prompt_index, request.choice_index),
            max_len=self._max_model_len,
            text=text,
            record=record,
            end_ids=self._end_ids(params),
            verifier=plan.verifier,
            drafter=plan.drafter,
            max_k=request.max_k,
            policy_drafts=self.policy.drafts,
            prediction=request.prediction_ids,
            lenience=request.lenience,
            typical=request.typical,
            tree=plan.tree,
            tree_depth=plan.tree_depth,
            takes_drafts=request.k is None and request.drafter is None and request.max_k != 0,
            cache_salt=request.cache_salt,
            group=request.group or request.id,
            deadline=None if within is None else record.arrived + within,
        )
