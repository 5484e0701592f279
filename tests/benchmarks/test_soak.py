"""The soak reads a process's memory as the kernel tells it, and fits a slope to it."""

from itertools import islice
from pathlib import Path

import pytest

from benchmarks.soak import Sample, find_replica, make_bodies, measure, slope

ROLLUP = "0-1 ---p 0 00:00 0 [rollup]\nRss: 3000 kB\nPss: 2500 kB\nPss_Anon: 2000 kB\nPss_File: 400 kB\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """With a replica, process 7, which has a KV cache's file of 8,192 bytes and another file open; and a shell, 8."""
    kv, other = tmp_path / "memfd:kv-cache", tmp_path / "log"
    kv.write_bytes(b"x" * 8192)
    other.write_bytes(b"x" * 8192)
    for pid, name in (("7", b"ray::ServeReplica:foretoken:Replica"), ("8", b"bash\0-c\0ray::ServeReplica")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "cmdline").write_bytes(name)
    (tmp_path / "7" / "smaps_rollup").write_text(ROLLUP, "utf-8")
    (tmp_path / "7" / "status").write_text("Name:\tray\nThreads:\t35\n", "utf-8")
    (tmp_path / "7" / "fd" / "3").symlink_to(kv)
    (tmp_path / "7" / "fd" / "4").symlink_to(other)
    return tmp_path


def test_what_a_process_holds(proc: Path) -> None:
    sample = measure(7, 61.0, 100, proc)
    assert (sample.rss, sample.anon, sample.files) == (3.072, 2.048, 0.4096)
    assert sample.kv == (proc / "memfd:kv-cache").stat().st_blocks * 512 / 1e6
    assert (sample.requests, sample.threads, sample.descriptors) == (100, 35, 2)


def test_the_one_replica_is_found(proc: Path) -> None:
    assert find_replica(proc) == 7
    (proc / "8" / "cmdline").write_bytes(b"ray::ServeReplica:other:Replica")
    with pytest.raises(RuntimeError, match=r"2 replicas on this machine \[7, 8\]: give one as --pid"):
        find_replica(proc)


def samples(*anon: float) -> list[Sample]:
    return [Sample(10.0 * i, 500 * i, 0.0, mb, 0.0, 0.0, 1, 1) for i, mb in enumerate(anon)]


def test_the_slope_is_per_thousand_requests() -> None:
    exact = slope(samples(10, 12, 14, 16))
    assert exact is not None
    assert exact == pytest.approx((4, 4, 4))
    noisy = slope(samples(10, 13, 13, 16))
    assert noisy is not None
    # By hand: 3.6 per 1,000 requests, residual sum of squares 1.8, 4.30 × sqrt(1.8 / 2 / 1.25) = 3.65.
    assert noisy == pytest.approx((3.6, -0.05, 7.25), abs=0.01)
    assert slope(samples(10, 12)) is None


def test_the_mix_repeats_and_has_every_kind() -> None:
    prompts = [list(range(64)), list(range(100, 228))]
    bodies = list(islice(make_bodies(prompts, "demo"), 64))
    assert bodies == list(islice(make_bodies(prompts, "demo"), 64))
    assert bodies != list(islice(make_bodies(prompts, "demo", seed=1), 64))
    for field in ("stream", "leave", "n", "logprobs", "echo", "prediction", "deadline_s", "speculation", "get"):
        assert any(field in body for body in bodies), field
