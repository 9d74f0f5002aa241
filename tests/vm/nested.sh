#!/usr/bin/env bash
# Gives an attached function to a virtual machine of its own and shows what that machine sees.
#
#   nested.sh prepare DIR REGISTERS      outside: packs the guest's kernel and initramfs into DIR, with the static program
#                                        dxpu-guest-registers at REGISTERS
#   nested.sh run DIR ADDRESS [--timeout S]   inside the test VM: boots a guest with the function at ADDRESS (dddd:bb:dd.f)
#                                        behind a root port, prints what the guest prints
#   nested.sh command DIR ADDRESS        prints the QEMU command line that `run` runs
# Exit status of run: that of dxpu-guest-registers in the guest; 124 out of time; 125 the guest said nothing.
set -uo pipefail
vm_name=nested
# shellcheck source=tests/vm/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

[ $# -ge 3 ] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" && exit 125; }
verb=$1 dir=$2 what=$3
shift 3
seconds=240
[ "${1:-}" != --timeout ] || seconds=$2

# One CPU and no ACPI tables to interpret: every instruction here is emulated twice.
guest_command() {
  # shellcheck disable=SC2054
  command=("$vm_qemu" -M q35,vmport=off,smbus=off,sata=off,usb=off -accel tcg,tb-size=256 -cpu "$vm_cpu" -smp 1 -m 256
    -nodefaults -display none -no-reboot -serial stdio
    -device pcie-root-port,id=port1,chassis=1 -device "vfio-pci,host=$what,bus=port1"
    -kernel "$dir/nested-kernel" -initrd "$dir/nested-initramfs"
    -append "console=ttyS0 panic=-1 quiet mitigations=off nokaslr nosmp noapic random.trust_cpu=on cryptomgr.notests")
}

case $verb in
  prepare)
    version=$(vm_kernel_version) || exit 125
    [ -x "$what" ] || vm_die "no program $what: build dxpu-guest-registers first"
    mkdir -p "$dir" || vm_die "cannot make $dir"
    vm_kernel "$dir/nested-kernel" "$version"
    vm_initramfs "$dir/nested-initramfs" "$vm_rooms/guest/nested-init" "$version" -- "$what"
    ;;
  command)
    guest_command
    printf '%q ' "${command[@]}"
    ;;
  run)
    [ -s "$dir/nested-kernel" ] || vm_die "no $dir/nested-kernel: nested.sh prepare makes it, outside the VM"
    # QEMU maps these files; over 9p each page of them would be a request of its own. In memory they are read once, in large pieces.
    near=$(mktemp -d "${TMPDIR:-/tmp}/dxpu-nested.XXXXXX") || exit 125
    trap 'rm -rf "$near"' EXIT
    cp "$dir/nested-kernel" "$dir/nested-initramfs" "$near/" || vm_die "no room for the guest's kernel in $near"
    dir=$near said=$near/said
    guest_command
    timeout -k 5 "$seconds" "${command[@]}" 2>&1 </dev/null | tr -d '\r' | tee "$said"
    ended=${PIPESTATUS[0]}
    status=$(sed -n 's/^NESTED-RC=//p' "$said")
    [ -z "$status" ] || exit "$status"
    [ "$ended" -ne 124 ] || { echo "nested: no answer after $seconds s" >&2 && exit 124; }
    vm_die "the guest ended without a word (QEMU's exit status: $ended)"
    ;;
  *) vm_die "no such thing: $verb" ;;
esac
