"""The operator's settings: in serve_config.yaml, or as `serve run deployments.build:build target=DIR`.

Only this module reads the application's arguments. Arguments of the command line are strings, so "4" means 4 here,
"false" means false, and "none" or "" means none.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from app.cross_origin import check_origins
from app.main import BODY_TIMEOUT_S
from app.telemetry.tracer import TraceConfig, TraceLevel
from engine.config import (
    CacheKind,
    EngineConfig,
    GenerationConfig,
    PolicyConfig,
    PolicyName,
    ProductForms,
    WeightForm,
    can_capture_graphs,
)
from engine.loading.hub_id import parse_hub_id
from engine.types import DrafterName, Verifier

ROOT = Path(__file__).resolve().parent.parent
DEMO_TARGET = "models/demo/target"
DEMO_DRAFT = "models/demo/eagle"

Device = Literal["cpu", "cuda"]

TRACE_ID = "{trace_id}"  # stands for the trace's id in trace_viewer_url


NOTHING = ("", "none", "null")  # what stands for none in an argument of the command line


def _none(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() in NOTHING else value


def _not_a_bool(value: Any) -> Any:
    """Refuse YAML's `yes`, which is true and which pydantic would read as 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def _off(value: Any) -> Any:
    """Return "off" for YAML's `off`, which is false."""
    return "off" if value is False else value


def _tags(value: Any) -> Any:
    """Split the two tags of a text at the space between them."""
    value = _none(value)
    return value.split() if isinstance(value, str) else value


def _names(value: Any) -> Any:
    """Read names: a list, or a text with spaces between them."""
    value = _none(value)
    return value.split() if isinstance(value, str) else () if value is None else value


def _trace_viewer(url: str | None) -> str | None:
    """Check the URL by which the live page links to a trace. Raises ValueError, which pydantic reports."""
    if url is not None and not (url.startswith(("http://", "https://")) and TRACE_ID in url):
        raise ValueError(f"must be an http or https URL with {TRACE_ID} in place of the trace's id")
    return url


def _origins(value: Any) -> Any:
    """Read origins: a list, or a text with spaces between them. Raises ValueError for a text that is no origin."""
    origins = _names(value)
    check_origins(origins)
    return tuple(origins)


def _template(choice: str | None) -> str | None:
    """Return a file's path in full. A name of the checkpoint's templates has neither a slash nor a suffix."""
    return _resolve(choice) if choice is not None and ("/" in choice or choice.endswith(".jinja")) else choice


Tag = Annotated[str, Field(min_length=1)]
CountSetting = Annotated[int, BeforeValidator(_not_a_bool), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(_not_a_bool), Field(ge=1)]
Number = Annotated[float, BeforeValidator(_not_a_bool), Field(gt=0, allow_inf_nan=False)]
ShareSetting = Annotated[float, BeforeValidator(_not_a_bool), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_not_a_bool), Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """The operator's settings for chats."""

    template: str | None = None  # a name of the checkpoint's templates or a file; None: the checkpoint's default
    reasoning_tags: tuple[str, str] | None = None  # around the model's reasoning; None: it stays in the text


DEFAULT_CHAT = ChatConfig()


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """The settings of a replica's HTTP edge."""

    model_name: str  # as clients know it
    traces: TraceConfig
    api_key_file: str | None  # on the replica's machine
    body_timeout_s: float
    chat: ChatConfig = DEFAULT_CHAT
    trace_viewer_url: str | None = None  # with {trace_id} in place of the id; None: the live page links to no traces
    allowed_origins: tuple[str, ...] = ()  # whose web pages may call the server


PolicySetting = Annotated[PolicyName, BeforeValidator(_off)]


class PolicySettings(BaseModel):
    """The settings that may change while a replica serves: its deployment's `user_config`. Raises ValidationError."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: PolicySetting = "goodput"
    k: CountSetting = 5  # k of policy fixed, and the first k of policy heuristic
    max_k: Annotated[CountSetting | None, BeforeValidator(_none)] = None  # of any policy; none: max_spec_length
    threshold: ShareSetting = 0.4  # policy confidence: a draft ends before its joint probability falls below this
    hysteresis: ShareSetting = 0.02  # policy goodput: a plan is kept unless another promises this share more goodput
    probe_share: ShareSetting = 0.01  # policy goodput: share of time for probes, which learn whether drafts pay again
    trees: bool = False  # policy goodput: whether a draft model's drafts may be trees
    draft: Annotated[str | None, BeforeValidator(_none)] = None  # none: no draft; left out: the draft of `args`

    @model_validator(mode="after")
    def _fits_the_policy(self) -> Self:
        self.freeze()
        return self

    def draft_of(self, config: EngineConfig) -> str | None:
        """Return the draft that serves in place of the one that the replica was started with. None: no draft.

        Raises ConfigError for one that conflicts with the configuration.
        """
        if "draft" not in self.model_fields_set:
            return config.draft
        return config.with_draft(None if self.draft is None else _checkpoint(self.draft)).draft

    def freeze(self) -> PolicyConfig:
        return PolicyConfig(
            name=self.policy,
            k=self.k,
            max_k=self.max_k,
            threshold=self.threshold,
            hysteresis=self.hysteresis,
            probe_share=self.probe_share,
            trees=self.trees,
        )


class Settings(BaseModel):
    """The application's arguments. The builder checks them before anything starts: an unknown name or a conflict ends
    the start with the reason. `foretoken serve --help` shows the texts below the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    target: Annotated[str, Field(min_length=1)] = DEMO_TARGET
    """directory of the target's checkpoint (a relative one is below the repository's root), or a hub id:
    owner/name[@revision]"""
    draft: Annotated[str | None, BeforeValidator(_none)] = None
    """the draft's checkpoint; none: no draft model. The embedded target has the embedded draft"""
    drafts: Annotated[tuple[str, ...], BeforeValidator(_names)] = ()
    """checkpoints of several drafts, separated by spaces, in place of draft: drafter merged asks all of them, drafter
    model the first"""
    model_name: Annotated[str | None, BeforeValidator(_none)] = None
    """what clients call the model; none: "demo" for the embedded pair, else the hub id or the directory's name"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if Ray has a GPU to give"""
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on CPU, bfloat16 on CUDA, float16 on a GPU without bfloat16"""
    target_weights: WeightForm = "as_is"
    """int8, int4, fp8: quantised at load; fp8 only on CUDA. int4 takes the least memory; on a CPU it reads prompts and
    verifies drafts more slowly than int8"""
    draft_weights: WeightForm = "as_is"
    """as target_weights"""
    quantize_head: bool = True
    """whether quantised weights include the product that gives the logits"""
    products: ProductForms = "auto"
    """the layout of weights on a CPU. auto: the fastest ones, measured at load, with up to two copies of each weight;
    packed: one copy for oneDNN, the same bits at every start; plain: one copy as it is stored"""
    deterministic: bool = False
    """true: with verifier match a seeded text has the same tokens for any k, batch and prompt chunks, in bfloat16 too.
    Slower; only on CPU, and not with sliding windows or experts"""
    graphs: bool | None = None
    """whether rounds in which every stream decodes run as captured graphs, which need CUDA and a paged cache. null:
    where they can"""
    drafter: Annotated[Literal["auto", "off", DrafterName], BeforeValidator(_off)] = "auto"
    """for requests that name no drafter. auto: the draft model if there is one; off: the same as policy off"""
    verifier: Verifier = "match"
    """for requests that name no verifier"""
    policy: PolicySetting = "goodput"
    """chooses k, the number of drafts, in every round; the deployment's user_config overrides it"""
    spec_length: CountSetting = 5
    """k of policy fixed, and the first k of policy heuristic"""
    max_spec_length: CountSetting = 16
    """the largest k of any policy or request"""
    max_running: Positive = 16
    """sequences that run at once"""
    max_waiting: CountSetting = 48
    """admitted sequences that wait for a place; further ones get 429"""
    max_model_len: Annotated[Positive | None, BeforeValidator(_none)] = None
    """tokens of a prompt and its output together; none: what the target allows, at most 4,096"""
    max_step_tokens: Positive = 512
    """target tokens of one pass"""
    prefill_chunk: Annotated[Positive | None, BeforeValidator(_none)] = None
    """most prompt tokens in a pass that also serves running streams; none: chosen for the device"""
    cache: CacheKind = "paged"
    """paged: blocks as needed; slotted: max_model_len tokens for every sequence"""
    block_size: Annotated[Positive | None, BeforeValidator(_none)] = None
    """tokens of a block; none: chosen for the models"""
    kv_tokens: Annotated[Positive | None, BeforeValidator(_none)] = None
    """tokens that each model's cache has room for; none: from memory_fraction"""
    memory_fraction: Annotated[Number | None, BeforeValidator(_none)] = None
    """share of the device's memory for weights, activations and caches; none: the engine chooses"""
    prefix_cache: bool = True
    """whether requests share the memory of what their prompts have in common"""
    suffix_tokens: CountSetting = 65_536
    """tokens of finished outputs from which drafter suffix guesses for later requests of the same API key; 0: none"""
    max_demand: Number = 8.0
    """admitted requests may need so many times the tokens that the cache holds"""
    generation_config: GenerationConfig = "auto"
    """auto: the sampling fields of the target's generation_config.json are the defaults of requests"""
    max_prompt_tokens: Positive = 131_072
    """prompt tokens of one request, all its prompts together"""
    request_timeout_s: Annotated[Number | None, BeforeValidator(_none)] = None
    """longest time of any request in seconds; none: no limit"""
    body_timeout_s: Number = BODY_TIMEOUT_S
    """seconds from the start of a request to the end of its body"""
    drain_s: ShareSetting = 30.0
    """seconds that running requests get after SIGINT or SIGTERM"""
    threads: Annotated[Positive | None, BeforeValidator(_none)] = None
    """CPU threads of the engine; none: on CPU as many of num_cpus as pay, measured at the start"""
    num_cpus: Number = 1.0
    """CPUs that Ray reserves per replica. `foretoken serve`, which has one replica, reserves all that there are"""
    api_key_file: Annotated[str | None, BeforeValidator(_none)] = None
    """one API key per line; none: no key is needed"""
    allowed_origins: Annotated[tuple[str, ...], BeforeValidator(_origins)] = ()
    """origins whose web pages may call the server, separated by spaces, such as "https://chat.example.org"; "*": all"""
    chat_template: Annotated[str | None, BeforeValidator(_none)] = None
    """a file (*.jinja), or a name of the checkpoint's templates; none: the checkpoint's default"""
    reasoning_tags: Annotated[tuple[Tag, Tag] | None, BeforeValidator(_tags)] = None
    """the two tags around the model's reasoning, such as "<think> </think>"; none: chats do not tell it apart"""
    trace_level: Annotated[TraceLevel, BeforeValidator(_off)] = "packed"
    """what traces hold: docs/operations.md, Traces"""
    trace_steps: Fraction = 0.0
    """share of the engine's steps that get a trace of their own"""
    trace_viewer_url: Annotated[str | None, BeforeValidator(_none), AfterValidator(_trace_viewer)] = None
    """where the live page's trace ids lead, such as http://localhost:16686/trace/{trace_id}; none: nowhere"""

    @model_validator(mode="before")
    @classmethod
    def _embedded_draft(cls, given: Any) -> Any:
        """The embedded draft is for the embedded target only: a target that is named alone has no draft."""
        named = isinstance(given, dict) and not {"target", "draft", "drafts"}.isdisjoint(given)
        return given if named or not isinstance(given, dict) else {**given, "draft": DEMO_DRAFT}

    @model_validator(mode="after")
    def _fits_the_engine(self) -> Self:
        """Let the engine check the fields for conflicts, so that a conflict ends the build and not each replica."""
        self.freeze("cuda" if self.device == "cuda" else "cpu")
        return self

    @property
    def hint(self) -> str | None:
        """What to tell an operator who named a target and said nothing of a draft."""
        if not self.model_fields_set.isdisjoint({"draft", "drafts"}):
            return None
        return "no draft is named, so decoding is plain: name a smaller model of the same family as draft, or none"

    @property
    def name(self) -> str:
        """The model's name for clients: model_name, a hub id without its revision, "demo" for the embedded pair, or the
        target directory's name."""
        if self.model_name:
            return self.model_name
        if hub_id := parse_hub_id(_checkpoint(self.target)):
            return hub_id.name
        target = Path(os.path.abspath(_resolve(self.target)))  # does not follow links: a link's name is the operator's
        return "demo" if target == ROOT / DEMO_TARGET else target.name

    def policy_settings(self) -> PolicySettings:
        """Return the first user_config: the settings that may change while a replica serves."""
        return PolicySettings(policy="off" if self.drafter == "off" else self.policy, k=self.spec_length)

    def edge(self) -> EdgeConfig:
        return EdgeConfig(
            self.name,
            TraceConfig(self.trace_level, self.trace_steps),
            None if self.api_key_file is None else _resolve(self.api_key_file),
            self.body_timeout_s,
            ChatConfig(_template(self.chat_template), self.reasoning_tags),
            self.trace_viewer_url,
            self.allowed_origins,
        )

    def freeze(self, device: Device) -> EngineConfig:
        """Return the engine's configuration for this device. Raises ConfigError for a conflict."""
        return EngineConfig(
            target=_checkpoint(self.target),
            draft=None if self.draft is None else _checkpoint(self.draft),
            drafts=tuple(map(_checkpoint, self.drafts)),
            drafter=None if self.drafter == "auto" or self.drafter == "off" else self.drafter,
            verifier=self.verifier,
            device=device,
            dtype=self.dtype,
            target_weights=self.target_weights,
            draft_weights=self.draft_weights,
            quantize_head=self.quantize_head,
            products=self.products,
            deterministic=self.deterministic,
            graphs=can_capture_graphs(device, self.cache) if self.graphs is None else self.graphs,
            policy=self.policy_settings().freeze(),
            max_spec_length=self.max_spec_length,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_model_len=self.max_model_len,
            max_step_tokens=self.max_step_tokens,
            prefill_chunk=self.prefill_chunk,
            cache=self.cache,
            block_size=self.block_size,
            kv_tokens=self.kv_tokens,
            memory_fraction=self.memory_fraction,
            prefix_cache=self.prefix_cache,
            suffix_tokens=self.suffix_tokens,
            max_demand=self.max_demand,
            max_prompt_tokens=self.max_prompt_tokens,
            generation_config=self.generation_config,
            request_timeout_s=self.request_timeout_s,
            threads=self.threads,
            most_threads=max(1, int(self.num_cpus)) if device == "cpu" else None,
        )


def _checkpoint(given: str) -> str:
    """A checkpoint's absolute path, or its hub id where there is no directory of that name, here or in the working
    directory. The replica's own working directory does not matter."""
    path = _resolve(given)
    hub_id = None if Path(path).is_dir() else parse_hub_id(given)
    if hub_id is not None:
        return hub_id.url
    return path if Path(path).is_dir() or not Path(given).is_dir() else os.path.abspath(given)


def _resolve(directory: str) -> str:
    return str(ROOT / Path(directory).expanduser())
