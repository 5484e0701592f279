#!/usr/bin/env bash
# What the tests in tests/external run beside the server: Chromium with its driver, and Prometheus with promtool.
# Installs from Debian's archive what is missing, as root or with a sudo that asks for no password. Where that cannot be
# done it says so and ends well: the tests that need it are then skipped, with the reason.
set -euo pipefail
cd "$(dirname "$0")/.."

external=.venv/external # tests/external/conftest.py looks here first

as_root() {
    if [ "$(id -u)" = 0 ]; then
        DEBIAN_FRONTEND=noninteractive "$@"
    else
        sudo -n DEBIAN_FRONTEND=noninteractive "$@"
    fi
}

has() {
    [ -x "$external/usr/bin/$1" ] || command -v "$1" > /dev/null
}

# Unpacked, not installed: the package's installation would start a service.
unpack_prometheus() {
    local folder unpacked=0
    folder=$(mktemp -d)
    { (cd "$folder" && apt-get download -qq prometheus) && mkdir -p "$external" &&
        dpkg -x "$folder"/prometheus_*.deb "$external"; } || unpacked=1
    rm -r "$folder"
    return $unpacked
}

# Each step says by itself whether it failed: what runs before || does not end by `set -e`.
install() {
    as_root apt-get update -qq || return
    has prometheus && has promtool || unpack_prometheus || return
    has chromium && has chromedriver || as_root apt-get install -y -qq --no-install-recommends chromium chromium-driver
}

missing() {
    for program in chromium chromedriver prometheus promtool; do
        has "$program" || echo -n " $program"
    done
}

wanted=$(missing)
[ -n "$wanted" ] || exit 0

why=
if ! command -v apt-get > /dev/null; then
    why="there is no apt-get"
elif ! as_root true 2> /dev/null; then
    why="this is not root, and there is no sudo that asks for no password"
else
    install || why="apt-get failed"
fi
left=$(missing)
[ -z "$left" ] || echo "not installed:$left (${why:-no package has it})"
