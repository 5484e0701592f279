"""A checkpoint that cannot be served ends the launcher with status 1 and with the engine's own reason."""

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
    target.mkdir()
    config = (ROOT / "models/demo/target/config.json").read_bytes()
    (target / "config.json").write_bytes(config)
    (target / "tokenizer.json").write_bytes((ROOT / "models/demo/target/tokenizer.json").read_bytes())
    (target / "model.safetensors").write_bytes((10**6).to_bytes(8, "little") + b"{}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = tmp_path / "serve.yaml"
    file.write_text(CONFIG % (port, target), "utf-8")
    command = [sys.executable, "-m", "deployments.launch", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 1
    said = [line for line in done.stdout.splitlines() if line.startswith("foretoken: ")]
    assert said == [
        f"foretoken: application broken: {target}/model.safetensors is truncated or no safetensors file: "
        "the header's length is 1,000,000 bytes, the file's 10"
    ]
