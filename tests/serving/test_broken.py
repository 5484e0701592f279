"""A checkpoint that only a replica finds broken ends the launcher with status 1 and with the engine's own reason.

tests/deployments/test_mistakes.py has those that are found before Ray starts.
"""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.conftest import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.proofs]

CONFIG = """
http_options: {host: 127.0.0.1, port: %d}
applications:
  - {name: broken, import_path: deployments.build:build, args: {target: %s, draft: none}}
"""


def test_the_launcher_ends_with_the_reason(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(ROOT / "models/demo/target", target)
    config = json.loads((target / "config.json").read_text("utf-8"))
    (target / "config.json").write_text(json.dumps(config | {"intermediate_size": 500}), "utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = tmp_path / "serve.yaml"
    file.write_text(CONFIG % (port, target), "utf-8")
    command = [sys.executable, "-m", "deployments.launch", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"foretoken: application broken: {target}: model.layers.0.mlp.gate_proj.weight has shape")
    assert "Traceback" not in done.stdout
