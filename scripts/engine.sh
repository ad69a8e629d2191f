#!/bin/sh
# A real Docker engine with buildx for this checkout: `make engine`.
#
#   scripts/engine.sh          engine answers: say what it is, change nothing. Otherwise, on Debian or Ubuntu as root:
#                              install one, start it, prove that it builds. Anywhere else: say what to do, exit 9.
#   scripts/engine.sh --check  only report
#
# ENGINE_DRY_RUN=1 prints what would be done and does nothing; with it ENGINE_ROOT names another root to read from.
# Exit status: 0 ready, 2 usage, 9 no usable engine.
set -eu

DRY_RUN=${ENGINE_DRY_RUN:-}
ROOT=
[ -z "$DRY_RUN" ] || ROOT=${ENGINE_ROOT:-}

SOURCE_FILE=/etc/apt/sources.list.d/buildctl-trixie.sources
PIN_FILE=/etc/apt/preferences.d/buildctl-trixie
CONFIG_FILE=/etc/docker/daemon.json
POLICY_FILE=/usr/sbin/policy-rc.d
LOG_FILE=/var/log/dockerd.log
START_SECONDS=60
ENGINE_PACKAGES="docker.io docker-buildx"
TOOL_PACKAGES="iptables mmdebstrap debian-archive-keyring docker-registry"

say() { printf 'engine: %s\n' "$*"; }

# fail WHAT FOUND TODO
fail() {
    {
        printf 'engine: %s\n' "$1"
        printf '  found: %s\n' "$2"
        printf '  do:    %s\n' "$3"
    } >&2
    exit 9
}

run() {
    if [ -n "$DRY_RUN" ]; then
        printf 'would run: %s\n' "$*"
    else
        "$@"
    fi
}

# write PATH: the new content comes on stdin
write() {
    if [ -n "$DRY_RUN" ]; then
        printf 'would write: %s\n' "$1"
        sed 's/^/    /'
    else
        mkdir -p "$(dirname "$1")"
        cat >"$1"
    fi
}

have() { command -v "$1" >/dev/null 2>&1; }

answers() { have docker && docker info >/dev/null 2>&1; }

# Each `docker` on PATH and whether it knows buildx; plugins are looked up by the client, so the first one may not.
clients() {
    saved_ifs=$IFS
    IFS=:
    for dir in $PATH; do
        [ -x "$dir/docker" ] || continue
        if buildx=$("$dir/docker" buildx version 2>/dev/null); then
            printf '%s (%s)\n' "$dir/docker" "$buildx"
        else
            printf '%s (no buildx)\n' "$dir/docker"
        fi
    done
    IFS=$saved_ifs
}

report() {
    server=$(docker info --format '{{.ServerVersion}}')
    store=$(docker info --format '{{range .DriverStatus}}{{index . 0}}={{index . 1}};{{end}}')
    say "answers: version $server, client $(command -v docker)"
    if ! docker buildx version >/dev/null 2>&1; then
        fail "the docker client knows no buildx" \
            "$(clients | tr '\n' ' ')" \
            "install docker-buildx (docker-buildx-plugin in Docker's own packages); where another docker above knows it, put its folder first in PATH"
    fi
    say "buildx: $(docker buildx version)"
    case $store in
    *driver-type=io.containerd.snapshotter*) say "image store: containerd" ;;
    *)
        say "image store: $(docker info --format '{{.Driver}}') (no containerd store: builds work; cache export and attestations do not)"
        ;;
    esac
    for tool in mmdebstrap docker-registry; do
        have "$tool" || say "note: $tool is not installed (mmdebstrap: bases by bootstrap; docker-registry: the tests)"
    done
}

# Effects, not exit statuses: the file that a build copied must come out of it.
prove() {
    probe=$(mktemp -d)
    printf 'FROM scratch\nCOPY word /\n' >"$probe/Dockerfile"
    date -u +%s >"$probe/word"
    if docker buildx build -q --output "type=local,dest=$probe/out" "$probe" >"$probe/log" 2>&1 </dev/null &&
        cmp -s "$probe/word" "$probe/out/word"; then
        rm -rf "$probe"
        say "builds: yes"
        return
    fi
    found=$(tail -n 5 "$probe/log" | tr '\n' ' ')
    rm -rf "$probe"
    fail "the engine answers, but a two-line build fails" "${found:-another file than the one copied}" \
        "see 'docker info' and $LOG_FILE (or 'journalctl -u docker')"
}

# os_field NAME: a field of os-release, without its quotes
os_field() { sed -n "s/^$1=//p" "$ROOT/etc/os-release" 2>/dev/null | tr -d '"' | head -n 1; }

# mirror CODENAME: "URI [keyring]" of the source that this machine already uses for its own suite
mirror() {
    for file in "$ROOT"/etc/apt/sources.list.d/*.sources; do
        [ -e "$file" ] || continue
        # deb822: stanzas between empty lines; comments and continued lines (an inline key) are left out
        sed '/^#/d' "$file" | awk -v suite="$1" '
            function flush(  i, n, parts) {
                n = split(suites, parts, " ")
                for (i = 1; i <= n; i++)
                    if (parts[i] == suite && types ~ /(^| )deb( |$)/ && enabled !~ /^no$/ && uri != "") {
                        print uri, key; done = 1; exit
                    }
                suites = types = enabled = uri = key = ""
            }
            /^[ \t]*$/ { flush(); next }
            /^[ \t]/ { next }
            {
                name = tolower($1); value = $0; sub(/^[^:]*:[ \t]*/, "", value)
                if (name == "types:") types = value
                else if (name == "suites:") suites = value
                else if (name == "uris:") { split(value, parts, " "); uri = parts[1] }
                else if (name == "enabled:") enabled = tolower(value)
                else if (name == "signed-by:") key = value
            }
            END { if (!done) flush() }'
    done
    for file in "$ROOT"/etc/apt/sources.list "$ROOT"/etc/apt/sources.list.d/*.list; do
        [ -e "$file" ] || continue
        awk -v suite="$1" '
            $1 == "deb" {
                key = ""; line = $0; sub(/^deb[ \t]+/, "", line)
                if (match(line, /^\[[^]]*\]/)) {
                    options = substr(line, 2, RLENGTH - 2); line = substr(line, RLENGTH + 1)
                    if (match(options, /signed-by=[^ \t]+/)) key = substr(options, RSTART + 10, RLENGTH - 10)
                }
                split(line, parts, " ")
                if (parts[2] == suite) print parts[1], key
            }' "$file"
    done
}

# Debian 12's own docker.io has no buildx. Debian 13's packages need libc6 2.34 only and run on it; its runc needs a
# newer libc6 and stays out, as does everything else, by the pin.
add_source() {
    if [ -e "$ROOT$SOURCE_FILE" ] && [ -e "$ROOT$PIN_FILE" ]; then
        say "apt source for Debian 13's docker packages: already there"
        return
    fi
    found=$(mirror bookworm | head -n 1)
    [ -n "$found" ] || fail "no apt source for Debian 13's docker packages" \
        "no 'deb' source for suite bookworm in /etc/apt whose mirror could be used" \
        "add one, or install an engine with buildx by hand (https://docs.docker.com/engine/install/debian/)"
    uri=${found%% *}
    key=${found#* }
    say "adding $SOURCE_FILE: suite trixie of this machine's own mirror, pinned so that only docker comes from it"
    {
        printf 'Types: deb\nURIs: %s\nSuites: trixie\nComponents: main\n' "$uri"
        [ -z "$key" ] || printf 'Signed-By: %s\n' "$key"
    } | write "$SOURCE_FILE"
    write "$PIN_FILE" <<PIN
Package: *
Pin: release n=trixie
Pin-Priority: 1

Package: docker.io docker-cli docker-buildx containerd
Pin: release n=trixie
Pin-Priority: 990
PIN
}

configure() {
    if [ -e "$ROOT$CONFIG_FILE" ]; then
        say "$CONFIG_FILE exists: left as it is"
        return
    fi
    say "writing $CONFIG_FILE: containerd image store"
    printf '{"features": {"containerd-snapshotter": true}}\n' | write "$CONFIG_FILE"
}

# Nothing may start while packages are unpacked: the tests run the registry themselves, and dockerd is started below.
allow_services() { [ -z "${POLICY_OURS:-}" ] || run rm -f "$POLICY_FILE"; }

forbid_services() {
    [ ! -e "$ROOT$POLICY_FILE" ] || return 0
    POLICY_OURS=1
    trap allow_services EXIT
    trap 'exit 130' INT TERM
    printf '#!/bin/sh\nexit 101\n' | write "$POLICY_FILE"
    run chmod 755 "$POLICY_FILE"
}

install_packages() {
    packages=$TOOL_PACKAGES
    if have dockerd; then
        say "dockerd is installed ($(command -v dockerd)): not replaced"
        docker buildx version >/dev/null 2>&1 || say "note: its client knows no buildx"
    else
        case $1 in
        debian-12) add_source && packages="$ENGINE_PACKAGES docker-cli containerd $packages" ;;
        debian-*) packages="$ENGINE_PACKAGES docker-cli $packages" ;;
        *) packages="$ENGINE_PACKAGES $packages" ;;
        esac
        configure
    fi
    missing=
    for package in $packages; do
        if [ -n "$ROOT" ] || ! dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed; then
            missing="$missing $package"
        fi
    done
    [ -n "$missing" ] || return 0
    say "installing:$missing"
    had_registry=
    case $missing in *docker-registry*) ;; *) had_registry=1 ;; esac
    forbid_services
    run apt-get update -q ||
        fail "apt-get update failed" "see its output above" "repair the apt sources or the network, then run this again"
    # shellcheck disable=SC2086 # a list of words
    run env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
        -o Dpkg::Options::=--force-confold $missing ||
        fail "apt-get install failed" "see its output above" "repair what apt names, then run this again"
    allow_services
    POLICY_OURS=
    if [ -z "$had_registry" ] && [ -d "$ROOT/run/systemd/system" ]; then
        run systemctl disable --quiet docker-registry
    fi
}

# started PID: whether dockerd answers within the time, watching that it lives; PID 0 is systemd's
started() {
    left=$START_SECONDS
    while [ "$left" -gt 0 ]; do
        ! answers || return 0
        [ "$1" -eq 0 ] || kill -0 "$1" 2>/dev/null || return 1
        sleep 1
        left=$((left - 1))
    done
    return 1
}

start() {
    if [ -d "$ROOT/run/systemd/system" ]; then
        say "starting docker by systemd"
        run systemctl daemon-reload
        run systemctl enable --quiet --now docker || true
        [ -z "$DRY_RUN" ] || return 0
        started 0 || fail "docker did not start within $START_SECONDS s" \
            "$(journalctl -u docker -n 20 --no-pager 2>&1)" "repair what its log names, then run this again"
        return
    fi
    say "starting dockerd in a session of its own (no systemd here); log: $LOG_FILE"
    if [ -n "$DRY_RUN" ]; then
        printf 'would run: setsid dockerd >>%s 2>&1\n' "$LOG_FILE"
        return
    fi
    # one that is still starting is waited for, not doubled
    pid=$(cat /var/run/docker.pid 2>/dev/null || true)
    if [ -z "$pid" ] || ! kill -0 "$pid" 2>/dev/null; then
        old_lines=$(wc -l 2>/dev/null <"$LOG_FILE" || true)
        setsid dockerd >>"$LOG_FILE" 2>&1 </dev/null &
        pid=$!
    fi
    started "$pid" || fail "dockerd did not answer within $START_SECONDS s or ended" \
        "$(tail -n "+$((${old_lines:-0} + 1))" "$LOG_FILE" 2>&1 | tail -n 20)" \
        "repair what the log names; inside a container an engine needs '--privileged'; then run this again"
}

by_hand() {
    fail "no Docker engine answers, and this script installs one only on Debian 12+ or Ubuntu, as root" "$1" \
        "start or install Docker Engine 23 or newer with buildx (https://docs.docker.com/engine/install/), or set DOCKER_HOST to one that runs; then 'docker info' must answer"
}

main() {
    only_check=
    case ${1:-} in
    --check) only_check=1 ;;
    '') ;;
    *)
        sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p;}' "$0" >&2
        exit 2
        ;;
    esac

    if answers; then
        report
        [ -n "$only_check" ] || say "nothing changed"
        return
    fi
    reason=$(docker ps -q 2>&1 >/dev/null | tail -n 1) || true
    case $reason in
    *"permission denied"*)
        fail "a Docker engine is there, but this user may not use it" "$reason" \
            "add the user to the group 'docker' and log in again, or run as root"
        ;;
    esac
    if [ -n "${DOCKER_HOST:-}${DOCKER_CONTEXT:-}" ]; then
        fail "the engine that DOCKER_HOST or DOCKER_CONTEXT names does not answer" "$reason" \
            "start it, or unset the variable to use an engine on this machine"
    fi
    system="$(os_field ID)-$(os_field VERSION_ID)"
    pretty=$(os_field PRETTY_NAME)
    case $system in
    debian-[1-9] | debian-1[01]) by_hand "Debian $(os_field VERSION_ID): its packages are too old" ;;
    debian-* | ubuntu-*) ;;
    *) by_hand "${pretty:-$(uname -s)}" ;;
    esac
    [ -z "$only_check" ] || fail "no Docker engine answers" "$reason" "run 'make engine' as root"
    [ -n "$DRY_RUN" ] || [ "$(id -u)" -eq 0 ] || by_hand "user $(id -u), not root"

    say "no engine answers on $pretty: setting one up"
    install_packages "$system"
    start
    [ -z "$DRY_RUN" ] || return 0
    report
    prove
    [ ! -e "$SOURCE_FILE" ] || say "$SOURCE_FILE and its pin stay, so that docker gets its updates"
    say "ready"
}

main "$@"
