#!/usr/bin/env bash
# A VM with the stock Debian 12 kernel and this machine's whole root, for tests and for ./demo. Plain emulation, no KVM.
#
#   vm.sh start DIR [OPTION…]      boots it and returns when it takes commands (5 to 10 s)
#   vm.sh exec  DIR [--timeout S] COMMAND…   runs COMMAND by bash inside, prints its output, returns its exit status
#   vm.sh spawn DIR COMMAND…       starts COMMAND inside and prints its number N at once
#   vm.sh wait  DIR [--timeout S] N   prints what N printed and returns its exit status, when it has ended
#   vm.sh stop  DIR                ends the VM
#
# The root is read-only, /tmp and /run are empty and in memory. DIR/scratch is writable from both sides and has the same path
# inside ($SCRATCH); DIR/console.log is the console, DIR/dmesg the kernel log, written by stop.
# Options of start: --memory MIB (2048), --smp N (2), --net (user network: 10.0.2.15, this machine's loopback at 10.0.2.2),
#   --lifetime S (1800: the VM is killed after that, whatever happens), --boot-timeout S (120), --log FILE,
#   --scratch DIR (instead of DIR/scratch), --keep PATH (a path under /tmp or /run to show inside, read-only; repeatable),
#   --hostname NAME (vm1), --append WORDS (kernel command line), --qemu WORDS (QEMU arguments).
# Exit status of vm.sh itself when it, not COMMAND, fails: 125; a COMMAND that ran out of time: 124.
set -uo pipefail
vm_name=vm
# shellcheck source=tests/vm/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
  exit "$1"
}

alive() { [ -s "$dir/pid" ] && kill -0 "$(cat "$dir/pid")" 2>/dev/null; }
show_console() {
  echo "$vm_name: the end of the console ($log):" >&2
  tail -n "${1:-25}" "$log" 2>/dev/null | tr -d '\r' | sed 's/^/  | /' >&2
}
# Sleeps without a process.
nap() { read -rt "$1" <> <(:) || :; }

start() {
  local memory=2048 smp=2 net="" lifetime=1800 boot_timeout=120 scratch="" hostname=vm1 append="" qemu="" keep=() arguments=() version
  log=$dir/console.log
  while [ $# -gt 0 ]; do
    case $1 in
      --net) net=yes && shift && continue ;;
      --memory | --smp | --lifetime | --boot-timeout | --log | --scratch | --keep | --hostname | --append | --qemu)
        [ $# -ge 2 ] || vm_die "$1 wants a value"
        ;;
    esac
    case $1 in
      --memory) memory=$2 ;;
      --smp) smp=$2 ;;
      --lifetime) lifetime=$2 ;;
      --boot-timeout) boot_timeout=$2 ;;
      --log) log=$2 ;;
      --scratch) scratch=$2 ;;
      --keep) keep+=("$(realpath "$2")") || exit 125 ;;
      --hostname) hostname=$2 ;;
      --append) append=$2 ;;
      --qemu) qemu=$2 ;;
      *) vm_die "unknown option $1 (vm.sh --help lists them)" ;;
    esac
    shift 2
  done
  vm_need_qemu
  version=$(vm_kernel_version) || exit 125
  mkdir -p "$dir" || vm_die "cannot make $dir"
  dir=$(realpath "$dir")
  alive && vm_die "a VM runs in $dir already (pid $(cat "$dir/pid")): stop it first, or take another directory"
  scratch=${scratch:-$dir/scratch}
  mkdir -p "$scratch" || vm_die "cannot make $scratch"
  scratch=$(realpath "$scratch")
  log=$(realpath -m "$log")
  case "$dir$scratch${keep[*]-}" in *[[:space:],:]*) vm_die "paths with spaces, commas or colons cannot be shown to a VM" ;; esac
  rm -rf "$dir"/{control.in,control.out,pid,dmesg,count} "$scratch/.vm"
  mkdir "$scratch/.vm" || vm_die "cannot clear $scratch"
  ln -sfn "$scratch/.vm" "$dir/vm"
  ln -sfn "$log" "$dir/log"
  : >"$log" || vm_die "cannot write $log"
  # This tree itself, when it lies where the VM has an empty /tmp.
  case $vm_rooms in /tmp/* | /run/*) keep+=("$(cd "$vm_rooms/../.." && pwd)") ;; esac

  vm_initramfs "$dir/initramfs" "$vm_rooms/guest/init" "$version" virtio_pci 9pnet_virtio 9p virtio_net -- "$vm_rooms/guest/agent.sh"
  vm_kernel "$dir/kernel" "$version"
  mkfifo "$dir/control.in" "$dir/control.out" || vm_die "cannot make a fifo in $dir"
  arguments=(-M q35 -accel "tcg,thread=multi" -cpu "$vm_cpu" -smp "$smp" -m "$memory" -nodefaults -display none -monitor none -no-reboot
    -serial "file:$log" -chardev "pipe,id=control,path=$dir/control" -serial chardev:control
    -virtfs "local,path=/,security_model=none,readonly=on,multidevs=remap,mount_tag=hostroot"
    -virtfs "local,path=$scratch,security_model=none,multidevs=remap,mount_tag=scratch"
    -kernel "$dir/kernel" -initrd "$dir/initramfs")
  [ -z "$net" ] || arguments+=(-netdev "user,id=net0,ipv6=off" -device "virtio-net-pci,netdev=net0,romfile=")
  local IFS=:
  local kept="${keep[*]-}"
  unset IFS
  # shellcheck disable=SC2206
  arguments+=($qemu -append "console=ttyS0 panic=-1 quiet mitigations=off random.trust_cpu=on cryptomgr.notests dxpu.scratch=$scratch dxpu.keep=$kept dxpu.net=${net:-no} dxpu.hostname=$hostname $append")
  setsid timeout -k 5 "$lifetime" $vm_qemu "${arguments[@]}" >"$dir/qemu.out" 2>&1 </dev/null &
  echo $! >"$dir/pid"
  local deadline=$((SECONDS + boot_timeout))
  until [ -e "$dir/vm/ready" ]; do
    if ! alive; then
      cat "$dir/qemu.out" >&2
      show_console
      vm_die "the VM ended before it was up"
    fi
    if [ $SECONDS -ge $deadline ]; then
      show_console
      stop_hard
      vm_die "the VM was not up after $boot_timeout s"
    fi
    nap 0.1
  done
}

attach() {
  [ -d "$dir/vm" ] || vm_die "no VM was started in $dir (vm.sh start $dir)"
  dir=$(realpath "$dir") && log=$(realpath "$dir/log")
}

# Files COMMAND under the next number and rings.
submit() {
  local n
  alive || vm_die "the VM in $dir does not run any more (console: $log)"
  exec 8>>"$dir/count.lock" && flock 8
  n=$(($(cat "$dir/count" 2>/dev/null || echo 0) + 1))
  echo $n >"$dir/count"
  printf '%s\n' "$*" >"$dir/vm/$n.sh"
  echo "run $n" >"$dir/control.in"
  exec 8>&-
  echo $n
}

# Prints what command N printed, as it comes, until it has ended.
follow() {
  local n=$1 deadline=$((SECONDS + $2)) out=""
  while :; do
    local ended=no
    [ -e "$dir/vm/$n.rc" ] && ended=yes
    [ -n "$out" ] || { [ -e "$dir/vm/$n.out" ] && exec {out}<"$dir/vm/$n.out"; }
    [ -z "$out" ] || cat <&"$out"
    [ $ended = no ] || return "$(cat "$dir/vm/$n.rc")"
    if ! alive; then
      show_console 40
      vm_die "the VM died under: $(head -c 200 "$dir/vm/$n.sh")"
    fi
    if [ $SECONDS -ge $deadline ]; then
      echo "kill $n" >"$dir/control.in"
      show_console
      echo "$vm_name: no end after $2 s: $(head -c 200 "$dir/vm/$n.sh")" >&2
      return 124
    fi
    nap 0.1
  done
}

stop_hard() {
  local pid
  pid=$(cat "$dir/pid" 2>/dev/null) || return 0
  kill "$pid" 2>/dev/null
  local deadline=$((SECONDS + 10))
  while kill -0 "$pid" 2>/dev/null; do
    [ $SECONDS -lt $deadline ] || { kill -KILL -- "-$pid" 2>/dev/null; break; }
    nap 0.1
  done
}

stop() {
  local deadline=$((SECONDS + 20))
  if alive; then
    echo off >"$dir/control.in"
    while alive && [ $SECONDS -lt $deadline ]; do nap 0.1; done
  fi
  stop_hard
  cp "$dir/vm/dmesg" "$dir/dmesg" 2>/dev/null
  rm -f "$dir"/{control.in,control.out,pid,initramfs,kernel}
}

case ${1:-} in --help | -h) usage 0 ;; esac
[ $# -ge 2 ] || usage 125 >&2
verb=$1 dir=$2
shift 2
seconds=300
case $verb in
  start) start "$@" ;;
  exec | spawn | wait)
    attach
    [ "${1:-}" = --timeout ] && { seconds=$2 && shift 2; }
    [ $# -ge 1 ] || vm_die "$verb what?"
    case $verb in
      exec) n=$(submit "$@") && follow "$n" "$seconds" ;;
      spawn) submit "$@" ;;
      wait) follow "$1" "$seconds" ;;
    esac
    ;;
  stop)
    attach
    stop
    ;;
  *) usage 125 >&2 ;;
esac
