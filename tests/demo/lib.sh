# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154
# How ./demo shows a step, checks it, and ends. Sourced by ./demo, never run.
#
# Everything that must hold is an `expect` or an `until_true`; both end the demo when it does not. `run` shows a command a user
# would type and its real output, and ends the demo when the command fails.

vm_started="" current="setup" started=$SECONDS
say() { printf '%s\n' "$*"; }

begin() {
  state=$(mktemp -d "${TMPDIR:-/tmp}/dxpu-demo.XXXXXX") || exit 1
  vm=$state/vm bin=$root/build/release/bin
  : >"$state/pids"
  trap 'cleanup' EXIT
  trap 'say "demo: interrupted"; exit 130' INT TERM
}

cleanup() {
  local pid name status=$?
  [ -z "$vm_started" ] || tests/vm/vm.sh stop "$vm" >/dev/null 2>&1
  # Daemons first, then the workers that outlive them on purpose; only processes that run our programs from our state.
  for name in poolmgr b1 b2; do
    [ -e "$state/$name.pid" ] && kill -TERM "$(cat "$state/$name.pid")" 2>/dev/null
  done
  for pid in $(pgrep -f "dxpu-worker.*$state/" 2>/dev/null); do kill -KILL "$pid" 2>/dev/null; done
  wait 2>/dev/null
  [ $status -ne 0 ] || rm -rf "$state"
  return $status
}

fail() {
  say "  FAILED: $*"
  [ ! -s "$vm/console.log" ] || { tail -n 15 "$vm/console.log" | tr -d '\r' | sed 's/^/  console | /'; }
  say "demo: FAILED in step $current: $* (logs: $state)"
  exit 1
}

end_well() {
  say ""
  say "demo: ok, $steps steps in $((SECONDS - started)) s"
  exit 0
}

title() {
  say ""
  say "== $* =="
}
step() {
  current=$1
  shift
  title "step $current of $steps: $* [$((SECONDS - started)) s]"
}

# run COMMAND…: shows it and its output; it must succeed. The output is also in $state/last.out.
run() {
  say "\$ ${*//$root\//}"
  "$@" 2>&1 | tee "$state/last.out" | sed 's/^/    /'
  [ "${PIPESTATUS[0]}" -eq 0 ] || fail "'$1 ${2:-}' failed"
}

# in_vm COMMAND / in_vm_for SECONDS COMMAND: the same inside the VM; returns its status.
in_vm() { in_vm_for 120 "$@"; }
in_vm_for() {
  local seconds=$1
  shift
  [ -t 1 ] || [ ! -p /dev/stdout ] || :
  say "vm1\$ ${*//$root\//}" >&2
  tests/vm/vm.sh exec "$vm" --timeout "$seconds" "$@" 2>&1 | tee "$state/last.out" | sed 's/^/    /'
  return "${PIPESTATUS[0]}"
}

# expect WHAT COMMAND…: it must succeed.
expect() {
  local what=$1
  shift
  if "$@"; then say "  ok: $what"; else fail "$what"; fi
}

# until_true SECONDS WHAT COMMAND…: it must succeed within that time.
until_true() {
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >"$state/until.out" 2>&1; do
    [ $SECONDS -lt $deadline ] || { sed 's/^/    /' "$state/until.out" && fail "$what (not within the time it may take)"; }
    sleep 0.3
  done
  say "  ok: $what"
}

# says PATTERN COMMAND… / says_times N PATTERN COMMAND…: its output has lines that match.
# (Not by tee /dev/stderr: that empties the file that a person sent our output to.)
says() {
  local pattern=$1 out
  shift
  out=$("$@" 2>&1)
  printf '%s\n' "$out" >&2
  grep -Eq -- "$pattern" <<<"$out"
}
says_times() {
  local n=$1 pattern=$2 out
  shift 2
  out=$("$@" 2>&1)
  printf '%s\n' "$out" >&2
  [ "$(grep -Ec -- "$pattern" <<<"$out")" = "$n" ]
}

# in_order FILE PATTERN…: lines matching the patterns, each after the one before.
in_order() {
  local file=$1 from=0 line
  shift
  for pattern; do
    line=$(awk -v from="$from" -v pattern="$pattern" 'NR > from && $0 ~ pattern { print NR; exit }' "$file")
    [ -n "$line" ] || { say "    no line like '$pattern' after line $from" && return 1; }
    from=$line
  done
}

# A loopback port nobody listens on, different each time. Sets nothing, prints it.
free_port() {
  local port
  while :; do
    port=$((20000 + RANDOM % 12000))
    grep -qi ":$(printf '%04X' $port) " /proc/net/tcp /proc/net/tcp6 2>/dev/null || break
  done
  echo $port
}

# daemon NAME PROGRAM…: in the background; log and pid in $state.
daemon() {
  local name=$1
  shift
  say "\$ ${*//$state/STATE} &"
  "$@" >>"$state/$name.log" 2>&1 </dev/null &
  echo $! >"$state/$name.pid"
  # It is ours to end; the shell need not tell how it died.
  disown $!
}

start_hostd() {
  local command="$bin/dxpu-hostd --id vm1 --pool 10.0.2.2:$pool_port --attach kernel ${deadlines[*]}"
  say "vm1\$ ${command//$root\//} &"
  tests/vm/vm.sh spawn "$vm" "exec $command >\$SCRATCH/hostd.log 2>&1" >/dev/null || fail "the VM does not take commands"
}

build_all() {
  local log=$state/build.log
  say "\$ cmake --preset release && cmake --build build/release"
  { cmake --preset release && cmake --build build/release -j"$(nproc)" --target dxpu-poolmgr dxpu-boxd dxpu-worker dxpu-hostd dxpu \
    dxpu-vfio-exercise dxpu-guest-registers; } >"$log" 2>&1 &
  local pid=$! shown=""
  while kill -0 $pid 2>/dev/null; do
    sleep 2
    local now
    now=$(grep -oE '^\[[0-9]+/[0-9]+\]' "$log" 2>/dev/null | tail -n 1)
    [ $((SECONDS % 20)) -ge 3 ] || [ "$now" = "$shown" ] || { shown=$now && [ -z "$now" ] || say "    built $now"; }
  done
  wait $pid || { grep -E 'error|FAILED' "$log" | head -n 8 && fail "the build (see build.log)"; }
  local kernel
  kernel=$(find /lib/modules -maxdepth 1 -name '6.1*-amd64' -printf '%f\n' | sort -V | tail -n 1)
  say "\$ make -C kmod KVER=$kernel"
  make -s -C kmod KVER="$kernel" OUT="$root/build/release/kmod" >"$state/kmod.log" 2>&1 ||
    { tail -n 8 "$state/kmod.log" && fail "the kernel module does not build"; }
}

# attach OPTION…: dxpu attach --wait; sets attachment, host_port, function_id, address.
attach() {
  run dxpu attach --host vm1 "$@" --wait --timeout 60s
  read -r attachment _ host_port function_id address _ < <(grep -E '^att-' "$state/last.out")
  [ -n "${address:-}" ] && [ "$address" != - ] || fail "attach gave no bus address"
}

# worker_of BOX/SLOT: pid of its worker, as the tables say.
worker_of() {
  dxpu table --box "${1%/*}" | awk -v box="${1%/*}" -v slot="${1#*/}" '$1 == box && $2 == slot && $8 ~ /^[0-9]+$/ { print $8 }'
}
no_holder() {
  local out
  out=$(dxpu host show vm1 2>&1)
  printf '%s\n' "$out" >&2
  awk -v port="$1" '$1 == port { found = $5 == "-" } END { exit !found }' <<<"$out"
}

# take_away WHAT: for the test that the demo notices.
take_away() {
  case $1 in
    "") ;;
    module) in_vm "pkill -KILL -x dxpu-hostd; for i in \$(seq 50); do rmmod dxpu && break; sleep 0.2; done" && start_hostd ;;
    box) for name in b1 b2; do kill -KILL "$(cat "$state/$name.pid")"; done ;;
    network) in_vm "ip link set eth0 down" ;;
    *) fail "DXPU_DEMO_WITHOUT is module, box or network, not '$1'" ;;
  esac
}
