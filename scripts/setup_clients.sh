#!/usr/bin/env bash
# Installs the clients that tests/external/clients runs, each into an environment of its own below $FORETOKEN_CLIENTS or
# .cache/clients. tests/external/clients/requirements has one file per client. `oldest` is no client: it holds the oldest
# versions of what the engine needs.
# Usage: setup_clients.sh [NAME...]; without names, all. A client that cannot be installed in time leaves the reason in
# NAME.reason, and pytest skips its test. The exit status is 0.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${FORETOKEN_CLIENTS:-.cache/clients}
requirements=tests/external/clients/requirements
python=.venv/bin/python
uv=$folder/.uv/bin/uv
total_s=600 # for everything; a busy machine took 178 s for all seven
sharing_torch="guidellm lm-eval oldest" # these take torch and what else they lack from .venv, which saves gigabytes

# pip's settings of this machine, for uv, which does not read them.
of_pip() {
    "$python" -m pip config get "global.$1" 2> /dev/null || true
}
export UV_CACHE_DIR=$folder/.uv-cache UV_PYTHON_DOWNLOADS=never UV_HTTP_TIMEOUT=20 UV_HTTP_RETRIES=1 UV_NO_CONFIG=1
index=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(of_pip index-url)}}
[ -z "$index" ] || export UV_DEFAULT_INDEX=$index
certificates=${SSL_CERT_FILE:-${PIP_CERT:-$(of_pip cert)}}
[ -z "$certificates" ] || export SSL_CERT_FILE=$certificates

# What is left of the time, in seconds. A limit of 0 would be none.
left_s() {
    echo $((total_s > SECONDS ? total_s - SECONDS : 1))
}

get_uv() {
    timeout "$(left_s)" "$python" -m pip install -q --disable-pip-version-check --retries 1 --timeout 20 \
        --target "$folder/.uv" uv
}

# torch is never downloaded.
install() {
    local name=$1
    "$uv" venv -q --clear --python "$python" "$folder/$name" &&
        timeout "$(left_s)" "$uv" pip install -q --python "$folder/$name/bin/python" \
            --overrides <(echo "torch; sys_platform == 'never'") -r "$requirements/$name.txt" || return
    [[ " $sharing_torch " != *" $name "* ]] || share "$name" || return
    cp "$requirements/$name.txt" "$folder/$name/.ready"
}

# The environment's own packages go before those of .venv.
share() {
    local site='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$python" -c "$site" > "$("$folder/$1/bin/python" -c "$site")/project.pth"
}

# Why the client $1 is missing, from the exit status $2 of its installation. pytest prints it.
give_reason() {
    local reason="the installation took more than $total_s s"
    [ "$2" = 124 ] || reason=$(grep -o '[^ ].*' "$folder/log" | tail -1)
    echo "$reason" > "$folder/$1.reason"
    echo "not installed: $1 ($reason)"
}

mkdir -p "$folder"
[ $# -gt 0 ] || set -- $(basename -s .txt "$requirements"/*.txt)
without_uv=0
[ -x "$uv" ] || get_uv 2> "$folder/log" || without_uv=$?
for name; do
    ! cmp -s "$requirements/$name.txt" "$folder/$name/.ready" || continue
    rm -rf "$folder/$name" "$folder/$name.reason"
    if [ $without_uv != 0 ]; then
        give_reason "$name" $without_uv
    else
        install "$name" 2> "$folder/log" || give_reason "$name" $?
    fi
done
