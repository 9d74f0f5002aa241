#!/bin/bash
# The VM's side of `vm.sh exec`: takes one word per line from the second serial port and runs the command filed under it.
#
#   run N    runs $SCRATCH/.vm/N.sh with its output in N.out; its exit status goes to N.rc when it ends
#   kill N   has the kernel log what is blocked, then kills it with all its children
#   off      ends the VM
# Commands run side by side. The exit status also goes to the console as "GUEST-RC N STATUS", so that the console log alone
# tells which command was the last to end.
vm=$SCRATCH/.vm
exec 3</dev/ttyS1 || exit 1
stty -F /dev/ttyS1 raw -echo

run() {
  setsid bash "$vm/$1.sh" >"$vm/$1.out" 2>&1 </dev/null &
  local pid=$! status=0
  echo $pid >"$vm/$1.pid"
  wait $pid || status=$?
  echo "GUEST-RC $1 $status" >/dev/ttyS0
  echo $status >"$vm/$1.rc.new" && mv "$vm/$1.rc.new" "$vm/$1.rc"
}

: >"$vm/ready"
while read -r word n <&3; do
  case $word in
    run) run "$n" & ;;
    # What everybody is waiting for, to the kernel log first.
    kill) echo w >/proc/sysrq-trigger && pkill -KILL -s "$(cat "$vm/$n.pid")" ;;
    off) break ;;
  esac
done
dmesg >"$vm/dmesg.new" 2>/dev/null && mv "$vm/dmesg.new" "$vm/dmesg"
