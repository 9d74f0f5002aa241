#!/usr/bin/env bash
# Runs one bash script in a VM with the stock Debian 12 kernel and returns its exit status.
#
#   run.sh [OPTION…] SCRIPT [ARGUMENT…]
#
# The script sees this machine's whole root read-only, empty /tmp and /run, and a writable $SCRATCH that outlives it when
# --scratch names it. Options: --timeout S (300, boot included), --log FILE (console; default: kept only on failure),
# --scratch DIR, --clean-dmesg (fails when the kernel log shows WARNING, BUG, Oops, a hung task or a stall), and those of
# `vm.sh start`: --memory --smp --net --keep --hostname --append --qemu.
# Exit status: the script's own; 124 out of time; 125 the VM failed; 123 the kernel log was not clean.
set -uo pipefail
vm_name=run.sh
# shellcheck source=tests/vm/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

seconds=300 log="" clean="" options=()
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" && exit 0 ;;
    --timeout) seconds=$2 && shift 2 ;;
    --log) log=$2 && shift 2 ;;
    --clean-dmesg) clean=yes && shift ;;
    --net) options+=("$1") && shift ;;
    --memory | --smp | --scratch | --keep | --hostname | --append | --qemu) options+=("$1" "$2") && shift 2 ;;
    --*) vm_die "unknown option $1 (run.sh --help lists them)" ;;
    *) break ;;
  esac
done
[ $# -ge 1 ] || vm_die "which script? (run.sh --help)"
script=$(realpath "$1") || exit 125
[ -r "$script" ] || vm_die "cannot read $script"
shift

dir=$(mktemp -d "${TMPDIR:-/tmp}/dxpu-vm.XXXXXX") || exit 125
started=$SECONDS
end() {
  trap - EXIT
  "$vm_rooms/vm.sh" stop "$dir" 2>/dev/null
  [ -z "$log" ] || cp "$dir/console.log" "$log"
  rm -rf "$dir"
}
trap end EXIT
trap 'exit 130' INT TERM HUP

# The script itself, when it lies where the VM has an empty /tmp.
case $(dirname "$script") in
  /tmp | /run) options+=(--keep "$script") ;;
  /tmp/* | /run/*) options+=(--keep "$(dirname "$script")") ;;
esac
status=0
"$vm_rooms/vm.sh" start "$dir" --lifetime $((seconds + 30)) --boot-timeout "$seconds" "${options[@]}" || status=125
if [ $status -eq 0 ]; then
  left=$((seconds - (SECONDS - started)))
  "$vm_rooms/vm.sh" exec "$dir" --timeout $((left > 1 ? left : 1)) "$(printf '%q ' bash "$script" "$@")" || status=$?
  "$vm_rooms/vm.sh" stop "$dir"
fi
if [ $status -eq 0 ] && [ -n "$clean" ]; then
  if [ ! -s "$dir/dmesg" ]; then
    echo "run.sh: the VM left no kernel log" >&2
    status=123
  elif grep -E 'WARNING:|BUG:|Oops|general protection|hung_task|blocked for more than|self-detected stall|detected stalls|refcount_t' "$dir/dmesg" | sed 's/^/  | /' >&2; then
    echo "run.sh: the kernel log is not clean (lines above)" >&2
    status=123
  fi
fi
if [ $status -ne 0 ]; then
  kept=${log:-$(mktemp "${TMPDIR:-/tmp}/dxpu-vm-console.XXXXXX.log")}
  cat "$dir/console.log" >"$kept"
  [ ! -s "$dir/dmesg" ] || { echo "---- dmesg" && tail -n 200 "$dir/dmesg"; } >>"$kept"
  echo "run.sh: $(basename "$script") ended with $status; console: $kept" >&2
  tail -n 15 "$dir/console.log" | tr -d '\r' | sed 's/^/  | /' >&2
  log=""
fi
exit $status
