"""Shared by all benchmarks: arguments, prompts, the description of machine, models and workload, the report."""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from transformers.utils import logging as transformers_logging

from benchmarks.prompts import builtin_prompts, file_prompts
from benchmarks.stats import REPETITION_LIMIT, repeated_ngram_share, table
from engine.config import DTYPES, EngineConfig
from engine.engine import Engine
from engine.models.tokenizer import Tokenizer
from policies.config import PolicyConfig, PolicyName
from policies.control import SpecControl

ChosenBy = PolicyName | Literal["trees"]  # a policy; trees: goodput that may draw trees
Spec = int | ChosenBy  # a fixed k, 0 for plain decoding; or what chooses the drafts
POLICIES: tuple[ChosenBy, ...] = ("heuristic", "optimal", "confidence", "goodput", "trees")
MAX_K = EngineConfig("").max_spec_length  # the largest k of a policy, unless a larger fixed k runs beside it
STEP_TOKENS = 512  # token budget of a pass; more where one verification of every sequence needs it
SHAPE_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments every benchmark takes."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True, help="directory of a Hugging Face checkpoint")
    p.add_argument("--draft", required=True, help="directory of its draft model")
    p.add_argument("--prompts", type=Path, help="text file, one prompt per line; default: built-in")
    p.add_argument("--prompts-count", type=positive, default=16, help="number of prompts (default %(default)s)")
    p.add_argument("--max-tokens", type=positive, default=64, help="tokens emitted per prompt (default %(default)s)")
    p.add_argument("--threads", type=positive, help="CPU threads; default: torch's own")
    p.add_argument("--dtype", choices=DTYPES, default="float32")
    p.add_argument("--device", default="cpu")
    p.add_argument("--json", action="store_true", help="end with the report as one JSON line")
    return p


def add_timing_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--concurrency", type=concurrency_list, default=[1], help="sequences that run together, such as 1,8")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--repeats", type=positive, default=3, help="medians are over repeats (default %(default)s)")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def spec_list(text: str) -> list[int]:
    """The text off,2,4 → [0, 2, 4]. Plain decoding always comes first, as the baseline of every ratio."""
    values = [0 if part == "off" else int(part) for part in text.split(",")]
    if min(values) < 0:
        raise argparse.ArgumentTypeError("drafts per round cannot be negative")
    return [0, *sorted(set(values) - {0})]


def policy_list(text: str) -> list[Spec]:
    """The text goodput,4,off → [0, 4, "goodput"]: as spec_list, then the policies in the order of POLICIES."""
    parts = text.split(",")
    numbers = spec_list(",".join([part for part in parts if part not in POLICIES] or ["off"]))
    return [*numbers, *(name for name in POLICIES if name in parts)]


def concurrency_list(text: str) -> list[int]:
    return sorted({positive(part) for part in text.split(",")})


def spec_name(spec: Spec) -> str:
    return str(spec) if spec else "off"


def policy(spec: Spec) -> PolicyConfig:
    """The policy for a spec: plain decoding and a fixed k are policies too."""
    if spec == "trees":
        return PolicyConfig("goodput", trees=True)
    if isinstance(spec, str):
        return PolicyConfig(spec)
    return PolicyConfig("fixed", k=spec) if spec else PolicyConfig("off")


class Chooser:
    """Switches one engine between variants by name. Each variant learns from its own rounds and keeps its knowledge."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._timings = engine.speculator.control.timings
        self._controls: dict[str, SpecControl] = {}

    def use(self, name: str, spec: Spec) -> None:
        """Use a variant from the next round on. No sequence should be running."""
        if name not in self._controls:
            self._controls[name] = SpecControl(policy(spec), self._engine.max_spec_length, self._timings)
        self._engine.speculator.control = self._controls[name]
        self._engine.configure(policy(spec))


@dataclass(frozen=True)
class Workload:
    """The prompts of a run, as token ids so that every system gets the same."""

    prompts: list[list[int]]
    source: str

    def describe(self, **more: object) -> dict[str, object]:
        lengths = [len(prompt) for prompt in self.prompts]
        return {"prompts": len(lengths), "source": self.source, "prompt_tokens": [min(lengths), max(lengths)], **more}


def prepare(args: argparse.Namespace) -> Workload:
    """Set the process up (threads, quiet libraries) and load the prompts. Raises ValueError when there are none."""
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    tokenizer = Tokenizer(args.target)
    if args.prompts is None:
        return Workload(builtin_prompts(tokenizer, args.prompts_count), "held-out standard library files")
    return Workload(file_prompts(tokenizer, args.prompts)[: args.prompts_count], args.prompts.name)


def engine_config(args: argparse.Namespace, specs: Sequence[Spec], max_running: int, waiting: int) -> dict[str, Any]:
    """Keyword arguments of LLM for an engine that can run all of `specs`. It starts with the last one's policy."""
    longest = max(MAX_K if isinstance(spec, str) else spec for spec in specs)
    return {
        "device": args.device,
        "dtype": args.dtype,
        "threads": args.threads,
        "policy": policy(specs[-1]),
        "max_spec_length": longest,
        "max_running": max_running,
        "max_waiting": waiting,
        "max_step_tokens": max(STEP_TOKENS, max_running * (1 + longest)),
    }


def describe_machine(device: str) -> dict[str, object]:
    """Processor, cores this process may use, threads, versions, and the load others put on the machine."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_1m": round(os.getloadavg()[0], 2),
        "accelerator": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe_model(directory: str, dtype: str) -> dict[str, object]:
    """Name, shape and stored parameters of a checkpoint, and the dtype it runs in."""
    root = Path(directory)
    config = json.loads((root / "config.json").read_text("utf-8"))
    shape = {name: config[name] for name in SHAPE_FIELDS if name in config}
    count = 0
    for path in root.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            count += sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())  # noqa: SIM118
    return {"name": f"{root.resolve().parent.name}/{root.resolve().name}", "parameters": count, "dtype": dtype, **shape}


def describe_run(args: argparse.Namespace, benchmark: str, workload: dict[str, object]) -> dict[str, object]:
    """The head of a report: what ran where. Call it before the measurement, for the load it records."""
    models = {role: describe_model(getattr(args, role), args.dtype) for role in ("target", "draft")}
    return {"benchmark": benchmark, "machine": describe_machine(args.device), "models": models, "workload": workload}


def repetition(outputs: Sequence[Sequence[int]]) -> dict[str, object]:
    """Share of repeated 8-grams, and whether it reaches the limit."""
    share = repeated_ngram_share(outputs)
    return {"repeated_8grams": round(share, 4), "repetitive": share >= REPETITION_LIMIT}


def print_report(report: dict[str, Any], tables: Sequence[Sequence[dict[str, object]]], as_json: bool) -> None:
    """Head, tables, the warning about repetition if it is due, and the JSON line when asked for."""
    print("machine  ", report["machine"])
    for role, model in report["models"].items():
        print(f"{role:9}", model)
    print("workload ", report["workload"])
    for rows in tables:
        print("\n" + table(rows))
    text = report.get("text")
    if text:
        print(f"\nrepeated 8-grams in the plain output: {text['repeated_8grams']:.1%}")
    if text and text["repetitive"]:
        print(f"WARNING: repetitive text (limit {REPETITION_LIMIT:.0%}): α and speedups may not hold for other text")
    if as_json:
        print(json.dumps(report))
