#!/usr/bin/env bash
# Installs the Debian packages that dxpu needs (.ci/packages) and that are missing. ./demo and ./check call it first; run by
# hand it does the same. Needs Debian 12 on amd64, and root or sudo when something is missing. Touches nothing when nothing is
# missing. Nothing is asked; the full output of apt is in the log that a failure names.
set -euo pipefail
export LC_ALL=C.UTF-8
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# A fresh root may have no sbin in PATH; dpkg wants it.
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

die() {
  echo "setup: $*" >&2
  exit 1
}

# ---- where are we ----------------------------------------------------------------------------------------------------
[ -r /etc/os-release ] || die "this is not Debian 12 (no /etc/os-release); dxpu is built and tested on Debian 12 (bookworm)"
# shellcheck disable=SC1091
os=$(. /etc/os-release && echo "${ID:-?} ${VERSION_ID:-?}")
[ "$os" = "debian 12" ] || die "this is $os; dxpu is built and tested on Debian 12 (bookworm): use such a machine, container or chroot"
arch=$(dpkg --print-architecture)
[ "$arch" = amd64 ] || die "this is Debian 12 on $arch; the kernel module and the VM tests need amd64"

# ---- what is missing -------------------------------------------------------------------------------------------------
mapfile -t wanted < <(sed -e 's/#.*//' -e 's/[[:space:]]//g' -e '/^$/d' "$here/packages")
installed=$(dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' 2>/dev/null | sed -n 's/^[a-z]i  *//p')
missing=()
for package in "${wanted[@]}"; do
  grep -Fxq -- "$package" <<<"$installed" || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "setup: all ${#wanted[@]} packages are installed"
  exit 0
fi
echo "setup: ${#missing[@]} of ${#wanted[@]} packages are missing: ${missing[*]}"

# ---- who are we ------------------------------------------------------------------------------------------------------
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || die "not root and no sudo: as root, run: apt-get install --no-install-recommends ${missing[*]}"
  sudo -n true 2>/dev/null || [ -t 0 ] || die "not root and sudo asks for a password: run sudo $here/setup.sh in a terminal first"
  as_root=(sudo)
fi

# ---- install ---------------------------------------------------------------------------------------------------------
log=$(mktemp "${TMPDIR:-/tmp}/dxpu-setup.XXXXXX.log")
start=$SECONDS

# Runs apt-get with its output in the log, and prints its progress each time another tenth is done.
apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 PATH="$PATH" apt-get -y -q \
    -o APT::Status-Fd=3 -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 \
    -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30 \
    -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold \
    "$@" 3>&1 >>"$log" 2>&1 </dev/null |
    awk -F: '/^(dlstatus|pmstatus):/ {
      part = $1 == "dlstatus" ? "fetched" : "installed"
      if (part != last) { last = part; shown = 0 }
      while ($3 >= shown + 10) { shown += 10; now = 1 }
      if (now) { printf "setup:   %s %d %%\n", part, shown; fflush(); now = 0 }
    }'
}

echo "setup: apt-get update"
updated=yes
apt update --error-on=any || updated=no
echo "setup: apt-get install (log: $log)"
if ! apt install --no-install-recommends "${missing[@]}"; then
  grep -E '^(E|Err|dpkg: error)' "$log" | tail -n 3 >&2 || true
  [ $updated = yes ] || die "the Debian archive could not be reached, so ${#missing[@]} packages are still missing: check the network and /etc/apt/sources.list*, then run this again (log: $log)"
  die "apt-get could not install what is missing: see the lines above, mend it, run this again (log: $log)"
fi
for package in "${missing[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | cut -c2)" = i ] ||
    die "apt-get ended well but $package is not installed (log: $log)"
done
rm -f "$log"
echo "setup: installed ${#missing[@]} packages with what they depend on in $((SECONDS - start)) s"
