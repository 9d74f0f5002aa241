#!/usr/bin/env bash
# dxpu.ko on the stock kernel: load, plug, VFIO, DMA, interrupts, reset, removal, hostile rings, cycles; then a clean kernel log.
# Usage: test_module.sh [GTEST OPTION…]. DXPU_CYCLES: plug and unplug cycles (20). DXPU_BUILD: build directory.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$(realpath "${DXPU_BUILD:-$root/build/release}")
export PATH="$PATH:/usr/sbin:/sbin"
tests=$build/bin/module_test
[ -x "$tests" ] || { echo "no $tests: build first (cmake --build $build --target module_test)"; exit 1; }
kernel=$(find /lib/modules -maxdepth 1 -name '6.1*-amd64' -printf '%f\n' | sort -V | tail -n 1)
[ -e "/lib/modules/$kernel/build" ] || { echo "no headers of the stock kernel: install linux-headers-amd64"; exit 77; }
echo "building dxpu.ko for $kernel"
make -s -C "$root/kmod" KVER="$kernel" OUT="$build/kmod" >"$build/kmod.log" 2>&1 || { tail -n 30 "$build/kmod.log"; exit 1; }
scratch=$(mktemp -d "${TMPDIR:-/tmp}/dxpu-module.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
cp "$build/kmod/dxpu.ko" "$tests" "$here/module/guest.sh" "$scratch/"
cycles=${DXPU_CYCLES:-20}
cat >"$scratch/run.sh" <<RUN
export DXPU_CYCLES=$cycles
exec bash "\$SCRATCH/guest.sh" "\$SCRATCH/dxpu.ko" "\$SCRATCH/module_test" $(printf '%q ' "$@")
RUN
"$here/run.sh" --timeout $((600 + cycles * 3)) --scratch "$scratch" --clean-dmesg --hostname dxpu-module ${DXPU_VM_LOG:+--log "$DXPU_VM_LOG"} "$scratch/run.sh"
