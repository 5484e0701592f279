"""What is measured at a start is kept for the same code only."""

from pathlib import Path

import pytest
import torch

from engine.models import product_times
from engine.models.product_times import TimesFile
from engine.profiling import profile_cache
from engine.profiling.kept_files import code_digest
from engine.profiling.profile_cache import ProfileFile
from tests.engine.driving import load
from tests.engine.pairs import Pair


def test_any_change_of_the_engine_or_of_its_memory_gives_another_digest(tmp_path: Path) -> None:
    digests = set[str]()
    for name in ("cache/slots.py", "engine/round.py", "engine/kernels/cpu_code.py", "engine/kernels/cpu_code.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# {len(digests)}", "utf-8")
        code_digest.cache_clear()
        digests.add(code_digest(tmp_path))
    assert len(digests) == 4
    (tmp_path / "README.md").write_text("other files do not count", "utf-8")
    code_digest.cache_clear()
    assert code_digest(tmp_path) in digests
    assert code_digest() not in digests


def test_other_code_has_files_of_its_own(pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = load(pair)
    paths = set[Path]()
    for digest in ("before", "after"):
        for module in (profile_cache, product_times):
            monkeypatch.setattr(module, "code_digest", lambda digest=digest: digest)
        paths |= {ProfileFile([engine.target], 2, 2).path, TimesFile(tmp_path, torch.float32, 1 << 24).path}
    assert len(paths) == 4
