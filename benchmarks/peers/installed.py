"""The peers that scripts/setup_peers.sh installs: vLLM and llama.cpp, each as worker processes."""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.peers.systems import System, TimedOutputs, fixed_drafts
from benchmarks.peers.worker import Worker
from benchmarks.prompts import Prompts

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = Path(os.environ.get("FORETOKEN_PEERS", ROOT / ".cache" / "peers"))
WORKERS = Path(__file__).resolve().parent / "workers"
VLLM_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
GGUF_KINDS = {"float32": "F32", "bfloat16": "F16", "float16": "F16"}


class Unavailable(RuntimeError):
    """A peer cannot do this work here. The message is the reason."""


class WorkerPool:
    """The started workers. Leaving the context ends them, and SIGTERM leaves it: stopped processes would stay."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self._workers: list[Worker] = []

    def __enter__(self) -> "WorkerPool":
        self._on_end = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, self._on_end)
        for worker in self._workers:
            worker.close()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Worker:
        """Raises WorkerError."""
        worker = Worker(command, environment, self.folder / "logs" / f"{name}.log")
        self._workers.append(worker)
        return worker

    def installed(self, peer: str, path: str) -> Path:
        """Raises Unavailable with what the installation left as its reason."""
        found = self.folder / path
        if not found.exists():
            reason = self.folder / f"{peer}.reason"
            text = reason.read_text("utf-8").strip() if reason.exists() else "run scripts/setup_peers.sh"
            raise Unavailable(f"not installed: {text}")
        return found


def vllm_systems(args: argparse.Namespace, pool: WorkerPool) -> dict[int, list[System]]:
    """Per batch size; one process per k, which serves every batch size. Raises Unavailable, WorkerError."""
    if args.weights != "as_is":
        raise Unavailable("it does not quantise to int8 at load on a CPU")
    systems: dict[int, list[System]] = {batch: [] for batch in args.concurrency}
    for k in [0, *fixed_drafts(args.spec)]:
        drafting = [args.draft, str(k)] if k else []
        worker = vllm_worker(pool, args.target, args.dtype, max(args.concurrency), drafting)
        run = partial(ask, worker, args.max_tokens, k)
        for of_batch in systems.values():
            of_batch.append(System("vLLM", k, run))
    return systems


def vllm_worker(
    pool: WorkerPool, target: str, dtype: str, batch: int, drafting: Sequence[str] = (), *, kv_gib: int = 1
) -> Worker:
    """drafting: a draft model and k. kv_gib: memory for keys and values. Raises Unavailable, WorkerError."""
    python = pool.installed("vllm", "vllm/bin/python")
    if dtype == "float64":
        raise Unavailable("it has no float64")
    threads = torch.get_num_threads()
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    environment = {
        **VLLM_SETTINGS,
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "OMP_NUM_THREADS": str(threads),
    }
    command = [str(python), f"{WORKERS}/vllm_cpu.py", target, dtype, str(batch), *drafting]
    return pool.start(f"vllm-{drafting[1] if drafting else 0}", command, environment)


def llama_systems(args: argparse.Namespace, pool: WorkerPool) -> dict[int, list[System]]:
    """Per batch size: k > 0 for one sequence at a time, as its server does. Raises Unavailable, WorkerError."""
    modules = pool.installed("llama", "llama/node_modules/node-llama-cpp").parent
    python = pool.installed("gguf", "gguf/bin/python")
    node = shutil.which("node")
    if node is None:
        raise Unavailable("there is no node")
    if args.dtype == "float64":
        raise Unavailable("it has no float64")
    kind = "Q8_0" if args.weights == "int8" else GGUF_KINDS[args.dtype]
    files = [gguf_file(python, Path(model), kind, pool.folder / "gguf") for model in (args.target, args.draft)]
    cache = "F32" if kind == "F32" else "F16"
    widest = str(max(args.concurrency))
    paths = [f"{WORKERS}/llama_cpp.mjs", str(modules), *map(str, files)]
    command = [node, *paths, cache, str(torch.get_num_threads()), widest]
    worker = pool.start("llama", command, {})
    systems = {batch: [System("llama.cpp", 0, partial(ask, worker, args.max_tokens, 0))] for batch in args.concurrency}
    for k in fixed_drafts(args.spec):
        if 1 in systems:
            systems[1].append(System("llama.cpp", k, partial(ask, worker, args.max_tokens, k)))
    return systems


def ask(worker: Worker, max_tokens: int, k: int, prompts: Prompts) -> TimedOutputs:
    reply = worker.ask(prompts=[list(prompt) for prompt in prompts], max_tokens=max_tokens, k=k)
    return TimedOutputs(reply["seconds"], reply["tokens"])


def gguf_file(python: Path, checkpoint: Path, kind: str, folder: Path) -> Path:
    """The checkpoint as GGUF; written only if it changed. Raises Unavailable for a checkpoint that cannot be one."""
    source = checkpoint.resolve()
    weights = source / "model.safetensors"
    if not weights.exists():
        raise Unavailable(f"{checkpoint} has no model.safetensors")
    stamp = hashlib.sha256(f"{source} {weights.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    file = folder / f"{source.parent.name}-{source.name}-{kind}-{stamp}.gguf"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        command = [str(python), f"{WORKERS}/write_gguf.py", str(source), str(part), kind]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Unavailable((done.stderr.strip() or "write_gguf.py failed").splitlines()[-1])
        part.rename(file)
    return file
