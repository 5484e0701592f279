"""The engine's configuration: one frozen value, checked when it is made. Imports no torch; settings.py builds it."""

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from engine.types import DRAFTERS, VERIFIERS, DrafterName, Verifier
from policies.config import PolicyConfig as PolicyConfig
from policies.config import PolicyName as PolicyName

DTYPES = ("float64", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
CPU_CHUNK = 40  # measured, docs/log.md
CacheKind = Literal["paged", "slotted"]
WeightForm = Literal["as_is", "int8", "int4", "fp8"]
ProductForms = Literal["auto", "packed", "plain"]
GenerationConfig = Literal["auto", "none"]  # whether generation_config.json gives the defaults of requests


class ConfigError(ValueError):
    """The engine cannot start as configured. The message names both sides of the conflict."""


def can_capture_graphs(device: str, cache: CacheKind) -> bool:
    """Whether an engine with these settings can run rounds as captured graphs."""
    return device != "cpu" and cache == "paged"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that the engine needs to know at start-up. Only the policy and the draft can be replaced later
    (Engine.configure, Engine.put_draft)."""

    target: str  # directory of a Hugging Face checkpoint, or a hub id: owner/name or owner/name@revision
    draft: str | None = None  # None: no draft model, unless there are drafts
    drafts: tuple[str, ...] = ()  # several draft models, in place of draft; the first is drafter "model"
    drafter: DrafterName | None = None  # for requests that do not say; None: "model" if there is a draft, else off
    verifier: Verifier = "match"  # for requests that do not say
    device: str = "cpu"  # cpu, cuda or cuda:N
    dtype: str = "float32"  # one of DTYPES; auto: float32 on CPU, bfloat16 on CUDA, float16 on a GPU without bfloat16
    target_weights: WeightForm = "as_is"  # int8, int4, fp8: quantised at load; fp8 only on CUDA
    draft_weights: WeightForm = "as_is"
    quantize_head: bool = True  # whether quantised weights include the product that gives the logits
    products: ProductForms = "auto"  # auto: measured; packed: oneDNN's layout; plain: one copy as it is stored
    deterministic: bool = False  # a seeded text does not depend, bit for bit, on k, the batch or prompt chunks
    graphs: bool = False  # captured graphs on CUDA
    policy: PolicyConfig = field(default_factory=PolicyConfig)  # chooses k for requests that do not fix their own
    max_spec_length: int = 16  # the largest k of any policy or request
    max_running: int = 16  # sequences that hold a cache slot at once
    max_waiting: int = 48  # admitted requests beyond those; more are refused with Overloaded
    max_model_len: int | None = None  # None: the target's own limit, at most 4,096
    max_step_tokens: int = 512  # target tokens of one pass, prefill chunks and verification together
    prefill_chunk: int | None = None  # most prompt tokens in a pass with decoding sequences; None: see `chunk`
    cache: CacheKind = "paged"
    block_size: int | None = None  # positions per block; None: chosen for the models, see memory/budget.py
    kv_tokens: int | None = None  # positions in each model's cache; None: see memory/budget.py
    memory_fraction: float | None = None  # share of the device's memory for weights, activations and both caches
    prefix_cache: bool = True  # whether requests share the KV of a common prefix of their prompts
    suffix_tokens: int = 65_536  # finished outputs that drafter `suffix` keeps, all tenants' together; some 20 MB
    max_demand: float = 8.0  # admitted requests may need this many times the tokens that the cache holds
    max_prompt_tokens: int = 131_072  # per client's request, each prompt counted once for all n choices
    request_timeout_s: float | None = None  # the longest that a request may take, waiting included; None: no limit
    generation_config: GenerationConfig = "auto"
    threads: int | None = None  # intra-op CPU threads; None: as many of most_threads as pay, measured at the start
    most_threads: int | None = None  # None: torch's own default, and no measurement

    def chunk(self, rows: int) -> int:
        """Return the most prompt tokens in a pass that also verifies `rows` tokens of other sequences.

        By default a CPU reads as many as make the pass take some two times as long. A GPU reads hundreds in the time of
        one token, so it takes as many as fit.
        """
        if self.prefill_chunk is not None:
            return self.prefill_chunk
        return max(CPU_CHUNK, 2 * rows) if self.device == "cpu" else self.max_step_tokens

    def check_policy(self, policy: PolicyConfig) -> None:
        """Raise ConfigError for a policy whose k exceeds max_spec_length, or whose trees `deterministic` rules out."""
        if policy.name in ("fixed", "heuristic") and policy.k > self.max_spec_length:
            raise ConfigError(
                f"policy {policy.name} with k {policy.k} exceeds max_spec_length, which is {self.max_spec_length}"
            )
        if policy.trees and self.deterministic:
            raise ConfigError("policy trees cannot be honoured by a deterministic server: set trees to false")
        if policy.max_k is not None and policy.max_k > self.max_spec_length:
            raise ConfigError(f"max_k {policy.max_k} exceeds max_spec_length, which is {self.max_spec_length}")

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(f"dtype {self.dtype!r} is not one of auto, {', '.join(DTYPES)}")
        if self.device.partition(":")[0] not in DEVICES:
            raise ConfigError(f"device {self.device!r} is not one of {', '.join(DEVICES)}")
        if self.verifier not in VERIFIERS:
            raise ConfigError(f"verifier {self.verifier!r} is not one of {', '.join(VERIFIERS)}")
        if self.drafter is not None and self.drafter not in DRAFTERS:
            raise ConfigError(f"drafter {self.drafter!r} is not one of {', '.join(DRAFTERS)}")
        self._check_drafts()
        self._check_weights()
        if self.generation_config not in get_args(GenerationConfig):
            known = ", ".join(get_args(GenerationConfig))
            raise ConfigError(f"generation_config {self.generation_config!r} is not one of {known}")
        self._check_cache()
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads must be at least 1, not {self.threads}")
        if self.most_threads is not None and self.most_threads < 1:
            raise ConfigError(f"most_threads must be at least 1, not {self.most_threads}")
        if self.max_spec_length < 0:
            raise ConfigError(f"max_spec_length must not be negative, not {self.max_spec_length}")
        self.check_policy(self.policy)
        for name in ("max_running", "max_step_tokens", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_waiting", "suffix_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.max_step_tokens < self.max_running * (1 + self.max_spec_length):
            raise ConfigError(
                f"max_step_tokens {self.max_step_tokens} cannot hold one verification of every sequence: "
                f"max_running {self.max_running} × (1 + max_spec_length {self.max_spec_length})"
            )

    def with_draft(self, draft: str | None) -> "EngineConfig":
        """Return the configuration with another draft, or none, in place of its own.

        Raises ConfigError if several drafts serve, and for a draft that conflicts with other settings.
        """
        if self.drafts:
            raise ConfigError(
                f"draft {draft or 'none'} cannot replace the drafts {', '.join(self.drafts)} while the server runs: "
                "only a single draft can be replaced, so restart with draft in place of drafts"
            )
        return replace(self, draft=draft)

    @property
    def draft_models(self) -> tuple[str, ...]:
        """The checkpoints of all draft models, named by `draft` or `drafts`."""
        return self.drafts if self.draft is None else (self.draft,)

    def _check_drafts(self) -> None:
        if self.draft is not None and self.drafts:
            raise ConfigError(f"draft {self.draft} and drafts {', '.join(self.drafts)} are both set: set one of them")
        if self.drafter == "model" and not self.draft_models:
            raise ConfigError("drafter 'model' needs a draft checkpoint, and draft is not set")
        if self.drafter == "merged" and len(self.drafts) < 2:
            raise ConfigError(f"drafter 'merged' needs at least two draft checkpoints: drafts has {len(self.drafts)}")
        if self.deterministic and len(self.drafts) > 1:
            raise ConfigError(
                "deterministic cannot be honoured with several drafts, which make trees: set draft, or choose false"
            )

    def _check_weights(self) -> None:
        for name in ("target_weights", "draft_weights"):
            form = getattr(self, name)
            if form not in get_args(WeightForm):
                raise ConfigError(f"{name} {form!r} is not one of {', '.join(get_args(WeightForm))}")
            if form == "fp8" and self.device == "cpu":
                raise ConfigError(f"{name} fp8 needs device cuda, not cpu: choose int8 or as_is")
        if self.products not in get_args(ProductForms):
            raise ConfigError(f"products {self.products!r} is not one of {', '.join(get_args(ProductForms))}")
        if self.products == "packed" and (self.device != "cpu" or self.dtype in ("float64", "float16")):
            raise ConfigError(
                f"products packed needs device cpu and dtype float32 or bfloat16, not {self.device} and {self.dtype}: "
                "choose auto"
            )
        if self.deterministic and (self.device != "cpu" or self.products == "plain"):
            raise ConfigError(
                f"deterministic needs device cpu and products auto or packed, not {self.device} and {self.products}"
            )
        if self.graphs and not can_capture_graphs(self.device, self.cache):
            raise ConfigError(f"graphs need device cuda and cache paged, not {self.device} and {self.cache}")
        if self.draft_weights != "as_is" and not self.draft_models:
            raise ConfigError(f"draft_weights {self.draft_weights} needs a draft checkpoint, and draft is not set")

    def _check_cache(self) -> None:
        if self.cache not in get_args(CacheKind):
            raise ConfigError(f"cache {self.cache!r} is not one of {', '.join(get_args(CacheKind))}")
        if self.cache == "slotted":
            given = [n for n in ("block_size", "kv_tokens", "memory_fraction") if getattr(self, n) is not None]
            if given:
                raise ConfigError(
                    f"{', '.join(given)} cannot be honoured by a slotted cache: its slots are max_model_len"
                )
        if self.kv_tokens is not None and self.memory_fraction is not None:
            raise ConfigError("kv_tokens and memory_fraction both say how large the cache is: set one of them")
        for name in ("block_size", "kv_tokens", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction must lie between 0 and 1, not {self.memory_fraction}")
        if not self.max_demand >= 1:
            raise ConfigError(f"max_demand must be at least 1, not {self.max_demand}: one request may need all memory")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ConfigError(f"request_timeout_s must be above 0, not {self.request_timeout_s}")
