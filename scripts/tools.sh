#!/bin/sh
# What the tests need besides Python and an engine: a registry, mmdebstrap, jq, git, an ssh server, ip. `make tools`.
# Installs what is missing on Debian and Ubuntu as root, and starts no service; elsewhere it says what to install.
# Exit status: 0 all there, 9 something is missing.
set -eu

packages=
add() { command -v "$1" >/dev/null 2>&1 || packages="$packages $2"; }
add docker-registry docker-registry
add mmdebstrap mmdebstrap
add jq jq
add git git
add sshd openssh-server
add ip iproute2
# Ubuntu does not have the keys that mmdebstrap checks Debian's packages with
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e "$keyring" ] || packages="$packages debian-archive-keyring"
[ -n "$packages" ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    {
        echo "tools: programs that the tests need are missing"
        echo "  found: no$packages"
        echo "  do:    install the Debian packages$packages, or run 'make tools' as root on Debian or Ubuntu"
    } >&2
    exit 9
fi
echo "tools: installing$packages"
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get -qq update
# shellcheck disable=SC2086 # names of packages
DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends -y $packages
[ -e "$keyring" ] || { echo "tools: $keyring is still missing" >&2; exit 9; }
for program in docker-registry mmdebstrap jq git sshd ip; do
    command -v "$program" >/dev/null 2>&1 || { echo "tools: $program is still not on PATH" >&2; exit 9; }
done
