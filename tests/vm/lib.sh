# shellcheck shell=bash
# shellcheck disable=SC2034
# What vm.sh and run.sh share: finding the stock kernel, packing an initramfs, saying what went wrong.
# Sourced, never run. Sets PATH, because a fresh root may have no sbin in it.

export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
export LC_ALL=C.UTF-8
vm_rooms=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

vm_die() {
  echo "${vm_name:-vm}: $*" >&2
  exit "${vm_die_code:-125}"
}

# The newest stock Debian 12 kernel on this machine; never the running one, which a builder seldom shares with its tests.
vm_kernel_version() {
  local newest
  newest=$(find /boot -maxdepth 1 -name 'vmlinuz-6.1*-amd64' ! -name '*-rt-amd64' ! -name '*-cloud-amd64' -printf '%f\n' | sort -V | tail -n 1)
  [ -n "$newest" ] || vm_die "no /boot/vmlinuz-6.1*-amd64: install linux-image-amd64 (.ci/setup.sh does)"
  newest=${newest#vmlinuz-}
  [ -e "/lib/modules/$newest/modules.dep" ] || vm_die "/lib/modules/$newest has no modules.dep: run depmod $newest, or reinstall linux-image-$newest"
  echo "$newest"
}

# vm_initramfs OUT INIT KERNEL_VERSION MODULE… -- FILE…: INIT becomes /init, each FILE lands in /bin, the modules with all
# they need in /lib, and /modules lists them in the order to load them in.
vm_initramfs() {
  local out=$1 init=$2 version=$3 tree module path
  shift 3
  [ -x /bin/busybox ] || vm_die "no /bin/busybox: install busybox-static"
  tree=$(mktemp -d "${TMPDIR:-/tmp}/dxpu-initramfs.XXXXXX") || vm_die "no room in ${TMPDIR:-/tmp}"
  mkdir -p "$tree"/{bin,lib,proc,sys,dev,mnt,tmp}
  cp /bin/busybox "$tree/bin/" && cp "$init" "$tree/init" && chmod 755 "$tree/init"
  : >"$tree/modules"
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    while read -r _ path _; do
      module=$(basename "$path")
      grep -qx "$module" "$tree/modules" && continue
      cp "$path" "$tree/lib/" && echo "$module" >>"$tree/modules"
    done < <(modprobe -S "$version" --show-depends "$1" | grep '^insmod ')
    grep -q . "$tree/modules" || vm_die "kernel $version has no module $1"
    shift
  done
  shift
  for path; do
    cp -L "$path" "$tree/bin/" || vm_die "cannot pack $path into the initramfs"
  done
  # Uncompressed: unpacking gzip under plain emulation takes longer than reading the few megabytes.
  (cd "$tree" && find . | cpio -o -H newc --quiet) >"$out" || vm_die "cannot write $out"
  rm -rf "$tree"
}

# vm_kernel OUT VERSION: the stock kernel without its compression. QEMU starts that by the PVH entry, which spares the guest
# the unpacking: half of the boot under plain emulation, more than that in a nested guest.
vm_kernel() {
  local image=/boot/vmlinuz-$2 offset
  offset=$(LC_ALL=C grep -aboPm1 '\xfd7zXZ\x00' "$image" | head -n 1 | cut -d: -f1)
  # What follows the compressed kernel in the image is not xz; the checksum of the kernel itself is checked before that.
  [ -z "$offset" ] || tail -c "+$((offset + 1))" "$image" | xz -dc --single-stream >"$1" 2>/dev/null
  if ! head -c 4 "$1" 2>/dev/null | grep -q ELF; then
    cp "$image" "$1" || vm_die "cannot write $1"
  fi
}

# vm_qemu: the emulator, and the part of the command line that every VM here shares.
vm_qemu=qemu-system-x86_64
vm_need_qemu() {
  command -v $vm_qemu >/dev/null || vm_die "no $vm_qemu: install qemu-system-x86 (.ci/setup.sh does)"
}
# Enough physical address bits for windows at 512 GiB and above; four-level paging, which is quicker to emulate.
vm_cpu=max,la57=off,phys-bits=46
