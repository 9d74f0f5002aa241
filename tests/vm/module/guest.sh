#!/bin/bash
# In the VM: guest.sh DXPU_KO MODULE_TEST [GTEST OPTION…]. Loads the module, runs the tests, unloads, looks for leaks.
module=$1 tests=$2
shift 2
failures=0
check() { # check WHAT COMMAND…
  local what=$1
  shift
  if "$@"; then echo "PASS $what"; else echo "FAIL $what" && failures=$((failures + 1)); fi
}
no_ports() { ! ls -d /sys/bus/pci/devices/00d0:* >/dev/null 2>&1; }
no_groups() { [ -z "$(ls -A /sys/kernel/iommu_groups 2>/dev/null)" ]; }
refuses() { ! insmod "$module" "$@" 2>/dev/null; }
ports_are() { [ "$(find /sys/class/dxpu -mindepth 1 -maxdepth 1 | wc -l)" = "$1" ] && [ "$(lspci -d d80b:0001 -D | wc -l)" = "$1" ]; }
slots_are() { [ "$(find /sys/bus/pci/slots -mindepth 1 -maxdepth 1 | wc -l)" = "$1" ]; }

modprobe vfio_iommu_type1 && modprobe vfio || exit 1
check "bad parameters are refused" eval 'refuses ports=0 && refuses ports=33 && refuses domain=0x10000 && refuses pref_mib=3 && refuses mem_mib=128'
for _ in 1 2; do
  check "the module loads" insmod "$module" ports=2
  check "two ports" ports_are 2
  check "two hot-plug slots" slots_are 2
  check "the module unloads" rmmod dxpu
  check "no port is left" no_ports
done
check "the module loads" insmod "$module"
"$tests" "$@"
check "module_test" test $? = 0
check "lspci shows nothing but ports" eval '[ "$(lspci -D -s 00d0:: | grep -vc "PCI bridge")" = 0 ]'
check "the module unloads" rmmod dxpu
check "no port is left" no_ports
check "no IOMMU group is left" no_groups
check "nothing is left in iomem" eval '! grep -q dxpu /proc/iomem'
[ $failures = 0 ]
