#!/usr/bin/env bash
# Installs the programs that tests/external needs: Chromium with its driver, and Prometheus with promtool.
# Takes them from Debian's archive, as root or with a sudo that needs no password. If that is not possible, it prints the
# reason and exits with status 0; pytest then skips the tests that need a missing program.
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

# Each step returns its own failure, because `set -e` does not act on the left side of ||.
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

[ -n "$(missing)" ] || exit 0

reason=
if ! command -v apt-get > /dev/null; then
    reason="there is no apt-get"
elif ! as_root true 2> /dev/null; then
    reason="run it as root, or with a sudo that needs no password"
else
    install || reason="apt-get failed"
fi
still_missing=$(missing)
[ -z "$still_missing" ] || echo "not installed:$still_missing (${reason:-no package provides it})"
